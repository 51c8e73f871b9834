"""A clock that moves when it is told to.

::

    clock = ManualClock()
    bus = trunkline.connect("memory:", clock=clock)
    ...
    clock.advance(30)             # timers that came due have fired, in order
    await clock.run(30)           # the same, and what they woke has run too
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from trunkline.clock import SystemClock
from trunkline.store import Store

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
_TURNS = 30


class Timer:
    """A call that is to come; ``cancel`` it and it never does."""

    __slots__ = ("callback", "due")

    def __init__(self, due: float, callback: Callable[[], object]) -> None:
        self.due = due
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """Wall and monotonic time, and the timers that hang on them. Belongs to one event loop."""

    def __init__(
        self, now: datetime = EPOCH, monotonic: float = 1000.0, boot: str = "manual"
    ) -> None:
        self.boot = boot
        self._wall = now
        self._monotonic = monotonic
        self._timers: list[tuple[float, int, Timer]] = []
        self._stores: list[Store] = []
        self._count = itertools.count()

    def now(self) -> datetime:
        return self._wall

    def monotonic(self) -> float:
        return self._monotonic

    async def sleep(self, seconds: float) -> None:
        """Until the clock was advanced by as much."""
        done = asyncio.Event()
        timer = self.call_later(seconds, done.set)
        try:
            await done.wait()
        finally:
            timer.cancel()

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Call back once the clock was advanced by ``seconds``; what is due at once comes with the
        loop's next turn, as it would with a real clock.
        """
        timer = Timer(self._monotonic + max(0.0, seconds), callback)
        if seconds <= 0:
            asyncio.get_running_loop().call_soon(_fire, timer)
        else:
            heapq.heappush(self._timers, (timer.due, next(self._count), timer))
        return timer

    @property
    def timers(self) -> int:
        """How many calls are to come."""
        return sum(timer.callback is not None for _, _, timer in self._timers)

    def advance(self, seconds: float) -> None:
        """Let time pass. Each timer that comes due fires at its own time, the earliest first."""
        end = self._monotonic + seconds
        while (timer := self._next(end)) is not None:
            self._move(timer.due)
            _fire(timer)
        self._move(end)

    async def run(self, seconds: float = 0.0) -> None:
        """Let time pass, and let what each timer wakes run before time goes on."""
        end = self._monotonic + seconds
        await self.settle()
        while (timer := self._next(end)) is not None:
            self._move(timer.due)
            _fire(timer)
            await self.settle()
        self._move(end)
        await self.settle()

    def wait_for(self, store: Store) -> None:
        """Let ``settle`` wait for the calls of a remote store: they take real time."""
        self._stores.append(store)

    async def settle(self) -> None:
        """Let every task that can go on do so, without any time passing."""
        idle = False
        while not idle:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            idle = all([await store.idle() for store in self._stores])

    def jump(self, seconds: float) -> None:
        """Set the wall clock alone, forward or back, as an operator or NTP would."""
        self._wall += timedelta(seconds=seconds)

    def _next(self, end: float) -> Timer | None:
        """Take out the next timer that is due by ``end``."""
        while self._timers and self._timers[0][0] <= end:
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                return timer
        return None

    def _move(self, to: float) -> None:
        if to > self._monotonic:
            self._wall += timedelta(seconds=to - self._monotonic)
            self._monotonic = to


def _fire(timer: Timer) -> None:
    callback, timer.callback = timer.callback, None
    if callback is not None:
        callback()


class PassingClock(SystemClock):
    """The machine's clock with the words of ``ManualClock``: for a bus whose time is real."""

    async def run(self, seconds: float = 0.0) -> None:
        await asyncio.sleep(max(seconds, 0.05))

    async def settle(self) -> None:
        await asyncio.sleep(0.05)
