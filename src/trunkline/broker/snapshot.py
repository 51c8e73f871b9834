"""What lists and metrics show, gathered in the background and at a measured pace, so that a scrape
of thousands of groups holds up no publish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from trunkline.clock import Clock
from trunkline.errors import Closed

T = TypeVar("T")


class Gathered(Generic[T]):
    """A value that takes long to gather. A reader gets the last one at once if it is fresh, else
    the next one, or the last one if the next is not there within ``wait_s``. However many readers
    there are, it is gathered once.
    """

    def __init__(
        self,
        gather: Callable[[], Awaitable[T]],
        clock: Clock,
        fresh_s: float = 1.0,
        wait_s: float = 2.0,
    ) -> None:
        self._gather = gather
        self._clock = clock
        self._fresh_s = fresh_s
        self._wait_s = wait_s
        self._value: T | None = None
        self._at = float("-inf")
        self._gathering: asyncio.Task[T] | None = None

    async def get(self) -> T:
        value = self._value
        if value is not None and self._clock.monotonic() - self._at < self._fresh_s:
            return value
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().create_task(self._renew())
        gathering = self._gathering
        if value is not None:
            await asyncio.wait([gathering], timeout=self._wait_s)
            if not gathering.done():
                gathering.add_done_callback(_heard)
                return value
        try:
            return await asyncio.shield(gathering)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not gathering.cancelled() or (task is not None and task.cancelling()):
                raise
            raise Closed("the broker is closing", hint="connect again") from None

    def forget(self) -> None:
        """What was gathered is no longer true."""
        self._value, self._at = None, float("-inf")

    async def _renew(self) -> T:
        try:
            value = await self._gather()
            self._value, self._at = value, self._clock.monotonic()
            return value
        except BaseException:
            self.forget()  # the next reader waits, and is told why it fails
            raise
        finally:
            self._gathering = None

    async def close(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            await asyncio.gather(self._gathering, return_exceptions=True)


def _heard(task: asyncio.Task[Any]) -> None:
    """Take its error: its readers have the last value, and the next one is told."""
    if not task.cancelled():
        task.exception()


class Pace:
    """Give the loop back after each slice of work, for three times as long as the slice took."""

    def __init__(self, slice_s: float = 0.001) -> None:
        self._loop = asyncio.get_running_loop()
        self._slice_s = slice_s
        self._began = self._loop.time()

    async def turn(self) -> None:
        took_s = self._loop.time() - self._began
        if took_s >= self._slice_s:
            await asyncio.sleep(min(3 * took_s, 0.05))
            self._began = self._loop.time()
