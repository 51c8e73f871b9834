"""A broker under steady work, sampled for as long as asked: does anything grow?

    python -m benchmarks.soak --minutes 15 --plot docs/img/soak.svg

The broker runs in a process of its own. Two clients publish 200 events a second, three consume
them as one group, every fiftieth event fails once. Each second a client connects, subscribes and
leaves, ``/metrics`` is read, and an event is published over HTTP. The topic keeps 20,000 records,
so its files come and go. Memory, descriptors, threads and files of the broker are sampled once a
second; the first third of the run is warming up. The exit code is 1 if something grew after it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

import httpx

from benchmarks.harness import payloads, resident_mb

TOPIC = "soak"
RATE = 200
FAILS_EVERY = 50
KEPT_RECORDS = 20_000
SEGMENT_RECORDS = 5_000
# What each measure may be above its median of the middle third, in the last third.
ROOM = {"memory_mb": 8.0, "descriptors": 4, "threads": 2, "files": 6}
TITLES = {
    "memory_mb": "resident memory, MB",
    "descriptors": "open descriptors",
    "threads": "threads",
    "files": "files in the folder",
}


class Sample(NamedTuple):
    second: float
    memory_mb: float
    descriptors: int
    threads: int
    files: int


def sample(pid: int, folder: Path, second: float) -> Sample:
    of = Path(f"/proc/{pid}")
    return Sample(
        round(second, 1),
        round(resident_mb(pid), 1),
        len(os.listdir(of / "fd")),
        len(os.listdir(of / "task")),
        sum(len(names) for _, _, names in os.walk(folder)),
    )


def grown(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """The median of each measure in the middle and in the last third, where it went up by more
    than its room.
    """
    third = len(samples) // 3
    found = {}
    for name, room in ROOM.items():
        values = [getattr(one, name) for one in samples]
        before, after = median(values[third : 2 * third]), median(values[2 * third :])
        if after > before + room:
            found[name] = (before, after)
    return found


@asynccontextmanager
async def _broker(folder: Path) -> AsyncIterator[tuple[int, str]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trunkline.broker", "--json", "--port", "0"),
        *("--url", f"file:{folder}"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        said = await asyncio.wait_for(process.stdout.readline(), 60)
        yield process.pid, json.loads(said)["url"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


class Load:
    """The work of the clients, and what they counted."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.published = 0
        self.handled = 0
        self.failed = 0
        self.visits = 0
        self.errors: dict[str, int] = {}

    async def publishing(self, bus: Any, rate: int) -> None:
        ready, started, sent = payloads(), monotonic(), 0
        while True:
            await bus.publish(TOPIC, ready[sent % 1024], key=f"k{sent % 100}")
            sent += 1
            self.published += 1
            await asyncio.sleep(max(0.0, started + sent / rate - monotonic()))

    async def handle(self, delivery: Any) -> None:
        if delivery.offset % FAILS_EVERY == 0 and delivery.attempt == 1:
            self.failed += 1
            await delivery.nack()
            return
        self.handled += 1
        await delivery.ack()

    async def consuming(self, bus: Any) -> None:
        async with bus.subscribe(TOPIC, group="work", max_inflight=32) as deliveries:
            async for delivery in deliveries:
                await self.handle(delivery)

    async def visiting(self) -> None:
        """What comes and goes each second."""
        from trunkline.bus.remote import RemoteBus

        http = self.url.replace("ws", "http", 1)
        async with httpx.AsyncClient(base_url=http, trust_env=False, timeout=60) as kept:
            while True:
                try:
                    async with RemoteBus(self.url) as bus:
                        guests = bus.subscribe(TOPIC, group="guest", max_inflight=4)
                        async with guests as deliveries, asyncio.timeout(20):
                            async for delivery in deliveries:
                                await delivery.ack()
                                break
                    (await kept.get("/metrics")).raise_for_status()
                    said = await kept.post(f"/topics/{TOPIC}/events", json={"payload": "by http"})
                    said.raise_for_status()
                    self.visits += 1
                except (TimeoutError, httpx.HTTPError) as error:
                    name = type(error).__name__
                    self.errors[name] = self.errors.get(name, 0) + 1
                await asyncio.sleep(1)


async def soak(folder: Path, seconds: float) -> tuple[list[Sample], Load]:
    from trunkline.bus.remote import RemoteBus

    async with _broker(folder) as (pid, url), contextlib.AsyncExitStack() as stack:
        load = Load(url)
        buses = [await stack.enter_async_context(RemoteBus(url)) for _ in range(5)]
        await buses[0].define(
            TOPIC,
            segment_records=SEGMENT_RECORDS,
            retention_records=KEPT_RECORDS,
            retain_unsettled=False,
        )
        jobs = [asyncio.ensure_future(load.publishing(bus, RATE // 2)) for bus in buses[:2]]
        jobs += [asyncio.ensure_future(load.consuming(bus)) for bus in buses[2:]]
        jobs.append(asyncio.ensure_future(load.visiting()))
        samples: list[Sample] = []
        started = monotonic()
        try:
            while (second := monotonic() - started) < seconds:
                samples.append(sample(pid, folder, second))
                for job in jobs:
                    if job.done():
                        job.result()  # work that ended early is an error of the run
                await asyncio.sleep(1)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        return samples, load


def draw(samples: Sequence[Sample], path: Path) -> None:
    """One small chart for each measure, one under another."""
    import vl_convert

    charts: list[dict[str, Any]] = [
        {
            "title": {"text": title, "anchor": "start", "fontSize": 12},
            "width": 640,
            "height": 90,
            "data": {
                "values": [
                    {"minute": round(one.second / 60, 3), "value": getattr(one, name)}
                    for one in samples
                ]
            },
            "mark": {"type": "line", "strokeWidth": 1.2, "color": "#2a6f97"},
            "encoding": {
                "x": {"field": "minute", "type": "quantitative", "title": "minutes"},
                "y": {"field": "value", "type": "quantitative", "title": None},
            },
        }
        for name, title in TITLES.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(vl_convert.vegalite_to_svg({"vconcat": charts, "background": "white"}), "utf-8")


def table(samples: Sequence[Sample]) -> str:
    third = len(samples) // 3
    lines = [
        "| | at the start | middle third | last third | highest |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in ROOM:
        values = [getattr(one, name) for one in samples]
        cells = (values[0], median(values[third : 2 * third]), median(values[2 * third :]))
        lines.append(f"| {name} | {' | '.join(f'{v:g}' for v in (*cells, max(values)))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--plot", type=Path, help="draw the samples into this SVG file")
    parser.add_argument("--samples", type=Path, help="write the samples to this JSON file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        samples, load = asyncio.run(soak(Path(place) / "bus", options.minutes * 60))
    if options.samples:
        options.samples.write_text(json.dumps([one._asdict() for one in samples]), "utf-8")
    if options.plot:
        draw(samples, options.plot)
    print(f"{samples[-1].second / 60:.1f} minutes, {len(samples)} samples")
    print(f"{load.published:,} published, {load.handled:,} handled, {load.failed:,} failed once")
    print(f"{load.visits:,} visits, errors of visits: {load.errors or 'none'}")
    print(table(samples))
    found = grown(samples)
    for name, (before, after) in found.items():
        print(f"{name} grew: {before:g} in the middle third, {after:g} in the last")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
