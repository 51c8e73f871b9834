"""Growth: what a log of 5 M records costs to write to, to open, to hold and to be far behind in.

The lines share one log, filled by ``publish_many``. Every opening is a fresh process, timed from
the end of its imports to its first acknowledged publish, with the log's files dropped from the
kernel's cache before it.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import trunkline
from benchmarks.harness import (
    TOPIC,
    Pair,
    Run,
    alternate,
    forget_cached,
    line,
    payloads,
)
from benchmarks.lines_publish import Ours
from trunkline.options import TopicOptions

LARGE = 5_000_000
SMALL = 50_000
OPENINGS = 3
TOPICS = 1000
SCHEDULED = 1_000_000
DUE = 1000


async def _fill(folder: Path, records: int) -> None:
    batch = payloads(1000)
    async with trunkline.connect(f"file:{folder}") as bus:
        for _ in range(records // len(batch)):
            await bus.publish_many(TOPIC, batch)


async def _large(run: Run) -> Path:
    records = run.count(LARGE, 20_000)
    return await run.once("large log", lambda folder: _fill(folder, records))


async def _child(*words: str) -> dict[str, float]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.child", *words, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{words[0]} ended with status {process.returncode}")
    answer: dict[str, float] = json.loads(output)
    return answer


@line("growth-publish", against="rate at 50 k records", unit="events/s", goal=">= 0.90")
async def growth_publish(run: Run) -> Pair:
    """64 publishers on the large log, in turns with 64 publishers on a small one.

    The small log is made afresh for each turn, because publishing makes it grow. One publish goes
    ahead of each turn: what opening costs has lines of its own.
    """
    large = await _large(run)

    async def rate(folder: Path, seconds: float) -> float:
        async with trunkline.connect(f"file:{folder}") as bus:
            await bus.publish(TOPIC, payloads(1)[0])
            return await Ours(bus, 64).rate(seconds)

    async def large_rate(seconds: float) -> float:
        return await rate(large, seconds)

    async def small_rate(seconds: float) -> float:
        folder = run.fresh()
        await _fill(folder, run.count(SMALL, 1000))
        return await rate(folder, seconds)

    return await alternate(run, large_rate, small_rate)


@line("growth-define", against="limit", unit="s", goal="<= 1")
async def growth_define(run: Run) -> Pair:
    """A thousand topics are defined one after the other: the last costs what the first cost."""
    async with trunkline.connect(f"file:{run.fresh()}") as bus:
        begun = time.perf_counter()
        for number in range(run.count(TOPICS, 10)):
            await bus.define(f"{TOPIC}.{number}")
        return Pair(time.perf_counter() - begun, 5.0)


@line("growth-open-clean", against="limit", unit="s", goal="<= 1")
async def growth_open_clean(run: Run) -> Pair:
    folder = await _large(run)
    await _child("open", str(folder))  # a kill may have come before
    took = []
    for _ in range(run.count(OPENINGS, 1)):
        forget_cached(folder)
        took.append((await _child("open", str(folder)))["seconds"])
    return Pair(statistics.median(took), 1.0)


@line("growth-open-killed", against="limit", unit="s", goal="<= 1")
async def growth_open_killed(run: Run) -> Pair:
    """The writer is killed with -9 late in a segment, where the unsealed tail is longest."""
    folder = await _large(run)
    took = []
    for _ in range(run.count(OPENINGS, 1)):
        await _kill_late(folder, run)
        forget_cached(folder)
        took.append((await _child("open", str(folder)))["seconds"])
    return Pair(statistics.median(took), 3.0)


async def _kill_late(folder: Path, run: Run) -> None:
    late = run.count(TopicOptions().segment_bytes * 3 // 4, 0)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.child",
        "victim",
        str(folder),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        written = 0
        while written < 20 or _newest_segment(folder) < late:
            if not await process.stdout.readline():
                raise RuntimeError("the victim ended by itself")
            written += 1
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def _newest_segment(folder: Path) -> int:
    return os.path.getsize(max((folder / "wal").glob("*.jsonl")))


@line("growth-idle-memory", against="limit", unit="MB", goal="<= 1")
async def growth_idle_memory(run: Run) -> Pair:
    """Resident memory of a process that opened the log, published once and then sat idle."""
    return Pair((await _child("open", str(await _large(run))))["mb"], 80.0)


async def _behind(run: Run) -> dict[str, Any]:
    folder = await _large(run)
    forget_cached(folder)
    return await _child("behind", str(folder), str(run.count(5000, 100)))


@line("growth-behind-first", against="limit", unit="s", goal="<= 1")
async def growth_behind_first(run: Run) -> Pair:
    """A new group 5 M records behind: from ``subscribe`` to its first delivery."""
    return Pair((await _behind(run))["seconds"], 1.0)


@line("growth-behind-memory", against="limit", unit="MB", goal="<= 1")
async def growth_behind_memory(run: Run) -> Pair:
    """Memory that such a group adds, at its highest, while it takes its first 5,000 records."""
    return Pair((await _behind(run))["mb"], 32.0)


async def _fill_scheduled(folder: Path, records: int) -> None:
    """Records that are due in a day."""
    batch = payloads(1000)
    async with trunkline.connect(f"file:{folder}") as bus:
        for _ in range(records // len(batch)):
            await bus.publish_many(TOPIC, batch, delay_s=86_400)


async def _scheduled(run: Run) -> Path:
    records = run.count(SCHEDULED, 5000)
    return await run.once("scheduled", lambda folder: _fill_scheduled(folder, records))


@line("scheduled-first", against="reading the log", unit="s", goal="<= 2")
async def scheduled_first(run: Run) -> Pair:
    """A new group, 1,000 records that are due behind 1 M that are not: it reads the log once."""
    folder, due = await _scheduled(run), run.count(DUE, 100)
    read = await _child("read", str(folder))
    return Pair((await _child("due", str(folder), str(due)))["first"], read["seconds"])


@line("scheduled-then", against="none scheduled", unit="s", goal="<= 1.5")
async def scheduled_then(run: Run) -> Pair:
    """The next 1,000 that are due, beside a log in which nothing is scheduled."""
    folder, due = await _scheduled(run), run.count(DUE, 100)
    found, plain = [], []
    for _ in range(run.count(OPENINGS, 1)):
        found.append((await _child("due", str(folder), str(due)))["then"])
        plain.append((await _child("due", str(run.fresh()), str(due)))["then"])
    return Pair(statistics.median(found), statistics.median(plain))


@line("scheduled-memory", against="limit", unit="MB", goal="<= 1")
async def scheduled_memory(run: Run) -> Pair:
    """Memory that 1 M scheduled records add to a group that takes 1,000."""
    folder, due = await _scheduled(run), run.count(DUE, 100)
    found = await _child("due", str(folder), str(due))
    plain = await _child("due", str(run.fresh()), str(due))
    return Pair(found["mb"] - plain["mb"], 32.0)
