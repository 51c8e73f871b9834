"""A server that is gone for a while: publishers wait or fail typed, consumers go on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from trunkline.bus.nats import NatsBus
from trunkline.bus.nats.server import Servers
from trunkline.errors import ConnectionLost
from trunkline.event import Event
from trunkline.options import GroupOptions

POLICY = GroupOptions(ack_timeout_s=5.0, max_retries=50)


@pytest.mark.parametrize("gone_s", [1.0, pytest.param(10.0, marks=pytest.mark.slow)])
@pytest.mark.timeout(120)
async def test_publishers_wait_and_consumers_go_on(tmp_path: Path, gone_s: float) -> None:
    handled: Counter[int] = Counter()
    with Servers(tmp_path, sync="2m") as servers:
        (node,) = servers.nodes
        async with NatsBus(servers.url) as bus:

            @bus.on("orders", group="billing", workers=4, policy=POLICY)
            async def bill(event: Event) -> None:
                handled[event.payload] += 1

            stop = asyncio.Event()
            acked: list[int] = []

            async def publish(first: int) -> None:
                number = first
                while not stop.is_set():
                    receipt = await bus.publish("orders", number)
                    assert receipt.duplicate is False
                    acked.append(number)
                    number += 10
                    await asyncio.sleep(0.01)

            publishers = [asyncio.ensure_future(publish(first)) for first in range(10)]
            await asyncio.sleep(0.5)
            await asyncio.to_thread(node.kill)
            before = len(acked)
            await asyncio.sleep(gone_s)
            assert len(acked) - before <= 10, "a publish was acknowledged without a server"
            node.start()
            await asyncio.to_thread(node.wait_ready, time.monotonic() + 20)
            await asyncio.sleep(1.5)
            stop.set()
            await asyncio.wait_for(asyncio.gather(*publishers), 30)
            assert await bus.drain(30)
            records = await bus.read("orders", 1, 10**6)
    assert sorted(record.event.payload for record in records) == sorted(acked)
    assert set(handled) == set(acked)
    again = sum(handled.values()) - len(handled)
    assert again <= 100, "more came again than was in hand"


@pytest.mark.timeout(60)
async def test_a_publish_fails_typed_where_that_is_asked_for(tmp_path: Path) -> None:
    with Servers(tmp_path, sync="2m") as servers:
        async with NatsBus(servers.url, when_away="raise") as bus:
            await bus.publish("orders", 1)
            await asyncio.to_thread(servers.nodes[0].kill)
            async with asyncio.timeout(10):
                while bus.link.is_up:
                    await asyncio.sleep(0.01)
            with pytest.raises(ConnectionLost):
                await bus.publish("orders", 2)
            servers.nodes[0].start()
            async with asyncio.timeout(30):
                while not bus.link.is_up:
                    await asyncio.sleep(0.01)
            assert (await bus.publish("orders", 3)).offset == 2


@pytest.mark.timeout(60)
async def test_a_publish_gives_up_after_its_patience(tmp_path: Path) -> None:
    with Servers(tmp_path, sync="2m") as servers:
        async with NatsBus(servers.url, patience_s=1.0, ack_deadline_s=0.2) as bus:
            await bus.publish("orders", 1)
            await asyncio.to_thread(servers.nodes[0].kill)
            with pytest.raises(ConnectionLost, match="within 1 s"):
                await bus.publish("orders", 2)
            servers.nodes[0].start()
            await asyncio.to_thread(servers.nodes[0].wait_ready, time.monotonic() + 20)
