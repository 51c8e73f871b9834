"""``trunkline topic``: what topics there are, what they hold, and what becomes of it."""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec

from trunkline.cli import ERROR, OK, Commands, branch, leaf
from trunkline.cli.arguments import (
    add_bounds,
    at_least,
    choose_bus,
    open_log,
    parse_point,
    pick_partitions,
    pick_topics,
    refuse,
)
from trunkline.cli.flags import add_option_flags, edited, given
from trunkline.cli.groups import OPTIONAL, far_groups, group_row, info_row, ledgers_of
from trunkline.cli.render import Printer, amount, cell, confirm, progress, size, to_time
from trunkline.delivery.deadletters import is_hidden
from trunkline.errors import Conflict, Corrupt, InvalidOption, NotFound
from trunkline.folder import Folder, upkeep
from trunkline.log.reader import PartitionReader
from trunkline.names import check_pattern, check_topic, is_pattern, matches
from trunkline.options import TopicOptions, changed, differences, make

if TYPE_CHECKING:
    from trunkline.cli.far import FarLog


def register(commands: Commands[Any]) -> None:
    below = branch(commands, "topic", "list, create, edit, remove, purge and compact topics")

    ls = leaf(below, "ls", run_ls, "list topics")
    add_bounds(ls)
    ls.add_argument(
        "pattern", metavar="PATTERN", nargs="?", help="only these topics: orders, orders.*, >"
    )

    info = leaf(below, "info", run_info, "show a topic: options, partitions, groups")
    info.add_argument("topic", metavar="TOPIC")

    create = leaf(below, "create", run_create, "define a topic")
    create.add_argument("topic", metavar="TOPIC")
    add_option_flags(create, TopicOptions)

    edit = leaf(below, "edit", run_edit, "change a topic's options")
    edit.add_argument("topic", metavar="TOPIC")
    add_option_flags(edit, TopicOptions, unset=True)

    for name, run, about in (
        ("rm", run_rm, "remove a topic, its records and its groups"),
        ("purge", run_purge, "remove records, settled or not; the topic stays"),
        ("compact", run_compact, "keep only the latest record of each key, now"),
    ):
        parser = leaf(below, name, run, about)
        parser.add_argument("topic", metavar="TOPIC")
        parser.add_argument("--dry-run", action="store_true", help="only show the effect")
        parser.add_argument("--yes", action="store_true", help="do not ask")
        if name != "rm":
            parser.add_argument("-p", "--partition", type=at_least(0), help="only this one")
        if name == "purge":
            parser.add_argument(
                "--before", metavar="PLACE", help="keep from there on: 7, @-1h, ..."
            )
        if name == "compact":
            parser.add_argument(
                "--all", action="store_true", help="finish the last file first, to compact it too"
            )


# -- looking -----------------------------------------------------------------------------------


def run_ls(args: argparse.Namespace) -> int:
    pattern = args.pattern
    if pattern is not None:
        check_pattern(pattern)
    with closing(open_log(args)) as folder:
        groups = _group_names(folder)
        rows = []
        for topic, options in sorted(folder.topics().items()):
            if pattern is not None and topic != pattern and not matches(pattern, topic):
                continue
            parts = [_partition_row(folder, topic, n) for n in range(options.partitions)]
            rows.append(
                {
                    "topic": topic,
                    "partitions": options.partitions,
                    "records": sum(part["records"] for part in parts),
                    **_sizes(parts),
                    "groups": sum(name == topic for name, _ in groups),
                }
            )
        if not rows and pattern is not None and not is_pattern(pattern):
            raise NotFound(f"there is no topic {pattern}", hint="trunkline topic ls")
        sized = ("size",) if isinstance(folder, Folder) else ()
        columns = ("topic", "partitions", "records", *sized, "groups")
        Printer(args).table(rows, columns, "there are no topics")
    return OK


def _group_names(log: Folder | FarLog) -> set[tuple[str, str]]:
    """Topic and name of each group, without those that keep the books of dead letters."""
    folder = ledgers_of(log)
    if folder is None:
        assert not isinstance(log, Folder)
        return {(one.topic, one.group) for one in far_groups(log, None)}
    return {(key.topic, key.group) for key in folder.groups() if not is_hidden(key)}


