"""A server that is no replica set: it has no change streams, so members poll."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import trunkline
from kit.mongod import Mongod, free_port, need_mongod
from trunkline.options import GroupOptions

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[str]:
    server = Mongod(need_mongod(), tmp_path, free_port(), name=None)
    server.start()
    yield f"mongodb://127.0.0.1:{server.port}/shop"
    server.kill()


async def test_members_hear_of_each_other_by_polling(
    alone: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    policy = GroupOptions(max_retries=0)
    async with (
        trunkline.connect(alone) as one,
        trunkline.connect(alone) as two,
        two.subscribe("orders", group="billing", policy=policy) as stream,
    ):
        for number in range(3):
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.2)  # it waits for news by now
            assert (await one.publish("orders", number)).durability == "fsync"
            delivery = await asyncio.wait_for(waiting, 20)
            assert delivery.event.payload == number
            await delivery.ack()
        await one.pause("orders", "billing")
        waiting = asyncio.ensure_future(anext(stream))
        await one.publish("orders", "after the pause")
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await one.resume("orders", "billing")
        assert (await asyncio.wait_for(waiting, 20)).event.payload == "after the pause"
    assert "polling instead" in caplog.text
