"""Delivering: latency from publish to handler, and how fast a group works off what is waiting."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

import trunkline
from benchmarks.harness import (
    EVENT_BYTES,
    TOPIC,
    Pair,
    Run,
    line,
    payloads,
)
from benchmarks.pace import Side, p95_of
from benchmarks.peers import jetstream
from trunkline.buses.local import LocalBus

GROUP = "billing"
WORKERS = 8
FETCH = 500


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


@line("catch-up-nats", against="JetStream pull with ack", unit="events/s", goal=">= 2.5")
async def catch_up_nats(run: Run) -> Pair:
    """A new group works off everything that was published before it existed.

    Ours: a handler called with each decoded event, acknowledged when it returns, until the bus has
    stopped and every acknowledgement is saved. Theirs: ``fetch`` in the batch size that is fastest
    here, ``ack`` for each message, bytes left undecoded; half of it before our turn, half after.
    """
    ours = run.count(1_000_000, 2_000)
    theirs = run.count(150_000, 1_000)
    async with trunkline.connect(f"file:{run.fresh()}") as bus, jetstream(run.fresh()) as js:
        batch = payloads(500)
        for _ in range(ours // len(batch)):
            await bus.publish_many(TOPIC, batch)
        data = b"." * EVENT_BYTES
        for _ in range(theirs // 500):
            await asyncio.gather(*(js.publish(TOPIC, data) for _ in range(500)))
        subscription = await js.pull_subscribe(TOPIC, durable=GROUP)
        before = await _pull(js, subscription, theirs // 2)
        rate = await _work_off(bus, ours)
        after = await _pull(js, subscription, theirs // 2)
    return Pair(rate, (before + after) / 2)


async def _work_off(bus: LocalBus, count: int) -> float:
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


async def _pull(js: Any, subscription: Any, count: int) -> float:
    started = perf_counter()
    got = 0
    while got < count:
        for message in await subscription.fetch(min(FETCH, count - got), timeout=10):
            await message.ack()
            got += 1
    await js._nc.flush()
    return got / (perf_counter() - started)
