"""The outbox as a collection: a committed row becomes one record, in the order of its key."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient

import trunkline
from kit.mongod import fresh_database
from trunkline.bus.connect import open_local
from trunkline.errors import StorageFull
from trunkline.event import Event
from trunkline.patterns.mongo_outbox import MongoOutbox
from trunkline.patterns.outbox import Drainer
from trunkline.testing import ManualClock

DRAINER = Path(__file__).with_name("drainer.py")


@pytest.fixture
def place(mongo_url: str) -> str:
    return fresh_database(mongo_url)


@pytest.fixture
async def client(place: str) -> AsyncIterator[Any]:
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(place, tz_aware=True)
    async with client:
        yield client


@pytest.fixture
async def outbox(client: Any) -> MongoOutbox:
    outbox = MongoOutbox(client.get_default_database()["outbox"])
    await outbox.create()
    return outbox


@pytest.fixture
async def bus() -> AsyncIterator[Any]:
    async with trunkline.connect("memory:") as bus:
        yield bus


async def test_what_is_committed_is_published_once(bus: Any, outbox: MongoOutbox) -> None:
    ids = [await outbox.add("orders", n, key="k") for n in (1, 2, 3)]
    drainer = Drainer(outbox, bus, batch=2)
    assert await drainer.drain() == 3
    assert await drainer.drain() == 0
    records = await bus.read("orders")
    assert [(r.event.id, r.event.payload) for r in records] == [(ids[n - 1], n) for n in (1, 2, 3)]
    rows = await outbox.rows.find().sort("offset").to_list()
    assert [(row["state"], row["offset"]) for row in rows] == [("sent", n) for n in (1, 2, 3)]
    assert await outbox.waiting() == 0


async def test_a_row_is_part_of_the_callers_transaction(
    bus: Any, outbox: MongoOutbox, client: Any
) -> None:
    data = client.get_default_database()["shop"]
    await data.insert_one({"_id": 0})  # a collection is made outside of transactions
    async with client.start_session() as session:
        async with await session.start_transaction():
            await data.insert_one({"_id": 1}, session=session)
            await outbox.add("orders", 1, session=session)
        await session.start_transaction()
        await data.insert_one({"_id": 2}, session=session)
        await outbox.add("orders", 2, session=session)
        await session.abort_transaction()
    assert await Drainer(outbox, bus).drain() == 1
    assert [record.event.payload for record in await bus.read("orders")] == [1]
    assert await data.count_documents({}) == 2


class FullBus:
    """A bus that keeps nothing."""

    async def publish_many(self, topic: str, payloads: Any) -> Any:
        raise StorageFull("no room")

    publish_again = publish_many


async def test_a_row_that_was_not_acknowledged_is_not_marked(bus: Any, outbox: MongoOutbox) -> None:
    await outbox.add("orders", 1)
    with pytest.raises(StorageFull):
        await Drainer(outbox, FullBus()).drain()
    (row,) = await outbox.rows.find().to_list()
    assert (row["state"], row["attempts"], row["error"]) == ("waiting", 1, "no room")
    assert await Drainer(outbox, bus).drain() == 1, "its lane is free at once"


async def test_a_bad_row_is_given_up_and_holds_up_nobody(bus: Any, outbox: MongoOutbox) -> None:
    await outbox.add("orders", 1, key="k")
    await outbox.add("orders", "x" * 2_000_000, key="k")
    await outbox.add("orders", 3, key="k")
    drainer = Drainer(outbox, bus, max_attempts=2)
    for _ in range(4):
        await drainer.drain()
    assert [record.event.payload for record in await bus.read("orders")] == [1, 3]
    assert await outbox.waiting() == 0
    assert await outbox.retry() == 1


async def test_bad_input_is_refused_and_nothing_is_written(outbox: MongoOutbox) -> None:
    for topic, payload, fields in (
        ("a b", 1, {}),
        ("orders", {1j}, {}),
        ("orders", 1, {"colour": "red"}),
        (Event(topic="orders"), 1, {}),
        (Event(topic="orders", id="x" * 300), None, {}),
    ):
        with pytest.raises(trunkline.TrunklineError):
            await outbox.add(topic, payload, **fields)  # type: ignore[arg-type]
    assert await outbox.waiting() == 0


async def test_sent_rows_are_pruned_by_their_age(bus: Any, client: Any) -> None:
    clock = ManualClock()
    outbox = MongoOutbox(client.get_default_database()["outbox"], clock=clock)
    await outbox.add("orders", 1)
    await Drainer(outbox, bus).drain()
    assert await outbox.prune(3600) == 0
    await clock.run(3601)
    assert await outbox.prune(3600) == 1


async def test_drainers_share_an_outbox_and_keep_the_order_of_keys(
    bus: Any, outbox: MongoOutbox
) -> None:
    for number in range(20):
        for key in ("a", "b", "c", "d"):
            await outbox.add("orders", number, key=key)
    drainers = [Drainer(outbox, bus, batch=5) for _ in range(4)]

    async def drain(drainer: Drainer) -> int:
        total = 0
        while await outbox.waiting():
            total += await drainer.drain()
            await asyncio.sleep(0.001)
        return total

    assert sum(await asyncio.gather(*map(drain, drainers))) == 80
    await check_order(bus, 20)


async def check_order(bus: Any, count: int) -> None:
    records = await bus.read("orders", 1, 10**6)
    ids = [record.event.id for record in records]
    assert len(ids) == len(set(ids)), "a row became two records"
    for key in ("a", "b", "c", "d"):
        found = [record.event.payload for record in records if record.event.key == key]
        assert found == list(range(count)), key


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
async def test_killed_drainers_lose_no_row_and_keep_the_order_of_keys(
    place: str, outbox: MongoOutbox, kills: int
) -> None:
    async def start() -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(DRAINER), place, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"ready\n"
        return process

    count = 100 * kills
    running = [await start(), await start()]
    try:

        async def add() -> None:
            for number in range(count):
                for key in ("a", "b", "c", "d"):
                    await outbox.add("orders", number, key=key)

        adding = asyncio.ensure_future(add())
        for _ in range(kills):
            victim = running.pop(0)
            await asyncio.sleep(0.2)
            victim.kill()
            await victim.wait()
            running.append(await start())
        await asyncio.wait_for(adding, 120)
        async with asyncio.timeout(120):
            while await outbox.waiting():
                await asyncio.sleep(0.1)
    finally:
        for process in running:
            process.kill()
            await process.wait()
    async with open_local(place) as bus:
        await check_order(bus, count)
