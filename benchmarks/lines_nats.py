"""The bus on NATS beside bare nats-py, on one server, in turns.

Fairness. Both sides run in this process, on the same event loop and the same server with its
default sync. Ours makes an event of a Python value, encodes it, and decodes it on the way back; the
bare side is handed ready bytes of the same size and leaves them undecoded. Both send
``Nats-Msg-Id`` with every message, and both wait for every acknowledgement.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.harness import EVENT_BYTES, Pair, Run, line, middle, payloads
from trunkline.bus.nats import NatsBus
from trunkline.bus.nats.server import Servers
from trunkline.options import GroupOptions

IN_FLIGHT = 256
_names = itertools.count(1)


@line("nats-publish-256", against="bare nats-py publish_async", unit="events/s", goal=">= 1.2")
async def nats_publish(run: Run) -> Pair:
    """256 publishes in flight, each with its acknowledgement."""
    count = run.count(20_000, 500)
    with Servers(Path(run.fresh()), sync="2m") as servers:
        pairs = [
            Pair(await _publish_ours(servers.url, count), await _publish_bare(servers.url, count))
            for _ in range(1 if run.quick else 5)
        ]
    return middle(pairs)


@line("nats-consume", against="the best bare fetch loop", unit="events/s", goal=">= 2")
async def nats_consume(run: Run) -> Pair:
    """A new group takes and acknowledges everything there is."""
    count = run.count(20_000, 500)
    with Servers(Path(run.fresh()), sync="2m") as servers:
        pairs = []
        for _ in range(1 if run.quick else 5):
            async with NatsBus(f"{servers.url}/c{next(_names)}") as bus:
                for _ in range(count // 500):
                    await bus.publish_many("orders", payloads(500))
                theirs = max([await _fetch(bus, count, batch) for batch in (100, 250, 500)])
                pairs.append(Pair(await _consume(bus, count), theirs))
    return middle(pairs)


async def _publish_ours(url: str, count: int) -> float:
    async with NatsBus(f"{url}/p{next(_names)}", publish_inflight=IN_FLIGHT) as bus:
        await bus.publish("orders", 0)
        rows = itertools.cycle(payloads())
        left = itertools.repeat(None, count)

        async def publish() -> None:
            for _ in left:
                await bus.publish("orders", next(rows))

        started = perf_counter()
        await asyncio.gather(*(publish() for _ in range(IN_FLIGHT)))
        return count / (perf_counter() - started)


async def _publish_bare(url: str, count: int) -> float:
    import nats

    client = await nats.connect(url, pending_size=8 * 1024 * 1024)
    try:
        js = client.jetstream(publish_async_max_pending=IN_FLIGHT, timeout=30)
        name = f"bare{next(_names)}"
        await js.add_stream(name=name, subjects=[name])
        data = b"." * EVENT_BYTES
        started = perf_counter()
        futures = [
            await js.publish_async(name, data, headers={"Nats-Msg-Id": str(number)})
            for number in range(count)
        ]
        await asyncio.gather(*futures)
        return count / (perf_counter() - started)
    finally:
        await client.close()


async def _fetch(bus: NatsBus, count: int, batch: int) -> float:
    import nats
    from nats.js.api import AckPolicy, ConsumerConfig

    place = bus.link.place
    client = await nats.connect(list(place.servers))
    try:
        js = client.jetstream(timeout=30)
        config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, max_ack_pending=2000)
        subject = place.subject("orders", 0)
        subscription: Any = await js.pull_subscribe(subject, durable=f"b{batch}", config=config)
        started, got = perf_counter(), 0
        while got < count:
            for message in await subscription.fetch(batch, timeout=5):
                await message.ack()
                got += 1
        await client.flush()
        return count / (perf_counter() - started)
    finally:
        await client.close()


async def _consume(bus: NatsBus, count: int) -> float:
    policy = GroupOptions(ordering="none")
    started = perf_counter()
    async with bus.subscribe("orders", group="ours", policy=policy, max_inflight=1000) as stream:
        for _ in range(count):
            delivery = await anext(stream)
            await delivery.ack()
    return count / (perf_counter() - started)
