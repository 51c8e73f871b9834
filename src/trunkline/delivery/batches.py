"""Batches of deliveries, for readers that handle many records at once."""

from __future__ import annotations

from collections.abc import AsyncIterator

from trunkline.bus import DeliveryBatch
from trunkline.check import check_count, check_delay
from trunkline.delivery.inbox import NEW, DeliveryInbox
from trunkline.errors import Closed

__all__ = ["DeliveryBatch", "batches"]


async def batches(inbox: DeliveryInbox, size: int, wait_s: float) -> AsyncIterator[DeliveryBatch]:
    check_count("size", size, 1)
    check_delay(wait_s, "wait_s")
    if inbox.life is NEW:
        raise Closed("enter the subscription first", hint="async with bus.subscribe(...)")
    while found := await inbox.gather(size, wait_s):
        yield DeliveryBatch(found, inbox.ack_all)
