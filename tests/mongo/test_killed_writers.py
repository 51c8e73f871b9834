"""A writer that is killed at any step leaves no hole and no double, and nobody waits for it."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from trunkline.event import Event, Record
from trunkline.store.mongo import MongoStore

WRITER = Path(__file__).with_name("writer.py")
SIZE = 5


class Outcome(NamedTuple):
    was_killed: bool
    records: int
    longest_s: float


async def victim(url: str, database: str, kill_at: str) -> tuple[int, list[tuple[str, int, int]]]:
    words = [sys.executable, str(WRITER), url, database, "victim", "9", str(SIZE)]
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, env={**os.environ, "KILL_AT": kill_at}
    )
    assert process.stdout is not None
    said = await process.stdout.read()
    acked = [line.split() for line in said.decode().splitlines()]
    code = await process.wait()
    return code, [(who, int(batch), int(at)) for who, batch, at in acked]


async def kill_one(url: str, kill_at: str) -> Outcome:
    """A writer is killed beside two others and a reader."""
    database = f"k{secrets.token_hex(6)}"
    stores = [MongoStore(url, database=database) for _ in range(3)]
    *writers, reads = stores
    acked: list[tuple[str, int, int]] = []
    seen: list[Record] = []
    took: list[float] = []
    done = asyncio.Event()

    async def write(store: MongoStore, who: str) -> None:
        batch = 0
        while not done.is_set() or batch < 6:
            started = time.monotonic()
            ids = [f"{who}-{batch}-{number}" for number in range(SIZE)]
            events = [Event(topic="orders", id=name, payload=0) for name in ids]
            receipts = await store.append("orders", events)
            took.append(time.monotonic() - started)
            acked.append((who, batch, receipts[0].offset))
            batch += 1
            await asyncio.sleep(0.02)

    async def follow() -> None:
        while not done.is_set():
            seen.extend(await reads.read("orders", 0, len(seen) + 1, 1000))
            await asyncio.sleep(0.01)

    try:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for number, store in enumerate(writers):
                tasks.create_task(write(store, f"w{number}"))
            tasks.create_task(follow())
            code, said = await victim(url, database, kill_at)
            acked += said
            await asyncio.sleep(0.1)
            done.set()
        records = await reads.read("orders", 0, 1, 10**6)
    finally:
        for store in stores:
            await store._server.client.drop_database(database)
            await store.abandon()
    check(records, acked, seen)
    return Outcome(code == -9, len(records), max(took))


def check(records: list[Record], acked: list[tuple[str, int, int]], seen: list[Record]) -> None:
    place = {record.offset: record.event.id for record in records}
    ids = list(place.values())
    batches = Counter(name.rpartition("-")[0] for name in ids)
    assert list(place) == list(range(1, len(records) + 1)), "there is a hole"
    assert len(ids) == len(set(ids)), "an event is stored twice"
    assert set(batches.values()) == {SIZE}, "a batch is torn"
    for who, batch, at in acked:
        mine = [place.get(at + number) for number in range(SIZE)]
        assert mine == [f"{who}-{batch}-{number}" for number in range(SIZE)], "an ack is lost"
    assert [(r.offset, r.event.id) for r in seen] == list(place.items())[: len(seen)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kill_at", ["insert.started:4", "insert.succeeded:4"])
async def test_a_killed_writer_leaves_no_hole_and_no_double(mongo_url: str, kill_at: str) -> None:
    outcome = await kill_one(mongo_url, kill_at)
    assert outcome.was_killed


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_writer_killed_at_each_command_leaves_no_hole_and_no_double(
    mongo_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [f"any.{moment}:{n}" for n in range(1, 25) for moment in ("started", "succeeded")]
    kills, records, longest_s = 0, 0, 0.0
    for kill_at in steps:
        outcome = await kill_one(mongo_url, kill_at)
        kills += outcome.was_killed
        records += outcome.records
        longest_s = max(longest_s, outcome.longest_s)
    assert kills >= 40, "the writer ended before it was killed"
    with capsys.disabled():
        print(
            f"\n{kills} kills at {len(steps)} steps: {records} records, 0 holes, 0 doubles, "
            f"0 torn, 0 acks lost; the longest append of another writer took {longest_s:.2f} s"
        )
