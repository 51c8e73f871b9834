"""Reading one partition: no lock, no thread, nothing written.

A reader stops at the head, so it never shows a record that a crash could still take back. What it
cannot read it reports: a damaged line, or offsets that no file holds, raise ``Corrupt``.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

from trunkline.errors import Corrupt, NoBus, OutOfRange
from trunkline.event import Bounds, Record
from trunkline.log import atomic, layout
from trunkline.log.head import Head, HeadFile
from trunkline.log.line import Damaged, parse, read_records
from trunkline.log.recover import READ_BYTES, is_whole, survey
from trunkline.log.segment import Segment

T = TypeVar("T")
_LEAST_BYTES = 4096
_OPEN = 64  # files of one log, and places in them: it may have more than a process may open
_LOOKS = 100  # each finds other files, if they are but replaced meanwhile


def list_segments(root: str, stem: str) -> list[Segment]:
    """The partition's segments in order. Where a crash left a segment both plain and compressed,
    the plain one counts.
    """
    folder, _, name = stem.partition("/")
    found: dict[int, Segment] = {}
    try:
        names = os.listdir(os.path.join(root, folder))
    except FileNotFoundError:
        if not os.path.isdir(root):  # moved or removed while it was open: not the same as empty
            raise NoBus(f"there is no bus at {root} any more", path=root) from None
        return []
    for file in names:
        if not file.startswith(name + "."):
            continue
        bad = file.endswith(".corrupt")
        parsed = layout.parse_segment(file.removesuffix(".corrupt"), folder == "dlq")
        if parsed is None or parsed[0] != name:
            continue
        number, packed = parsed[1], parsed[2]
        known = found.get(number)
        if known is None or (known.packed and not packed) or (known.bad and not bad):
            found[number] = Segment(root, stem, number, packed=packed, bad=bad)
    return [found[number] for number in sorted(found)]


class PartitionReader:
    def __init__(self, root: str, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self._root = root
        self._stem = layout.log_stem(topic, partition)
        self._file = HeadFile(os.path.join(root, self._stem + ".head"))
        self._segments: list[Segment] = []
        self._places: dict[int, tuple[Segment, int]] = {}
        self._corrected: tuple[Head | None, Head] = (None, Head())
        self._looked = Head()  # where the log ended when it was last read
        self._opened = 0
        self._said = b""  # the line that was said to have changed
        self._checked = False
        self._line_bytes = 1024  # of what was read last: as much is read as it takes

    def head(self) -> Head:
        """Where the log ends now."""
        return self._look(self._head)

    def _head(self) -> Head:
        head = self._file.load() if self._file.open(create=False) else None
        if self._file.opened != self._opened:  # removed, and perhaps made anew: other files
            self._opened, self._checked = self._file.opened, False
            self.forget()
        if head is None:
            self.forget()
            segments = list_segments(self._root, self._stem)
            return survey(segments, None).head if segments else Head()
        if not self._checked:
            self._check(head)
            self._checked = True
        return self._corrected[1] if head == self._corrected[0] else head

    def is_behind(self) -> bool:
        """Whether the log may have changed since it was last looked at here. Said once."""
        said, self._said = self._said, self._file.peek()
        return self._said != said and self._file.is_changed()

    def _check(self, head: Head) -> None:
        """A power cut may have taken what was never synced, but not the head that speaks of it.
        The next writer puts that right; until then the files say where the log ends.
        """
        segments = [Segment(self._root, self._stem, head.segment)]
        if not os.path.exists(segments[0].path):  # else without a look at the files of all topics
            segments = list_segments(self._root, self._stem)
        last = next((s for s in segments if s.number == head.segment and not s.bad), None)
        if last is not None and last.seal is None and not is_whole(last, head):
            found = survey(list_segments(self._root, self._stem), head)
            self._corrected = (head, found.head)

    def bounds(self) -> Bounds:
        head = self.head()
        return Bounds(head.start, head.next)

    def read(
        self, start: int, limit: int = 1000, bytes_max: int = READ_BYTES, strict: bool = True
    ) -> list[Record]:
        """Up to ``limit`` records from ``start`` on, fewer when ``bytes_max`` is reached, at least
        one when there is one. Offsets may be missing where the log was compacted.

        ``strict=False`` begins at the first offset there is when ``start`` was trimmed away.
        """
        try:
            return self._look(lambda: self._read(start, limit, bytes_max, strict))
        except Corrupt:
            if self.head() == self._looked:
                raise
        # Its files may be another log's by now.
        return self._look(lambda: self._read(start, limit, bytes_max, strict))

    def _read(self, start: int, limit: int, bytes_max: int, strict: bool) -> list[Record]:
        self._looked = head = self.head()
        if start < head.start:
            if strict:
                raise OutOfRange(
                    f"{self.topic}/{self.partition} begins at offset {head.start}, not {start}",
                    offset=start,
                    first=head.start,
                    next=head.next,
                    hint="retention or a purge removed it" if start > 0 else "they count from 1",
                )
            start = head.start
        bytes_max = min(bytes_max, max(_LEAST_BYTES, 2 * limit * self._line_bytes))
        again = 0  # a remembered place may be the end of its segment: look once more
        while start < head.next and limit > 0:
            segment, position = self._place(start, head)
            records, end_position, after = self._read_segment(
                segment, position, start, limit, bytes_max, head
            )
            if records:
                self._remember(records[-1].offset + 1, segment, end_position)
                self._line_bytes = (end_position - position) // len(records)
                return records
            if after <= start and start == again:
                raise self._missing([segment], start)
            again = start = max(after, start)
        return []

    def id_at(self, offset: int) -> str | None:
        """The id of the record at an offset; None if there is none, or none any more."""
        found = self.read(offset, 1, strict=False)
        return found[0].event.id if found and found[0].offset == offset else None

    def seek(self, when: datetime) -> int:
        """The offset of the first record whose time is at or after ``when``, else the next one."""
        return self._look(lambda: self._seek(when))

    def _look(self, look: Callable[[], T]) -> T:
        """``look``, and again where files were removed or replaced after they were listed; a file
        that is listed time and again and never there is an error of the system.
        """
        for left in range(_LOOKS, 0, -1):
            try:
                return look()
            except OSError as error:
                self.forget()
                if left == 1 or not isinstance(error, FileNotFoundError):
                    raise atomic.storage_error(error, error.filename or self._stem) from error
            except Corrupt:
                self.forget()  # by the next time it may be mended
                raise
        raise AssertionError

    def _seek(self, when: datetime) -> int:
        head = self.head()
        wanted = int(when.timestamp() * 1_000_000)
        following: int | None = head.start
        for segment in self._listed(head):
            if segment.bad or segment.number > head.segment:
                following = None
                continue
            active = segment.number == head.segment
            first = segment.first
            if following is not None and first is not None and first > max(following, head.start):
                raise self._missing([segment], following)
            seal = None if active else segment.seal
            following = seal.last + 1 if seal else following
            if (seal and seal.ts < wanted) or (active and head.ts < wanted):
                continue
            end = head.end if active else segment.size()
            if segment.size() < end:
                raise self._corrupt(segment, segment.size(), "it is shorter than the head says")
            for place, text in segment.lines(_time_hint(segment, wanted), end):
                try:
                    line = parse(text)
                except Damaged as error:
                    raise self._corrupt(segment, place, str(error)) from None
                meta = line.meta
                if meta is not None and meta.ts >= when and line.offset >= head.start:
                    return line.offset
                following = line.offset + 1 if seal is None else following
        return head.next

    def segment_of(self, offset: int) -> int:
        """The number of the segment that holds ``offset``, or would."""
        return self._look(lambda: self._segment_of(offset))

    def _segment_of(self, offset: int) -> int:
        head = self.head()
        if head.records and offset >= head.next - head.records:
            return head.segment  # for most groups, and without a look at all topics' files
        number = 1
        for segment in self._listed(head):
            with contextlib.suppress(Corrupt):  # the reader of the segment says so
                if not segment.bad and (segment.first or offset + 1) <= max(offset, 1):
                    number = segment.number
        return number

    def files(self) -> list[Segment]:
        """Its segments, in order."""
        return self._listed(self.head())

    def count(self) -> int:
        """How many records there are: fewer than offsets where segments were compacted. Holes in
        one that is damaged, or was trimmed in its middle, are not counted.
        """
        first, end = self.bounds()
        holes = 0
        for segment in self.files():
            with contextlib.suppress(Corrupt, FileNotFoundError):
                seal = segment.seal
                if seal is not None and seal.holes and seal.first >= first:
                    holes += seal.last - seal.first + 1 - seal.count
        return end - first - holes

    def close(self) -> None:
        self._file.close()
        self.forget()

    def forget(self) -> None:
        """Drop what is known of the files, after they were rewritten."""
        for segment in self._segments:
            segment.close()
        self._segments, self._places = [], {}

    def _close(self, which: Callable[[Segment], bool]) -> None:
        """Close files. Places in them are those of the files that were open."""
        for segment in self._segments:
            if segment.is_open and which(segment):
                segment.close()
                self._places = {at: p for at, p in self._places.items() if p[0] is not segment}

    def _listed(self, head: Head) -> list[Segment]:
        if not self._segments or self._segments[-1].number < head.segment:
            self._close(lambda segment: segment.is_replaced)
            known = {segment.number: segment for segment in self._segments}
            self._segments = [
                known.pop(fresh.number, fresh) for fresh in list_segments(self._root, self._stem)
            ]
            for gone in known.values():
                gone.close()
        return self._segments

    def _place(self, offset: int, head: Head) -> tuple[Segment, int]:
        """The segment that holds ``offset``, and where in it to begin."""
        place = self._places.pop(offset, None)
        if place is not None:
            return place
        segments = [s for s in self._listed(head) if s.number <= head.segment]
        # A segment without a readable first line is the empty last one, or a quarantined one.
        firsts = [(s.first if not s.bad else None) for s in segments]
        known = [(first, i) for i, first in enumerate(firsts) if first is not None]
        at = bisect_right(known, offset, key=lambda pair: pair[0]) - 1
        if at < 0:
            raise self._missing(segments, offset)
        segment = segments[known[at][1]]
        if sum(other.is_open for other in segments) >= _OPEN:
            self._close(lambda other: other is not segment)
        end = head.end if segment.number == head.segment else segment.size()
        return segment, segment.locate(offset, end)

    def _read_segment(
        self, segment: Segment, position: int, start: int, limit: int, bytes_max: int, head: Head
    ) -> tuple[list[Record], int, int]:
        """Records at or after ``start``, the position after them, and the offset to go on with
        if there were none.
        """
        active = segment.number == head.segment
        end = head.end if active else segment.size()
        data = segment.read(position, min(bytes_max, end - position))
        cut = data.rfind(b"\n") + 1
        part = data
        while not cut and part and position + len(data) < end:
            step = max(bytes_max, len(data))
            part = segment.read(position + len(data), min(step, end - position - len(data)))
            data += part
            cut = data.rfind(b"\n") + 1
        records, good = read_records(data[:cut], self.partition, limit)
        if not records and (good < cut or (not cut and position < end)):
            raise self._corrupt(segment, position + good, "the checksum does not fit")
        after = head.next if active else self._after(segment, head)
        while records and records[-1].offset >= after:
            records.pop()  # written before a failed sync, never acknowledged, numbered anew since
        if not records:
            if start < after and not self._may_miss(segment):
                raise self._missing([segment], start)
            return [], 0, after
        first, last = records[0].offset, records[-1].offset
        if (first != start or last - first != len(records) - 1) and not self._may_miss(segment):
            raise self._corrupt(segment, position, f"offset {start} is missing")
        return records, position + good, 0

    def _may_miss(self, segment: Segment) -> bool:
        return segment.seal is not None and segment.holes

    def _after(self, segment: Segment, head: Head) -> int:
        """The first offset behind a finished segment. What has no seal was abandoned, and ends
        where the next one begins.
        """
        seal = segment.seal
        if seal is not None:
            return seal.last + 1
        for follower in [s for s in self._listed(head) if s.number > segment.number]:
            if follower.bad or follower.number > head.segment:
                break
            if follower.first is not None:
                return follower.first
        return head.next

    def _remember(self, offset: int, segment: Segment, position: int) -> None:
        if len(self._places) > _OPEN:
            self._places.clear()
        self._places[offset] = (segment, position)

    def _corrupt(self, segment: Segment, position: int, why: str) -> Corrupt:
        return Corrupt(
            f"{os.path.relpath(segment.path, self._root)} is damaged at byte {position}: {why}",
            path=segment.path,
            position=position,
            hint="run 'trunkline verify', then 'trunkline doctor --salvage'",
        )

    def _missing(self, segments: list[Segment], offset: int) -> Corrupt:
        bad = [s for s in self._segments if s.bad]
        name = next(iter(bad or segments), None)
        where = os.path.relpath(name.path, self._root) if name else self._stem
        return Corrupt(
            f"offset {offset} of {self.topic}/{self.partition} is in no readable file: see {where}",
            path=name.path if name else os.path.join(self._root, self._stem),
            position=0,
            offset=offset,
            hint="run 'trunkline verify', then 'trunkline doctor --salvage'",
        )


def _time_hint(segment: Segment, wanted: int) -> int:
    """A position before which no event time reaches ``wanted``."""
    known = None
    for entry in segment.entries():
        if entry.ts >= wanted:
            break
        known = entry
    return known.position if known is not None and segment.points_at(known) else 0
