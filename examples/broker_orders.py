"""A broker, a publisher, and two workers that share the work, all in one program.

In life each is a process of its own: ``trunkline serve`` and any number of clients.
"""

import asyncio

from trunkline.broker.server import Broker
from trunkline.bus.remote import RemoteBus
from trunkline.event import Event
from trunkline.options import BrokerOptions


async def main() -> None:
    async with (
        Broker(BrokerOptions(url="file:.bus-orders", port=0)) as broker,
        RemoteBus(broker.url) as shop,
        RemoteBus(broker.url) as one,
        RemoteBus(broker.url) as two,
    ):
        done: dict[str, int] = {"one": 0, "two": 0}

        def worker(name: str, bus: RemoteBus) -> None:
            @bus.on("orders", group="billing", max_inflight=5)
            async def bill(event: Event) -> None:
                await asyncio.sleep(0.001)
                done[name] += event.payload["id"] >= 0

        worker("one", one)
        worker("two", two)
        receipts = await asyncio.gather(*(shop.publish("orders", {"id": n}) for n in range(100)))
        print(f"published {len(receipts)}, durability {receipts[0].durability}")
        await one.drain()
        await two.drain()
        print(f"billed {sum(done.values())}, both worked: {min(done.values()) > 0}")


asyncio.run(main())
