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
