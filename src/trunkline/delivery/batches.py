"""Batches of deliveries, for readers that handle many records at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from trunkline.bus import Delivery, Outcome
from trunkline.check import check_count, check_delay
from trunkline.delivery.inbox import NEW, DeliveryInbox
from trunkline.errors import Closed
from trunkline.event import Event


class DeliveryBatch:
    """Deliveries that were read together, in the order in which to handle them.

    ``ack`` finishes all of them that are not finished. A single delivery has its own verbs: finish
    those that failed first, then ``ack`` the batch.
    """

    __slots__ = ("_inbox", "deliveries")

    def __init__(self, inbox: DeliveryInbox, deliveries: list[Delivery]) -> None:
        self._inbox = inbox
        self.deliveries = deliveries

    def __len__(self) -> int:
        return len(self.deliveries)

    def __iter__(self) -> Iterator[Delivery]:
        return iter(self.deliveries)

    def __getitem__(self, index: int) -> Delivery:
        return self.deliveries[index]

    @property
    def events(self) -> list[Event]:
        return [delivery.record.event for delivery in self.deliveries]

    async def ack(self) -> int:
        """Ack every delivery that is not finished; how many there were."""
        return self._inbox.ack_all(self.deliveries)

    async def nack(self, delay_s: float | None = None, reason: str = "") -> int:
        """Deliver every delivery again that is not finished; how many there were."""
        return sum(one.finish(Outcome.NACK, delay_s, reason) for one in self.deliveries)

    async def in_progress(self) -> None:
        """Begin the ack timeout of every delivery anew that is not finished."""
        for delivery in self.deliveries:
            delivery.extend()


async def batches(inbox: DeliveryInbox, size: int, wait_s: float) -> AsyncIterator[DeliveryBatch]:
    check_count("size", size, 1)
    check_delay(wait_s, "wait_s")
    if inbox.life is NEW:
        raise Closed("enter the subscription first", hint="async with bus.subscribe(...)")
    while found := await inbox.gather(size, wait_s):
        yield DeliveryBatch(inbox, found)
