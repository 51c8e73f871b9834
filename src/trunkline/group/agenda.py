"""Offsets that may not be leased before a time, as bare numbers: 16 bytes for a record."""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

_RUN = 16_384

# The first pair of a run that is left, the run's number, the place of that pair, and the run.
_Head = tuple[float, int, int, int, "array[float]", "array[int]"]


class Agenda:
    """Pairs ``(time, offset)``, popped in that order. The newest pairs are a heap. A full heap
    becomes a sorted run of two arrays.
    """

    __slots__ = ("_gone", "_heads", "_heap", "_numbers", "_size")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._heads: list[_Head] = []  # of the runs
        self._numbers = itertools.count()
        self._size = 0
        self._gone: set[int] = set()  # offsets that were discarded and are still in here

    def __len__(self) -> int:
        """How many pairs there are. Discarded offsets are taken out first."""
        if self._gone:
            self.keep(lambda _: True)
        return self._size

    @property
    def first(self) -> float:
        """The time of the first pair; infinity if there is none."""
        first = self._heap[0][0] if self._heap else float("inf")
        if self._heads and self._heads[0][0] < first:
            return self._heads[0][0]
        return first

    def add(self, time: float, offset: int) -> None:
        self._size += 1
        heappush(self._heap, (time, offset))
        if len(self._heap) >= _RUN:
            self._heap.sort()
            times, offsets = zip(*self._heap, strict=True)
            self._heap = []
            self._push(next(self._numbers), 0, array("d", times), array("q", offsets))

    def count_due(self, now: float) -> int:
        """How many offsets have a time that has come."""
        if self.first > now:
            return 0
        if self._gone:
            self.keep(lambda _: True)
        runs = sum(bisect_right(times, now, at) - at for _, _, _, at, times, _ in self._heads)
        return runs + sum(time <= now for time, _ in self._heap)

    def pop_due(self, now: float, limit: int) -> list[int]:
        """Up to ``limit`` offsets whose time has come."""
        found: list[int] = []
        gone = self._gone
        while self._size and len(found) < limit and self.first <= now:
            self._size -= 1
            if self._heads and (not self._heap or self._heads[0][:2] < self._heap[0]):
                _, offset, number, at, times, offsets = heappop(self._heads)
                self._push(number, at + 1, times, offsets)
            else:
                offset = heappop(self._heap)[1]
            if gone and offset in gone:
                gone.discard(offset)
            else:
                found.append(offset)
        return found

    def discard(self, offset: int) -> None:
        """Forget an offset, which may be in here or not."""
        if self._size:
            self._gone.add(offset)

    def keep(self, wanted: Callable[[int], bool]) -> None:
        """Forget all but the wanted offsets."""
        gone, heap = self._gone, self._heap
        runs = [_pairs(at, times, offsets) for _, _, _, at, times, offsets in self._heads]
        self.__init__()  # type: ignore[misc]
        for time, offset in itertools.chain(heap, *runs):
            if offset not in gone and wanted(offset):
                self.add(time, offset)

    def _push(self, number: int, at: int, times: array[float], offsets: array[int]) -> None:
        if at < len(times):
            heappush(self._heads, (times[at], offsets[at], number, at, times, offsets))


def _pairs(at: int, times: array[float], offsets: array[int]) -> Iterator[tuple[float, int]]:
    return ((times[place], offsets[place]) for place in range(at, len(times)))
