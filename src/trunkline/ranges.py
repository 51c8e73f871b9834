"""A set of offsets, kept as disjoint ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Ranges:
    """Inclusive ranges ``[a, b]`` in order; neighbours that touch are one range."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, ranges: Iterable[Iterable[int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for first, last in ranges:
            self.add(first, last)

    def add(self, first: int, last: int) -> None:
        starts, ends = self._starts, self._ends
        low = bisect_left(ends, first - 1)
        high = bisect_right(starts, last + 1)
        if low < high:
            first = min(first, starts[low])
            last = max(last, ends[high - 1])
        starts[low:high] = [first]
        ends[low:high] = [last]

    def remove(self, offset: int) -> None:
        at = bisect_right(self._starts, offset) - 1
        if at < 0 or self._ends[at] < offset:
            return
        first, last = self._starts[at], self._ends[at]
        left = [(first, offset - 1)] if first < offset else []
        right = [(offset + 1, last)] if offset < last else []
        self._starts[at : at + 1] = [pair[0] for pair in left + right]
        self._ends[at : at + 1] = [pair[1] for pair in left + right]

    def pop_from(self, first: int) -> int:
        """Take out everything up to the end of the range that begins at or before ``first``, and
        return that end; ``first - 1`` if no range reaches it.
        """
        last = first - 1
        while self._starts and self._starts[0] <= last + 1:
            last = max(last, self._ends[0])
            del self._starts[0], self._ends[0]
        return last

    def covers(self, first: int, last: int) -> bool:
        at = bisect_right(self._starts, first) - 1
        return at >= 0 and last <= self._ends[at]

    def end_of(self, offset: int) -> int:
        """The last offset of the range that holds ``offset``; ``offset - 1`` if none does."""
        at = bisect_right(self._starts, offset) - 1
        return max(offset - 1, self._ends[at]) if at >= 0 else offset - 1

    def __contains__(self, offset: int) -> bool:
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset <= self._ends[at]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def __len__(self) -> int:
        """How many offsets."""
        return self.count(-1)

    def count(self, after: int) -> int:
        """How many of them lie behind ``after``."""
        return sum(last - max(first - 1, after) for first, last in self if last > after)

    def __bool__(self) -> bool:
        return bool(self._starts)

    @property
    def last(self) -> int:
        return self._ends[-1] if self._ends else 0


def compress(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """The ranges that make up ``offsets``, which may come in any order."""
    ranges: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if ranges and ranges[-1][1] == offset - 1:
            ranges[-1] = (ranges[-1][0], offset)
        else:
            ranges.append((offset, offset))
    return ranges
