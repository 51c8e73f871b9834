"""One subscription and its several pumps: they share its room, and end together."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trunkline import connect
from trunkline.bus.local import LocalBus
from trunkline.delivery.pump import Pump
from trunkline.event import Event
from trunkline.group import Group
from trunkline.names import GroupKey
from trunkline.options import TtlPolicy
from trunkline.testing import ManualClock

from .conftest import soon


async def test_a_subscriber_that_leaves_takes_nothing_more(
    bus: LocalBus, clock: ManualClock
) -> None:
    """What a partition hands out while another one is being left would wait for its timeout."""
    await bus.define("orders", partitions=4)
    await bus.publish_many("orders", list(range(100)))
    async with bus.subscribe("orders", group="billing", max_inflight=20) as stream:
        for _ in range(50):
            await (await soon(stream)).ack()
    for partition in range(4):
        key = GroupKey("orders", partition, "billing")
        assert not await bus.store.update(key, lambda group: group.leases)
        assert not await bus.store.update(key, lambda group: group.attempts)


async def test_room_is_made_for_every_partition(bus: LocalBus, clock: ManualClock) -> None:
    await bus.define("orders", partitions=2)
    await bus.publish_many("orders", [1, 2])
    async with bus.subscribe("orders", group="billing", max_inflight=1) as stream:
        delivery = await soon(stream)
        waiting = asyncio.ensure_future(soon(stream))  # asks while there is no room
        await clock.settle()
        await delivery.ack()
        assert (await waiting).partition != delivery.partition


async def test_room_that_a_timeout_makes_is_for_every_partition(
    bus: LocalBus, clock: ManualClock
) -> None:
    await bus.define("orders", partitions=2)
    await bus.publish_many("orders", [1, 2])
    async with bus.subscribe("orders", group="billing", max_inflight=1) as stream:
        lost = await soon(stream)
        waiting = asyncio.ensure_future(soon(stream))
        await clock.run(30.0)
        assert (await waiting).partition != lost.partition


def is_of(kind: str, event: Event) -> bool:
    return bool(event.payload == kind)


async def test_members_do_not_keep_each_other_busy_with_what_nobody_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, work = 0, Pump._round

    async def count(pump: Pump, told: bool) -> bool:
        nonlocal rounds
        rounds += 1
        return await work(pump, told)

    monkeypatch.setattr(Pump, "_round", count)
    async with connect(f"file:{tmp_path}") as one, connect(f"file:{tmp_path}") as two:
        await one.publish_many("orders", ["x"] * 4)
        async with contextlib.AsyncExitStack() as stack:
            readers = []
            for bus in (one, two, one, two, one):
                wanted = bus.subscribe("orders", group="g", max_inflight=1)
                stream = await stack.enter_async_context(wanted)
                readers.append(asyncio.create_task(anext(stream)))
            await asyncio.sleep(0.3)
            before = rounds
            await asyncio.sleep(0.5)
            assert rounds - before < 100
            assert sum(reader.done() for reader in readers) == 4
            await one.publish("orders", "y")
            await asyncio.wait(readers, timeout=5)
            assert all(reader.done() for reader in readers)
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


async def test_none_of_several_topics_waits_for_another(bus: LocalBus) -> None:
    """Also where each free place is asked for by somebody."""
    for topic in ("orders.a", "orders.b", "orders.c"):
        await bus.publish_many(topic, [0] * 100)
    seen: list[str] = []

    async def work(stream: Any) -> None:
        async for delivery in stream:
            seen.append(delivery.topic)
            await asyncio.sleep(0.001)
            await delivery.ack()

    async with bus.subscribe("orders.*", group="billing", max_inflight=4) as stream:
        workers = [asyncio.ensure_future(work(stream)) for _ in range(4)]
        while len(seen) < 90:
            await asyncio.sleep(0.01)
        for worker in workers:
            worker.cancel()
    assert min(seen[:90].count(topic) for topic in ("orders.a", "orders.b", "orders.c")) >= 20


async def test_what_lies_unread_from_before_a_seek_is_not_delivered(
    bus: LocalBus, clock: ManualClock
) -> None:
    key = GroupKey("orders", 0, "billing")
    await bus.publish_many("orders", list(range(1000)))
    async with bus.subscribe("orders", group="billing") as stream:
        while not stream.is_ready:  # a quick reader finds more than it asked for
            await (await soon(stream)).ack()
        await bus.store.update(key, lambda group: group.seek(900))
        bus.store.bell.ring(None)
        await clock.settle()
        assert (await soon(stream)).offset == 901


async def test_a_record_unread_from_before_a_seek_is_left_to_the_member_that_has_it_now(
    bus: LocalBus,
) -> None:
    """Another process may be the first to take it again: with as many tries, of another era."""
    await bus.publish_many("orders", list(range(1000)))
    async with bus.subscribe("orders", group="billing") as stream:
        while not stream.is_ready:
            await (await soon(stream)).ack()
        (pump,) = stream._pumps.values()
        old = [delivery.lease for delivery in stream.inbox.open]
        theirs = Group()
        theirs.ledger.leases = {
            one.offset: msgspec.structs.replace(one, era=one.era + 1) for one in old
        }
        pump._keep(stream.inbox, theirs)
        assert not stream.is_ready


async def test_what_expires_meets_the_policy_that_its_topic_has_by_then(tmp_path: Path) -> None:
    """Also where somebody else changed it beside a subscriber that is at work."""
    url = f"file:{tmp_path}"
    async with connect(url) as bus, connect(url) as other:
        await bus.define("orders", ttl_policy="drop")
        async with bus.subscribe("orders", group="billing") as stream:
            await other.define("orders", ttl_policy="deliver")
            waiting = asyncio.ensure_future(soon(stream))
            while not waiting.done():
                await bus.publish("orders", "old", ttl_s=1.0, ts=datetime(2020, 1, 1, tzinfo=UTC))
                await asyncio.sleep(0.02)
            assert (await waiting).event.payload == "old"


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_what_is_published_once_a_policy_is_defined_meets_it(
    tmp_path: Path, kind: str
) -> None:
    old = datetime(2020, 1, 1, tzinfo=UTC)
    url = "memory:" if kind == "memory" else f"file:{tmp_path}"
    async with connect(url) as bus, bus.subscribe("orders", group="billing") as stream:
        policies: list[TtlPolicy] = ["deliver", "drop", "deliver", "drop", "deliver"]
        for number, policy in enumerate(policies):
            await bus.define("orders", ttl_policy=policy)
            await bus.publish("orders", number, ttl_s=1.0, ts=old)
            await bus.publish("orders", "fresh")
            if policy == "deliver":
                assert (await soon(stream)).event.payload == number
            assert (await soon(stream)).event.payload == "fresh"
