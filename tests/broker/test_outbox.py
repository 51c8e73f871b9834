"""An outbox that is drained into a broker, while drainers and broker are killed."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from time import monotonic

import pytest
import sqlalchemy as sa

from trunkline.bus.connect import connect
from trunkline.patterns.outbox import SqlOutbox

from .client import Launch, until

DRAIN = """
import asyncio, sys
import sqlalchemy as sa
import trunkline
from trunkline.patterns.outbox import Drainer, SqlOutbox

async def main():
    outbox = SqlOutbox(sa.create_engine(sys.argv[1]))
    async with (
        trunkline.connect(sys.argv[2]) as bus,
        Drainer(outbox, bus, batch=7, lease_s=1.0, poll_s=0.01),
    ):
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_each_row_is_one_record_after_a_kill_of_any_process(
    tmp_path: Path, launch: Launch
) -> None:
    rng = random.Random(3)
    url = f"sqlite:///{tmp_path / 'app.db'}"
    engine = sa.create_engine(url)
    outbox = SqlOutbox(engine)
    outbox.create()
    broker = await launch(tmp_path / "bus")
    words = (sys.executable, "-c", DRAIN, url, broker.url)
    drainers = [await asyncio.create_subprocess_exec(*words) for _ in range(2)]
    ids: set[str] = set()
    kills = Counter[str]()
    ends = monotonic() + 30
    try:
        while monotonic() < ends:
            with engine.begin() as connection:
                ids |= {outbox.add(connection, "t", n) for n in range(rng.randrange(1, 15))}
            await asyncio.sleep(rng.random() * 0.2)
            if rng.random() < 0.2:
                kills["drainer"] += 1
                drainers[0].send_signal(signal.SIGKILL)
                await drainers.pop(0).wait()
                drainers.append(await asyncio.create_subprocess_exec(*words))
            if rng.random() < 0.05:
                kills["broker"] += 1
                broker.kill()
                await broker.process.wait()
                broker = await launch(tmp_path / "bus", port=broker.port)
        await until(lambda: not outbox.waiting(), 120)
    finally:
        for drainer in drainers:
            drainer.send_signal(signal.SIGKILL)
            await drainer.wait()
        engine.dispose()
    await broker.end()
    async with connect(f"file:{tmp_path / 'bus'}") as bus:
        seen = Counter(record.event.id for record in await bus.read("t", limit=1_000_000))
    print(f"{len(ids)} rows, {dict(kills)} killed")
    assert len(ids) > 100
    assert min(kills["drainer"], kills["broker"]) > 0
    assert seen == Counter(ids)
