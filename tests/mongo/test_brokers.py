"""``trunkline serve --url mongodb://…``: brokers over one database, and what people find in it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pymongo
import pytest

import trunkline
from broker.client import Launch, Process, peer, running, start, until
from kit.mongod import fresh_database
from trunkline.bus.remote import RemoteBus
from trunkline.options import GroupOptions

pytestmark = pytest.mark.timeout(180)

QUICK: dict[str, Any] = {"backoff_base_s": 0.05, "backoff_max_s": 0.2}


@pytest.fixture
def place(mongo_url: str) -> str:
    return fresh_database(mongo_url)


@pytest.fixture
def database(place: str) -> Iterator[Any]:
    """The database, seen by the driver alone."""
    client: pymongo.MongoClient[dict[str, Any]]
    with pymongo.MongoClient(place) as client:
        yield client.get_default_database()


@pytest.fixture
async def launch() -> AsyncIterator[Launch]:
    started: list[Process] = []

    async def launch(*args: Any, **options: Any) -> Process:
        started.append(await start(*args, **options))
        return started[-1]

    yield launch
    for broker in started:
        if broker.process.returncode is None:
            broker.kill()
            await broker.process.wait()


async def test_the_recipe_publish_consume_kill_restart_resume(
    place: str, database: Any, launch: Launch
) -> None:
    """Publish at a rate; a group from offset 0 with a window of 10; the broker is killed with -9
    and started again; the group goes on from its committed offset.
    """
    broker = await launch(place)
    sent: list[int] = []
    seen: list[int] = []

    async def publish(bus: RemoteBus) -> None:
        for n in range(200):
            sent.append((await bus.publish("test.topic", {"n": n})).offset)
            await asyncio.sleep(0.005)

    async def consume(bus: RemoteBus) -> None:
        async with bus.subscribe("test.topic", group="g1", start=0, max_inflight=10) as stream:
            async for delivery in stream:
                seen.append(delivery.event.payload["n"])
                await delivery.ack()

    def committed() -> int:
        found = database.group_offsets.find_one({"_id": "test.topic:0:g1"})
        return 0 if found is None else found["lastCommitted"]

    async with RemoteBus(broker.url, **QUICK) as one, RemoteBus(broker.url, **QUICK) as two:
        publishing = asyncio.ensure_future(publish(one))
        consuming = asyncio.ensure_future(consume(two))
        await until(lambda: committed() >= 40, 60)
        broker.kill()
        await broker.process.wait()
        at_kill, had = committed(), len(seen)
        broker = await launch(place, port=broker.port)
        await asyncio.wait_for(publishing, 60)
        await until(lambda: set(seen) == set(range(200)), 60)
        await until(lambda: committed() == 200, 60)
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
    assert sent == list(range(1, 201)), "one record for each event, in order, in spite of the kill"
    assert min(seen[had:]) + 1 > at_kill, "a record came again below the committed offset"
    assert len(seen) <= 200 + 3 * 10, "more came again than was in flight"
    assert await broker.end() == 0


async def test_without_acks_everything_comes_again_and_ends_as_dead_letters(place: str) -> None:
    async with running(place, "--ack-timeout-ms", "300") as broker:
        async with httpx.AsyncClient(base_url=broker.http, trust_env=False) as http:
            await http.post("/topics", json={"topic": "test.topic", "maxAttempts": 3})
            async with peer(broker.url) as one:
                for n in range(5):
                    await one.ask("PUBLISH", topic="test.topic", payload=n)
                await one.subscribe("test.topic", "g1", max_inflight=10)
                tries = [(await one.hear("MESSAGE", 30))["attempt"] for _ in range(15)]
                assert sorted(tries) == [1] * 5 + [2] * 5 + [3] * 5

                async def letters() -> list[Any]:
                    found = (await http.get("/topics/test.topic/dlq")).json()["letters"]
                    return found if len(found) == 5 else []

                found = await until(letters, 30)
        assert {letter["attempts"] for letter in found} == {3}


async def test_several_brokers_serve_one_database_and_one_is_killed(
    place: str, launch: Launch
) -> None:
    brokers = await asyncio.gather(*(launch(place) for _ in range(2)))
    seen: list[Counter[int]] = [Counter(), Counter()]
    sent: dict[int, int] = {}

    async def consume(bus: RemoteBus, mine: Counter[int]) -> None:
        async with bus.subscribe("orders", group="billing", max_inflight=5) as stream:
            async for delivery in stream:
                mine[delivery.event.payload] += 1
                await asyncio.sleep(0.002)
                await delivery.ack()

    async def publish(bus: RemoteBus, numbers: range) -> None:
        for n in numbers:
            sent[n] = (await bus.publish("orders", n)).offset
            await asyncio.sleep(0.003)

    async with RemoteBus(brokers[0].url, **QUICK) as one, RemoteBus(brokers[1].url, **QUICK) as two:
        consuming = [
            asyncio.ensure_future(consume(b, c)) for b, c in zip((one, two), seen, strict=True)
        ]
        first = asyncio.ensure_future(publish(one, range(100)))
        second = asyncio.ensure_future(publish(two, range(100, 400)))
        await first
        await until(lambda: len(seen[0]) >= 20 and len(seen[1]) >= 20, 60)
        brokers[0].kill()
        await brokers[0].process.wait()
        await asyncio.wait_for(second, 60)
        await until(lambda: set(seen[0]) | set(seen[1]) == set(range(400)), 60)
        for task in consuming:
            task.cancel()
        await asyncio.gather(*consuming, return_exceptions=True)
        records = await two.read("orders", 1, 1000)
    assert {record.event.payload: record.offset for record in records} == sent
    assert len(records) == 400
    again = sum((seen[0] + seen[1]).values()) - 400
    assert again <= 2 * 5, "more came again than the killed broker had handed out"


async def test_a_person_finds_the_names_of_the_older_service(
    mongo_url: str, place: str, database: Any, launch: Launch
) -> None:
    named = {"MONGO_URL": mongo_url, "MONGO_DB": urlsplit(place).path[1:]}
    broker = await launch("mongodb:", env=named)
    async with httpx.AsyncClient(base_url=broker.http, trust_env=False) as http:
        made = {"topic": "orders", "partitions": 2, "retentionMs": 3_600_000}
        assert (await http.post("/topics", json=made)).status_code < 300
    async with peer(broker.url) as one:
        fields = {"topic": "orders", "key": "duck-1", "headers": {"ct": "json"}}
        digest = hashlib.sha256(json.dumps({"cpu": 12.3}).encode()).hexdigest()
        told = await one.ask("PUBLISH", **fields, payload={"cpu": 12.3}, payload_sha256=digest)
        await one.subscribe("orders", "g1")
        message = await one.hear("MESSAGE")
        await one.ack(message)
        await until(lambda: database.group_offsets.find_one({"lastCommitted": 1}), 30)
    number = message["partition"]

    (row,) = database.events.find({"topic": "orders"})
    assert row.items() >= {"partition": number, "offset": 1, "key": "duck-1"}.items()
    assert set(row) == {
        *("_id", "topic", "partition", "offset", "ts", "id", "key", "headers"),
        *("payload_sha256", "payload", "attempts"),
    }
    assert (row["headers"]["ct"], row["payload"]) == ("json", {"cpu": 12.3})
    assert (row["payload_sha256"], row["attempts"]) == (digest, None)
    assert row["id"] == message["envelope"]["id"]
    assert abs(row["ts"] - message["envelope"]["ts"]) <= 1, "milliseconds"

    config = database.topic_configs.find_one({"topic": "orders"})
    assert (config["partitions"], config["retentionMs"]) == (2, 3_600_000)

    offset = database.group_offsets.find_one({"_id": f"orders:{number}:g1"})
    assert (offset["topic"], offset["partition"], offset["group"]) == ("orders", number, "g1")
    assert (offset["lastCommitted"], told["offset"]) == (1, 1)
    assert abs(offset["updatedTs"] - row["ts"]) < 60_000, "milliseconds"

    def counted() -> Any:
        return database.counters.find_one({"_id": f"orders:{number}", "nextOffset": 2})

    await until(counted, 30)
    assert await broker.end() == 0


async def test_the_row_of_a_dead_letter_says_how_often_it_was_tried(
    place: str, database: Any
) -> None:
    policy = GroupOptions(max_retries=1, backoff_base_s=0.0)
    async with trunkline.connect(place) as bus:
        await bus.publish("orders", 1)
        await bus.publish("orders", 2, headers={"dlq-attempts": "many"})  # a header of the user
        async with bus.subscribe("orders", group="billing", policy=policy) as stream:
            for _ in range(2):
                await (await anext(stream)).nack()
            await (await anext(stream)).ack()

            def letters() -> Any:
                return list(database.events.find({"topic": "orders.DLQ"}))

            (row,) = await until(letters, 30)
    assert (row["attempts"], row["payload"]) == (2, 1)
    assert [one["attempts"] for one in database.events.find({"topic": "orders"})] == [None, None]


async def test_a_view_that_a_killed_process_did_not_make_is_made_later(
    place: str, database: Any
) -> None:
    async with trunkline.connect(place) as bus:
        await bus.publish("orders", 1)
    database.drop_collection("events")
    database.about.update_one({}, {"$unset": {"view": ""}})
    async with trunkline.connect(place) as bus:
        await bus.publish("orders", 2)
    assert [row["payload"] for row in database.events.find()] == [1, 2]
