"""Several processes make and change one topic at the same time."""

from __future__ import annotations

import asyncio

import pytest

import trunkline
from kit.mongod import fresh_database
from trunkline.errors import Conflict
from trunkline.options import TopicOptions
from trunkline.store.mongo import MongoStore
from trunkline.store.mongo.server import end_tasks

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def place(mongo_url: str) -> str:
    return fresh_database(mongo_url)


async def test_a_topic_that_is_made_twice_loses_nothing(place: str) -> None:
    """One process looks for the topic, another publishes into it, then the first one makes it."""
    slow = MongoStore(place)
    async with trunkline.connect(place) as bus:
        await slow.topics()
        was = await slow._topics.find("orders")
        await bus.publish("orders", 1)
        assert not await slow._topics.swap("orders", was, TopicOptions(dedup_window_s=60))
        await slow.define("orders", TopicOptions(dedup_window_s=60))
        await bus.publish("orders", 2)
        assert [record.event.payload for record in await bus.read("orders")] == [1, 2]
    await slow.close()


async def test_two_changes_of_a_topic_at_once_both_count(place: str) -> None:
    async with trunkline.connect(place) as one, trunkline.connect(place) as two:
        for number in range(10):
            topic = f"orders.{number}"
            await asyncio.gather(
                one.define(topic, dedup_window_s=60), two.define(topic, partitions=3)
            )
            found = (await one.topics())[topic]
            assert (found.dedup_window_s, found.partitions) == (60, 3)


async def test_partitions_are_not_taken_away_by_a_process_that_looked_before(place: str) -> None:
    slow = MongoStore(place)
    async with trunkline.connect(place) as bus:
        await bus.define("orders", partitions=2)
        was = await slow._topics.find("orders")
        await bus.define("orders", partitions=4)
        assert not await slow._topics.swap("orders", was, TopicOptions(partitions=3))
        with pytest.raises(Conflict):
            await slow.define("orders", TopicOptions(partitions=3))
        assert (await bus.topics())["orders"].partitions == 4
    await slow.close()


async def test_a_task_that_loses_a_cancel_ends_all_the_same() -> None:
    async def deaf() -> None:
        for _ in range(2):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue
        await asyncio.sleep(60)

    task = asyncio.ensure_future(deaf())
    await asyncio.sleep(0)
    await asyncio.wait_for(end_tasks([task]), 10)
    assert task.done()
