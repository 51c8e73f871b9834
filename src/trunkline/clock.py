"""Where time comes from. Everything that needs the time takes a ``Clock``.

Wall time stamps events and judges TTL and delay; monotonic time judges deadlines, so a jump of the
wall clock never expires a lease. ``boot`` names the stretch of time in which monotonic readings can
be compared: readings taken under another boot mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Wall time, monotonic time and timers."""

    def now(self) -> datetime: ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Handle: ...

    @property
    def boot(self) -> str: ...


class Handle(Protocol):
    def cancel(self) -> None: ...


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


class SystemClock:
    """The machine's clock. Monotonic readings are comparable between processes of one boot."""

    def __init__(self) -> None:
        self._boot = _boot_id()

    @property
    def boot(self) -> str:
        return self._boot

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        import asyncio  # here, because it is most of what a short command would import

        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Handle:
        import asyncio

        return asyncio.get_running_loop().call_later(seconds, callback)


class ServerClock(SystemClock):
    """The time of a server, for a store whose members run on several machines: their boots and
    monotonic clocks cannot be compared, so both come from the server.

    ``boot`` is the name of the place that all members share, such as the id of a database. Call
    ``heard`` with the server's time now and then; between two calls time goes on by this machine's
    monotonic clock, and never backwards.
    """

    def __init__(self, boot: str) -> None:
        self._boot = boot
        self._ahead_s = super().now().timestamp() - time.monotonic()
        self._last = 0.0

    def heard(self, server: datetime, *, asked: float, answered: float) -> None:
        """The server's time, between two readings of ``time.monotonic``."""
        self._ahead_s = server.timestamp() - (asked + answered) / 2

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.monotonic(), UTC)

    def monotonic(self) -> float:
        self._last = max(self._last, time.monotonic() + self._ahead_s)
        return self._last
