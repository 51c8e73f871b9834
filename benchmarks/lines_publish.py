"""Publishing: rates against the bare ceiling of this machine and against the peers, and latency.

Fairness. Ours makes an event of a Python value, encodes, numbers and checksums it, and acknowledges
after ``fdatasync``. The ceiling encodes events that already exist and does nothing but write and
sync; the sketch adds the events and the tasks that wait for them. The peers are handed ready bytes
of the same size and so encode nothing. Both sides run on the same event loop implementation, in
this process, through the call an application would make: ``await bus.publish(...)`` beside
``await js.publish(...)``. A server has the second core for itself. nats-py can also publish without
awaiting each acknowledgement; that has its own line.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from itertools import cycle
from pathlib import Path
from time import perf_counter

import trunkline
from benchmarks.harness import (
    EVENT_BYTES,
    TOPIC,
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
from trunkline.codec import encode_event
from trunkline.event import Event
from trunkline.log.line import frame_batch
from trunkline.options import Limits

BATCH = 500


class Ceiling:
    """Encode, frame, join, write, ``fdatasync``, in a loop: what the disk and the encoder allow."""

    def __init__(self, folder: Path, batch: int) -> None:
        self._events = [Event(topic=TOPIC, payload=payload) for payload in payloads(batch)]
        self._fd = os.open(folder / "ceiling", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._size = 0
        self._offset = 1

    async def rate(self, seconds: float) -> float:
        limits, events, fd = Limits(), self._events, self._fd
        first = self._offset
        started = perf_counter()
        end = started + seconds
        while perf_counter() < end:
            bodies = [encode_event(event, limits) for event in events]
            data = b"".join(frame_batch(self._offset, bodies, self._size, 0))
            os.write(fd, data)
            os.fdatasync(fd)
            self._size += len(data)
            self._offset += len(events)
        return (self._offset - first) / (perf_counter() - started)

    def close(self) -> None:
        os.close(self._fd)


class Sketch:
    """Group commit and nothing else: tasks that wait, events, the encoder, one write and one sync
    for all of them. No checks, no options, no receipts, no other process: what asyncio allows.
    """

    def __init__(self, folder: Path, publishers: int) -> None:
        self._publishers = publishers
        self._payloads = payloads()
        self._limits = Limits()
        self._waiting: list[tuple[bytes, asyncio.Future[int]]] = []
        self._fd = os.open(folder / "sketch", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._size = 0
        self._offset = 1

    async def rate(self, seconds: float) -> float:
        ready, publish = self._payloads, self._publish
        return await publish_rate(
            lambda number: publish(ready[number & 1023]), self._publishers, seconds
        )

    async def _publish(self, payload: object) -> int:
        body = encode_event(Event(topic=TOPIC, payload=payload), self._limits)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._commit)
        self._waiting.append((body, future))
        return await future

    def _commit(self) -> None:
        waiting, self._waiting = self._waiting, []
        bodies = [body for body, _ in waiting]
        data = b"".join(frame_batch(self._offset, bodies, self._size, 0))
        os.write(self._fd, data)
        os.fdatasync(self._fd)
        for offset, (_, future) in enumerate(waiting, self._offset):
            future.set_result(offset)
        self._offset += len(waiting)
        self._size += len(data)

    def close(self) -> None:
        os.close(self._fd)


class Ours:
    """A bus on a folder of its own, published to by a number of concurrent tasks."""

    def __init__(self, bus: trunkline.Bus, publishers: int) -> None:
        self._bus = bus
        self._publishers = publishers
        self._payloads = payloads()

    async def rate(self, seconds: float) -> float:
        publish, ready = self._bus.publish, self._payloads
        return await publish_rate(
            lambda number: publish(TOPIC, ready[number & 1023]), self._publishers, seconds
        )


async def _against_jetstream(
    run: Run, publishers: int, *, sync_always: bool = False, windowed: bool = False
) -> Pair:
    async with trunkline.connect(f"file:{run.fresh()}") as bus:
        rate = Ours(bus, publishers).rate
        return await _beside_jetstream(run, rate, publishers, sync_always, windowed)


async def _beside_jetstream(
    run: Run,
    rate: Callable[[float], Awaitable[float]],
    publishers: int,
    sync_always: bool = False,
    windowed: bool = False,
) -> Pair:
    data = b"." * EVENT_BYTES
    async with jetstream(run.fresh(), sync_always=sync_always) as js:

        async def publish(_: int) -> None:
            await (await js.publish_async(TOPIC, data))

        call = publish if windowed else lambda _: js.publish(TOPIC, data)
        return await alternate(run, rate, lambda seconds: publish_rate(call, publishers, seconds))


@line("publish-64-ceiling", against="bare ceiling, batches of 64", unit="events/s", goal=">= 0.40")
async def publish_64_ceiling(run: Run) -> Pair:
    ceiling = Ceiling(run.fresh(), 64)
    async with trunkline.connect(f"file:{run.fresh()}") as bus:
        pair = await alternate(run, Ours(bus, 64).rate, ceiling.rate)
    ceiling.close()
    return pair


async def _against_sketch(run: Run, publishers: int) -> Pair:
    sketch = Sketch(run.fresh(), publishers)
    async with trunkline.connect(f"file:{run.fresh()}") as bus:
        pair = await alternate(run, Ours(bus, publishers).rate, sketch.rate)
    sketch.close()
    return pair


@line("publish-64-sketch", against="bare asyncio group commit", unit="events/s", goal=">= 0.7")
async def publish_64_sketch(run: Run) -> Pair:
    return await _against_sketch(run, 64)


@line("publish-1024-sketch", against="bare asyncio group commit", unit="events/s", goal=">= 0.7")
async def publish_1024_sketch(run: Run) -> Pair:
    return await _against_sketch(run, 1024)


@line("publish-64-nats-sync", against="JetStream, sync always", unit="events/s", goal=">= 20")
async def publish_64_nats_sync(run: Run) -> Pair:
    return await _against_jetstream(run, 64, sync_always=True)


@line("publish-64-nats-async", against="JetStream publish_async", unit="events/s", goal=">= 1")
async def publish_64_nats_async(run: Run) -> Pair:
    """The same, with nats-py's cheaper call: it shares one inbox and skips a task per request."""
    return await _against_jetstream(run, 64, windowed=True)


