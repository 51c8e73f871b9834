from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from trunkline.broker.server import Broker
from trunkline.options import BrokerOptions

from .client import Launch, Peer, Process, peer, start


@pytest.fixture
def settings() -> dict[str, Any]:
    """Options of the broker; a test overrides what it is about."""
    return {}


@pytest.fixture
async def broker(settings: dict[str, Any]) -> AsyncIterator[Broker]:
    options = {"url": "memory:", "port": 0, "metrics_s": 0, **settings}
    async with Broker(BrokerOptions(**options)) as broker:
        yield broker


@pytest.fixture
async def one(broker: Broker) -> AsyncIterator[Peer]:
    async with peer(broker.url) as found:
        yield found


@pytest.fixture
async def two(broker: Broker) -> AsyncIterator[Peer]:
    async with peer(broker.url) as found:
        yield found


@pytest.fixture
async def launch() -> AsyncIterator[Launch]:
    """Starts brokers in processes of their own; none outlives the test."""
    started: list[Process] = []

    async def launch(*args: Any, **options: Any) -> Process:
        started.append(await start(*args, **options))
        return started[-1]

    yield launch
    for broker in started:
        if broker.process.returncode is None:
            broker.kill()
            await broker.process.wait()
