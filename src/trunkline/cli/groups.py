"""``trunkline group``: where groups stand, and moving them. Works beside running members."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from trunkline.cli import ERROR, OK, Commands, branch, leaf
from trunkline.cli.arguments import (
    Point,
    add_bounds,
    at_least,
    duration,
    open_log,
    parse_point,
    pick_topics,
    refuse,
    rest,
)
from trunkline.cli.flags import add_option_flags, edited
from trunkline.cli.render import Printer, cell, clear_screen, confirm
from trunkline.delivery.deadletters import is_hidden
from trunkline.errors import Corrupt, InvalidOption, NotFound, StorageError
from trunkline.folder import Folder
from trunkline.group import Group
from trunkline.group.members import MemberInfo, count, select
from trunkline.log import atomic, layout
from trunkline.names import GroupKey, check_group, check_pattern, is_pattern, matches
from trunkline.options import GroupOptions, differences

if TYPE_CHECKING:
    from trunkline.bus import GroupInfo, Start
    from trunkline.cli.far import FarLog, StoreLog

OPTIONAL = ("partition", "scheduled", "next_due", "leases", "waiting", "paused")
_COLUMNS = (
    *("topic", "partition", "group", "floor", "lag", "scheduled", "next_due"),
    *("leases", "waiting", "paused", "members"),
)
_MEMBERS = ("pid", "host", "client", "since", "in_flight", "last_delivery")


def register(commands: Commands[Any]) -> None:
    below = branch(commands, "group", "list, edit, seek, pause, resume and remove groups")

    ls = leaf(below, "ls", run_ls, "list groups and how far they are")
    add_bounds(ls)
    ls.add_argument("topic", metavar="TOPIC", nargs="?", help="only of these: orders, orders.*")
    ls.add_argument("--group", help="only this one")
    ls.add_argument(
        "--all", action="store_true", help="also the groups that keep the books of dead letters"
    )

    ls.add_argument(
        "--watch",
        nargs="?",
        type=duration,
        const=2.0,
        metavar="S",
        help="show it again every 2 seconds, or every S, until Ctrl-C",
    )

    lag = leaf(below, "lag", run_lag, "print how many records a group has yet to do")
    lag.add_argument("topic", metavar="TOPIC", help="a topic, or a pattern with * and >")
    lag.add_argument("group", metavar="GROUP")

    for name, run, about in (
        ("info", run_info, "show a group: policy, leases, what waits"),
        ("edit", run_edit, "change a group's policy; its place stays"),
        ("seek", run_seek, "move a group to another place"),
        ("pause", run_pause, "hand out nothing to a group's members"),
        ("resume", run_resume, "undo a pause"),
        ("rm", run_rm, "remove a group; its place is forgotten"),
    ):
        parser = leaf(below, name, run, about)
        parser.add_argument("topic", metavar="TOPIC", help="a topic, or a pattern with * and >")
        parser.add_argument("group", metavar="GROUP")
        parser.add_argument("-p", "--partition", type=at_least(0), help="only this one")
        if name == "seek":
            parser.add_argument(
                "--to", required=True, metavar="PLACE", help="start, end, 7, +3, -3, @time"
            )
        if name == "edit":
            add_option_flags(parser, GroupOptions, unset=True)
        if name in ("edit", "seek", "rm"):
            parser.add_argument("--dry-run", action="store_true", help="only show the effect")
        if name == "rm":
            parser.add_argument("--yes", action="store_true", help="do not ask")


def group_row(
    folder: Folder | StoreLog, key: GroupKey, listening: list[MemberInfo] | None = None
) -> dict[str, Any]:
    """Where a group stands. ``members`` are those that are subscribed, or hold records."""
    known = folder.listening() if listening is None else listening
    first, end = folder.bounds(key.topic, key.partition)
    now, wall = folder.clock.monotonic(), folder.clock.now().timestamp()

    def look(group: Group) -> dict[str, Any]:
        ahead = group.outlook(wall)
        return {
            "topic": key.topic,
            "partition": key.partition,
            "group": key.group,
            "floor": group.floor,
            "lag": group.lag(end, first, wall=wall),
            "scheduled": ahead.scheduled,
            "next_due": None if ahead.next_due is None else _moment(ahead.next_due),
            "leases": len(group.leases),
            "waiting": sum(at > now for at in group.waiting.values()),
            "paused": group.paused,
            "members": count(known, key.topic, key.group, group.holders()),
        }

    return folder.look(key, look)


def info_row(info: GroupInfo) -> dict[str, Any]:
    """The same, as a bus tells it."""
    return {
        "topic": info.topic,
        "partition": info.partition,
        "group": info.group,
        "floor": info.floor,
        "lag": info.lag,
        "scheduled": info.scheduled,
        "next_due": None if info.next_due is None else _moment(info.next_due),
        "leases": info.leases,
        "waiting": info.waiting,
        "paused": info.paused,
        "members": info.members,
    }


def far_groups(log: FarLog, topic: str | None, group: str | None = None) -> list[GroupInfo]:
    """The groups of a bus whose ledgers are out of reach."""
    found = log.call(log.bus.groups(topic, group))
    return sorted(found, key=lambda one: (one.topic, one.partition, one.group))


def ledgers_of(log: Folder | FarLog) -> Folder | StoreLog | None:
    """The bus, if its groups can be looked at by offset."""
    if isinstance(log, Folder):
        return log
    from trunkline.cli.far import StoreLog

    return log if isinstance(log, StoreLog) else None


def _moment(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds")


def run_ls(args: argparse.Namespace) -> int:
    out = Printer(args)
    if args.topic is not None:
        check_pattern(args.topic)
    if args.group is not None:
        check_group(args.group)
    code = OK
    with closing(open_log(args)) as log:
        if args.topic is not None and not is_pattern(args.topic):
            pick_topics(log, args.topic)  # a topic that is not there has not merely no groups
        rows, code = _rows(log, args, out)
        if rows or code == OK:
            _show(out, args, rows)
        while args.watch is not None:
            rest(log, args.watch)
            rows, code = _rows(log, args, out)
            if not out.json:
                clear_screen()
            _show(out, args, rows)
    return code


def _show(out: Printer, args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    columns = ("group",) if args.quiet else _COLUMNS
    out.table(rows, columns, "there are no groups", optional=OPTIONAL)


def _rows(
    log: Folder | FarLog, args: argparse.Namespace, out: Printer
) -> tuple[list[dict[str, Any]], int]:
    """The groups that were asked for; what cannot be read is told, and is an error."""
    folder = ledgers_of(log)
    if folder is None:
        assert not isinstance(log, Folder)
        return [info_row(one) for one in far_groups(log, args.topic, args.group)], OK
    rows, code = [], OK
    listening = folder.listening()
    for key in folder.groups():
        if args.topic is not None and not matches(args.topic, key.topic):
            continue
        if args.group not in (None, key.group):
            continue
        if is_hidden(key) and not (args.all or args.group):
            continue
        try:
            rows.append(group_row(folder, key, listening))
        except StorageError as error:
            out.note(str(error))
            code = ERROR
    return rows, code


def run_lag(args: argparse.Namespace) -> int:
    with closing(open_log(args)) as log:
        folder = ledgers_of(log)
        if folder is None:
            assert not isinstance(log, Folder)
            lag = sum(one.lag for one in _picked_far(log, args))
        else:
            args.partition = None
            lag = sum(group_row(folder, key)["lag"] for key in _picked(folder, args))
    row = {"topic": args.topic, "group": args.group, "lag": lag}
    if args.json:
        Printer(args).row(row, "")
    else:
        print(lag)
    return OK


def _picked_far(log: FarLog, args: argparse.Namespace) -> list[GroupInfo]:
    """As ``_picked``, on a bus that changes a group on all partitions of a topic at once."""
    if getattr(args, "partition", None) is not None:
        refuse(log.url, "ledgers", "--partition")
    found = far_groups(log, check_pattern(args.topic), check_group(args.group))
    if not found:
        raise NotFound(f"there is no group {args.group} on {args.topic}", hint="trunkline group ls")
    return found


def _picked(folder: Folder | StoreLog, args: argparse.Namespace) -> list[GroupKey]:
    check_pattern(args.topic)
    check_group(args.group)
    keys = [
        key for key in folder.groups() if key.group == args.group and matches(args.topic, key.topic)
    ]
    if not keys:
        raise NotFound(f"there is no group {args.group} on {args.topic}", hint="trunkline group ls")
    picked = [key for key in keys if args.partition in (None, key.partition)]
    if not picked:
        raise NotFound(f"group {args.group} on {args.topic} has no partition {args.partition}")
    return picked


def run_info(args: argparse.Namespace) -> int:
    out = Printer(args)
    with closing(open_log(args)) as log:
        folder = ledgers_of(log)
        if folder is None:
            assert not isinstance(log, Folder)
            rows = [
                info_row(one) | {"options": msgspec.to_builtins(one.policy)}
                for one in _picked_far(log, args)
            ]
            listening = log.call(log.bus.members(group=args.group))
        else:
            now = folder.clock.monotonic()
            listening = folder.listening()
            rows = [
                group_row(folder, key, listening)
                | folder.look(key, lambda group: _inside(group, now))
                for key in _picked(folder, args)
            ]
    for row in rows:
        row["subscribed"] = _subscribed(listening, row["topic"], row["group"])
    if out.json:
        out.table(rows, ())
        return OK
    out.table(rows, _COLUMNS, optional=OPTIONAL)
    if not any(row["subscribed"] for row in rows):
        out.say("\nno process is subscribed")
    for topic in dict.fromkeys(row["topic"] for row in rows):
        found = next(row["subscribed"] for row in rows if row["topic"] == topic)
        if found:
            out.say(f"\nsubscribed to {topic}")
            out.table(found, _MEMBERS, optional=("client",))
    for row in rows:
        place = f"{row['topic']}/{row['partition']}"
        out.say(f"\n{place} {row['group']}")
        out.say("policy   " + " ".join(f"{k}={cell(v)}" for k, v in row["options"].items()))
        if row.get("settled"):
            spans = " ".join(f"{a}-{b}" if a != b else str(a) for a, b in row["settled"])
            out.say(f"settled  {spans} above the floor")
        if row.get("again"):
            out.say(f"redriven {' '.join(map(str, row['again']))}")
        if row.get("held"):
            out.say("leased")
            out.table(row["held"], ("offset", "attempt", "member", "seconds_left"))
        if row.get("retrying"):
            out.say("waiting for a retry")
            out.table(row["retrying"], ("offset", "attempts", "seconds_left"))
    return OK


def _subscribed(listening: list[MemberInfo], topic: str, group: str) -> list[dict[str, Any]]:
    return [
        {
            "pid": one.pid,
            "host": one.host,
            "client": one.client,
            "since": datetime.fromtimestamp(one.since, UTC),
            "in_flight": one.in_flight,
            "last_delivery": None
            if one.last_delivery is None
            else datetime.fromtimestamp(one.last_delivery, UTC),
            "member": one.member,
        }
        for one in select(listening, topic, group)
    ]


def _inside(group: Group, now: float) -> dict[str, Any]:
    return {
        "options": msgspec.to_builtins(group.options),
        "settled": list(group.settled),
        "again": sorted(group.again),
        "held": [
            {
                "offset": lease.offset,
                "attempt": lease.attempt,
                "member": lease.by,
                "seconds_left": round(lease.until - now, 1),
            }
            for _, lease in sorted(group.leases.items())
        ],
        "retrying": [
            {
                "offset": offset,
                "attempts": group.attempts.get(offset, 0),
                "seconds_left": round(at - now, 1),
            }
            for offset, at in sorted(group.waiting.items())
            if at > now
        ],
    }


def run_seek(args: argparse.Namespace) -> int:
    out = Printer(args)
    with closing(open_log(args)) as log:
        point = parse_point(args.to, log.clock.now())
        folder = ledgers_of(log)
        if folder is None:
            assert not isinstance(log, Folder)
            rows = _seek_far(log, args, point)
            out.table(rows, ("topic", "partition", "group", "from", "to"), optional=("partition",))
            return OK
        rows = []
        for key in _picked(folder, args):
            reader = folder.reader(key.topic, key.partition)
            first, end = reader.bounds()
            wanted = point.resolve(reader)
            floor = max(first, min(wanted, end)) - 1
            if floor != wanted - 1:
                holds = f"holds {first} to {end - 1}" if first < end else "is empty"
                out.note(f"{key.topic}/{key.partition} {holds}: not to {wanted}, to {floor + 1}")
            before = _move(folder, key, floor, out, dry_run=args.dry_run)
            rows.append(
                {
                    "topic": key.topic,
                    "partition": key.partition,
                    "group": key.group,
                    "from": None if before is None else before + 1,
                    "to": floor + 1,
                    "dry_run": args.dry_run,
                }
            )
    out.table(rows, ("topic", "partition", "group", "from", "to"), optional=("partition",))
    return OK


def _seek_far(log: FarLog, args: argparse.Namespace, point: Point) -> list[dict[str, Any]]:
    """Move a group on a bus that takes one place for all partitions of a topic."""
    rows = []
    for topic in dict.fromkeys(one.topic for one in _picked_far(log, args)):
        before = far_groups(log, topic, args.group)
        after = [point.resolve(log.reader(topic, one.partition)) for one in before]
        to: Start
        match point.base, point.n:
            case "time", _:
                assert point.when is not None
                to = point.when
            case ("start" | "end") as word, 0:
                to = "earliest" if word == "start" else "latest"
            case "offset", offset:
                to = offset
            case _ if len(before) > 1:
                refuse(log.url, "ledgers", f"{args.to} on a topic of several partitions")
            case _:
                to = after[0]
        if not args.dry_run:
            moved = log.call(log.bus.seek(topic, args.group, to))
            after = [one.floor + 1 for one in sorted(moved, key=lambda one: one.partition)]
        rows += [
            {
                "topic": topic,
                "partition": one.partition,
                "group": one.group,
                "from": one.floor + 1,
                "to": next_,
                "dry_run": args.dry_run,
            }
            for one, next_ in zip(before, after, strict=True)
        ]
    return rows


def _move(
    folder: Folder | StoreLog, key: GroupKey, floor: int, out: Printer, *, dry_run: bool
) -> int | None:
    """Returns where the group stood, None if that cannot be told. A group whose files are damaged
    is begun anew, and the damaged files are kept in ``quarantine/``.
    """

    def move(group: Group) -> int:
        before = group.floor
        group.seek(floor)
        return before

    try:
        return (folder.look if dry_run else folder.step)(key, move)
    except Corrupt as error:
        out.note(str(error.message))
        if not dry_run and isinstance(folder, Folder):
            _set_aside(folder, key)
            folder.remove_group(key)
            folder.step(key, lambda group: group.define(GroupOptions(), floor))
            out.note(f"{key.group} begins anew with the default policy")
        return None


def _set_aside(folder: Folder, key: GroupKey) -> None:
    place = os.path.join(folder.path, "quarantine")
    atomic.make_dir(place)
    stem = os.path.join(folder.path, layout.group_stem(*key))
    for ending in (".json", ".json.bak", ".journal"):
        try:
            data = atomic.read_file(stem + ending)
        except FileNotFoundError:
            continue
        atomic.replace_file(os.path.join(place, os.path.basename(stem) + ending), data)


def run_edit(args: argparse.Namespace) -> int:
    out = Printer(args)
    change = edited(args, GroupOptions)
    if change is None:
        hint = f"trunkline group info {args.topic} {args.group}"
        raise InvalidOption("nothing to change", hint=hint)

    def edit(group: Group) -> tuple[GroupOptions, GroupOptions]:
        before = group.options
        group.edit(change(before))
        return before, group.options

    with closing(open_log(args)) as log:
        folder = ledgers_of(log)
        edits: list[tuple[GroupKey, GroupOptions, GroupOptions]] = []
        if folder is None:
            assert not isinstance(log, Folder)
            edits = _edit_far(log, args, change)
        else:
            for key in _picked(folder, args):
                verb = folder.look if args.dry_run else folder.step
                edits.append((key, *verb(key, edit)))
    for key, before, after in edits:
        told = [f"{n} {cell(a)} -> {cell(b)}" for n, a, b in differences(before, after)]
        place = f"{key.group} on {key.topic}/{key.partition}"
        text = f"{'would change' if args.dry_run else 'changed'} {place}: {', '.join(told)}"
        row = {
            **key._asdict(),
            "options": msgspec.to_builtins(after),
            "changed": bool(told),
            "dry_run": args.dry_run,
        }
        out.row(row, text if told else f"{place} has this policy already")
    return OK


def _edit_far(
    log: FarLog, args: argparse.Namespace, change: Callable[[GroupOptions], GroupOptions]
) -> list[tuple[GroupKey, GroupOptions, GroupOptions]]:
    edits = []
    for one in _picked_far(log, args):
        after = change(one.policy)
        differ = {name: value for name, _, value in differences(one.policy, after)}
        if differ and not one.partition and not args.dry_run:
            log.call(log.bus.edit(one.topic, one.group, **differ))
        edits.append((GroupKey(one.topic, one.partition, one.group), one.policy, after))
    return edits


def run_pause(args: argparse.Namespace) -> int:
    return _change(args, on=True)


def run_resume(args: argparse.Namespace) -> int:
    return _change(args, on=False)


def _change(args: argparse.Namespace, *, on: bool) -> int:
    out = Printer(args)
    with closing(open_log(args)) as log:
        folder = ledgers_of(log)
        if folder is None:
            assert not isinstance(log, Folder)
            rows = []
            for topic in dict.fromkeys(one.topic for one in _picked_far(log, args)):
                verb = log.bus.pause if on else log.bus.resume
                rows += [info_row(one) for one in log.call(verb(topic, args.group))]
        else:
            keys = _picked(folder, args)
            for key in keys:
                folder.step(key, lambda group: group.pause(on))
            rows = [group_row(folder, key) for key in keys]
    for row in rows:
        place = f"{row['topic']}/{row['partition']}"
        out.row(row, f"{'paused' if on else 'resumed'} {row['group']} on {place}")
    return OK


def run_rm(args: argparse.Namespace) -> int:
    out = Printer(args)
    with closing(open_log(args)) as log:
        folder = ledgers_of(log)
        if folder is None:
            assert not isinstance(log, Folder)
            found = _picked_far(log, args)
            keys = [GroupKey(one.topic, one.partition, one.group) for one in found]
        else:
            keys = _picked(folder, args)
        places = " ".join(f"{key.topic}/{key.partition}" for key in keys)
        if not args.dry_run and not confirm(args, f"remove {args.group} from {places}?"):
            return ERROR
        for key in keys:
            if not args.dry_run and folder is not None:
                folder.remove_group(key)
            elif not args.dry_run and not key.partition:
                assert not isinstance(log, Folder)
                log.call(log.bus.forget(key.topic, key.group))
            verb = "would remove" if args.dry_run else "removed"
            row = {**key._asdict(), "dry_run": args.dry_run}
            out.row(row, f"{verb} {key.group} from {key.topic}/{key.partition}")
    return OK
