"""Delivering: latency from publish to handler, and how fast a group works off what is waiting."""

from __future__ import annotations

import asyncio
from time import perf_counter

import trunkline
from benchmarks.harness import (
    TOPIC,
    Pair,
    Run,
    line,
)
from benchmarks.pace import Side, p95_of
from trunkline.bus import Bus

GROUP = "billing"
WORKERS = 8


@line("end-to-end-p95", against="fdatasync p95", unit="ms", goal="<= 4")
async def end_to_end_p95(run: Run) -> Pair:
    """1,000 events a second, each timed from the moment it arises to its handler."""
    async with trunkline.connect(f"file:{run.fresh()}") as bus:
        side = Side(bus.publish)
        bus.on(TOPIC, group=GROUP)(side.handle)
        await bus.start()
        ours, bare = await p95_of(run, side)
        await bus.stop()
    return Pair(ours, bare)


async def work_off_batches(bus: Bus, count: int, size: int) -> float:
    """By batches, each acknowledged as a whole; until every acknowledgement is saved."""
    started = perf_counter()
    handled = 0
    async with bus.subscribe(TOPIC, group=GROUP, max_inflight=2 * size) as stream:
        async for batch in stream.batches(size):
            handled += len(batch.events)  # each decoded event is at hand
            await batch.ack()
            if handled >= count:
                break
    return count / (perf_counter() - started)


async def work_off(bus: Bus, count: int) -> float:
    """A handler is called with each decoded event, and acknowledges by returning; until every
    acknowledgement is saved.
    """
    done = asyncio.Event()
    handled = 0

    @bus.on(TOPIC, group=GROUP, workers=WORKERS)
    async def handle(event: trunkline.Event) -> None:
        nonlocal handled
        handled += 1
        if handled == count:
            done.set()

    started = perf_counter()
    await bus.start()
    await done.wait()
    await bus.stop()
    return count / (perf_counter() - started)
