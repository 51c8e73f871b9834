"""One expensive condition does not starve the others: each reader has a share of the loop, counted
in units of work and not in time.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from trunkline.broker.server import Broker
from trunkline.filters.where import WORK_MAX, compile_where
from trunkline.filters.work import METER, SHARE

from .client import Peer

pytest.importorskip("sqlglot")

TEXT = "a" * 40_000
# Each evaluation reads the text once for each piece: far within its own budget.
COSTLY = "payload LIKE '%" + "%".join(f"a_{n}" for n in range(40)) + "%'"


def cost() -> int:
    """Units that one evaluation spends."""
    from trunkline.event import Event

    before = METER.units
    compile_where(COSTLY)(Event(topic="t", payload=TEXT))
    return METER.units - before


@asynccontextmanager
async def watched() -> Any:
    """The most units that were spent between two turns of the loop."""
    most = [0]

    async def watch() -> None:
        while True:
            before = METER.units
            await asyncio.sleep(0)
            most[0] = max(most[0], METER.units - before)

    task = asyncio.ensure_future(watch())
    try:
        yield most
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _subscribe(broker: Broker, one: Peer) -> None:
    await one.subscribe("t", "g", where=COSTLY)
    async with asyncio.timeout(60):
        while await broker.hub.bus.lag("t", "g"):
            await asyncio.sleep(0)


async def _page(broker: Broker, _one: Peer) -> None:
    base = broker.url.replace("ws", "http", 1)
    async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60) as http:
        done = await http.get("/topics/t/events", params={"where": COSTLY})
    assert (done.status_code, done.json()["events"]) == (200, [])


async def _tail(broker: Broker, _one: Peer) -> None:
    base = broker.url.replace("ws", "http", 1)
    where = f"{COSTLY} OR payload = 'end'"
    async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60) as http:
        query = {"where": where, "from": "earliest", "limit": "1"}
        done = await http.get("/topics/t/tail", params=query)
    assert '"payload":"end"' in done.text


@pytest.mark.parametrize("read", [_subscribe, _page, _tail])
async def test_a_costly_condition_gives_the_loop_back(
    broker: Broker, one: Peer, read: Callable[[Broker, Peer], Awaitable[None]]
) -> None:
    each = cost()
    assert SHARE / 50 < each < WORK_MAX, "the condition is costly, and allowed"
    count = 10 * SHARE // each
    await broker.hub.bus.publish_many("t", [TEXT] * count)
    await broker.hub.bus.publish("t", "end")
    before = METER.units
    async with watched() as most:
        await read(broker, one)
    assert METER.units - before >= 10 * SHARE, "each record was looked at"
    assert most[0] <= 2 * SHARE + 2 * each


DOORS = {
    "subscribe": 'await one.subscribe("t", "g", where=CONDITION)',
    "page": 'await http.get("/topics/t/events", params={"where": CONDITION})',
    "tail": 'await http.get("/topics/t/tail", params={"where": CONDITION, "limit": "1", '
    '"from": "earliest"})',
    "fetch": 'await http.post("/topics/t/groups/g/fetch", json={"where": CONDITION})',
    "redrive": 'await http.post("/topics/t/dlq/redrive", json={"where": CONDITION})',
}
LOADING = """
import asyncio, sys, threading
import httpx
from broker.client import peer
from trunkline.broker.server import Broker
from trunkline.options import BrokerOptions

CONDITION = "payload = 1"
by = []

class Spy:
    def find_spec(self, name, path=None, target=None):
        if name == "sqlglot":
            by.append(threading.current_thread() is threading.main_thread())

async def main():
    options = BrokerOptions(url="memory:", port=0, metrics_s=0)
    async with Broker(options) as broker, peer(broker.url) as one:
        base = broker.url.replace("ws", "http", 1)
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60) as http:
            await http.post("/topics/t/events", json={"payload": 1})
            sys.meta_path.insert(0, Spy())
            assert not by and "sqlglot" not in sys.modules
            DOOR
    assert by == [False], by

asyncio.run(main())
"""


@pytest.mark.parametrize("door", DOORS)
async def test_the_parser_of_conditions_is_not_loaded_in_the_loop(door: str) -> None:
    """It takes a second on a busy machine, in which nobody would be answered."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LOADING.replace("DOOR", DOORS[door])),
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stderr=asyncio.subprocess.PIPE,
    )
    _, error = await process.communicate()
    assert process.returncode == 0, error.decode()[-2000:]
