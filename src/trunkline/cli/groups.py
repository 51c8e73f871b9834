"""``trunkline group``: where groups stand, and moving them. Works beside running members."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec

from trunkline.cli import ERROR, OK, Commands, branch, leaf
from trunkline.cli.flags import add_option_flags, edited
from trunkline.cli.places import at_least, open_folder, parse_point, pick_topics
from trunkline.cli.render import Output, cell, confirm
from trunkline.dead import keeps_books
from trunkline.errors import Corrupt, InvalidOption, NotFound, StorageError
from trunkline.group import Group
from trunkline.log import atomic, layout
from trunkline.log.folder import Folder, GroupKey
from trunkline.options import GroupOptions, differences
from trunkline.topics import check_group, check_pattern, is_pattern, matches

_COLUMNS = ("topic", "partition", "group", "floor", "lag", "leases", "waiting", "paused", "members")


def register(commands: Commands[Any]) -> None:
    below = branch(commands, "group", "list, edit, seek, pause, resume and remove groups")

    ls = leaf(below, "ls", run_ls, "list groups and how far they are")
    ls.add_argument("topic", metavar="TOPIC", nargs="?", help="only of these: orders, orders.*")
    ls.add_argument("--group", help="only this one")
    ls.add_argument("--all", action="store_true", help="with those that keep the books of dlq")

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
            parser.add_argument(
                "--dry-run", action="store_true", help="only show what would be done"
            )
        if name == "rm":
            parser.add_argument("--yes", action="store_true", help="do not ask")


def group_row(folder: Folder, key: GroupKey) -> dict[str, Any]:
    """Where a group stands. ``members`` are those that hold records and are alive."""
    first, end = folder.bounds(key.topic, key.partition)
    now = folder.clock.monotonic()

    def look(group: Group) -> dict[str, Any]:
        return {
            "topic": key.topic,
            "partition": key.partition,
            "group": key.group,
            "floor": group.floor,
            "lag": group.lag(end, first),
            "leases": len(group.leases),
            "waiting": sum(at > now for at in group.waiting.values()),
            "paused": group.paused,
            "members": len(group.holders()),
        }

    return folder.look(key, look)


def run_ls(args: argparse.Namespace) -> int:
    out = Output(args)
    if args.topic is not None:
        check_pattern(args.topic)
    if args.group is not None:
        check_group(args.group)
    code = OK
    with closing(open_folder(args)) as folder:
        rows = []
        if args.topic is not None and not is_pattern(args.topic):
            pick_topics(folder, args.topic)  # a topic that is not there has not merely no groups
        for key in folder.groups():
            if args.topic is not None and not matches(args.topic, key.topic):
                continue
            if args.group not in (None, key.group):
                continue
            if keeps_books(key) and not (args.all or args.group):
                continue
            try:
                rows.append(group_row(folder, key))
            except StorageError as error:
                out.note(str(error))
                code = ERROR
        if rows or code == OK:
            out.table(rows, ("group",) if args.quiet else _COLUMNS, "there are no groups")
    return code


def _picked(folder: Folder, args: argparse.Namespace) -> list[GroupKey]:
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
    out = Output(args)
    with closing(open_folder(args)) as folder:
        keys = _picked(folder, args)
        rows = []
        for key in keys:
            row = group_row(folder, key)
            rows.append(row | folder.look(key, lambda group: _inside(folder, group)))
    if out.json:
        out.table(rows, ())
        return OK
    out.table(rows, _COLUMNS)
    for row in rows:
        place = f"{row['topic']}/{row['partition']}"
        out.say(f"\n{place} {row['group']}")
        out.say("policy   " + " ".join(f"{k}={cell(v)}" for k, v in row["options"].items()))
        if row["settled"]:
            spans = " ".join(f"{a}-{b}" if a != b else str(a) for a, b in row["settled"])
            out.say(f"settled  {spans} above the floor")
        if row["again"]:
            out.say(f"redriven {' '.join(map(str, row['again']))}")
        if row["held"]:
            out.table(row["held"], ("offset", "attempt", "member", "seconds_left"))
        if row["retrying"]:
            out.table(row["retrying"], ("offset", "attempts", "seconds_left"))
    return OK


def _inside(folder: Folder, group: Group) -> dict[str, Any]:
    now = folder.clock.monotonic()
    return {
        "options": msgspec.structs.asdict(group.options),
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
    out = Output(args)
    with closing(open_folder(args)) as folder:
        point = parse_point(args.to, folder.clock.now())
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
    out.table(rows, ("topic", "partition", "group", "from", "to"))
    return OK


def _move(folder: Folder, key: GroupKey, floor: int, out: Output, *, dry_run: bool) -> int | None:
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
        if not dry_run:
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
            with open(stem + ending, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            continue
        atomic.replace_file(os.path.join(place, os.path.basename(stem) + ending), data)


def run_edit(args: argparse.Namespace) -> int:
    out = Output(args)
    change = edited(args, GroupOptions)
    if change is None:
        hint = f"trunkline group info {args.topic} {args.group}"
        raise InvalidOption("nothing to change", hint=hint)

    def edit(group: Group) -> tuple[GroupOptions, GroupOptions]:
        before = group.options
        group.edit(change(before))
        return before, group.options

    with closing(open_folder(args)) as folder:
        for key in _picked(folder, args):
            before, after = (folder.look if args.dry_run else folder.step)(key, edit)
            told = [f"{n} {cell(a)} -> {cell(b)}" for n, a, b in differences(before, after)]
            place = f"{key.group} on {key.topic}/{key.partition}"
            text = f"{'would change' if args.dry_run else 'changed'} {place}: {', '.join(told)}"
            row = {
                **key._asdict(),
                "options": msgspec.structs.asdict(after),
                "changed": bool(told),
                "dry_run": args.dry_run,
            }
            out.row(row, text if told else f"{place} has this policy already")
    return OK


def run_pause(args: argparse.Namespace) -> int:
    return _change(args, "paused", lambda group: group.pause(True))


def run_resume(args: argparse.Namespace) -> int:
    return _change(args, "resumed", lambda group: group.pause(False))


def _change(args: argparse.Namespace, what: str, change: Callable[[Group], None]) -> int:
    out = Output(args)
    with closing(open_folder(args)) as folder:
        for key in _picked(folder, args):
            folder.step(key, change)
            out.row(group_row(folder, key), f"{what} {key.group} on {key.topic}/{key.partition}")
    return OK


def run_rm(args: argparse.Namespace) -> int:
    out = Output(args)
    with closing(open_folder(args)) as folder:
        keys = _picked(folder, args)
        places = " ".join(f"{key.topic}/{key.partition}" for key in keys)
        if not args.dry_run and not confirm(args, f"remove {args.group} from {places}?"):
            return ERROR
        for key in keys:
            if not args.dry_run:
                folder.remove_group(key)
            verb = "would remove" if args.dry_run else "removed"
            row = {**key._asdict(), "dry_run": args.dry_run}
            out.row(row, f"{verb} {key.group} from {key.topic}/{key.partition}")
    return OK
