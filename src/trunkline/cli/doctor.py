"""``trunkline doctor``: what is wrong with a bus folder, and what to do about each thing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from typing import Any, NamedTuple
from zlib import crc32

from trunkline.cli import ERROR, OK, Commands, leaf
from trunkline.cli.arguments import URL, at_least, bus_path, bus_url, open_folder
from trunkline.cli.folder import is_wrong, verify_group_files, verify_topics
from trunkline.cli.groups import group_row
from trunkline.cli.render import Printer, amount, progress, size
from trunkline.delivery.deadletters import DESK, is_hidden
from trunkline.errors import Corrupt, NoBus, StorageError, TrunklineError
from trunkline.files import ndjson
from trunkline.folder import Folder, in_hand
from trunkline.folder.repair import salvage
from trunkline.log import atomic
from trunkline.log.segment import Segment
from trunkline.names import DEAD_SUFFIX, GroupKey, is_dead
from trunkline.options import TopicOptions

_LAG = 10_000
_CHUNK = 1024 * 1024
_FREE_SHARE = 0.05
_LOST_OPTIONS = (
    "restore it from a backup; or move it away and set the options again by trunkline topic edit: "
    "the records are not touched"
)
_GONE = "put it back from a backup, or go on without it: trunkline doctor --salvage"
_EXTRAS = (
    ("rich", "cli", "tables are plain text and there are no progress bars"),
    ("sqlglot", "filters", "--where cannot be used"),
)


class Diagnosis(NamedTuple):
    """``level`` is error, warning or note; ``remedy`` what to do about it; ``code`` is for
    programs, and does not change with the words.
    """

    level: str
    where: str
    problem: str
    remedy: str = ""
    code: str = "other"


def register(commands: Commands[Any]) -> None:
    doctor = leaf(commands, "doctor", run_doctor, "say what is wrong and what to do about it")
    doctor.add_argument(
        "--salvage",
        action="store_true",
        help="bring back the records of damaged files that can be read",
    )
    doctor.add_argument("--verify", action="store_true", help="check every byte as well")
    doctor.add_argument(
        "--lag", type=at_least(0), default=_LAG, metavar="N", help="speak of groups so far behind"
    )
    doctor.add_argument(
        "--letters",
        type=at_least(1),
        default=1,
        metavar="N",
        help="name topics with N dead letters or more",
    )
    doctor.add_argument(
        "--free",
        type=at_least(0),
        default=round(_FREE_SHARE * 100),
        metavar="PERCENT",
        help="speak of a device with less room",
    )
    doctor.add_argument(
        "--fail-on",
        choices=("error", "warning"),
        default="error",
        help="exit with 1 for these, and worse (error)",
    )


def run_doctor(args: argparse.Namespace) -> int:
    out = Printer(args)
    found: list[Diagnosis] = []
    try:
        opened = _open(args, found)
    except NoBus:
        # Whether to go on from a bare NDJSON file is a question of trees that have no bus yet.
        found += _adoption() if bus_url(args) == URL else ()
        if not found:
            raise
        return _tell(out, found, args.fail_on)
    unread: list[str] = []
    with closing(opened) as folder:
        found += _storage(folder, args.free / 100)
        try:
            topics = folder.topics()
        except TrunklineError as error:
            found.append(Diagnosis("error", "topics.json", str(error), _LOST_OPTIONS))
            topics = {}
        if args.salvage:
            mended = list(_salvage(folder, topics))
            found += mended
            if not mended:
                out.note("no record is damaged, so none was brought back")
        for topic, options in sorted(topics.items()):
            for partition in range(options.partitions):
                found += _partition(folder, topic, partition, unread)
        if args.verify:
            unread = []
            counts = {name: options.partitions for name, options in topics.items()}
            with progress(args, "verifying") as step:
                found += [
                    Diagnosis(
                        "error" if finding.severe else "warning",
                        f"{finding.path}:{finding.position}",
                        finding.problem,
                        "trunkline doctor --salvage" if finding.severe else "",
                    )
                    for finding in verify_topics(folder, counts, step)
                ]
        found += _groups(folder, args.lag)
        found += _letters(folder, topics, args.letters)
        found += _members(folder)
        found += _extras(topics)
        found += _adoption()
    return _tell(out, found, args.fail_on, len(unread))


def _tell(out: Printer, found: list[Diagnosis], fail_on: str, unread: int = 0) -> int:
    order = ("error", "warning", "note")
    found.sort(key=lambda diagnosis: order.index(diagnosis.level))
    rows = [diagnosis._asdict() for diagnosis in dict.fromkeys(found)]
    if rows:
        out.table(rows, ("level", "where", "problem", "remedy"))
    else:
        out.row({"ok": True, "unread_files": unread}, "nothing is wrong")
    if unread:
        out.say(
            f"finished files of which only the seals were looked at: {unread} "
            "(trunkline verify checks every byte)"
        )
    failing = order[: order.index(fail_on) + 1]
    return ERROR if any(diagnosis.level in failing for diagnosis in found) else OK


def _open(args: argparse.Namespace, found: list[Diagnosis]) -> Folder:
    """The folder, also where it lies on a network file system: that is one thing to tell."""
    path = bus_path(bus_url(args))
    kind = atomic.network_kind(path)
    if kind is not None:
        problem = f"it is on a network file system ({kind}), where locks cannot be trusted"
        found.append(Diagnosis("error", path, problem, "move it to a local disk"))
        args.allow_network = True
    return open_folder(args)


def _storage(folder: Folder, free_share: float) -> Iterator[Diagnosis]:
    space = os.statvfs(folder.path)
    free, whole = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    reserve = os.path.join(folder.path, "reserve")
    kept = os.stat(reserve).st_size if os.path.exists(reserve) else 0
    if kept < folder.options.reserve_bytes:
        yield Diagnosis(
            "error",
            folder.path,
            f"the device is full: {size(free)} are left and the reserve is used up",
            "free some space, or trunkline topic purge; publishing then goes on by itself",
            "storage_full",
        )
    elif free < free_share * whole:
        yield Diagnosis(
            "warning",
            folder.path,
            f"only {size(free)} of {size(whole)} are free",
            "free some space",
            "storage_low",
        )
    mode = os.stat(folder.path).st_mode & 0o077
    if mode:
        yield Diagnosis("note", folder.path, "other users may enter it", f"chmod 700 {folder.path}")
    for place in (".", "wal", "dlq", "offsets"):
        for name in folder.names(place):
            if name.endswith(".tmp"):
                yield Diagnosis(
                    "note",
                    os.path.normpath(os.path.join(place, name)),
                    "left by a process that died while it wrote",
                    "remove it when nothing runs",
                )


def _partition(
    folder: Folder, topic: str, partition: int, unread: list[str]
) -> Iterator[Diagnosis]:
    """What a quick look finds: every byte of the last file, of the others what their seals say.
    The names of those others are added to ``unread``.
    """
    try:
        reader = folder.reader(topic, partition)
        head = reader.head()
        expected: int | None = head.start
        files = reader.files()
        if head.end and all(segment.number != head.segment for segment in files):
            yield Diagnosis(
                "error",
                f"{topic}/{partition}",
                f"its last file, number {head.segment}, is gone",
                _GONE,
            )
        for segment in files:
            name = os.path.relpath(segment.path, folder.path)
            if segment.number < head.segment and not segment.bad:
                unread.append(name)
            first = None if segment.bad else segment.first
            if expected is not None and first is not None and first > expected:
                yield _lost(name, expected, first)
            seal = None if segment.bad or segment.number == head.segment else segment.seal
            expected = None if seal is None else max(seal.last + 1, head.start)
            if segment.bad:
                yield Diagnosis(
                    "error",
                    name,
                    "damaged, and set aside: its records cannot be read",
                    "trunkline doctor --salvage",
                    "damaged",
                )
            elif segment.number < head.segment and seal is None:
                yield Diagnosis(
                    "warning",
                    name,
                    "it has no seal that can be read: a process died, a sync failed, or damage",
                    f"trunkline verify {topic}",
                )
            elif segment.number == head.segment and segment.size() < head.end:
                yield Diagnosis(
                    "error",
                    name,
                    f"it ends at byte {segment.size()}, and was written up to {head.end}",
                    "trunkline doctor --salvage; the next publish would set the file aside"
                    if segment.size() < head.durable
                    else "the next publish to this topic goes on behind the last whole record",
                )
            elif segment.number == head.segment and _sum(segment, head.end) != head.sum:
                yield Diagnosis(
                    "error",
                    name,
                    f"it is damaged (trunkline verify {topic} says where)",
                    "trunkline doctor --salvage",
                    "damaged",
                )
        if head.end == 0 and expected is not None and expected < head.next:
            yield _lost(f"{topic}/{partition}", expected, head.next)
    except FileNotFoundError:  # removed or replaced while we looked, so there was life in it
        return
    except (ValueError, OSError, TrunklineError) as error:
        remedy = "trunkline doctor --salvage"
        if isinstance(error, StorageError) and not isinstance(error, Corrupt):
            remedy = error.hint
        yield Diagnosis("error", f"{topic}/{partition}", str(error), remedy)


def _lost(where: str, first: int, following: int) -> Diagnosis:
    problem = f"{_spans([(first, following - 1)])} missing: a file is gone"
    return Diagnosis("error", where, problem, _GONE, "records_lost")


def _sum(segment: Segment, end: int) -> int:
    """CRC-32 of the bytes up to ``end``."""
    position = sum_ = 0
    while position < end and (data := segment.read(position, min(_CHUNK, end - position))):
        sum_ = crc32(data, sum_)
        position += len(data)
    return sum_


def _salvage(folder: Folder, topics: dict[str, TopicOptions]) -> Iterator[Diagnosis]:
    for topic, options in sorted(topics.items()):
        for partition in range(options.partitions):
            place = f"{topic}/{partition}"
            try:
                mended = salvage(folder, topic, partition)
            except (ValueError, OSError, StorageError) as error:
                yield Diagnosis("error", place, f"it could not be salvaged: {error}")
                continue
            for name, path, kept, lost in mended:
                were = "was" if kept == 1 else "were"
                told = f"{amount(kept, 'record')} of {name} {were} brought back"
                told = told if path is not None else f"{name} is gone: it was made with no records"
                told += f", {_spans(lost)} lost" if lost else ", none is lost"
                if path is not None:
                    told += f"; the damaged file is {os.path.relpath(path, folder.path)}"
                remedy = "publish what is lost again" if lost else ""
                yield Diagnosis("warning" if lost else "note", place, told, remedy)


def _spans(ranges: list[tuple[int, int]]) -> str:
    """``offset 3 is``, ``offsets 3, 5 to 9 are``"""
    named = ", ".join(f"{a} to {b}" if a != b else str(a) for a, b in ranges)
    return f"offset {named} is" if named.isdigit() else f"offsets {named} are"


def _groups(folder: Folder, lag: int) -> Iterator[Diagnosis]:
    for key in folder.groups():
        if is_hidden(key):
            continue
        place = f"{key.topic}/{key.partition} {key.group}"
        seek = f"trunkline group seek {key.topic} {key.group} --to"
        try:
            row = group_row(folder, key)
            ahead = folder.look(key, lambda group: group.last_settled)
            damaged = verify_group_files(folder, key)
        except Corrupt as error:
            yield Diagnosis("error", place, error.message, f"{seek} N")
            continue
        except StorageError as error:
            yield _unread(place, error)
            continue
        for finding in damaged:  # the group goes on without these files
            where, remedy = (
                f"{finding.path}:{finding.position}",
                "the group's next snapshot mends it",
            )
            yield Diagnosis("warning", where, finding.problem, remedy, "group_file")
        if ahead >= folder.bounds(key.topic, key.partition).next:
            problem = f"it has settled offset {ahead}, which the log does not reach"
            yield Diagnosis("error", place, problem, f"{seek} end")
        if row["paused"]:
            remedy = f"trunkline group resume {key.topic} {key.group}"
            said = f"it is paused, {row['lag']} behind"
            yield Diagnosis("warning", place, said, remedy, "group_paused")
        elif row["lag"] >= max(1, lag):
            how = "it has no members" if not row["members"] else "its members are slower"
            said = f"it is {row['lag']} behind: {how}"
            yield Diagnosis("warning", place, said, "start more members", "group_lag")
        if row["scheduled"]:
            said = f"{row['scheduled']} records are not due, the first at {row['next_due']}"
            yield Diagnosis("note", place, said, f"trunkline group info {key.topic} {key.group}")


def _unread(place: str, error: StorageError) -> Diagnosis:
    if is_wrong(error):
        return Diagnosis("error", place, error.message, error.hint)
    return Diagnosis("note", place, f"not looked at: {error.message}", error.hint)


def _letters(folder: Folder, topics: dict[str, TopicOptions], most: int) -> Iterator[Diagnosis]:
    for name in filter(is_dead, sorted(topics)):
        first, end = folder.bounds(name, 0)
        key = GroupKey(name, 0, DESK)
        try:
            count = folder.group(key).lag(end, first) if folder.has_group(key) else end - first
        except Corrupt as error:
            remedy = f"trunkline group seek {name} {DESK} --to start"
            yield Diagnosis("error", name, error.message, remedy)
            continue
        except StorageError as error:
            yield _unread(name, error)
            continue
        if count >= most:
            topic = name.removesuffix(DEAD_SUFFIX)
            yield Diagnosis(
                "warning",
                topic,
                f"open: about {amount(count, 'dead letter')}",
                f"trunkline dlq ls {topic}",
                "letters_open",
            )


def _members(folder: Folder) -> Iterator[Diagnosis]:
    names = [name for name in folder.names("members") if not name.endswith(in_hand.SUFFIX)]
    gone = [name for name in names if not folder.is_alive(name)]
    if gone:
        yield Diagnosis(
            "note",
            "members/",
            f"{len(gone)} of {len(names)} members died; what they held is free again",
        )


def _extras(topics: dict[str, TopicOptions]) -> Iterator[Diagnosis]:
    for module, extra, effect in _EXTRAS:
        if find_spec(module) is None:
            yield Diagnosis("note", module, f"not installed: {effect}", _install(extra))
    packed = sorted(name for name, options in topics.items() if options.compress)
    if packed and find_spec("zstandard") is None:
        problem = f"not installed, but {', '.join(packed)} asks for compression"
        yield Diagnosis("error", "zstandard", problem, _install("zstd"))


def _install(extra: str) -> str:
    return f"pip install 'trunkline[{extra}]'"


def _adoption() -> Iterator[Diagnosis]:
    """Where this tree keeps an NDJSON file: whether it has earned its place."""
    if os.path.exists(ndjson.EVENTS_FILE):
        rule = ndjson.adoption()
        level = "note" if rule.met else "warning"
        yield Diagnosis(level, ndjson.EVENTS_FILE, str(rule), "trunkline ndjson status")
