"""Idempotency keys seen lately in one partition: a repeated publish is one record.

Kept in memory and rebuilt from the log, so it holds for every process and across restarts. A key
counts from the moment it was written, which each batch's commit tells, not from the event's own
time, which a producer may set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from trunkline.event import Event
from trunkline.log.head import Head
from trunkline.log.line import Damaged, Line, parse
from trunkline.log.segment import Segment
from trunkline.options import TopicOptions

_idem_key = attrgetter("idem_key")


class Recent:
    def __init__(self, root: str, topic: str, partition: int) -> None:
        from trunkline.log.reader import PartitionReader

        self._reader = PartitionReader(root, topic, partition)
        self._keys: dict[str, tuple[int, int]] = {}  # key -> (offset, written at, epoch µs)
        self._next = 0
        self._epoch = 0

    def close(self) -> None:
        self._reader.close()

    def find(
        self, events: Sequence[Event], head: Head, now: int, topic: TopicOptions
    ) -> dict[int, int]:
        """``{position in events: offset of the record that has its key}``."""
        window = int(topic.dedup_window_s * 1_000_000)
        self._catch_up(head, now - window, topic.dedup_keys)
        duplicates: dict[int, int] = {}
        fresh: dict[str, int] = {}
        for position, event in enumerate(events):
            key = event.idem_key
            if key is None:
                continue
            known = self._keys.get(key)
            if known is not None and now - known[1] < window:
                duplicates[position] = known[0]
            elif key in fresh:
                duplicates[position] = fresh[key]
            else:
                fresh[key] = head.next + position - len(duplicates)
        return duplicates

    def add(
        self, events: Sequence[Event], duplicates: dict[int, int], head: Head, now: int
    ) -> None:
        """Note what was just written; ``head`` is the one after it."""
        self._next = head.next
        offset = head.next - (len(events) - len(duplicates))
        for position, event in enumerate(events):
            if position in duplicates:
                continue
            if event.idem_key is not None:
                self._note(event.idem_key, offset, now)
            offset += 1

    def skip(self, before: Head, head: Head) -> None:
        """Take notice of a batch without keys, so that its lines need not be read for them."""
        if self._next == before.next and self._epoch == before.epoch:
            self._next = head.next

    def _note(self, key: str, offset: int, at: int) -> None:
        self._keys.pop(key, None)
        self._keys[key] = (offset, at)

    def _catch_up(self, head: Head, since: int, most: int) -> None:
        if self._epoch != head.epoch:
            self._keys, self._next, self._epoch = {}, 0, head.epoch
        if self._next < head.next:
            start = max(self._next, head.next - most)
            try:
                found = self._lines(head, since, start)
            except FileNotFoundError:  # removed or replaced since it was listed
                self._reader.forget()
                found = self._lines(head, since, start)
            for line, at in found:
                if line.meta is not None and line.meta.idem_key is not None:
                    self._note(line.meta.idem_key, line.offset, at)
            self._next = head.next
        while self._keys:
            oldest = next(iter(self._keys))
            if self._keys[oldest][1] >= since and len(self._keys) <= most:
                break
            del self._keys[oldest]

    def _lines(self, head: Head, since: int, start: int) -> list[tuple[Line, int]]:
        """The lines from ``start`` on that were written after ``since``, with that time; found
        from the end backwards, block by block of the index.
        """
        blocks: list[list[tuple[Line, int]]] = []
        for segment in reversed(self._reader.files()):
            if segment.bad or segment.number > head.segment:
                continue
            end = head.end if segment.number == head.segment else segment.size()
            for low, high in _blocks(segment, end):
                block = _dated(segment, low, high, end)
                blocks.append([pair for pair in block if pair[0].offset >= start])
                if block and (block[0][1] < since or block[0][0].offset <= start):
                    return [pair for found in reversed(blocks) for pair in found]
        return [pair for found in reversed(blocks) for pair in found]


def has_idem_keys(events: Sequence[Event]) -> bool:
    """Most have none, and this is asked for every event there is."""
    if len(events) == 1:
        return events[0].idem_key is not None
    return [*map(_idem_key, events)].count(None) < len(events)


def _blocks(segment: Segment, end: int) -> Iterator[tuple[int, int]]:
    """The segment in pieces, the last one first, cut where the index is right about a line."""
    high = end
    for entry in reversed(segment.entries()):
        if 0 < entry.position < high and (segment.packed or segment.points_at(entry)):
            yield entry.position, high
            high = entry.position
    yield 0, high


def _dated(segment: Segment, low: int, high: int, end: int) -> list[tuple[Line, int]]:
    """The records of ``[low, high)`` with the time their batch was written, which the last line of
    the batch tells, even if that lies beyond ``high``. A damaged line has no key any more.
    """
    dated: list[tuple[Line, int]] = []
    waiting: list[Line] = []
    at = 0
    for position, text in segment.lines(low, end):
        if position >= high and not waiting:
            break
        try:
            line = parse(text)
        except Damaged:
            continue
        if line.seal is not None:
            break
        if position < high:
            waiting.append(line)
        if line.commit is not None:
            at = line.commit.at
            dated += [(one, at) for one in waiting]
            waiting = []
    return dated + [(one, at) for one in waiting]
