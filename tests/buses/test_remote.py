"""The client meets both suites, against a real broker on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from trunkline.broker.options import BrokerOptions
from trunkline.broker.server import Broker
from trunkline.buses.local import LocalBus
from trunkline.buses.remote import RemoteBus
from trunkline.store import open_store
from trunkline.testing import BusContract, HandlerContract
from trunkline.testing.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def broker(clock: Any) -> AsyncIterator[Broker]:
    bus = LocalBus(open_store("memory:", clock=clock), clock=clock)
    async with Broker(BrokerOptions(port=0, metrics_s=0), bus=bus) as broker:
        yield broker
    await bus.close()


class TestRemoteBus(BusContract, HandlerContract):
    @pytest.fixture
    def connect(self, broker: Broker, clock: Any) -> Any:
        def connect(**options: Any) -> RemoteBus:
            return RemoteBus(broker.url, clock=clock, **options)

        return connect
