"""What the benchmark runs in a process of its own: a clock's tick, scrapes, a fresh opening, a
victim.

``python -m benchmarks.child WORD FOLDER``; the answer is one JSON object on standard output.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic_ns, perf_counter, sleep
from urllib.parse import quote

import trunkline
from benchmarks.harness import EVENT_BYTES, TOPIC, payloads, publish_rate, resident_mb

TICK_S = 0.001
STAMP_BYTES = 8


def tick() -> None:
    """Write a stamp of the monotonic clock each ms, until stopped: work that arises elsewhere."""
    start = perf_counter()
    for number in itertools.count():
        wait = start + number * TICK_S - perf_counter()
        if wait > 0:
            sleep(wait)
        os.write(1, monotonic_ns().to_bytes(STAMP_BYTES, "little"))


def scrape(address: str) -> None:
    """For each line on standard input ask a broker for what operators look at, all pages of it,
    and write how long that took in all: ``METRICS_MS GROUPS_MS TOPICS_MS``.
    """
    wire = HTTPConnection(address, timeout=60)

    def get(path: str) -> bytes:
        wire.request("GET", path)
        answer = wire.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {said[:200]!r}")
        return said

    def pages(path: str) -> None:
        after: str | None = ""
        while after is not None:
            after = json.loads(get(f"{path}?after={quote(after)}"))["next"]

    for _ in sys.stdin:
        took = []
        for ask in (partial(get, "/metrics"), partial(pages, "/groups"), partial(pages, "/topics")):
            started = perf_counter()
            ask()
            took.append(f"{(perf_counter() - started) * 1000:.2f}")
        print(*took, flush=True)


async def open_log(folder: Path) -> dict[str, float]:
    """Seconds from the end of imports to the first acknowledged publish; memory a second later."""
    payload = payloads(1)[0]
    started = perf_counter()
    async with trunkline.connect(f"file:{folder}") as bus:
        receipt = await bus.publish(TOPIC, payload)
        took = perf_counter() - started
        await asyncio.sleep(1)
        return {"seconds": took, "offset": receipt.offset, "mb": resident_mb()}


async def publish_until_killed(folder: Path) -> None:
    ready = payloads(500)
    async with trunkline.connect(f"file:{folder}") as bus:
        while True:
            receipts = await bus.publish_many(TOPIC, ready)
            print(receipts[-1].offset, flush=True)


async def fall_behind(folder: Path, takes: int) -> dict[str, float]:
    """A new group at the first record: seconds to its first delivery, memory it adds."""
    async with trunkline.connect(f"file:{folder}") as bus:
        await bus.publish(TOPIC, payloads(1)[0])
        before = resident_mb()
        started = perf_counter()
        took = 0.0
        async with bus.subscribe(TOPIC, group=f"behind-{os.getpid()}") as deliveries:
            count = 0
            async for delivery in deliveries:
                took = took or perf_counter() - started
                await delivery.ack()
                count += 1
                if count == takes:
                    break
        return {"seconds": took, "mb": resident_mb(peak=True) - before}


async def take_due(folder: Path, due: int) -> dict[str, float]:
    """A new group takes records that are due behind others that are not: seconds for the first
    ``due`` of them, for as many more once the log was read, and the memory that it adds.
    """
    async with trunkline.connect(f"file:{folder}") as bus:
        ready = payloads(due)
        before = resident_mb()
        took = []
        async with bus.subscribe(TOPIC, group=f"due-{os.getpid()}") as deliveries:
            for _ in range(2):
                started = perf_counter()
                await bus.publish_many(TOPIC, ready)
                for _ in range(due):
                    await (await anext(deliveries)).ack()
                took.append(perf_counter() - started)
        return {"first": took[0], "then": took[1], "mb": resident_mb(peak=True) - before}


async def read_all(folder: Path) -> dict[str, float]:
    """Seconds to read a log once, in order."""
    async with trunkline.connect(f"file:{folder}") as bus:
        first, end = await bus.bounds(TOPIC)
        started = perf_counter()
        while first < end:
            first = (await bus.read(TOPIC, first, 1000))[-1].offset + 1
        return {"seconds": perf_counter() - started}


async def publish_for(folder: Path, seconds: float, in_flight: int) -> dict[str, float]:
    """The rate of one of several processes that publish to the same log."""
    ready = payloads()
    async with trunkline.connect(f"file:{folder}") as bus:
        rate = await publish_rate(
            lambda number: bus.publish(TOPIC, ready[number % len(ready)]), in_flight, seconds
        )
        return {"rate": rate}


def redis_for(port: int, seconds: float, in_flight: int) -> dict[str, float]:
    """The same beside Redis: one pipeline after another."""
    from redis import Redis

    client = Redis(host="127.0.0.1", port=port)
    started = perf_counter()
    end, sent = started + seconds, 0
    while perf_counter() < end:
        pipe = client.pipeline(transaction=False)
        for _ in range(in_flight):
            pipe.xadd(TOPIC, {"event": b"." * EVENT_BYTES})
        sent += len(pipe.execute())
    return {"rate": sent / (perf_counter() - started)}


def main() -> None:
    word, *rest = sys.argv[1:]
    match word:
        case "tick":
            tick()
        case "scrape":
            scrape(rest[0])
        case "open":
            print(json.dumps(asyncio.run(open_log(Path(rest[0])))))
        case "victim":
            asyncio.run(publish_until_killed(Path(rest[0])))
        case "behind":
            print(json.dumps(asyncio.run(fall_behind(Path(rest[0]), int(rest[1])))))
        case "due":
            print(json.dumps(asyncio.run(take_due(Path(rest[0]), int(rest[1])))))
        case "read":
            print(json.dumps(asyncio.run(read_all(Path(rest[0])))))
        case "publish":
            folder, seconds, many = Path(rest[0]), float(rest[1]), int(rest[2])
            print(json.dumps(asyncio.run(publish_for(folder, seconds, many))))
        case "redis":
            print(json.dumps(redis_for(int(rest[0]), float(rest[1]), int(rest[2]))))
        case _:
            sys.exit(f"unknown word {word!r}")


if __name__ == "__main__":
    main()
