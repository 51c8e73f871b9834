"""A thousand moments a second, from another process: what happens at each is timed from then on.

A loop that is busy when a moment comes is part of the latency. A bare sync at the same pace is what
durability costs a program that is not in a hurry; in a tight loop it costs less.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from time import monotonic_ns
from typing import Any

from benchmarks.child import STAMP_BYTES
from benchmarks.harness import TOPIC, SyncProbe

_STALE_NS = 2_000_000


@asynccontextmanager
async def ticks() -> AsyncIterator[asyncio.StreamReader]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.child", "tick", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def traffic(
    publish: Callable[..., Coroutine[Any, Any, Any]],
    stamps: asyncio.StreamReader,
    ready: Iterator[dict[str, Any]],
    count: int,
) -> None:
    """Publish each event as its stamp arrives, without waiting for the one before."""
    at = await _fresh(stamps)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(publish(TOPIC, {**next(ready), "at": at}))
            at = await _stamp(stamps)


async def probe_at_pace(probe: SyncProbe, stamps: asyncio.StreamReader, count: int) -> None:
    await _fresh(stamps)
    for _ in range(count):
        await _stamp(stamps)
        probe.burst(1)


async def _fresh(stamps: asyncio.StreamReader) -> int:
    """The next stamp that did not wait in the pipe while nobody read."""
    at = await _stamp(stamps)
    while monotonic_ns() - at > _STALE_NS:
        at = await _stamp(stamps)
    return at


async def _stamp(stamps: asyncio.StreamReader) -> int:
    return int.from_bytes(await stamps.readexactly(STAMP_BYTES), "little")
