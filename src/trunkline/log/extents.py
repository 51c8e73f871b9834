"""Which file holds which offsets, and how many bytes lie between two of them.

An extent is what counts of one segment: ``first <= offset < after``. Where a sync failed, the log
went on in a new segment with the same offsets, so a segment may hold lines that no longer count.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from trunkline.log.head import Head
from trunkline.log.reader import PartitionReader
from trunkline.log.segment import Segment


class Extent(NamedTuple):
    segment: Segment
    first: int
    after: int
    size: int  # in bytes, without what the head does not show
    is_last: bool

    @property
    def has_holes(self) -> bool:
        return not self.is_last and self.segment.seal is not None and self.segment.holes


def list_extents(reader: PartitionReader, head: Head, since: int = 0) -> list[Extent]:
    """What can be read, in order. Offsets between two extents are in no readable file. Files that
    end before ``since`` are not looked at, so that the end of a long log costs no more than a
    short one.
    """
    segments = [s for s in reader.files() if s.number <= head.segment]
    for at in range(len(segments) - 1, 0, -1) if since else ():
        first = None if segments[at].bad else segments[at].first
        if first is not None and first <= since:
            segments = segments[at:]
            break
    found: list[Extent] = []
    for at, segment in enumerate(segments):
        if segment.bad or segment.first is None:
            continue
        is_last = segment.number == head.segment
        after = head.next
        size = head.end
        if not is_last:
            size = segment.size()
            follower = next((s for s in segments[at + 1 :] if s.bad or s.first is not None), None)
            seal = segment.seal
            if seal is not None:  # else it was abandoned, and ends where the next one begins
                after = seal.last + 1
            elif follower is not None and not follower.bad and follower.first is not None:
                after = follower.first
        if size and segment.first < after:
            found.append(Extent(segment, segment.first, after, size, is_last))
    return found


def bytes_between(extent: Extent, start: int, end: int) -> int:
    """About how many bytes of lines ``[start, end)`` is, by the index alone."""
    low = 0 if start <= extent.first else _position(extent, start)
    high = extent.size if end >= extent.after else _position(extent, end)
    share = extent.size * (end - start) // max(1, extent.after - extent.first)
    return max(high - low, min(share, 1))


def _position(extent: Extent, offset: int) -> int:
    """Where ``offset`` lies, between two entries of the index by the rule of three."""
    entries = extent.segment.entries()
    at = bisect_right(entries, offset, key=lambda entry: entry.offset) - 1
    low = entries[at][:2] if at >= 0 else (extent.first, 0)
    high = entries[at + 1][:2] if at + 1 < len(entries) else (extent.after, extent.size)
    low, high = (low[0], min(low[1], extent.size)), (high[0], min(high[1], extent.size))
    span = max(1, high[0] - low[0])
    return low[1] + (high[1] - low[1]) * min(offset - low[0], span) // span


def cut_by_bytes(extents: list[Extent], start: int, end: int, budget: int) -> int:
    """The highest offset up to ``end`` such that ``[start, offset)`` takes about ``budget`` bytes,
    and at least one record.
    """
    for extent in extents:
        low, high = max(start, extent.first), min(end, extent.after)
        if low >= high:
            continue
        size = bytes_between(extent, low, high)
        if size <= budget:
            budget -= size
            continue
        lowest, highest = low, high
        while highest - lowest > 1:
            middle = (lowest + highest) // 2
            if bytes_between(extent, low, middle) <= budget:
                lowest = middle
            else:
                highest = middle
        return max(lowest, start + 1)
    return end
