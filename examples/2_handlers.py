"""Handlers: what a function returns or raises becomes the outcome.

It returns: done. It raises ``Retry`` or anything else: again, later. It raises ``Reject``: a dead
letter.
"""

import asyncio
import sys

import trunkline
from trunkline import Delivery, Event, GroupOptions
from trunkline.middleware import HandleNext


class Told:
    """Middleware: any object with ``publish`` or ``handle``."""

    async def handle(self, delivery: Delivery, call_next: HandleNext) -> None:
        await call_next(delivery)
        print(f"{delivery.group} finished offset {delivery.offset}, attempt {delivery.attempt}")


async def main(url: str) -> None:
    bus = trunkline.connect(url, middleware=[Told()])
    quick = GroupOptions(backoff_base_s=0.05)

    @bus.on("handlers.orders", group="billing", workers=4, policy=quick)
    async def bill(event: Event, delivery: Delivery) -> None:
        if event.payload["price"] < 0:
            raise trunkline.Reject("a negative price")
        if event.payload["price"] == 13 and delivery.attempt == 1:
            raise trunkline.Retry(delay_s=0.05)
        print(f"billed order {event.payload['id']}")

    @bus.on("handlers.orders", group="mail", where="payload.price >= 13", policy=quick)
    def mail(event: Event) -> None:  # a plain function runs in a thread: it may block
        print(f"mailed order {event.payload['id']}")

    async with bus:
        orders = [{"id": 1, "price": 12}, {"id": 2, "price": 13}, {"id": 3, "price": -1}]
        await bus.publish_many("handlers.orders", orders)
        await bus.drain(timeout_s=10)
        async for letter in bus.dead_letters("handlers.orders").letters():
            print(f"dead letter of {letter.group}: {letter.event.payload} ({letter.error})")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "file:.bus"))
