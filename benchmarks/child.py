"""What the benchmark runs in a process of its own: a clock's tick, a fresh opening, a victim.

``python -m benchmarks.child WORD FOLDER``; the answer is one JSON object on standard output.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from time import monotonic_ns, perf_counter, sleep

import trunkline
from benchmarks.harness import TOPIC, payloads, resident_mb

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


def main() -> None:
    word, *rest = sys.argv[1:]
    match word:
        case "tick":
            tick()
        case "open":
            print(json.dumps(asyncio.run(open_log(Path(rest[0])))))
        case "victim":
            asyncio.run(publish_until_killed(Path(rest[0])))
        case "behind":
            print(json.dumps(asyncio.run(fall_behind(Path(rest[0]), int(rest[1])))))
        case _:
            sys.exit(f"unknown word {word!r}")


if __name__ == "__main__":
    main()