async def _sketch_against_jetstream(run: Run, publishers: int, *, sync_always: bool) -> Pair:
    """What asyncio alone would reach: no bus can do better in one process."""
    sketch = Sketch(run.fresh(), publishers)
    pair = await _beside_jetstream(run, sketch.rate, publishers, sync_always)
    sketch.close()
    return pair


@line("sketch-64-nats-sync", against="JetStream, sync always", unit="events/s", goal=">= 20")
async def sketch_64_nats_sync(run: Run) -> Pair:
    return await _sketch_against_jetstream(run, 64, sync_always=True)


@line("ceiling-64-nats-sync", against="JetStream, sync always", unit="events/s", goal=">= 20")
async def ceiling_64_nats_sync(run: Run) -> Pair:
    """Not even tasks: what the disk and the encoder allow."""
    ceiling = Ceiling(run.fresh(), 64)
    pair = await _beside_jetstream(run, ceiling.rate, 64, sync_always=True)
    ceiling.close()
    return pair


@line(
    "publish-many-ceiling", against="bare ceiling, batches of 500", unit="events/s", goal=">= 0.70"
)
async def publish_many_ceiling(run: Run) -> Pair:
    """One task publishes batch after batch: what a bulk load does."""
    ceiling = Ceiling(run.fresh(), BATCH)
    batch = payloads(BATCH)
    async with trunkline.connect(f"file:{run.fresh()}") as bus:

        async def ours(seconds: float) -> float:
            return BATCH * await publish_rate(lambda _: bus.publish_many(TOPIC, batch), 1, seconds)

        pair = await alternate(run, ours, ceiling.rate)
    ceiling.close()
    return pair


@line("publish-one-p95", against="fdatasync p95", unit="ms", goal="<= 3")
async def publish_one_p95(run: Run) -> Pair:
    """One publisher alone, in bursts that alternate with bursts of bare syncs."""
    probe = SyncProbe(run.fresh())
    ready = cycle(payloads())
    took: list[float] = []
    async with trunkline.connect(f"file:{run.fresh()}") as bus:
        for payload in payloads(50):
            await bus.publish(TOPIC, payload)
        for _ in range(run.count(100, 3)):
            probe.burst(50)
            for _ in range(50):
                started = perf_counter()
                await bus.publish(TOPIC, next(ready))
                took.append(perf_counter() - started)
    probe.close()
    return Pair(percentile(took, 0.95) * 1000, probe.p(0.95) * 1000)
