"""What handlers behind a broker meet: they are slow, and they kill their process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import trunkline
from trunkline import GroupOptions
from trunkline.broker.options import BrokerOptions
from trunkline.broker.server import Broker

POISON = """
import asyncio, os, sys, trunkline

async def main():
    async with trunkline.connect(sys.argv[1]) as bus:
        @bus.on("orders", group="billing")
        async def handle(event):
            if event.payload == 1:
                os._exit(3)
        await bus.drain(30)

asyncio.run(main())
"""

MORTAL = """
import asyncio, os, sys, trunkline

async def main():
    async with trunkline.connect(sys.argv[1]) as bus:
        @bus.on("orders", group="billing", policy=trunkline.GroupOptions(max_retries=2))
        async def handle(event, delivery):
            print(event.payload, delivery.attempt)
            sys.stdout.flush()
            await asyncio.sleep(0.2)
            os._exit(3)
        await bus.drain(30)

asyncio.run(main())
"""


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    options = BrokerOptions(url=f"file:{tmp_path}", port=0, metrics_s=0)
    async with Broker(options) as broker:
        yield broker.url


async def test_a_slow_handler_loses_no_try_on_what_it_has_not_seen(url: str) -> None:
    tries: list[tuple[int, int]] = []
    async with trunkline.connect(url) as bus:
        await bus.publish_many("orders", list(range(12)))
        policy = GroupOptions(ack_timeout_s=1.0, max_retries=0)

        @bus.on("orders", group="billing", policy=policy)
        async def handle(event: trunkline.Event, delivery: trunkline.Delivery) -> None:
            tries.append((event.payload, delivery.attempt))
            await asyncio.sleep(0.2)

        assert await bus.drain(60)
    assert tries == [(number, 1) for number in range(12)]


async def test_a_record_that_kills_its_worker_takes_no_other_with_it(url: str) -> None:
    async with trunkline.connect(url) as bus:
        await bus.publish_many("orders", list(range(1, 121)))
        tries = GroupOptions().max_retries + 1
        command = [sys.executable, "-c", POISON, url]
        codes = [
            (await asyncio.to_thread(subprocess.run, command)).returncode for _ in range(tries + 1)
        ]
        assert codes == [3] * tries + [0]
        letters = await bus.read("orders.DLQ")
        assert [letter.event.payload for letter in letters] == [1]


def _said(command: list[str]) -> str:
    return subprocess.run(command, stdout=-1, text=True).stdout


async def test_whoever_dies_at_work_takes_only_what_was_begun(url: str) -> None:
    async with trunkline.connect(url) as bus:
        await bus.publish_many("orders", list(range(20)))
    command = [sys.executable, "-c", MORTAL, url]
    seen = [await asyncio.to_thread(_said, command) for _ in range(7)]
    assert seen == [f"{n} {attempt}\n" for n in range(3) for attempt in (1, 2, 3)][:7]


async def test_a_quick_reader_gets_all_it_may_hold(url: str) -> None:
    async with trunkline.connect(url) as bus:
        await bus.publish_many("orders", list(range(40)))
        async with bus.subscribe("orders", group="billing", max_inflight=25) as stream:
            held = [await asyncio.wait_for(anext(stream), 10) for _ in range(25)]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.2)
            for delivery in held:
                await delivery.ack()
            more = [await asyncio.wait_for(anext(stream), 10) for _ in range(15)]
        assert [d.event.payload for d in held + more] == list(range(40))
