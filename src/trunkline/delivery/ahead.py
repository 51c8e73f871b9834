"""How far ahead of its reader a subscription fetches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

_SOON_S = 0.05


class Ahead:
    """How many deliveries may lie unread. What lies there is leased: that counts as a try, and its
    time runs. So a slow reader gets one when it waits for one, a quick one as many as it may have,
    and one that has yet to show how quick it is counts as slow: its first may be its last.
    A reader is as quick as it comes back: how long it waits then is the store's time, not its own.
    """

    __slots__ = ("_asked_at", "_read_at", "limit", "most", "waiting")

    def __init__(self, most: int) -> None:
        self.limit = 0
        self.most = most
        self.waiting = 0  # readers that want one now
        self._read_at = 0.0
        self._asked_at = 0.0  # when a reader last began to wait

    def room(self) -> int:
        return self.limit if self.limit > self.waiting else self.waiting

    async def wait(self, arrived: asyncio.Event, ask: Callable[[], None]) -> None:
        """Let a reader wait for what comes next, once it was asked for."""
        arrived.clear()
        self._asked_at = monotonic()
        self.waiting += 1
        try:
            ask()
            await arrived.wait()
        finally:
            self.waiting -= 1

    def took(self, came: float, left: int) -> bool:
        """One that came at this time of the monotonic clock is read, so many are left. True if it
        lay there for long: its time should begin anew.
        """
        now = monotonic()  # real time, whatever the bus's clock
        came_back = self._asked_at if self._asked_at > self._read_at else now
        is_quick = came_back - self._read_at <= _SOON_S
        self._read_at = now
        if now - came > _SOON_S:
            self.limit //= 2
            return True
        if is_quick and not left:
            self.limit = max(1, min(2 * self.limit, self.most))
        return False
