"""Names to paths and back: the only module that knows the folder's tree.

::

    wal/actions.00000001.jsonl       a segment          wal/actions.head    where the log ends
    wal/actions~3.00000001.jsonl     of partition 3     wal/actions.00000001.index
    offsets/actions__learner.json    a group: snapshot, .journal, .lock
    dlq/actions.dlq.jsonl            the topic actions.DLQ, its first segment
    members/<id>                     locked for as long as a process is a member
    topics.json  bus.json  reserve
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import lru_cache

from trunkline.errors import InvalidName, InvalidOption, NoBus
from trunkline.names import DEAD_SUFFIX, check_topic, is_dead
from trunkline.options import PARTITIONS_MAX

_STEM_MAX = 230
_SEGMENT = re.compile(r"(?P<stem>.+)\.(?P<number>\d{8})\.jsonl(?P<zst>\.zst)?")
_DEAD_FIRST = re.compile(r"(?P<stem>.+\.dlq)\.jsonl(?P<zst>\.zst)?")


def folder_path(place: str) -> str:
    """The folder that stands behind ``file:``. A ``~`` in front is the home: no shell sees it.
    Two slashes name a host, as in any URL: a folder of that name at the root is what nobody means.
    """
    if place.startswith("//") and not place.startswith("///"):
        hint = f"file:{place[2:]}, or file:/// and the whole path"
        raise InvalidOption(f"not a folder: file:{place}", value=place, hint=hint)
    path = os.path.expanduser(place.removeprefix("//"))
    try:
        os.path.abspath(path)
    except FileNotFoundError as error:
        said, hint = f"there is no bus at {path}: the current folder is gone", "name the whole path"
        raise NoBus(said, path=path, hint=hint) from error
    return path


def log_stem(topic: str, partition: int) -> str:
    """The path of a partition's files, relative to the folder, without number and ending."""
    mark = f"~{partition}" if partition else ""
    if is_dead(topic):
        return f"dlq/{topic.removesuffix(DEAD_SUFFIX)}{mark}.dlq"
    return f"wal/{topic}{mark}"


def segment_path(stem: str, number: int) -> str:
    if number == 1 and stem.startswith("dlq/"):
        return f"{stem}.jsonl"
    return f"{stem}.{number:08d}.jsonl"


def parse_segment(name: str, in_dlq: bool) -> tuple[str, int, bool] | None:
    """``(stem without folder, number, compressed)`` of a segment's file name."""
    match = _SEGMENT.fullmatch(name)
    if match:
        return match["stem"], int(match["number"]), bool(match["zst"])
    match = _DEAD_FIRST.fullmatch(name) if in_dlq else None
    return (match["stem"], 1, bool(match["zst"])) if match else None


@lru_cache(maxsize=1024)  # of what changes, most is the same over and over
def parse_stem(stem: str, in_dlq: bool) -> tuple[str, int] | None:
    """``(topic, partition)`` of a partition's files; None if they are not ours."""
    name, _, partition = stem.removesuffix(".dlq").partition("~") if in_dlq else stem.partition("~")
    place = name + (DEAD_SUFFIX if in_dlq else ""), int(partition) if partition.isdigit() else 0
    try:
        check_topic(place[0])
    except InvalidName:
        return None
    fits = place[1] < PARTITIONS_MAX and log_stem(*place).partition("/")[2] == stem
    return place if fits else None


def partitions(names: Iterable[str], in_dlq: bool) -> set[tuple[str, int]]:
    """What the files of a folder belong to; those that are not ours are passed over."""
    stems: set[str] = set()
    for name in names:
        if name.endswith(".head"):
            stems.add(name.removesuffix(".head"))
        elif segment := parse_segment(name.removesuffix(".corrupt"), in_dlq):
            stems.add(segment[0])
    return {place for stem in stems if (place := parse_stem(stem, in_dlq)) is not None}


def group_stem(topic: str, partition: int, group: str) -> str:
    """The path of a group's files without ending. A name too long for a file is cut and told apart
    by its digest; the files themselves say which group they belong to.
    """
    mark = f"~{partition}" if partition else ""
    stem = f"{topic}{mark}__{group}"
    if len(stem) > _STEM_MAX:
        import hashlib  # short commands do without it

        digest = hashlib.sha256(stem.encode()).hexdigest()[:32]
        stem = f"{stem[: _STEM_MAX - 33]}~{digest}"
    return f"offsets/{stem}"


@lru_cache(maxsize=1024)
def parse_group_stem(stem: str) -> tuple[str, int, str] | None:
    """``(topic, partition, group)``, or None where the name was cut."""
    left, mark, group = stem.rpartition("__")
    topic, _, partition = left.partition("~")
    if not mark or "~" in group or (partition and not partition.isdigit()):
        return None
    return topic, int(partition or 0), group


def belongs(file: str, stem: str, in_dlq: bool) -> bool:
    """Whether a file is one of a partition's."""
    if file == stem + ".head":
        return True
    name = file.removesuffix(".corrupt")
    if name.endswith(".index"):
        return name[:-15] == stem
    parsed = parse_segment(name, in_dlq)
    return parsed is not None and parsed[0] == stem
