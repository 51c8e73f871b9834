"""Trimming a log: removing its oldest records."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from trunkline.errors import StorageFull
from trunkline.folder import Folder
from trunkline.folder.rewrite import rewrite
from trunkline.log import atomic
from trunkline.log.head import Head
from trunkline.log.segment import Segment


def trim(folder: Folder, topic: str, partition: int, before: int) -> int:
    """Remove the records below ``before``. Returns how many are gone.

    They are out of sight at once; their files go as soon as all of a file is below. The last file
    stays, emptied, because it says which offset comes next. On a full device the reserve is used.
    """
    removed = _with_room(folder, lambda: _hide(folder, topic, partition, before))
    _with_room(folder, lambda: _drop_files(folder, topic, partition))
    return removed


def _with_room(folder: Folder, action: Callable[[], int]) -> int:
    try:
        return action()
    except StorageFull:
        if not folder.make_room():
            raise
    return action()


def _hide(folder: Folder, topic: str, partition: int, before: int) -> int:
    writer = folder.writer(topic, partition)
    head = writer.begin()
    try:
        before = min(before, head.next)
        removed = before - head.start
        if removed <= 0:
            return 0
        if before == head.next:
            head = writer.roll(head)
        writer.save(replace(head, start=before), durable=True)
        return removed
    finally:
        writer.end()


def _drop_files(folder: Folder, topic: str, partition: int) -> int:
    """Remove the finished segments that hold nothing any more. Returns how many."""
    writer = folder.writer(topic, partition)
    head = writer.begin()
    try:
        segments = writer.segments()
        done = [
            segment
            for at, segment in enumerate(segments)
            if segment.number < head.segment and last_offset(segments[at:], head) < head.start
        ]
        if done and done[-1].number == head.segment - 1 and head.end == 0:
            last = done.pop()
            if not last.bad and last.seal is not None and last.seal.count:
                rewrite(last, [], replace(last.seal, count=0, holes=True))
        atomic.remove_files([path for s in done for path in (s.path, s.index_path)])
        return len(done)
    finally:
        writer.end()


def last_offset(segments: list[Segment], head: Head) -> int:
    """The last offset that the first of these, a finished one, may hold."""
    first, *later = segments
    if not first.bad and first.seal is not None:
        return first.seal.last
    starts = (s.first for s in later if not s.bad and s.number <= head.segment)
    return next((start for start in starts if start is not None), head.next) - 1
