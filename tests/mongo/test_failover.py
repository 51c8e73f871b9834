"""A set of three servers whose primary is killed with -9, and a server that is away."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pymongo
import pytest

from kit.mongod import Mongod, fresh_database, replica_set
from trunkline.bus.connect import open_local
from trunkline.errors import ConnectionLost
from trunkline.event import Event
from trunkline.options import GroupOptions

POLICY = GroupOptions(ack_timeout_s=20.0, max_retries=1000)


def primary_of(url: str, servers: Sequence[Mongod]) -> Mongod:
    client: pymongo.MongoClient[dict[str, Any]]
    with pymongo.MongoClient(url, serverSelectionTimeoutMS=30_000) as client:
        client.admin.command("ping")
        address = client.primary
        assert address is not None
    return next(server for server in servers if server.port == address[1])


class Work:
    """Writers and a handler on one bus, until it is told to end."""

    def __init__(self, url: str, writers: int = 3) -> None:
        self.acked: dict[int, int] = {}
        self.handled: Counter[int] = Counter()
        self.standstill_s = 0.0
        self._url = url
        self._writers = writers
        self._stop = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Any]:
        async with open_local(self._url, patience_s=60.0) as bus:

            @bus.on("orders", group="billing", workers=4, policy=POLICY)
            async def bill(event: Event) -> None:
                self.handled[event.payload] += 1

            writing = [
                asyncio.ensure_future(self._write(bus, first)) for first in range(self._writers)
            ]
            yield bus
            self._stop.set()
            await asyncio.wait_for(asyncio.gather(*writing), 60)
            async with asyncio.timeout(60):
                while set(self.handled) != set(self.acked):
                    await asyncio.sleep(0.05)
            self.records = await bus.read("orders", 1, 10**6)

    async def _write(self, bus: Any, first: int) -> None:
        number = first
        while not self._stop.is_set():
            started = time.monotonic()
            receipt = await bus.publish("orders", number)
            self.standstill_s = max(self.standstill_s, time.monotonic() - started)
            self.acked[number] = receipt.offset
            number += self._writers
            await asyncio.sleep(0.005)

    async def more(self, count: int) -> None:
        wanted = len(self.acked) + count
        async with asyncio.timeout(60):
            while len(self.acked) < wanted:
                await asyncio.sleep(0.02)

    def check(self) -> str:
        place = {record.offset: record.event.payload for record in self.records}
        assert {number: at for at, number in place.items()} == self.acked, "lost, or stored twice"
        assert list(place) == list(range(1, len(place) + 1)), "there is a hole"
        again = sum(self.handled.values()) - len(self.handled)
        return (
            f"{len(self.acked)} acked, 0 lost, 0 twice, 0 holes, {again} delivered again, "
            f"longest publish {self.standstill_s:.1f} s"
        )


@pytest.mark.parametrize("kills", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.timeout(400)
async def test_killed_primaries_lose_nothing(
    kills: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with replica_set(3) as (url, servers):
        work = Work(fresh_database(url))
        async with work.running() as bus:
            assert (await bus.publish("other", 0)).durability == "replicated"
            await work.more(50)
            for _ in range(kills):
                server = await asyncio.to_thread(primary_of, url, servers)
                await asyncio.to_thread(server.kill)
                await work.more(30)
                server.start()
                await work.more(30)
        said = work.check()
    with capsys.disabled():
        print(f"\n{kills} kills of the primary: {said}")


@pytest.mark.parametrize("gone_s", [1.0, pytest.param(10.0, marks=pytest.mark.slow)])
@pytest.mark.timeout(200)
async def test_publishers_wait_and_consumers_go_on_while_the_server_is_away(
    gone_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    with replica_set() as (url, (server,)):
        work = Work(fresh_database(url))
        async with work.running():
            await work.more(30)
            await asyncio.to_thread(server.kill)
            before = len(work.acked)
            await asyncio.sleep(gone_s)
            assert len(work.acked) <= before, "a publish was acknowledged without a server"
            server.start()
            await work.more(30)
        said = work.check()
        again = sum(work.handled.values()) - len(work.handled)
        assert again <= 100, "more came again than was in hand"
    with capsys.disabled():
        print(f"\nthe server was gone for {gone_s:g} s: {said}")


@pytest.mark.timeout(120)
async def test_a_publish_fails_typed_where_that_is_asked_for() -> None:
    with replica_set() as (url, (server,)):
        place = fresh_database(url)
        async with open_local(place, patience_s=0) as bus:
            await bus.publish("orders", 1)
            await asyncio.to_thread(server.kill)
            with pytest.raises(ConnectionLost, match="MongoDB does not answer"):
                await bus.publish("orders", 2)
            server.start()
            async with asyncio.timeout(60):
                while True:
                    with contextlib.suppress(ConnectionLost):
                        await bus.publish("orders", 3)
                        break
            payloads = [record.event.payload for record in await bus.read("orders", 1, 10)]
        assert payloads[0] == 1
        assert payloads[-1] == 3
