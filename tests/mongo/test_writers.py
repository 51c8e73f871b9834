"""Writers of one partition, and what a reader fetches of their batches."""

from __future__ import annotations

import asyncio
from typing import Any

import pymongo
import pytest

from kit.mongod import fresh_database
from trunkline.event import Event, Receipt
from trunkline.options import TopicOptions
from trunkline.store.mongo import MongoStore

BATCHES = 12
SIZE = 5


@pytest.mark.timeout(120)
@pytest.mark.parametrize("durability", ["fsync", "os"])
async def test_writers_that_meet_at_every_append_keep_each_key_once(
    mongo_url: str, durability: Any
) -> None:
    """A writer that lost is told the batch of the other one by the command that failed: it must
    not miss the keys in that batch, nor a batch behind it.
    """
    place = fresh_database(mongo_url)
    stores = [MongoStore(place) for _ in range(4)]
    try:
        await stores[0].define("orders", TopicOptions(durability=durability))

        async def write(store: MongoStore) -> list[Receipt]:
            receipts: list[Receipt] = []
            for batch in range(BATCHES):
                names = [f"{batch}-{number}" for number in range(SIZE)]
                events = [Event(topic="orders", idem_key=name, payload=name) for name in names]
                receipts += await store.append("orders", events)
            return receipts

        told = await asyncio.gather(*map(write, stores))
        records = await stores[0].read("orders", 0, 1, 10_000)
    finally:
        for store in stores:
            await store.close()
    count = BATCHES * SIZE
    assert [record.offset for record in records] == list(range(1, count + 1))
    at = {record.event.idem_key: record.offset for record in records}
    assert len(at) == count
    for receipts in told:
        assert [one.offset for one in receipts] == [
            at[f"{batch}-{number}"] for batch in range(BATCHES) for number in range(SIZE)
        ]
    assert sum(not one.duplicate for receipts in told for one in receipts) == count


@pytest.mark.timeout(60)
async def test_a_reader_of_a_hundred_records_does_not_fetch_two_thousand(mongo_url: str) -> None:
    store = MongoStore(fresh_database(mongo_url))
    try:
        for _ in range(25):
            await store.append("orders", [Event(topic="orders", payload=n) for n in range(100)])
        with pymongo.MongoClient[dict[str, Any]](mongo_url) as client:

            def returned() -> int:
                status = client.admin.command("serverStatus")
                return int(status["metrics"]["document"]["returned"])

            before = returned()
            for start in (1, 51, 101, 1001):
                records = await store.read("orders", 0, start, 100)
                assert [record.offset for record in records] == list(range(start, start + 100))
            assert returned() - before < 40
        rest = await store.read("orders", 0, 1951, 10_000)
        assert [record.offset for record in rest] == list(range(1951, 2501))
    finally:
        await store.close()
