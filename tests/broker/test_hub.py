"""The hub by itself: how it ends."""

from __future__ import annotations

import asyncio

from trunkline.broker import rights
from trunkline.broker.server import Broker


async def test_it_ends_also_when_rights_change_at_that_very_moment(broker: Broker) -> None:
    await asyncio.sleep(0)  # it waits for changes by now
    async with asyncio.timeout(5):
        broker.hub.bus.store.bell.ring(rights.TOPIC)
        await broker.hub.close()
    assert not broker.hub.is_open