def _sizes(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """How large a topic is, where its files can be seen."""
    if not all("bytes" in part for part in parts):
        return {}
    total = sum(part["bytes"] for part in parts)
    return {"bytes": total, "size": size(total)}


def _partition_row(folder: Folder | FarLog, topic: str, partition: int) -> dict[str, Any]:
    if not isinstance(folder, Folder):
        there = folder.reader(topic, partition)
        first, end = there.bounds()
        last = there.read(end - 1, 1, strict=False) if first < end else []
        return {
            "partition": partition,
            "first": first,
            "next": end,
            "records": end - first,
            "last": to_time(last[0].event.ts) if last else None,
        }
    reader = folder.reader(topic, partition)
    first, end = reader.bounds()
    segments = reader.files()
    return {
        "partition": partition,
        "first": first,
        "next": end,
        "records": reader.count(),
        "bytes": sum(_file_size(segment.path) for segment in segments),
        "segments": len(segments),
        "damaged": sum(segment.bad for segment in segments),
        "last": _last_time(reader),
    }


def _file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:  # it was removed meanwhile
        return 0


def _last_time(reader: PartitionReader) -> str | None:
    first, end = reader.bounds()
    try:
        last = reader.read(end - 1, 1, strict=False) if first < end else []
    except Corrupt:
        return None
    return to_time(last[0].event.ts) if last else None


def run_info(args: argparse.Namespace) -> int:
    out = Printer(args)
    with closing(open_log(args)) as folder:
        count = pick_topics(folder, check_topic(args.topic))[args.topic]
        options = msgspec.structs.asdict(folder.topics()[args.topic])
        parts = [_partition_row(folder, args.topic, n) for n in range(count)]
        groups = _group_rows(folder, args.topic)
    if out.json:
        out.row(
            {"topic": args.topic, "options": options, "partitions": parts, "groups": groups}, ""
        )
        return OK
    out.say(f"topic {args.topic}\n")
    chosen = changed(make(TopicOptions, options))
    rows = [
        {"option": name, "value": value, "set": "*" if name in chosen else ""}
        for name, value in options.items()
    ]
    out.table(rows, ("option", "value", "set"))
    columns: tuple[str, ...] = ("partition", "first", "next", "records", "last")
    if all("bytes" in part for part in parts):
        columns = ("partition", "first", "next", "records", "size", "segments", "last")
        for part in parts:
            part["size"] = size(part["bytes"])
    out.say("")
    out.table(parts, columns)
    out.say("")
    columns = ("group", "partition", "floor", "lag", "scheduled", "leases", "waiting", "paused")
    out.table(groups, columns, "no groups", optional=OPTIONAL)
    return OK


def _group_rows(log: Folder | FarLog, topic: str) -> list[dict[str, Any]]:
    folder = ledgers_of(log)
    if folder is None:
        assert not isinstance(log, Folder)
        return [info_row(one) for one in far_groups(log, topic)]
    keys = [key for key in folder.groups() if key.topic == topic]
    listening = folder.listening()
    return [group_row(folder, key, listening) for key in keys if not is_hidden(key)]


# -- changing ----------------------------------------------------------------------------------


def run_create(args: argparse.Namespace) -> int:
    check_topic(args.topic)
    options = make(TopicOptions, given(args, TopicOptions))
    # ``init`` makes a folder; a database has no other beginning than its first topic or event.
    with closing(open_log(args, create=not choose_bus(args).is_folder)) as folder:
        have = folder.topics().get(args.topic)
        if have is not None and have != options:
            raise Conflict(
                f"{args.topic} is there with other options",
                hint=f"trunkline topic edit {args.topic}",
            )
        if isinstance(folder, Folder):
            folder.define(args.topic, options)
        else:
            folder.call(folder.bus.define(args.topic, **given(args, TopicOptions)))
    _show_options(args, "created" if have is None else "is there already:", options)
    return OK


def run_edit(args: argparse.Namespace) -> int:
    change = edited(args, TopicOptions)
    if change is None:
        raise InvalidOption("nothing to change", hint=f"trunkline topic info {args.topic}")
    with closing(open_log(args)) as folder:
        pick_topics(folder, check_topic(args.topic))
        if isinstance(folder, Folder):
            folder.edit(args.topic, change)
        else:
            have = folder.topics()[args.topic]
            differ = differences(have, change(have))
            folder.call(folder.bus.define(args.topic, **{name: new for name, _, new in differ}))
        options = folder.topics()[args.topic]
    _show_options(args, "changed", options)
    return OK


def _show_options(args: argparse.Namespace, what: str, options: TopicOptions) -> None:
    values = msgspec.structs.asdict(options)
    defaults = msgspec.structs.asdict(TopicOptions())
    text = " ".join(f"{k}={cell(v)}" for k, v in values.items() if v != defaults[k])
    Printer(args).row(
        {"topic": args.topic, "options": values}, f"{what} {args.topic} {text}".rstrip()
    )


def run_rm(args: argparse.Namespace) -> int:
    with closing(open_log(args)) as folder:
        count = pick_topics(folder, check_topic(args.topic))[args.topic]
        parts = [_partition_row(folder, args.topic, n) for n in range(count)]
        groups = sorted(name for topic, name in _group_names(folder) if topic == args.topic)
        row = {
            "topic": args.topic,
            "records": sum(part["records"] for part in parts),
            **_sizes(parts),
            "groups": groups,
            "dry_run": args.dry_run,
        }
        what = f"{args.topic}: {amount(row['records'], 'record')}"
        what += f", {row.pop('size')}" if "size" in row else ""
        what += f", groups {', '.join(groups)}" if groups else ""
        if args.dry_run:
            Printer(args).row(row, f"would remove {what}")
            return OK
        if not confirm(args, f"remove {what}?"):
            return ERROR
        if isinstance(folder, Folder):
            folder.remove_topic(args.topic)
        else:
            folder.call(folder.bus.remove(args.topic))
    Printer(args).row(row, f"removed {what}")
    return OK


def run_purge(args: argparse.Namespace) -> int:
    out = Printer(args)
    with closing(open_log(args)) as folder:
        count = pick_topics(folder, check_topic(args.topic))[args.topic]
        point = parse_point("end" if args.before is None else args.before, folder.clock.now())
        plan: list[dict[str, Any]] = []
        for partition in pick_partitions(count, args.partition):
            reader = folder.reader(args.topic, partition)
            first, end = reader.bounds()
            before = max(first, min(point.resolve(reader), end))
            plan.append(
                {
                    "topic": args.topic,
                    "partition": partition,
                    "first": first,
                    "before": before,
                    "records": before - first,
                    "unsettled": _unsettled(folder, args.topic, partition, before),
                    "dry_run": args.dry_run,
                }
            )
        total = sum(row["records"] for row in plan)
        late = sum(row["unsettled"] for row in plan)
        what = f"{amount(total, 'record')} of {args.topic}"
        what += f", {late} of them not settled by every group" if late else ""
        if not args.dry_run:
            if not confirm(args, f"remove {what}?"):
                return ERROR
            for row in plan:
                if isinstance(folder, Folder):
                    upkeep.trim(folder, args.topic, row["partition"], row["before"])
                else:
                    place = {"before": row["before"], "partition": row["partition"]}
                    folder.call(folder.bus.trim(args.topic, **place))
        if out.json:
            out.table(plan, ())
        else:
            out.say(f"{'would remove' if args.dry_run else 'removed'} {what}")
    return OK


def _unsettled(log: Folder | FarLog, topic: str, partition: int, before: int) -> int:
    """How many records below ``before`` the group that is most behind has not settled."""
    folder = ledgers_of(log)
    if folder is None:  # all that it can tell is up to where everything is settled
        assert not isinstance(log, Folder)
        floors = [one.floor for one in far_groups(log, topic) if one.partition == partition]
        return max([max(0, before - 1 - floor) for floor in floors], default=0)
    keys = [key for key in folder.groups() if key[:2] == (topic, partition)]
    first, _ = folder.bounds(topic, partition)
    return max([folder.group(key).ledger.unsettled(before, first) for key in keys], default=0)


def run_compact(args: argparse.Namespace) -> int:
    out = Printer(args)
    with closing(open_log(args)) as folder:
        if not isinstance(folder, Folder):
            refuse(folder.url, "compaction", "topic compact")
        count = pick_topics(folder, check_topic(args.topic))[args.topic]
        partitions = pick_partitions(count, args.partition)
        if args.dry_run:
            gone = sum(_superseded(folder, args.topic, n, whole=args.all) for n in partitions)
        else:
            if not confirm(args, f"remove superseded records of {args.topic}?"):
                return ERROR
            gone = 0
            with progress(args, f"compacting {args.topic}") as step:
                for partition in partitions:
                    if args.all:
                        _finish(folder, args.topic, partition)
                    gone += upkeep.compact(folder, args.topic, partition, step)
                    folder.forget(args.topic, partition)
        row = {"topic": args.topic, "records": gone, "dry_run": args.dry_run}
        verb = "would remove" if args.dry_run else "removed"
        out.row(row, f"{verb} {gone} superseded records of {args.topic}")
    return OK


def _finish(folder: Folder, topic: str, partition: int) -> None:
    writer = folder.writer(topic, partition)
    head = writer.begin()
    try:
        writer.roll(head)
    finally:
        writer.end()


def _superseded(folder: Folder, topic: str, partition: int, *, whole: bool) -> int:
    """How many records a compaction would remove."""
    reader = folder.reader(topic, partition)
    first, end = reader.bounds()
    finished = end - 1
    if not whole:
        active = folder.head(topic, partition).segment
        seals = [s.seal for s in reader.files() if s.number < active and not s.bad]
        finished = max((seal.last for seal in seals if seal is not None), default=0)
    finished = upkeep.free(folder, topic, partition, finished)
    latest: dict[str, int] = {}
    tombs: set[str] = set()
    keyed: list[tuple[int, str]] = []
    while first < end and (found := reader.read(first, 1000, strict=False)):
        for record in found:
            key = record.event.key
            if key is not None:
                latest[key] = record.offset
                (tombs.add if record.event.payload is None else tombs.discard)(key)
                if record.offset <= finished:
                    keyed.append((record.offset, key))
        first = found[-1].offset + 1
    return sum(latest[key] != offset or key in tombs for offset, key in keyed)
