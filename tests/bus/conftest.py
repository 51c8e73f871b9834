"""A bus in memory, and how to wait for what it delivers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from trunkline.bus.local import LocalBus
from trunkline.store.memory import MemoryStore
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
