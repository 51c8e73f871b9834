"""What is done to a log besides appending: trim, retention, compaction, compression, verification.

Finished segments are never changed in place: a new file takes the old one's name, and until it does
the old one counts. Any process may do it at any time: what another one changed or removed meanwhile
is left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import NamedTuple
from zlib import crc32

from msgspec.structs import replace

from trunkline.errors import Corrupt, StorageFull, TrunklineError
from trunkline.log import atomic, reserve
from trunkline.log.folder import Folder
from trunkline.log.head import Head
from trunkline.log.line import Damaged, Line, Seal, frame_seal, parse, with_commit
from trunkline.log.segment import DIGEST_SIZE, Entry, Segment, index_line, pack, with_digest
from trunkline.options import TopicOptions

LAKE_GROUP = "pipeline.lake"  # what Spark has copied to its tables
_FRAME = 1024 * 1024
_TRIES = 5
Progress = Callable[[int, int], None]


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
            if segment.number < head.segment and _last(segments[at:], head) < head.start
        ]
        if done and done[-1].number == head.segment - 1 and head.end == 0:
            last = done.pop()
            if not last.bad and last.seal is not None and last.seal.count:
                rewrite(last, [], replace(last.seal, count=0, holes=True))
        atomic.remove_files([path for s in done for path in (s.path, s.index_path)])
        return len(done)
    finally:
        writer.end()


def _last(segments: list[Segment], head: Head) -> int:
    """The last offset that the first of these, a finished one, may hold."""
    first, *later = segments
    if not first.bad and first.seal is not None:
        return first.seal.last
    starts = (s.first for s in later if not s.bad and s.number <= head.segment)
    return next((start for start in starts if start is not None), head.next) - 1


def retain(folder: Folder, topic: str, partition: int) -> int:
    """Apply the topic's retention. Returns how many records are gone."""
    options = folder.topic(topic)
    reader = folder.fresh_reader(topic, partition)
    try:
        head = reader.head()
        before = head.start
        if options.retention_records is not None:
            before = max(before, head.next - options.retention_records)
        if options.retention_age_s is not None:
            oldest = folder.clock.now() - timedelta(seconds=options.retention_age_s)
            before = max(before, reader.seek(oldest))
        if options.retention_bytes is not None:
            room = options.retention_bytes
            segments = reader.files()
            for at, segment in reversed(list(enumerate(segments))):
                room -= os.stat(segment.path).st_size
                if room < 0 and segment.number < head.segment and not segment.bad:
                    before = max(before, _last(segments[at:], head) + 1)
                    break
    finally:
        reader.close()
    before = min(before, free(folder, topic, partition, before - 1) + 1)
    return trim(folder, topic, partition, before) if before > head.start else 0


def free(folder: Folder, topic: str, partition: int, limit: int) -> int:
    """The last offset up to ``limit`` that nobody waits for, by the topic's options."""
    options = folder.topic(topic)
    if options.retain_unsettled:
        limit = min([limit, *folder.floors(topic, partition)])
    if options.retain_for_lake:
        limit = min([limit, *(folder.floors(topic, partition, LAKE_GROUP) or [0])])
    return limit


def compact(folder: Folder, topic: str, partition: int, progress: Progress | None = None) -> int:
    """Keep only the latest record of each key in finished segments. Returns how many went.

    Records without a key stay. A null payload is a tombstone: it removes its key, and goes itself
    once every group has seen it. What some group has not settled stays unless the topic says so.
    """
    _make_head_durable(folder, topic, partition)
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
            for line, _ in _records(segment, durable):
                if line.meta is not None and line.meta.key is not None:
                    latest[line.meta.key] = line.offset
            segment.close()
            if progress is not None:
                progress(done + 1, 2 * len(files))
        for done, segment in enumerate(files):
            segment.open()  # its seal and its lines are those of one file
            seal = segment.seal if segment.number < head.segment else None
            if seal is not None:
                kept = _kept(_records(segment, head), limit, latest)
                if len(kept) < seal.count:
                    guard = _unchanged(folder, topic, partition, segment)
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


@contextmanager
def _unchanged(folder: Folder, topic: str, partition: int, segment: Segment) -> Iterator[None]:
    """Hold the log while a new file takes a segment's place; ``FileNotFoundError`` if the one that
    was read is not there any more.
    """
    writer = folder.writer(topic, partition)
    writer.begin()
    try:
        if os.stat(segment.path).st_ino != os.fstat(segment.open()).st_ino:
            raise FileNotFoundError(segment.path)
        yield
    finally:
        writer.end()


def _make_head_durable(folder: Folder, topic: str, partition: int) -> None:
    """Before a segment is rewritten: a head from before it was finished would, after a power cut,
    speak of bytes that are not there any more.
    """
    writer = folder.writer(topic, partition)
    head = writer.begin()
    try:
        writer.save(head, durable=True)
    finally:
        writer.end()


