"""The HTTP side of a broker in a process of its own: redriving dead letters, publishing, scrapes of
thousands of groups, and a folder of a thousand topics.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from time import monotonic_ns, perf_counter
from typing import Any

from benchmarks.harness import (
    TOPIC,
    Pair,
    Run,
    SyncProbe,
    least_stolen,
    line,
    middle,
    payloads,
    percentile,
)
from benchmarks.lines_broker import broker, client
from benchmarks.pace import Side, ticks, turn
from trunkline.group import Group
from trunkline.names import GroupKey
from trunkline.options import GroupOptions

LETTERS = 10_000
LETTERS_S = 5_000.0
GROUPS = (20, 10, 10)  # topics, partitions of each, groups on each
SCRAPE_S = 1.0
SCRAPED = 2_000  # events of one turn, at one a millisecond
TOPICS = 1_000


def _post(wire: http.client.HTTPConnection, path: str, body: Any, **headers: str) -> Any:
    """One request on the kept-alive connection; what is answered."""
    sent = json.dumps(body).encode()
    wire.request("POST", path, sent, {"Content-Type": "application/json", **headers})
    answer = wire.getresponse()
    said = answer.read()
    if answer.status >= 300:
        raise RuntimeError(f"{path}: {answer.status} {said[:200]!r}")
    return json.loads(said)


def _wire(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(url.partition("://")[2].rstrip("/"), timeout=120)


@line("redrive-rate", against="5,000 letters a second", unit="letters/s", goal=">= 1")
async def redrive_rate(run: Run) -> Pair:
    """10,000 letters of one group are redriven by one request."""
    folder, count = run.fresh(), run.count(LETTERS, 200)
    await _bury(folder, count)
    async with broker(folder) as url:
        wire = _wire(url)
        started = perf_counter()
        said = await asyncio.to_thread(
            _post, wire, f"/topics/{TOPIC}/dlq/redrive", {"group": "billing"}, Prefer="wait=100"
        )
        took = perf_counter() - started
        wire.close()
    if said["job"]["done"] != count:
        raise RuntimeError(f"{said['job']} instead of {count} letters")
    return Pair(count / took, LETTERS_S)


async def _bury(folder: Path, count: int) -> None:
    """Make that many dead letters."""
    from trunkline.bus.connect import open_local

    ready = payloads(count)
    async with open_local(f"file:{folder}") as bus:
        for start in range(0, count, 1000):
            await bus.publish_many(TOPIC, ready[start : start + 1000])
        left = count
        async with bus.subscribe(TOPIC, group="billing", max_inflight=500) as deliveries:
            async for delivery in deliveries:
                await delivery.term("no such customer")
                left -= 1
                if not left:
                    break


@line("http-publish-p50", against="fdatasync p50", unit="ms", goal="<= 5")
async def http_publish_p50(run: Run) -> Pair:
    """One event a request, one request after another, on a kept-alive connection."""
    probe, ready = SyncProbe(run.fresh()), payloads(64)
    took: list[float] = []
    async with broker(run.fresh()) as url:
        wire = _wire(url)

        def turn(count: int) -> list[float]:
            found = []
            for number in range(count):
                started = perf_counter()
                _post(wire, f"/topics/{TOPIC}/events", {"payload": ready[number % 64]})
                found.append(perf_counter() - started)
            return found

        await asyncio.to_thread(turn, run.count(100, 10))
        for _ in range(run.count(20, 1)):
            took += await asyncio.to_thread(turn, run.count(50, 10))
            await asyncio.to_thread(probe.burst, run.count(50, 10))
        wire.close()
    probe.close()
    return Pair(percentile(took, 0.5) * 1000, probe.p(0.5) * 1000)


@line("scraped-publish-p99", against="without scrapes", unit="ms", goal="<= 1.5")
async def scraped_publish_p99(run: Run) -> Pair:
    """1,000 events a second, each timed from the moment it arises in another process to its
    receipt, while `/metrics` and all pages of `/groups` and `/topics` are asked for each second,
    over 2,000 partitions of groups that have records to deliver.
    """
    folder, ready = run.fresh(), cycle(payloads())
    await _add_groups(folder, *(run.count(full, 2) for full in GROUPS))
    async with (
        broker(folder) as url,
        client(url) as bus,
        _scraper(url) as scrape,
        ticks() as stamps,
    ):
        side = _published(bus)
        count = run.count(SCRAPED, 50)

        async def both() -> Pair:
            alone = await turn(side, stamps, ready, count)
            async with _scraping(scrape):
                beside = await turn(side, stamps, ready, count)
            return Pair(percentile(beside, 0.99), percentile(alone, 0.99))

        await scrape()
        await both()
        return middle(await least_stolen(run.rounds, both))


async def _add_groups(folder: Path, topics: int, partitions: int, groups: int) -> None:
    """Topics of a few records, and groups that have settled half of them."""
    from trunkline.bus.connect import open_local

    async with open_local(f"file:{folder}") as bus:
        for topic in (f"{TOPIC}.{number}" for number in range(topics)):
            await bus.define(topic, partitions=partitions)
            for start in range(partitions):
                await bus.publish_many(topic, payloads(10), key=f"k{start}")
            for partition in range(partitions):
                _, end = await bus.bounds(topic, partition)
                for number in range(groups):
                    key = GroupKey(topic, partition, f"group-{number}")
                    await bus.store.change(key, partial(_begin, end // 2))


def _begin(floor: int, group: Group) -> None:
    group.define(GroupOptions(), floor)


def _published(bus: Any) -> Side:
    """What is timed is the receipt, not the delivery."""

    async def publish(topic: str, payload: Any) -> None:
        await bus.publish(topic, payload)
        side.took.append((monotonic_ns() - payload["at"]) / 1e6)

    side = Side(publish)
    return side


@asynccontextmanager
async def _scraper(url: str) -> AsyncIterator[Callable[[], Awaitable[list[float]]]]:
    """A process that scrapes when it is told to: how many ms `/metrics`, `/groups` and `/topics`
    took.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.child", "scrape", url.partition("://")[2].rstrip("/")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    wire, said = process.stdin, process.stdout

    async def scrape() -> list[float]:
        wire.write(b"\n")
        return [float(word) for word in (await said.readline()).split()]

    try:
        yield scrape
    finally:
        wire.close()
        await process.wait()


