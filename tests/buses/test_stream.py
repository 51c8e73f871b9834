"""One subscription and its several pumps: they share its room, and end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from trunkline.buses.local import LocalBus
from trunkline.store import GroupKey
from trunkline.stores.memory import MemoryStore
from trunkline.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def bus(clock: ManualClock) -> AsyncIterator[LocalBus]:
    async with LocalBus(MemoryStore(clock=clock), clock=clock) as bus:
        yield bus


async def soon(stream: Any) -> Any:
    return await asyncio.wait_for(anext(stream), 10)


async def test_who_leaves_takes_nothing_more(bus: LocalBus, clock: ManualClock) -> None:
    """What a partition hands out while another one is being left would wait for its timeout."""
    await bus.define("orders", partitions=4)
    await bus.publish_many("orders", list(range(100)))
    async with bus.subscribe("orders", group="billing", max_inflight=20) as stream:
        for _ in range(50):
            await (await soon(stream)).ack()
    for partition in range(4):
        key = GroupKey("orders", partition, "billing")
        assert not await bus.store.update(key, lambda group: group.leases)
        assert not await bus.store.update(key, lambda group: group.attempts)
