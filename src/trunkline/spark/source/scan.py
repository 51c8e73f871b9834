"""Reading offset ranges of the log as Arrow batches, anywhere: no lock, no bus, nothing written.

A range names offsets, not bytes, and finds its bytes by the index when it is read. So it still
means the same after a segment was compacted or compressed between planning and reading.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc

from trunkline.errors import Corrupt, OutOfRange
from trunkline.log.extents import Extent, list_extents
from trunkline.log.head import Head
from trunkline.log.line import Damaged, is_intact, offset_at
from trunkline.log.reader import PartitionReader
from trunkline.log.segment import Segment
from trunkline.spark.source.catalogs import is_remote, open_remote
from trunkline.spark.source.columns import CORRUPT
from trunkline.spark.source.parse import (
    SMALL,
    can_parse_files,
    commit_time,
    corrupt_row,
    keep_only,
    parse_file,
    parse_lines,
    rows_batch,
)

_CHUNK = 8 * 1024 * 1024
_LOOK = 64 * 1024
_LARGE = 8 * _CHUNK  # where the lines need no check: each piece is a query of its own
# Checking a whole segment by its sum is this many times faster than line by line.
_SUM_GAIN = 12

# Readers that this process read only the last segment with, and that segment.
_kept: dict[tuple[str, str, int], tuple[PartitionReader, Segment]] = {}
_KEPT_MAX = 64

BadRecords = Literal["fail", "column", "skip"]


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets ``start <= offset < end`` of one partition."""

    topic: str
    partition: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanOptions:
    """What is read of a span, wherever it is read."""

    root: str
    names: tuple[str, ...]
    bad_records: BadRecords = "fail"
    fail_on_data_loss: bool = True
    types: frozenset[str] = frozenset()
    spaces: frozenset[str] = frozenset()
    token: str = ""


def scan(span: OffsetRange, options: ScanOptions) -> Iterator[pa.RecordBatch]:
    """The records of a span in order."""
    if is_remote(options.root):
        yield from _scan_remote(span, options)
        return
    where = (options.root, span.topic, span.partition)
    reader = _kept_reader(where)
    scan_ = _Scan(span, options, reader)
    try:
        yield from scan_.batches()
    except BaseException:
        reader.close()
        raise
    if scan_.tail and where not in _kept and _has_room():
        _kept[where] = (reader, scan_.tail)
    else:
        reader.close()


def _kept_reader(where: tuple[str, str, int]) -> PartitionReader:
    """One that knows the end of the partition already, so that a micro-batch there lists no folder
    and reads no index; a new one if the log went on in another file or that one was replaced.
    """
    reader, tail = _kept.pop(where, (None, None))
    if reader is not None and tail is not None:
        if _is_there(tail) and reader.head().segment == tail.number:
            return reader
        reader.close()
    return PartitionReader(*where)


def _has_room() -> bool:
    """Whether one more may be kept; files that were removed make room, and lie open no longer."""
    for where, (_, tail) in list(_kept.items()) if len(_kept) >= _KEPT_MAX else ():
        if not _is_there(tail) and (gone := _kept.pop(where, None)):
            gone[0].close()
    return len(_kept) < _KEPT_MAX


def _is_there(segment: Segment) -> bool:
    """Whether the file that is open is still the one by that name: a bus may also be moved away."""
    try:
        return os.path.samestat(os.stat(segment.path), os.fstat(segment.open()))
    except FileNotFoundError:
        return False


def _scan_remote(span: OffsetRange, options: ScanOptions) -> Iterator[pa.RecordBatch]:
    where = (span.topic, span.partition)
    log = open_remote(options.root, options.token)
    try:
        start = check_bounds(span, log.head(*where), options)
        wanted = (*options.names, *_also(options))
        for rows in log.rows(*where, start, span.end):
            yield from shown(rows_batch(rows, *where, wanted), options)
    finally:
        log.close()


def _also(options: ScanOptions) -> list[str]:
    """The columns that are not shown but decide what is."""
    asked = (("type", options.types), ("space", options.spaces))
    return [name for name, wanted in asked if wanted and name not in options.names]


def check_bounds(span: OffsetRange, head: Head, options: ScanOptions) -> int:
    """Where reading the span begins."""
    if span.start < head.start:
        if options.fail_on_data_loss and span.end > span.start:
            raise lost(span.topic, span.partition, span.start, head)
        return min(head.start, span.end)
    if span.end > head.next:
        raise lost(span.topic, span.partition, span.end, head)
    return span.start


def shown(batch: pa.RecordBatch, options: ScanOptions) -> Iterator[pa.RecordBatch]:
    """What was asked for of a batch. A row that stands for damage is shown in any case."""
    if not _is_corrupt(batch):
        if options.types:
            batch = keep_only(batch, "type", options.types)
        if options.spaces:
            batch = keep_only(batch, "space", options.spaces)
    if batch.num_rows:
        yield batch.select(list(options.names))


