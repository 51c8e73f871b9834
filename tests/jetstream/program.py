"""A program that publishes and consumes until it is killed; it tells every acknowledgement."""

from __future__ import annotations

import asyncio
import sys

from trunkline.bus.nats import NatsBus
from trunkline.event import Event
from trunkline.options import GroupOptions

IN_FLIGHT = 64
POLICY = GroupOptions(ordering="none", ack_timeout_s=2.0, max_retries=1000)


async def main(url: str, first: int) -> None:
    async with NatsBus(url, patience_s=60.0, connect_timeout_s=20.0) as bus:
        numbers = iter(range(first, 10**9))

        @bus.on("orders", group="billing", workers=32, policy=POLICY)
        async def bill(event: Event) -> None:
            print("got", event.id, flush=True)

        async def publish() -> None:
            for number in numbers:
                event = Event(topic="orders", id=f"order-{number}", payload=number)
                receipt = await bus.publish(event)
                print("acked", number, receipt.offset, flush=True)
                await asyncio.sleep(0.02)

        await asyncio.gather(*(publish() for _ in range(IN_FLIGHT)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