def pack_segments(folder: Folder, topic: str, partition: int) -> int:
    """Compress finished segments. Returns how many."""
    _make_head_durable(folder, topic, partition)
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
        guard = _unchanged(folder, topic, partition, segment)
        rewrite(segment, list(_records(segment, head)), seal, packed=True, guard=guard)
    return seal is not None


def tend(folder: Folder, only: Collection[tuple[str, int]] | None = None) -> None:
    """Do for every partition, or for these, what the options of its topic ask for. What fails keeps
    nothing else from it.
    """
    if folder.is_full:  # was, and nobody may publish here, which would find out
        folder.is_full = not reserve.fill(folder.path, folder.options.reserve_bytes)
    _clear_locks(folder)
    failed: TrunklineError | None = None
    for topic, options in folder.topics().items():
        for partition in range(options.partitions):
            if only is not None and (topic, partition) not in only:
                continue
            try:
                with suppress(FileNotFoundError):  # another process is at it
                    _tend(folder, topic, partition, options)
            except TrunklineError as error:
                failed = failed or error
    if failed is not None:
        raise failed


def _clear_locks(folder: Folder) -> None:
    """Remove the locks of groups whose removal was cut short; who would use one makes another."""
    place = os.path.join(folder.path, "offsets")
    names = set(folder.names("offsets"))
    for name in names:
        stem, _, kind = name.rpartition(".")
        group = [f"{stem}.journal", f"{stem}.json"]
        if kind == "lock" and names.isdisjoint(group):
            made = [os.path.join(place, one) for one in group]  # since they were listed
            with suppress(OSError):  # it is another user's, for example
                atomic.remove_unlocked(os.path.join(place, name), unless=made)


def _tend(folder: Folder, topic: str, partition: int, options: TopicOptions) -> None:
    limits = (options.retention_age_s, options.retention_bytes, options.retention_records)
    if any(limit is not None for limit in limits):
        retain(folder, topic, partition)
    if options.compact:
        compact(folder, topic, partition)
    if options.compress:
        pack_segments(folder, topic, partition)


def _records(segment: Segment, head: Head) -> Iterator[tuple[Line, bytes]]:
    end = head.end if segment.number == head.segment else segment.size()
    for position, text in segment.lines(0, end):
        try:
            line = parse(text)
        except Damaged as error:
            raise Corrupt(
                f"{os.path.basename(segment.path)} is damaged at byte {position}: {error}",
                path=segment.path,
                position=position,
            ) from None
        if line.seal is None:
            yield line, text


def rewrite(
    segment: Segment,
    lines: Iterable[tuple[Line, bytes]],
    seal: Seal,
    *,
    packed: bool | None = None,
    guard: AbstractContextManager[None] | None = None,
) -> None:
    """Put a new file in the place of a finished segment, with these of its lines. The ``guard`` is
    held while it takes that place.
    """
    packed = segment.packed if packed is None else packed
    blocks: list[bytes] = []
    entries: list[Entry] = []
    block: list[bytes] = []
    size = position = out = latest = sum_ = 0

    def flush() -> None:
        nonlocal size, position, out, sum_
        data = b"".join(block)
        blocks.append(pack(data) if packed else data)
        sum_ = crc32(data, sum_)
        position += size
        out += len(blocks[-1])
        size = 0
        block.clear()

    offset = seal.first
    for line, text in lines:
        if size == 0:
            entries.append(Entry(line.offset, position, latest, out))
        assert line.meta is not None
        latest = max(latest, int(line.meta.ts.timestamp() * 1_000_000))
        offset = line.offset + 1
        block.append(text + b"\n")
        size += len(text) + 1
        if size >= _FRAME:
            flush()
    if block:
        flush()
    sealed = frame_seal(replace(seal, sum=f"{sum_:08x}", ts=latest or seal.ts))
    entries.append(Entry(offset, position, latest, out))
    block.append(sealed)
    size = len(sealed)
    flush()
    entries.append(Entry(max(seal.last, offset) + 1, position, latest, out + DIGEST_SIZE))
    if not packed:
        entries = [replace_entry(entry) for entry in entries[1:-2]]
    target = segment.path if segment.packed or not packed else segment.path + ".zst"
    data = b"".join(blocks)
    files = {target: with_digest(data) if packed else data}
    index = {segment.index_path: b"".join(map(index_line, entries))}
    # The frames of a compressed one are found by the index, so that comes first.
    files = index | files if packed else files | index
    staged: dict[str, str] = {}
    try:
        for path, content in files.items():
            staged[path] = atomic.stage_file(path, content)
        with guard or nullcontext():
            for path in files:
                atomic.move_file(staged.pop(path), path)
            if guard is not None and target != segment.path:
                atomic.remove_files([segment.path])
    except FileNotFoundError:
        raise
    except OSError as error:
        raise atomic.storage_error(error, target) from error
    finally:
        for temp in staged.values():
            os.unlink(temp)


