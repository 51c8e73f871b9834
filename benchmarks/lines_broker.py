"""The broker: publishing over a WebSocket beside JetStream, and latency between connections.

Ours is a broker in a process of its own and a client in this one, on one connection, acknowledged
after ``fdatasync``; theirs is a server in a process of its own and nats-py in this one. Both are
called the way an application would: ``await bus.publish(...)`` beside ``await js.publish(...)``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from time import monotonic_ns
from typing import Any

from benchmarks.child import STAMP_BYTES
from benchmarks.harness import (
    EVENT_BYTES,
    TOPIC,
    MissingPeerError,
    Pair,
    Run,
    SyncProbe,
    alternate,
    line,
    payloads,
    percentile,
    publish_rate,
)
from benchmarks.peers import jetstream

GROUP = "billing"
IN_FLIGHT = 64
BATCH = 100
BATCHES = 16
CONSUMERS = 10


@asynccontextmanager
async def broker(folder: Path, *flags: str) -> AsyncIterator[str]:
    """The address of a broker over ``folder`` in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trunkline.broker", "--json", "--port", "0"),
        *("--url", f"file:{folder}", *flags),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(20):
            said = await process.stdout.readline()
        if not said:
            raise MissingPeerError("the broker's extra")
        yield json.loads(said)["url"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@asynccontextmanager
async def client(url: str) -> AsyncIterator[Any]:
    from trunkline.buses.remote import RemoteBus

    async with RemoteBus(url) as bus:
        await bus.link.connected.wait()
        yield bus


async def _beside_jetstream(run: Run, *, sync_always: bool = False) -> Pair:
    data, ready = b"." * EVENT_BYTES, payloads()
    async with (
        broker(run.fresh()) as url,
        client(url) as bus,
        jetstream(run.fresh(), sync_always=sync_always) as js,
    ):
        return await alternate(
            run,
            lambda seconds: publish_rate(
                lambda number: bus.publish(TOPIC, ready[number & 1023]), IN_FLIGHT, seconds
            ),
            lambda seconds: publish_rate(lambda _: js.publish(TOPIC, data), IN_FLIGHT, seconds),
        )


@line("ws-publish-64-nats", against="JetStream, not synced", unit="events/s", goal=">= 1.0")
async def ws_publish_64_nats(run: Run) -> Pair:
    return await _beside_jetstream(run)


@line("ws-publish-64-nats-sync", against="JetStream, sync always", unit="events/s", goal=">= 8")
async def ws_publish_64_nats_sync(run: Run) -> Pair:
    return await _beside_jetstream(run, sync_always=True)


@line("ws-publish-batch", against="one by one, 64 in flight", unit="events/s", goal=">= 4")
async def ws_publish_batch(run: Run) -> Pair:
    """Batches of 100, 16 in flight, beside single events, 64 in flight; both on one connection."""
    ready = payloads()
    batch = ready[:BATCH]
    async with broker(run.fresh()) as url, client(url) as bus:

        async def batches(seconds: float) -> float:
            rate = await publish_rate(lambda _: bus.publish_many(TOPIC, batch), BATCHES, seconds)
            return rate * BATCH

        return await alternate(
            run,
            batches,
            lambda seconds: publish_rate(
                lambda number: bus.publish(TOPIC, ready[number & 1023]), IN_FLIGHT, seconds
            ),
        )


@line("ws-end-to-end-p95", against="fdatasync p95", unit="ms", goal="<= 6")
async def ws_end_to_end_p95(run: Run) -> Pair:
    """1,000 events a second, each timed from the moment it arises in another process to the
    moment a second connection has it.
    """
    probe = SyncProbe(run.fresh())
    async with broker(run.fresh()) as url, client(url) as sender, client(url) as receiver:
        took = await _timed(run, sender, [receiver], probe)
    probe.close()
    return Pair(percentile(took, 0.95), probe.p(0.95) * 1000)


@line("ws-10-consumers-p50", against="10 ms", unit="ms", goal="<= 1")
async def ws_10_consumers_p50(run: Run) -> Pair:
    """1,000 events a second to 10 consumers of one group each on a connection of its own."""
    return Pair(percentile(await _to_ten(run), 0.5), 10.0)


@line("ws-10-consumers-p99", against="50 ms", unit="ms", goal="<= 1")
async def ws_10_consumers_p99(run: Run) -> Pair:
    return Pair(percentile(await _to_ten(run), 0.99), 50.0)


async def _to_ten(run: Run) -> list[float]:
    probe = SyncProbe(run.fresh())
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(broker(run.fresh()))
        sender = await stack.enter_async_context(client(url))
        receivers = [await stack.enter_async_context(client(url)) for _ in range(CONSUMERS)]
        took = await _timed(run, sender, receivers, probe)
    probe.close()
    return took


async def _timed(run: Run, sender: Any, receivers: list[Any], probe: SyncProbe) -> list[float]:
    """Milliseconds of each event from its moment to its handler."""
    took: list[float] = []

    async def handle(event: Any) -> None:
        took.append((monotonic_ns() - event.payload["at"]) / 1e6)

    for receiver in receivers:
        receiver.on(TOPIC, group=GROUP)(handle)
    await asyncio.sleep(0.3)
    ready = cycle(payloads())
    await _traffic(sender.publish, ready, run.count(500, 50))
    await _arrived(took, run.count(500, 50))
    took.clear()
    count = run.count(1000, 100)
    for burst in range(run.count(8, 1)):
        probe.burst(run.count(400, 20))  # it holds up this process: nothing may be on its way
        await _traffic(sender.publish, ready, count)
        await _arrived(took, count * (burst + 1))
    return took


async def _arrived(took: list[float], count: int) -> None:
    for _ in range(1000):
        if len(took) >= count:
            return
        await asyncio.sleep(0.01)


async def _traffic(publish: Callable[..., Any], ready: Any, count: int) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.child", "tick", str(count), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                at = int.from_bytes(await process.stdout.readexactly(STAMP_BYTES), "little")
                tasks.create_task(publish(TOPIC, {**next(ready), "at": at}))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