@asynccontextmanager
async def _scraping(scrape: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Scrape each second until the body ends, and wait for the last answer."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    async def keep() -> None:
        while not ended.is_set():
            until = loop.time() + SCRAPE_S
            await scrape()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), max(0.0, until - loop.time()))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keep())
        yield
        ended.set()


async def _many(folder: Path, topics: int) -> None:
    """Topics of one record each; the first is the one that is published to."""
    from trunkline.bus.connect import open_local

    async with open_local(f"file:{folder}") as bus:
        for number in range(topics):
            await bus.publish(f"{TOPIC}.{number}" if number else TOPIC, number)


async def _folders(run: Run) -> tuple[Path, Path]:
    """A folder of 1,000 topics, and one of one."""
    many = await run.once("many topics", lambda folder: _many(folder, run.count(TOPICS, 10)))
    return many, await run.once("one topic", lambda folder: _many(folder, 1))


@line("topics-1000-ready", against="a folder of one topic", unit="ms", goal="<= 2")
async def topics_1000_ready(run: Run) -> Pair:
    """From the start of the process until `/readyz` says yes."""
    many, one = await _folders(run)

    async def ready_ms(folder: Path) -> float:
        started = perf_counter()
        async with broker(folder) as url:
            await asyncio.to_thread(_get, url, "/readyz")
            return (perf_counter() - started) * 1000

    async def both() -> Pair:
        return Pair(await ready_ms(many), await ready_ms(one))

    await both()
    return middle(await least_stolen(run.rounds, both))


@line("topics-1000-publish-p50", against="a folder of one topic", unit="ms", goal="<= 1.5")
async def topics_1000_publish_p50(run: Run) -> Pair:
    """One event after another to one topic, over a WebSocket."""
    many, one = await _folders(run)
    ready = cycle(payloads())
    async with (
        broker(many) as url,
        client(url) as bus,
        broker(one) as other_url,
        client(other_url) as other,
    ):

        async def p50(bus: Any) -> float:
            took = []
            for _ in range(run.count(300, 10)):
                started = perf_counter()
                await bus.publish(TOPIC, next(ready))
                took.append((perf_counter() - started) * 1000)
            return percentile(took, 0.5)

        async def both() -> Pair:
            return Pair(await p50(bus), await p50(other))

        await both()
        return middle(await least_stolen(run.rounds, both))


@line("topics-1000-metrics", against="1 s", unit="ms", goal="<= 1")
async def topics_1000_metrics(run: Run) -> Pair:
    """One `/metrics` that is gathered anew."""
    return Pair(await _answer_ms(run, "/metrics"), 1000.0)


@line("topics-1000-page", against="1 s", unit="ms", goal="<= 1")
async def topics_1000_page(run: Run) -> Pair:
    """The first page of `/topics`, gathered anew."""
    return Pair(await _answer_ms(run, "/topics"), 1000.0)


async def _answer_ms(run: Run, path: str) -> float:
    """The median of answers that come too late for what was gathered for the one before."""
    many, _ = await _folders(run)
    took = []
    async with broker(many) as url:
        await asyncio.to_thread(_get, url, path)
        for _ in range(run.rounds):
            await asyncio.sleep(1.1)
            started = perf_counter()
            await asyncio.to_thread(_get, url, path)
            took.append((perf_counter() - started) * 1000)
    return statistics.median(took)


def _get(url: str, path: str) -> bytes:
    wire = _wire(url)
    try:
        wire.request("GET", path)
        answer = wire.getresponse()
        said = answer.read()
    finally:
        wire.close()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status} {said[:200]!r}")
    return said
