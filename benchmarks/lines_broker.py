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
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    EVENT_BYTES,
    TOPIC,
    MissingPeerError,
    Pair,
    Run,
    alternate,
    line,
    payloads,
    percentile,
    publish_rate,
)
from benchmarks.pace import Side, p95_of, ticks, turn
from benchmarks.peers import jetstream

GROUP = "billing"
IN_FLIGHT = 64
BATCH = 100
BATCHES = 16
CONSUMERS = 10

Rate = Callable[[float], Awaitable[float]]


def broker(folder: Path) -> AbstractAsyncContextManager[str]:
    """The address of a broker over ``folder`` in a process of its own."""
    return _serving("trunkline.broker", "--json", "--port", "0", "--url", f"file:{folder}")


def bare(folder: Path) -> AbstractAsyncContextManager[str]:
    """The same of one with nothing in it."""
    return _serving("benchmarks.bare", str(folder))


@asynccontextmanager
async def _serving(module: str, *flags: str) -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *flags, stdout=asyncio.subprocess.PIPE
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
    from trunkline.bus.remote import RemoteBus

    async with RemoteBus(url) as bus:
        await bus.link.connected.wait()
        yield bus


def _one_by_one(bus: Any) -> Rate:
    """Single events, 64 in flight."""
    ready = payloads()
    return lambda seconds: publish_rate(
        lambda number: bus.publish(TOPIC, ready[number & 1023]), IN_FLIGHT, seconds
    )


def _in_batches(bus: Any) -> Rate:
    """Batches of 100, 16 in flight."""
    batch = payloads(BATCH)

    async def rate(seconds: float) -> float:
        batches = await publish_rate(lambda _: bus.publish_many(TOPIC, batch), BATCHES, seconds)
        return batches * BATCH

    return rate


async def _beside_jetstream(run: Run, *, sync_always: bool = False) -> Pair:
    data = b"." * EVENT_BYTES
    async with (
        broker(run.fresh()) as url,
        client(url) as bus,
        jetstream(run.fresh(), sync_always=sync_always) as js,
    ):
        return await alternate(
            run,
            _one_by_one(bus),
            lambda seconds: publish_rate(lambda _: js.publish(TOPIC, data), IN_FLIGHT, seconds),
        )


@line("ws-publish-64-nats", against="JetStream, not synced", unit="events/s", goal=">= 1.0")
async def ws_publish_64_nats(run: Run) -> Pair:
    return await _beside_jetstream(run)


@line("ws-publish-64-nats-sync", against="JetStream, sync always", unit="events/s", goal=">= 8")
async def ws_publish_64_nats_sync(run: Run) -> Pair:
    return await _beside_jetstream(run, sync_always=True)


@line("ws-publish-64-sketch", against="bare broker", unit="events/s", goal=">= 0.6")
async def ws_publish_64_sketch(run: Run) -> Pair:
    return await _beside_bare(run, _one_by_one)


@line("ws-publish-batch", against="one event a frame, 64 in flight", unit="events/s", goal=">= 4")
async def ws_publish_batch(run: Run) -> Pair:
    """Batches of 100, 16 in flight, beside frames of one event; one connection each."""
    from benchmarks.plain import plain

    async with broker(run.fresh()) as url, client(url) as bus, plain(url) as single:
        return await alternate(run, _in_batches(bus), _one_by_one(single))


@line("ws-publish-batch-joined", against="joined by the client", unit="events/s", goal=">= 2")
async def ws_publish_batch_joined(run: Run) -> Pair:
    """The same beside single events of our own client, which puts those that are published in one
    turn of its loop into one frame.
    """
    async with broker(run.fresh()) as url, client(url) as bus:
        return await alternate(run, _in_batches(bus), _one_by_one(bus))


@line("ws-publish-batch-sketch", against="bare broker", unit="events/s", goal=">= 0.6")
async def ws_publish_batch_sketch(run: Run) -> Pair:
    return await _beside_bare(run, _in_batches)


async def _beside_bare(run: Run, publishing: Callable[[Any], Rate]) -> Pair:
    async with (
        broker(run.fresh()) as url,
        client(url) as bus,
        bare(run.fresh()) as bare_url,
        client(bare_url) as bare_bus,
    ):
        return await alternate(run, publishing(bus), publishing(bare_bus))


@line("ws-end-to-end-p95", against="fdatasync p95", unit="ms", goal="<= 6")
async def ws_end_to_end_p95(run: Run) -> Pair:
    """1,000 events a second, each timed from the moment it arises in another process to the
    moment a second connection has it.
    """
    async with broker(run.fresh()) as url, _consumed(url) as side:
        ours, syncs = await p95_of(run, side)
    return Pair(ours, syncs)


@line("ws-end-to-end-sketch", against="bare broker", unit="ms", goal="<= 2")
async def ws_end_to_end_sketch(run: Run) -> Pair:
    """The p95 of both."""
    async with (
        broker(run.fresh()) as url,
        bare(run.fresh()) as bare_url,
        _consumed(url) as side,
        _consumed(bare_url) as bare_side,
    ):
        ours, theirs, _ = await p95_of(run, side, bare_side)
    return Pair(ours, theirs)


@asynccontextmanager
async def _consumed(url: str, consumers: int = 1) -> AsyncIterator[Side]:
    """A connection that publishes, and some that consume as one group."""
    async with contextlib.AsyncExitStack() as stack:
        side = Side((await stack.enter_async_context(client(url))).publish)
        for _ in range(consumers):
            receiver = await stack.enter_async_context(client(url))
            receiver.on(TOPIC, group=GROUP)(side.handle)
        await asyncio.sleep(0.3)
        yield side


@line("ws-10-consumers-p50", against="10 ms", unit="ms", goal="<= 1")
async def ws_10_consumers_p50(run: Run) -> Pair:
    """1,000 events a second to 10 consumers of one group each on a connection of its own."""
    return Pair(percentile(await _to_ten(run), 0.5), 10.0)


@line("ws-10-consumers-p99", against="50 ms", unit="ms", goal="<= 1")
async def ws_10_consumers_p99(run: Run) -> Pair:
    return Pair(percentile(await _to_ten(run), 0.99), 50.0)


async def _to_ten(run: Run) -> list[float]:
    ready = cycle(payloads())
    async with broker(run.fresh()) as url, _consumed(url, CONSUMERS) as side, ticks() as stamps:
        await turn(side, stamps, ready, run.count(500, 50))
        turns = [
            await turn(side, stamps, ready, run.count(1000, 100)) for _ in range(run.count(8, 1))
        ]
    return [took for mine in turns for took in mine]
