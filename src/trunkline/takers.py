"""Who gets which record, among the subscribers of one pump.

They take turns. Where they want different records, one that is wanted by none with room is passed
over, and stays free for members elsewhere; one that none wants at all is taken, to be settled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from trunkline.event import Event, Record


class Taker(Protocol):
    def room(self) -> int: ...

    def accepts(self, event: Event) -> bool: ...


T = TypeVar("T", bound=Taker)


class Takers(Generic[T]):
    def __init__(self) -> None:
        self.passed: set[int] = set()  # wanted, but by none that had room then
        self._all: deque[T] = deque()
        self._chosen: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._all))

    def add(self, taker: T) -> None:
        if taker not in self._all:
            self._all.append(taker)

    def remove(self, taker: T) -> bool:
        """Whether it was here."""
        if taker not in self._all:
            return False
        self._all.remove(taker)
        return True

    def room(self) -> int:
        if len(self._all) == 1:  # most often
            return self._all[0].room()
        return sum([taker.room() for taker in self._all])

    def plan(self, records: Mapping[int, Record]) -> Callable[[int], bool] | None:
        """Which offsets to take, as far as ``records`` tell what is there; None for any."""
        self._chosen.clear()
        if len(self._all) <= 1:
            return None
        rooms = {id(taker): taker.room() for taker in self._all}

        def is_for_one(offset: int) -> bool:
            if offset in self.passed:
                return False
            if (record := records.get(offset)) is None:
                return True
            taker = self._next(record, rooms)
            if taker is not None:
                rooms[id(taker)] -= 1
                self._chosen[offset] = taker
            elif self.want(record):
                self.passed.add(offset)
                return False
            return True

        return is_for_one

    def pick(self, record: Record) -> T | None:
        """Who gets a record that was taken; None if nobody does, or nobody who wants it can."""
        taker = self._chosen.pop(record.offset, None)
        if taker is None or taker not in self._all or taker.room() <= 0:
            taker = self._next(record)
        return taker

    def _next(self, record: Record, rooms: dict[int, int] | None = None) -> T | None:
        for _ in range(len(self._all)):
            taker = self._all[0]
            self._all.rotate(-1)
            room = taker.room() if rooms is None else rooms[id(taker)]
            if room > 0 and taker.accepts(record.event):
                return taker
        return None

    def want(self, record: Record) -> bool:
        """Whether any of them wants it; where there is none at all, somebody may come."""
        # One whose filter fails is none of them any more.
        return any(taker.accepts(record.event) for taker in self) or not self._all
