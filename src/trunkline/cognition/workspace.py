"""A bounded workspace: so many events, or so many bytes of payloads, are at work at once.

An event that finds no room waits in line. The line is ordered by rank: the highest salience first,
then the oldest. When the line is longer than it may be, its lowest rank is turned away.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Callable
from typing import NamedTuple


class _Ticket(NamedTuple):
    rank: tuple[float, int]  # sorts the highest salience first, then the oldest
    size: int
    may_turn: bool
    done: asyncio.Future[bool]


class Workspace:
    def __init__(self, items: int, size: int | None, waiting: int) -> None:
        self.items = items
        self.size = size
        self.waiting = waiting
        self.at_work = 0
        self.held = 0  # bytes
        self.is_closed = False
        self._line: list[_Ticket] = []
        self._count = itertools.count()
        self._watchers: dict[Callable[[], None], None] = {}  # in the order they came

    @property
    def in_line(self) -> int:
        return len(self._line)

    @property
    def load(self) -> float:
        """From 0, when nothing is at work, to 1, when the line is full."""
        items = (self.at_work + len(self._line)) / (self.items + self.waiting)
        share = self.held / self.size if self.size else 0.0
        return min(1.0, max(items, share * self.at_work / self.items))

    @property
    def has_room(self) -> bool:
        return not self._line and self.at_work < self.items

    async def enter(self, salience: float, size: int, *, may_turn: bool = True) -> bool:
        """Wait for room; False if the event was turned away because others rank higher, or because
        the workspace was closed. With ``may_turn`` false no rank turns it away.
        """
        if self.is_closed:
            return False
        ticket = _Ticket(
            (-salience, next(self._count)),
            size,
            may_turn,
            asyncio.get_running_loop().create_future(),
        )
        bisect.insort(self._line, ticket, key=lambda one: one.rank)
        self._admit()
        self._turn_away()
        try:
            return await ticket.done
        except asyncio.CancelledError:
            if ticket.done.done() and not ticket.done.cancelled() and ticket.done.result():
                self.leave(size)
            else:
                self._line = [one for one in self._line if one is not ticket]
            raise

    def leave(self, size: int) -> None:
        self.at_work -= 1
        self.held -= size
        self._admit()
        for watcher in list(self._watchers):
            watcher()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher`` each time an event leaves."""
        self._watchers[watcher] = None

    def ignore(self, watcher: Callable[[], None]) -> None:
        self._watchers.pop(watcher, None)

    def close(self) -> None:
        """Turn every event in line away, and every one that comes."""
        self.is_closed = True
        line, self._line = self._line, []
        for ticket in line:
            if not ticket.done.done():
                ticket.done.set_result(False)

    def open(self) -> None:
        self.is_closed = False

    def _fits(self, size: int) -> bool:
        if self.at_work >= self.items:
            return False
        # One payload larger than the budget works alone: it would else wait for ever.
        return self.size is None or not self.at_work or self.held + size <= self.size

    def _admit(self) -> None:
        while self._line and self._fits(self._line[0].size):
            ticket = self._line.pop(0)
            if not ticket.done.done():
                self.at_work += 1
                self.held += ticket.size
                ticket.done.set_result(True)

    def _turn_away(self) -> None:
        over = len(self._line) - self.waiting
        for ticket in reversed([one for one in self._line if one.may_turn]):
            if over <= 0:
                break
            over -= 1
            self._line.remove(ticket)
            ticket.done.set_result(False)
