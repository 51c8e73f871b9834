"""Events that survive the process: publish, subscribe, acknowledge."""

import asyncio
import sys

import trunkline


async def main(url: str) -> None:
    async with trunkline.connect(url) as bus:
        receipt = await bus.publish("embedded.orders", {"id": 1, "price": 12}, key="c42")
        print(f"{receipt.topic} offset {receipt.offset}, durability {receipt.durability}")
        async with bus.subscribe("embedded.orders", group="billing") as deliveries:
            async for delivery in deliveries:
                print(f"billing got {delivery.event.payload}, attempt {delivery.attempt}")
                await delivery.ack()
                break


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "file:.bus"))
