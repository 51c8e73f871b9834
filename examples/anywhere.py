"""One program, any bus: the URL decides where it runs.

python examples/anywhere.py memory:
python examples/anywhere.py file:.bus
python examples/anywhere.py ws://127.0.0.1:7070          trunkline serve
python examples/anywhere.py nats://127.0.0.1:4222        trunkline nats up
python examples/anywhere.py mongodb://127.0.0.1:27017/shop
"""

import asyncio
import sys
from typing import Any

import trunkline
from trunkline import Event, GroupOptions, Reject

ORDERS: list[dict[str, Any]] = [
    {"id": 1, "customer": "ada", "price": 12},
    {"id": 2, "customer": "bob", "price": 7},
    {"id": 3, "customer": "ada", "price": -1},
    {"id": 4, "customer": "bob", "price": 30},
]


async def main(url: str) -> None:
    billed: list[int] = []
    stumbled = False
    async with trunkline.connect(url) as bus:

        @bus.on("shop.orders", group="billing", policy=GroupOptions(backoff_base_s=0.05))
        async def bill(event: Event) -> None:
            nonlocal stumbled
            order = event.payload
            if order["price"] < 0:
                raise Reject("a negative price")  # never again: a dead letter
            if order["id"] == 2 and not stumbled:
                stumbled = True
                raise TimeoutError("the bank is busy")  # again, after a pause
            billed.append(order["id"])

        for order in [*ORDERS, ORDERS[0]]:  # the last one is published twice
            receipt = await bus.publish(
                "shop.orders", order, key=order["customer"], idem_key=f"order {order['id']}"
            )
        print(f"the last one is a repeat: {receipt.duplicate}")

        await bus.drain(30)
        print(f"billed {sorted(billed)}")
        for customer in ("ada", "bob"):
            mine = [order["id"] for order in ORDERS if order["customer"] == customer]
            print(f"{customer}: {[number for number in billed if number in mine]}")
        async for letter in bus.dead_letters("shop.orders").letters():
            print(f"dead letter: order {letter.event.payload['id']}, {letter.error}")
        print(f"lag {await bus.lag('shop.orders', 'billing')}")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "file:.bus"))
