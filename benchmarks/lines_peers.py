"""Beside peers in their best mode: pipelined, batched, overlapped, with the C parser. Lines that we
lose are here on purpose.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import trunkline
from benchmarks.harness import (
    EVENT_BYTES,
    TOPIC,
    MissingPeerError,
    Pair,
    Run,
    alternate,
    line,
    middle,
    payloads,
    publish_rate,
)
from benchmarks.lines_deliver import GROUP, work_off_batches
from benchmarks.peers import jetstream, kafka, redis_server

PULL = 250
READ = 500
IN_FLIGHT = 16
PROCESSES = 4
BATCH = 500
DATA = b"." * EVENT_BYTES


def _redis(port: int) -> Any:
    """A plain client: with hiredis it is the fastest that redis-py has."""
    try:
        import hiredis  # noqa: F401 -- the client finds it by itself
        from redis import Redis
    except ImportError as error:
        raise MissingPeerError("redis and hiredis") from error
    return Redis(host="127.0.0.1", port=port)


@line(
    "publish-64-redis-pipeline",
    against="Redis pipelines of 64 XADD, fsync always",
    unit="events/s",
    goal=">= 1",
)
async def publish_64_redis_pipeline(run: Run) -> Pair:
    ready = payloads()
    async with (
        trunkline.connect(f"file:{run.fresh()}") as bus,
        redis_server(run.fresh()) as port,
    ):
        client = _redis(port)

        async def theirs(seconds: float) -> float:
            return await asyncio.to_thread(_pipelines, client, 64, seconds)

        async def ours(seconds: float) -> float:
            return await publish_rate(
                lambda number: bus.publish(TOPIC, ready[number % len(ready)]), 64, seconds
            )

        try:
            return await alternate(run, ours, theirs)
        finally:
            client.close()


def _pipelines(client: Any, size: int, seconds: float) -> float:
    started = perf_counter()
    end, sent = started + seconds, 0
    while perf_counter() < end:
        pipe = client.pipeline(transaction=False)
        for _ in range(size):
            pipe.xadd(TOPIC, {"event": DATA})
        sent += len(pipe.execute())
    return sent / (perf_counter() - started)


@line(
    "publish-one-persist-queue",
    against="persist-queue SQLiteAckQueue.put",
    unit="events/s",
    goal=">= 0.75",
)
async def publish_one_persist_queue(run: Run) -> Pair:
    """One event after the other, each durable before the next. SQLite overwrites its log in place
    and so syncs no change of size.
    """
    try:
        from persistqueue import SQLiteAckQueue
    except ImportError as error:
        raise MissingPeerError("persist-queue") from error
    queue = SQLiteAckQueue(str(run.fresh()), auto_commit=True)
    ready = payloads()

    def puts(seconds: float) -> float:
        started = perf_counter()
        end, sent = started + seconds, 0
        while perf_counter() < end:
            queue.put(ready[sent % len(ready)])
            sent += 1
        return sent / (perf_counter() - started)

    async with trunkline.connect(f"file:{run.fresh()}") as bus:

        async def ours(seconds: float) -> float:
            return await publish_rate(
                lambda number: bus.publish(TOPIC, ready[number % len(ready)]), 1, seconds
            )

        async def theirs(seconds: float) -> float:
            return puts(seconds)  # in this thread: its connection belongs to it

        pair = await alternate(run, ours, theirs)
    queue.close()
    return pair


@line(
    "catch-up-nats-two-pulls",
    against="JetStream, two overlapping pulls, ack each",
    unit="events/s",
    goal=">= 1.0",
)
async def catch_up_nats_two_pulls(run: Run) -> Pair:
    """A new group works off everything that was published before it existed, by batches. One pull
    is under way while the messages of the other are acknowledged.
    """
    ours, theirs = run.count(400_000, 2_000), run.count(200_000, 1_000)
    async with trunkline.connect(f"file:{run.fresh()}") as bus, jetstream(run.fresh()) as js:
        await _fill(bus, ours)
        for _ in range(theirs // BATCH):
            await asyncio.gather(*(js.publish(TOPIC, DATA) for _ in range(BATCH)))
        await js.pull_subscribe(TOPIC, durable=GROUP)
        before = await _pull_twice(js, theirs // 2)
        rate = await work_off_batches(bus, ours, READ)
        after = await _pull_twice(js, theirs // 2)
    return Pair(rate, (before + after) / 2)


async def _fill(bus: trunkline.Bus, count: int) -> None:
    batch = payloads(BATCH)
    for _ in range(count // BATCH):
        await bus.publish_many(TOPIC, batch)


async def _pull_twice(js: Any, count: int) -> float:
    """Two pulls are always under way; ``fetch`` of the client would wait for each of them."""
    client = js._nc
    done = asyncio.Event()
    inbox = client.new_inbox()
    pull = f"$JS.API.CONSUMER.MSG.NEXT.{TOPIC}.{GROUP}"
    got = asked = 0

    async def ask() -> None:
        nonlocal asked
        if asked < count:
            asked += PULL
            await client.publish(pull, b'{"batch":%d}' % PULL, reply=inbox)

    async def take(message: Any) -> None:
        nonlocal got
        got += 1
        await message.ack()
        if got % PULL == 0:
            await ask()
        if got == count:
            done.set()

    subscription = await client.subscribe(inbox, cb=take)
    started = perf_counter()
    await ask()
    await ask()
    async with asyncio.timeout(120):
        await done.wait()
    await client.flush()
    took = perf_counter() - started
    await subscription.unsubscribe()
    return count / took


@line(
    "catch-up-redis",
    against="Redis XREADGROUP 500 + XACK, fsync always",
    unit="events/s",
    goal=">= 0.8",
)
async def catch_up_redis(run: Run) -> Pair:
    """A new group works off a log. Both hand out and acknowledge 500 at a time."""
    ours, theirs = run.count(400_000, 2_000), run.count(400_000, 2_000)
    async with trunkline.connect(f"file:{run.fresh()}") as bus, redis_server(run.fresh()) as port:
        client = _redis(port)
        await _fill(bus, ours)
        for _ in range(theirs // BATCH):
            pipe = client.pipeline(transaction=False)
            for _ in range(BATCH):
                pipe.xadd(TOPIC, {"event": DATA})
            pipe.execute()
        client.xgroup_create(TOPIC, GROUP, id="0")
        before = await asyncio.to_thread(_read_group, client, theirs // 2)
        rate = await work_off_batches(bus, ours, READ)
        after = await asyncio.to_thread(_read_group, client, theirs // 2)
        client.close()
    return Pair(rate, (before + after) / 2)


def _read_group(client: Any, count: int) -> float:
    started = perf_counter()
    got = 0
    while got < count:
        ((_, found),) = client.xreadgroup(GROUP, "one", {TOPIC: ">"}, count=READ)
        client.xack(TOPIC, GROUP, *(name for name, _ in found))
        got += len(found)
    return got / (perf_counter() - started)


@line(
    "four-publish-redis",
    against="Redis, 4 processes with pipelines of 16",
    unit="events/s",
    goal=">= 0.5",
)
async def four_publish_redis(run: Run) -> Pair:
    """Four processes publish to one log, 16 events under way in each."""
    async with redis_server(run.fresh()) as port:
        folder = run.fresh()
        rounds = []
        for _ in range(1 if run.quick else 5):
            ours = await _four("publish", str(folder), run.seconds)
            theirs = await _four("redis", str(port), run.seconds)
            rounds.append(Pair(ours, theirs))
    return middle(rounds)


async def _four(word: str, place: str, seconds: float) -> float:
    """The rates of four children that publish at the same time, together."""

    async def one() -> float:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "benchmarks.child", word, place, str(seconds), str(IN_FLIGHT)),
            cwd=Path(__file__).parents[1],
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        return float(json.loads(out)["rate"])

    return sum(await asyncio.gather(*(one() for _ in range(PROCESSES))))


@line(
    "publish-many-kafka-sync",
    against="Kafka, flush.messages=1, batches of 500",
    unit="events/s",
    goal=">= 0.95",
)
async def publish_many_kafka_sync(run: Run) -> Pair:
    """Bulk: each side has 500 events on disk before the next 500."""
    try:
        from confluent_kafka import Producer
    except ImportError as error:
        raise MissingPeerError("confluent-kafka") from error
    batch = payloads(BATCH)
    async with trunkline.connect(f"file:{run.fresh()}") as bus, kafka(run.fresh()) as address:
        producer = Producer({"bootstrap.servers": address, "acks": "all", "linger.ms": 0.5})

        def sends(seconds: float) -> float:
            started = perf_counter()
            end, sent = started + seconds, 0
            while perf_counter() < end:
                for _ in range(BATCH):
                    producer.produce(TOPIC, DATA)
                if producer.flush(30):
                    raise RuntimeError("Kafka did not acknowledge a batch within 30 s")
                sent += BATCH
            return sent / (perf_counter() - started)

        async def ours(seconds: float) -> float:
            return BATCH * await publish_rate(lambda _: bus.publish_many(TOPIC, batch), 1, seconds)

        async def theirs(seconds: float) -> float:
            return await asyncio.to_thread(sends, seconds)

        return await alternate(run, ours, theirs)