def replace_entry(entry: Entry) -> Entry:
    return entry._replace(packed=0)


class Finding(NamedTuple):
    """Something that is not as it should be. ``severe``: records are damaged or missing."""

    path: str
    position: int
    problem: str
    severe: bool = True


def verify(
    folder: Folder,
    topic: str,
    partition: int,
    progress: Progress | None = None,
    only: Collection[int] | None = None,
) -> Iterator[Finding]:
    """Check every byte: checksums, seals, and that no offset is missing. ``only`` names the
    segments to check, by number; the seals of the others say how these fit in between.
    """
    reader = folder.fresh_reader(topic, partition)
    try:
        head, segments = reader.head(), reader.files()
        while (now := reader.head()).segment != head.segment:  # it went on while they were listed
            head, segments = now, reader.files()
        expected: int | None = head.start
        for done, segment in enumerate(segments):
            name = os.path.relpath(segment.path, folder.path)
            if only is not None and segment.number not in only:
                sealed = None if segment.bad else segment.seal
                expected = sealed.last + 1 if sealed is not None else None
                continue
            if segment.bad:
                yield Finding(name, 0, "set aside as damaged; 'trunkline doctor --salvage'")
                expected = None
                continue
            try:
                first = segment.first
            except (Damaged, TrunklineError) as error:
                yield Finding(name, 0, str(error))
                expected = None
                continue
            if first is not None and expected is not None and expected <= head.start:
                expected = min(first, head.start)  # what comes before may be purged in part
            if expected is not None and first is not None and first != expected:
                yield Finding(name, 0, f"it begins at offset {first}, not {expected}")
            try:
                later = segments[done + 1 :]
                findings, following = verify_segment(segment, head, name, later, expected)
            except Corrupt as error:
                findings = [Finding(name, error.position, error.message)]
                expected = following = None
            yield from findings
            expected = following if following is not None else expected
            segment.close()
            if progress is not None:
                progress(done + 1, len(segments))
        if not segments:
            expected = head.start
        elif only is not None and segments[-1].number not in only:
            return
        if expected is not None and max(expected, head.start) != head.next:
            yield Finding(f"{topic}/{partition}", 0, f"ends before {expected}, not {head.next}")
    finally:
        reader.close()


def _first(segment: Segment) -> int | None:
    """Where a segment begins; None if it is damaged: whoever looks at that one says so."""
    with suppress(Corrupt, Damaged):
        return None if segment.bad else segment.first
    return None


def verify_segment(
    segment: Segment, head: Head, name: str, later: list[Segment], first: int | None
) -> tuple[list[Finding], int | None]:
    """What is wrong with one of them, which should begin at ``first`` if that is known; and the
    offset behind it.
    """
    found: list[Finding] = []
    active = segment.number == head.segment
    end = head.end if active else segment.size()
    expected = None
    count = sum_ = 0
    seal: Seal | None = None
    upper = next((at for at in map(_first, later) if at is not None), None)
    holes = not active and segment.seal is not None and segment.holes
    if segment.packed and not segment.is_sound():
        found.append(Finding(name, 0, "its digest does not fit"))
    for position, text in segment.lines(0, end):
        try:
            line = parse(text)
        except Damaged as error:
            found.append(Finding(name, position, str(error)))
            expected = None
            sum_ = crc32(text + b"\n", sum_)
            continue
        if line.seal is not None:
            seal = line.seal
            if position + len(text) + 1 != end:
                found.append(Finding(name, position, "there is something behind the seal"))
            break
        if upper is not None and line.offset >= upper:
            break
        if (
            expected is not None
            and line.offset != expected
            and not (holes and line.offset > expected)
        ):
            problem = f"offset {line.offset} stands where {expected} belongs"
            found.append(Finding(name, position, problem))
        expected = line.offset + 1
        count += 1
        sum_ = crc32(text + b"\n", sum_)
    if seal is not None:
        if (seal.count, seal.sum) != (count, f"{sum_:08x}"):
            found.append(Finding(name, end, "the seal does not fit what is in front of it"))
        expected = seal.last + 1
    elif not active and later:
        # A sync failed and the log went on in the next file, if nothing is missing between them.
        following = head.next if upper is None else upper
        whole = (first if expected is None else expected) in (None, following)
        found.append(Finding(name, end, "it was never sealed", severe=not whole))
        expected = following
    elif active and f"{sum_:08x}" != f"{head.sum:08x}":
        found.append(Finding(name, 0, "its checksum is not the one the head holds"))
    return found, expected
