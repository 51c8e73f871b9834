"""Where time comes from. Everything that needs the time takes a ``Clock``.

Wall time stamps events and judges TTL and delay; monotonic time judges deadlines, so a jump of the
wall clock never expires a lease. ``boot`` names the stretch of time in which monotonic readings can
be compared: readings taken under another boot mean nothing.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime: ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...

    @property
    def boot(self) -> str: ...


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


class SystemClock:
    """The machine's clock. Monotonic readings are comparable between processes of one boot."""

    def __init__(self) -> None:
        self.boot = _boot_id()

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
