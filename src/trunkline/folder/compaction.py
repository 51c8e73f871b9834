"""Compaction and compression of finished segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from msgspec.structs import replace

from trunkline.folder import Folder
from trunkline.folder.retention import free
from trunkline.folder.rewrite import make_head_durable, records, rewrite, unchanged
from trunkline.log.head import Head
from trunkline.log.line import Line, with_commit
from trunkline.log.segment import Segment

_TRIES = 5
Progress = Callable[[int, int], None]


def compact(folder: Folder, topic: str, partition: int, progress: Progress | None = None) -> int:
    """Keep only the latest record of each key in finished segments. Returns how many went.

    Records without a key stay. A null payload is a tombstone: it removes its key, and goes itself
    once every group has seen it. What some group has not settled stays unless the topic says so.
    """
    make_head_durable(folder, topic, partition)
    removed: list[int] = []
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):  # another process was quicker: look again
            _compact(folder, topic, partition, progress, removed)
            break
    return sum(removed)


def _compact(
    folder: Folder, topic: str, partition: int, progress: Progress | None, removed: list[int]
) -> None:
    """Adds to ``removed`` how many went, for each segment that was rewritten."""
    reader = folder.fresh_reader(topic, partition)
    try:
        head = reader.head()
        files = [s for s in reader.files() if not s.bad]
        limit = free(folder, topic, partition, head.next - 1)
        # Nothing to gain before another segment is finished or the groups have moved on.
        state = (head.segment, limit)
        if folder.compacted.get((topic, partition)) == state:
            return
        latest: dict[str, int] = {}
        durable = replace(head, end=head.durable)  # what a power cut may take replaces nothing
        for done, segment in enumerate(files):
            for line, _ in records(segment, durable):
                if line.meta is not None and line.meta.key is not None:
                    latest[line.meta.key] = line.offset
            segment.close()
            if progress is not None:
                progress(done + 1, 2 * len(files))
        for done, segment in enumerate(files):
            segment.open()  # its seal and its lines are those of one file
            seal = segment.seal if segment.number < head.segment else None
            if seal is not None:
                kept = _kept(records(segment, head), limit, latest)
                if len(kept) < seal.count:
                    guard = unchanged(folder, topic, partition, segment)
                    fresh = replace(seal, count=len(kept), holes=True)
                    rewrite(segment, kept, fresh, guard=guard)
                    removed.append(seal.count - len(kept))
            segment.close()
            if progress is not None:
                progress(len(files) + done + 1, 2 * len(files))
        folder.compacted[topic, partition] = state
    finally:
        reader.close()


def _kept(
    lines: Iterable[tuple[Line, bytes]], limit: int, latest: dict[str, int]
) -> list[tuple[Line, bytes]]:
    """What a compaction leaves. If the last line of a batch goes, the one that is left before it
    says in its place when the batch was written.
    """
    kept: list[tuple[Line, bytes]] = []
    begin = 0  # of its batch
    for line, text in lines:
        if line.offset > limit or _is_latest(line, latest):
            kept.append((line, text))
        elif line.commit is not None and len(kept) > begin:
            last, data = kept[-1]
            kept[-1] = (last, with_commit(data, line.commit))
        if line.commit is not None:
            begin = len(kept)
    return kept


def _is_latest(line: Line, latest: dict[str, int]) -> bool:
    if line.meta is None or line.meta.key is None:
        return True
    return latest[line.meta.key] == line.offset and line.meta.payload is not None


def pack_segments(folder: Folder, topic: str, partition: int) -> int:
    """Compress finished segments. Returns how many."""
    make_head_durable(folder, topic, partition)
    reader = folder.fresh_reader(topic, partition)
    packed = 0
    try:
        head = reader.head()
        for segment in reader.files():
            if segment.number < head.segment and not (segment.packed or segment.bad):
                with suppress(FileNotFoundError):  # another process was quicker
                    packed += _pack(folder, topic, partition, segment, head)
                segment.close()
    finally:
        reader.close()
    return packed


def _pack(folder: Folder, topic: str, partition: int, segment: Segment, head: Head) -> bool:
    segment.open()  # its seal and its lines are those of one file
    seal = segment.seal
    if seal is not None:
        guard = unchanged(folder, topic, partition, segment)
        rewrite(segment, list(records(segment, head)), seal, packed=True, guard=guard)
    return seal is not None
