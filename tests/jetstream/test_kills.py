"""A cluster of three nodes whose nodes and whose program are killed with -9."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from trunkline.bus.nats import NatsBus
from trunkline.bus.nats.server import Node, Servers
from trunkline.bus.nats.topics import stream_info
from trunkline.errors import TrunklineError
from trunkline.options import GroupOptions

PROGRAM = Path(__file__).with_name("program.py")
STANDSTILL_S = 10.0
DRAINS = GroupOptions(ordering="none", ack_timeout_s=2.0, max_retries=1000)


class Watched:
    """The program, its acknowledgements, and the longest time without one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.acked: dict[int, int] = {}
        self.got: Counter[str] = Counter()
        self.standstill_s = 0.0
        self._last = 0.0
        self._first = 0
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        # Numbers without an acknowledgement are published again: some are stored already.
        self._first = next(n for n in range(self._first, 10**9) if n not in self.acked)
        words = [sys.executable, str(PROGRAM), self._url, str(self._first)]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 -- closed with the program
        self._process = await asyncio.create_subprocess_exec(
            *words, stdout=asyncio.subprocess.PIPE, stderr=self._said
        )
        self._last = 0.0
        self._reader = asyncio.ensure_future(self._read(self._process.stdout))

    async def _read(self, lines: asyncio.StreamReader | None) -> None:
        assert lines is not None
        async for line in lines:
            words = line.decode().split()
            if words[0] == "got" and len(words) == 2:
                self.got[words[1]] += 1
            elif len(words) == 3:
                now = time.monotonic()
                if self._last:
                    self.standstill_s = max(self.standstill_s, now - self._last)
                self._last = now
                self.acked[int(words[1])] = int(words[2])

    async def kill(self) -> None:
        assert self._process is not None
        assert self._reader is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reader
        self._said.close()

    async def more(self, count: int) -> None:
        """Until that many further publishes are acknowledged."""
        wanted = len(self.acked) + count
        async with asyncio.timeout(40):
            while len(self.acked) < wanted:
                assert self._process is not None
                if self._process.returncode is not None:
                    self._said.seek(0)
                    raise AssertionError(f"the program ended: {self._said.read()[-3000:].decode()}")
                await asyncio.sleep(0.02)


async def leader(bus: NatsBus, servers: Servers) -> Node:
    with contextlib.suppress(TrunklineError):
        info = await stream_info(bus.link, bus.link.place.stream("orders", 0))
        for node in servers.nodes:
            if info.cluster is not None and node.name == info.cluster.leader:
                return node
    return random.choice(servers.nodes)


async def cycle(node: Node, down_s: float) -> None:
    """Kill a node, and start it again after a while."""
    await asyncio.to_thread(node.kill)
    await asyncio.sleep(down_s)
    node.start()
    await asyncio.to_thread(node.wait_ready, time.monotonic() + 20)


async def prove(servers: Servers, node_kills: int, program_kills: int) -> str:
    url = f"{servers.url}/k{random.randrange(10**9)}"
    async with NatsBus(url, patience_s=60.0) as bus:
        await bus.define("orders", dedup_window_s=600)
        program = Watched(url)
        await program.start()
        await program.more(50)
        kills = ["node"] * node_kills + ["program"] * program_kills
        random.shuffle(kills)
        for number, kind in enumerate(kills):
            await program.more(30)
            if kind == "program":
                await program.kill()
                await program.start()
            else:
                node = await leader(bus, servers) if number % 3 else random.choice(servers.nodes)
                await cycle(node, random.uniform(0.3, 1.5))
        await program.more(100)
        await program.kill()
        return await check(bus, program, node_kills, program_kills)


async def check(bus: NatsBus, program: Watched, node_kills: int, program_kills: int) -> str:
    records = await bus.read("orders", 1, 2**31)
    stored = Counter(record.event.id for record in records)
    places = {record.offset: record.event.id for record in records}
    missing = [n for n in program.acked if stored[f"order-{n}"] == 0]
    moved = [n for n, at in program.acked.items() if places.get(at) != f"order-{n}"]
    twice = [name for name, count in stored.items() if count > 1]
    assert (missing, moved, twice) == ([], [], [])
    assert sorted(places) == list(range(1, len(records) + 1)), "an offset is missing"
    left = set(stored) - set(program.got)
    async with bus.subscribe("orders", group="billing", policy=DRAINS) as stream:
        async with asyncio.timeout(60):
            while left or await bus.lag("orders", "billing"):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        delivery = await anext(stream)
                        program.got[delivery.event.id] += 1
                        left.discard(delivery.event.id)
                        await delivery.ack()
    again = sum(program.got.values()) - len(program.got)
    assert set(program.got) == set(stored), "a stored record was never delivered"
    assert program.standstill_s <= STANDSTILL_S
    return (
        f"{node_kills} kills of nodes, {program_kills} of the program: {len(program.acked)} acked, "
        f"{len(stored)} stored, 0 lost, 0 twice, {again} delivered again, "
        f"longest standstill {program.standstill_s:.1f} s"
    )


@pytest.mark.timeout(150)
async def test_a_killed_node_and_a_killed_program_lose_nothing(cluster: Servers) -> None:
    await prove(cluster, 2, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_twenty_killed_nodes_and_twenty_killed_programs_lose_nothing(
    cluster: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    said = await prove(cluster, 20, 20)
    with capsys.disabled():
        print(f"\n{said}")


@pytest.mark.timeout(120)
async def test_a_cluster_goes_on_with_one_node_down(cluster: Servers) -> None:
    async with NatsBus(f"{cluster.url}/d{random.randrange(10**9)}") as bus:
        receipt = await bus.publish("orders", 0)
        assert receipt.durability == "replicated"
        node = await leader(bus, cluster)
        await asyncio.to_thread(node.kill)
        try:
            started = time.monotonic()
            for number in range(1, 20):
                await bus.publish("orders", number)
            assert time.monotonic() - started <= STANDSTILL_S
            async with bus.subscribe("orders", group="billing") as stream:
                async with asyncio.timeout(30):
                    for number in range(20):
                        delivery = await anext(stream)
                        assert delivery.event.payload == number
                        await delivery.ack()
        finally:
            node.start()
            await asyncio.to_thread(node.wait_ready, time.monotonic() + 20)


@pytest.mark.timeout(120)
async def test_a_flipped_byte_in_a_followers_store_is_never_read_as_an_event(
    cluster: Servers,
) -> None:
    """The follower finds the damage when it starts, and the leader's records are read."""
    async with NatsBus(f"{cluster.url}/f{random.randrange(10**9)}") as bus:
        for start in range(0, 2000, 500):
            await bus.publish_many("orders", list(range(start, start + 500)))
        name = bus.link.place.stream("orders", 0)
        first = await leader(bus, cluster)
        follower = next(node for node in cluster.nodes if node is not first)
        await asyncio.to_thread(follower.stop)
        (block, *_) = sorted(follower.folder.glob(f"jetstream/$G/streams/{name}/msgs/*.blk"))
        data = bytearray(block.read_bytes())
        data[len(data) // 2] ^= 0xFF
        block.write_bytes(bytes(data))
        follower.start()
        await asyncio.to_thread(follower.wait_ready, time.monotonic() + 20)
        await asyncio.sleep(2.0)
        for _ in range(10):
            records = await bus.read("orders", 1, 3000)
            assert [record.event.payload for record in records] == list(range(2000))
