"""A record that cannot be handled becomes a dead letter; once the cause is gone it is redriven to
the one group that gave it up.
"""

import asyncio
import sys

import trunkline
from trunkline import Event, GroupOptions


async def main(url: str) -> None:
    bus = trunkline.connect(url)
    rates = {"EUR": 1.0}
    quick = GroupOptions(max_retries=2, backoff_base_s=0.02)

    @bus.on("payments", group="billing", policy=quick)
    async def bill(event: Event) -> None:
        print(f"billed {event.payload['price'] * rates[event.payload['currency']]} EUR")

    @bus.on("payments", group="audit", policy=quick)
    async def audit(event: Event) -> None:
        print(f"audited payment {event.payload['id']}")

    async with bus:
        await bus.publish("payments", {"id": 1, "price": 10, "currency": "EUR"})
        await bus.publish("payments", {"id": 2, "price": 10, "currency": "CHF"})
        await bus.drain(timeout_s=10)

        desk = bus.dead_letters("payments")
        async for letter in desk.letters():
            print(
                f"dead: payment {letter.event.payload['id']} in {letter.group} after "
                f"{letter.attempts} attempts: {letter.error}"
            )

        rates["CHF"] = 1.1
        async for done in desk.redrive(group="billing"):
            print(f"redriven: offset {done.letter.origin} of {done.letter.topic}")
        await bus.drain(timeout_s=10)
        print(f"left: {[letter.offset async for letter in desk.letters()]}")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "file:.bus"))
