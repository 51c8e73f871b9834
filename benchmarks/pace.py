"""A thousand moments a second, from another process: what happens at each is timed from then on.

A loop that is busy when a moment comes is part of the latency. A bare sync at the same pace is what
durability costs a program that is not in a hurry; in a tight loop it costs less.

The sides take turns, and the median of a side's turns counts: when others take the cores away for a
tenth of a second, that turn says nothing of either side, and a round in which the host took more
than a moment is repeated. A turn is a piece of a steady flow: its first moments, in which processes
that have slept find their cores and caches again, do not count.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from itertools import cycle
from time import monotonic_ns
from typing import Any

from benchmarks.child import STAMP_BYTES
from benchmarks.harness import TOPIC, Run, SyncProbe, least_stolen, payloads, percentile
from trunkline import Event

TURN = 250
_FIRST = 50
_STALE_NS = 2_000_000


class Side:
    """A bus that is published to, and a handler that notes how old each event is."""

    def __init__(self, publish: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self.publish = publish
        self.took: list[float] = []

    async def handle(self, event: Event) -> None:
        self.took.append((monotonic_ns() - event.payload["at"]) / 1e6)


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


async def p95_of(run: Run, *sides: Side) -> list[float]:
    """The p95 of each side in ms, and after them that of bare syncs at the same pace."""
    probe = SyncProbe(run.fresh())
    ready = cycle(payloads())
    async with ticks() as stamps:

        async def each() -> list[float]:
            took = [await turn(side, stamps, ready, TURN) for side in sides]
            took.append(await _bare(probe, stamps))
            return [percentile(mine, 0.95) for mine in took]

        for side in sides:
            await turn(side, stamps, ready, TURN)
        found = await least_stolen(run.count(24, 2), each)
    probe.close()
    return [statistics.median(mine) for mine in zip(*found, strict=True)]


async def turn(
    side: Side, stamps: asyncio.StreamReader, ready: Iterator[dict[str, Any]], count: int
) -> list[float]:
    """Publish each event as its stamp arrives, without waiting for the one before; how long each
    of the last ``count`` took to its handler.
    """
    count += _FIRST
    side.took.clear()
    at = await _fresh(stamps)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(side.publish(TOPIC, {**next(ready), "at": at}))
            at = await _stamp(stamps)
    for _ in range(1000):
        if len(side.took) >= count:
            return side.took[_FIRST:]
        await asyncio.sleep(0.01)
    raise RuntimeError(f"{len(side.took)} of {count} events arrived")


async def _bare(probe: SyncProbe, stamps: asyncio.StreamReader) -> list[float]:
    """How long each sync took, in ms."""
    await _fresh(stamps)
    for _ in range(_FIRST + TURN):
        await _stamp(stamps)
        probe.burst(1)
    return [took * 1000 for took in probe.samples[-TURN:]]


async def _fresh(stamps: asyncio.StreamReader) -> int:
    """The next stamp that did not wait in the pipe while nobody read."""
    at = await _stamp(stamps)
    while monotonic_ns() - at > _STALE_NS:
        at = await _stamp(stamps)
    return at


async def _stamp(stamps: asyncio.StreamReader) -> int:
    return int.from_bytes(await stamps.readexactly(STAMP_BYTES), "little")