def _is_corrupt(batch: pa.RecordBatch) -> bool:
    if CORRUPT not in batch.schema.names:
        return False
    return bool(batch.num_rows == 1 and batch.column(CORRUPT)[0].is_valid)


class _Scan:
    def __init__(self, span: OffsetRange, options: ScanOptions, reader: PartitionReader) -> None:
        self._span = span
        self._options = options
        self._reader = reader
        self.tail: Segment | None = None  # the last segment, if no other was looked at
        self._names = (*options.names, *_also(options))
        if "offset" not in self._names:
            self._names = (*self._names, "offset")

    def batches(self) -> Iterator[pa.RecordBatch]:
        span = self._span
        head = self._reader.head()
        cursor = check_bounds(span, head, self._options)
        for attempt in range(5):
            try:
                extents = list_extents(self._reader, head, cursor)
                alone = len(extents) == 1 and extents[0].is_last and not attempt
                self.tail = extents[0].segment if alone else None
                for extent in extents:
                    low, high = max(cursor, extent.first), min(span.end, extent.after)
                    if low >= high:
                        continue
                    if low > cursor:
                        yield from self._missing(cursor, low)
                    for batch in self._read(extent, low, high, head):
                        cursor = self._after(batch, cursor)
                        yield from shown(batch, self._options)
                    cursor = high
                if cursor < span.end:
                    yield from self._missing(cursor, span.end)
                return
            except FileNotFoundError:  # replaced or removed since it was listed: go on from here
                cursor, head = self._look_again(cursor)
            except Corrupt:
                # A compressed segment that was replaced does not fit its new index.
                if attempt or not any(s.packed for s in self._reader.files()):
                    raise
                cursor, head = self._look_again(cursor)
        raise Corrupt(f"the files of {span.topic}/{span.partition} come and go", position=0)

    def _look_again(self, cursor: int) -> tuple[int, Head]:
        self._reader.forget()
        head = self._reader.head()
        if cursor < head.start and self._options.fail_on_data_loss:
            raise lost(self._span.topic, self._span.partition, cursor, head)
        return max(cursor, head.start), head

    def _after(self, batch: pa.RecordBatch, cursor: int) -> int:
        last = batch.column("offset")[-1].as_py() if batch.num_rows else None
        return cursor if last is None else last + 1

    def _read(self, extent: Extent, low: int, high: int, head: Head) -> Iterator[pa.RecordBatch]:
        segment = extent.segment
        begin = 0 if low == extent.first else segment.locate(low, extent.size)
        end = extent.size if high == extent.after else segment.locate(high, extent.size)
        longest = self._trusted_length(extent, end - begin, head)
        bulk = end - begin > SMALL
        seen = 0
        for batch in self._lines(extent, begin, end, longest, bulk=bulk):
            if not _is_corrupt(batch):
                batch = _between(batch, low, high)
            seen += batch.num_rows
            yield batch
        if seen < high - low and not extent.has_holes and self._options.bad_records == "fail":
            raise self._corrupt(segment, begin, f"records missing in it: {high - low - seen}")

    def _lines(
        self, extent: Extent, begin: int, end: int, longest: int, *, bulk: bool
    ) -> Iterator[pa.RecordBatch]:
        span, names, segment = self._span, self._names, extent.segment
        # A file that is finished and wanted as a whole is read as it is; the last one may grow.
        whole = begin == 0 and end == extent.size and not extent.is_last and not segment.packed
        if longest and bulk and whole and can_parse_files():
            yield from parse_file(segment.open(), longest, span.topic, span.partition, names)
            return
        size = _LARGE if longest and bulk else _CHUNK
        for position, data in _chunks(segment, begin, end, size):
            if not longest:
                good: list[bytes] = []
                for line in bytes(data).split(b"\n")[:-1]:
                    if is_intact(line):
                        good.append(line)
                    else:
                        yield from self._damaged(segment, position, line)
                    position += len(line) + 1
                data = b"\n".join([*good, b""])
            most = min(longest or len(data), len(data))
            behind = position + len(data) if longest else position
            yield from parse_lines(
                data,
                most,
                span.topic,
                span.partition,
                names,
                bulk=bulk,
                next_at=self._next_commit(extent, behind),
            )

    def _next_commit(self, extent: Extent, position: int) -> int | None:
        """The time of the first commit at or behind ``position``: a batch may go on there."""
        if "appended_at" not in self._names:
            return None
        rest = b""
        while position < extent.size:
            data = extent.segment.read(position, min(_LOOK, extent.size - position))
            if not data:
                break
            position += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if (at := commit_time(line)) is not None:
                    return at
        return None

    def _trusted_length(self, extent: Extent, size: int, head: Head) -> int:
        """0 if each line has to be checked. If not, because the whole segment fits its sum, how
        long a line of it is at most. A compressed one carries a checksum of every frame.
        """
        segment = extent.segment
        if segment.packed:
            return extent.size
        seal = segment.seal if not extent.is_last else None
        wanted = f"{head.sum:08x}" if extent.is_last else (seal.sum if seal else None)
        if wanted is None or size * _SUM_GAIN < extent.size:
            return 0
        sum_ = 0
        longest = _CHUNK
        for _, data in _chunks(segment, 0, extent.size):
            sum_ = crc32(data, sum_)
            longest = max(longest, len(data))  # a longer line is a chunk of its own
        return longest if f"{sum_:08x}" == wanted else 0

    def _damaged(self, segment: Segment, position: int, line: bytes) -> Iterator[pa.RecordBatch]:
        if self._options.bad_records == "fail":
            raise self._corrupt(segment, position, "the checksum does not fit")
        if self._options.bad_records == "column":
            span = self._span
            text = line.decode("utf-8", "replace")
            offset = offset_at(line[:64])
            yield corrupt_row(span.topic, span.partition, offset, text, self._names)

    def _missing(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        span = self._span
        one = end == start + 1
        named = f"offset {start}" if one else f"offsets {start} to {end - 1}"
        place = f"{span.topic}/{span.partition}"
        text = f"{named} of {place} {'is' if one else 'are'} in no readable file"
        bad = [s for s in self._reader.files() if s.bad]
        if bad:
            text += f": see {os.path.basename(bad[0].path)}"
        if self._options.bad_records == "fail":
            raise Corrupt(
                text,
                path=bad[0].path if bad else "",
                position=0,
                hint="run 'trunkline doctor --salvage', or read with option badRecords=column",
            )
        if self._options.bad_records == "column":
            yield corrupt_row(span.topic, span.partition, start, text, self._names)

    def _corrupt(self, segment: Segment, position: int, why: str) -> Corrupt:
        return Corrupt(
            f"{os.path.relpath(segment.path, self._options.root)} is damaged at byte {position}: "
            f"{why}",
            path=segment.path,
            position=position,
            hint="run 'trunkline verify', or read with option badRecords=column",
        )


def lost(topic: str, partition: int, offset: int, head: Head) -> OutOfRange:
    trimmed = offset < head.start
    return OutOfRange(
        f"{topic}/{partition} has offsets {head.start} to {head.next - 1}, not {offset}",
        offset=offset,
        first=head.start,
        next=head.next,
        hint=(
            "retention removed it: start at 'earliest', or set failOnDataLoss=false"
            if trimmed
            else "it is not written yet, or a crash took it: start at 'latest'"
        ),
    )


def _between(batch: pa.RecordBatch, low: int, high: int) -> pa.RecordBatch:
    """Only a segment that a failed sync left behind holds more than its extent."""
    offsets = batch.column("offset")
    if not batch.num_rows or (offsets[0].as_py() >= low and offsets[-1].as_py() < high):
        return batch
    return batch.filter(pc.and_(pc.greater_equal(offsets, low), pc.less(offsets, high)))


def _chunks(
    segment: Segment, begin: int, end: int, size: int = _CHUNK
) -> Iterator[tuple[int, bytes | memoryview]]:
    """``(position, whole lines)`` of a byte range that starts and ends on a line, without the seal.
    A plain file is mapped, not copied: below its head it never changes.
    """
    if begin >= end:
        return
    if segment.packed or os.fstat(segment.open()).st_size < end:
        yield from _copied_chunks(segment, begin, end)
        return
    data = mmap.mmap(segment.open(), end, access=mmap.ACCESS_READ)
    view = memoryview(data)
    position = begin
    while position < end:
        stop = min(position + size, end)
        cut = data.rfind(b"\n", position, stop) + 1
        if not cut:  # a line that is longer than a chunk, or the file ends in the middle of one
            cut = data.find(b"\n", stop, end) + 1
            if not cut:
                return
        last = max(position, data.rfind(b"\n", position, cut - 1) + 1)
        sealed = data[last : last + 8] == b'{"seal":'
        yield position, view[position : last if sealed else cut]
        position = cut


def _copied_chunks(segment: Segment, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    position = begin
    rest = b""
    while position + len(rest) < end:
        at = position + len(rest)
        try:
            data = segment.read(at, min(_CHUNK, end - at))
        except Damaged as error:
            raise Corrupt(
                f"{os.path.basename(segment.path)} is damaged in its frame at {at}: {error}",
                path=segment.path,
                position=at,
                hint="run 'trunkline verify'",
            ) from None
        if not data:
            return
        data = rest + data
        cut = data.rfind(b"\n") + 1
        if cut:
            last = data.rfind(b"\n", 0, cut - 1) + 1
            sealed = data.startswith(b'{"seal":', last)
            yield position, data[: last if sealed else cut]
        position += cut
        rest = data[cut:]
