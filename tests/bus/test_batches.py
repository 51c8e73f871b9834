"""Batches of deliveries, of a local subscription and of one behind a broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from trunkline.broker.server import Broker
from trunkline.bus.local import LocalBus
from trunkline.bus.remote import RemoteBus
from trunkline.delivery.batches import DeliveryBatch
from trunkline.errors import Closed, InvalidOption
from trunkline.options import BrokerOptions, GroupOptions
from trunkline.store import open_store

POLICY = GroupOptions(backoff_base_s=0.01, backoff_max_s=0.01, max_retries=3)


@pytest.fixture(params=["local", "remote"])
async def either(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    local = LocalBus(open_store("memory:"))
    if request.param == "local":
        async with local:
            yield local
        return
    async with (
        Broker(BrokerOptions(port=0, metrics_s=0), bus=local) as broker,
        RemoteBus(broker.url) as bus,
    ):
        yield bus
    await local.close()


async def soon(found: AsyncIterator[DeliveryBatch]) -> DeliveryBatch:
    return await asyncio.wait_for(anext(found), 20)


async def settled(bus: Any) -> None:
    async with asyncio.timeout(20):
        while await bus.lag("orders", "billing"):
            await asyncio.sleep(0.01)


async def read(found: AsyncIterator[DeliveryBatch], count: int) -> list[DeliveryBatch]:
    """Batches with ``count`` deliveries in all; each batch is acked."""
    batches: list[DeliveryBatch] = []
    while sum(map(len, batches)) < count:
        batches.append(await soon(found))
        assert await batches[-1].ack() == len(batches[-1])
    return batches


async def test_one_ack_finishes_a_batch(either: Any) -> None:
    await either.publish_many("orders", list(range(300)))
    async with either.subscribe("orders", group="billing", max_inflight=200) as stream:
        batches = await read(stream.batches(50, wait_s=1.0), 300)
        assert [event.payload for one in batches for event in one.events] == list(range(300))
        assert max(map(len, batches)) <= 50
        assert len(batches) < 60
        assert await batches[0].ack() == 0  # it is finished
        await settled(either)
    async with either.subscribe("orders", group="billing") as stream:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream.batches(50)), 0.2)


async def test_a_single_delivery_of_a_batch_has_its_own_verbs(either: Any) -> None:
    await either.publish_many("orders", list(range(10)))
    async with either.subscribe("orders", group="billing", policy=POLICY) as stream:
        found = stream.batches(10, wait_s=2.0)
        batch = await soon(found)
        assert [one.event.payload for one in batch] == list(range(10))
        assert await batch[3].nack(reason="not now")
        assert await batch[5].term("broken")
        assert await batch[7].ack()
        assert await batch.ack() == 7
        again = await soon(found)
        assert [(one.event.payload, one.attempt) for one in again] == [(3, 2)]
        await again.ack()
        await settled(either)
    letters = [one async for one in either.dead_letters("orders").letters()]
    assert [one.offset for one in letters] == [1]
    assert "broken" in str(letters[0])


async def test_a_batch_keeps_the_order_of_each_key(either: Any) -> None:
    for number in range(200):
        await either.publish("orders", number, key=f"k{number % 3}")
    async with either.subscribe("orders", group="billing", max_inflight=100) as stream:
        batches = await read(stream.batches(40, wait_s=0.05), 200)
    seen: dict[str, list[int]] = {}
    for batch in batches:
        for event in batch.events:
            seen.setdefault(event.key or "", []).append(event.payload)
    assert seen == {f"k{n}": list(range(n, 200, 3)) for n in range(3)}


async def test_a_failed_record_holds_back_the_later_records_of_its_key(either: Any) -> None:
    await either.publish_many("orders", list(range(20)), key="one")
    handled: list[int] = []
    async with either.subscribe("orders", group="billing", policy=POLICY) as stream:
        found = stream.batches(20, wait_s=0.2)
        has_failed = False
        while len(handled) < 20:
            batch = await soon(found)
            for delivery in batch:
                if delivery.event.payload == 4 and not has_failed:
                    has_failed = True
                    await delivery.nack()
                    break  # the later records of the key come again behind it
                handled.append(delivery.event.payload)
                await delivery.ack()
            else:
                continue
            await batch.nack(delay_s=0.0)
        await settled(either)
    assert handled == list(range(20))


async def test_an_unfinished_batch_is_delivered_again_after_the_subscription(either: Any) -> None:
    await either.publish_many("orders", list(range(10)))
    async with either.subscribe("orders", group="billing", policy=POLICY) as stream:
        batch = await soon(stream.batches(10, wait_s=2.0))
        assert len(batch) == 10
        assert await batch[0].ack()
    async with either.subscribe("orders", group="billing", policy=POLICY) as stream:
        batches = await read(stream.batches(10, wait_s=0.5), 9)
        assert [event.payload for one in batches for event in one.events] == list(range(1, 10))
        await settled(either)
    assert [one async for one in either.dead_letters("orders").letters()] == []


async def test_a_batch_does_not_wait_longer_than_it_may(either: Any) -> None:
    await either.publish_many("orders", [1, 2, 3])
    async with either.subscribe("orders", group="billing") as stream:
        (batch,) = await read(stream.batches(500, wait_s=0.5), 3)
        assert len(batch) == 3


async def test_wrong_sizes_and_a_subscription_that_was_not_entered_are_refused(either: Any) -> None:
    stream = either.subscribe("orders", group="billing")
    with pytest.raises(Closed, match="enter"):
        await anext(stream.batches(10))
    async with stream:
        with pytest.raises(InvalidOption):
            await anext(stream.batches(0))
        with pytest.raises(InvalidOption):
            await anext(stream.batches(10, wait_s=-1.0))


async def test_a_reader_that_is_cancelled_gives_back_what_it_gathered(either: Any) -> None:
    await either.publish_many("orders", list(range(3)))
    async with either.subscribe("orders", group="billing", policy=POLICY) as stream:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream.batches(10, wait_s=60)), 0.5)
        batch = await soon(stream.batches(10, wait_s=0.5))
        assert [(one.payload, one.attempt) for one in batch] == [(n, 1) for n in range(3)]
        await batch.ack()
