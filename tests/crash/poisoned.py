"""A consumer that one record kills with -9: a program, so that a real process ends.

::

    python -m crash.poisoned URL WORKERS handler|batches     until everything due is settled
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import trunkline
from trunkline.bus.remote_subscription import RemoteSubscription
from trunkline.bus.subscription import LocalSubscription
from trunkline.event import Event
from trunkline.options import GroupOptions

TOPIC, GROUP = "t", "g"
POLICY = GroupOptions(max_retries=2, backoff_base_s=0.0)


def look_at(event: Event) -> None:
    if event.payload == "bad":
        os.kill(os.getpid(), signal.SIGKILL)


async def handle(bus: trunkline.Bus, workers: int) -> None:
    @bus.on(TOPIC, group=GROUP, workers=workers, policy=POLICY)
    async def work(event: Event) -> None:
        await asyncio.sleep(0.002)  # other workers have a record in hand by then
        look_at(event)

    async with bus:
        await bus.drain()


async def gather(bus: trunkline.Bus, size: int) -> None:
    async with bus, bus.subscribe(TOPIC, group=GROUP, policy=POLICY) as stream:
        assert isinstance(stream, LocalSubscription | RemoteSubscription)

        async def read() -> None:
            async for batch in stream.batches(size, wait_s=0.2):
                for event in batch.events:
                    look_at(event)
                await batch.ack()

        reader = asyncio.ensure_future(read())
        while await bus.lag(TOPIC, GROUP):
            await asyncio.sleep(0.02)
        reader.cancel()


if __name__ == "__main__":
    url, workers, how = sys.argv[1:]
    run = handle if how == "handler" else gather
    asyncio.run(run(trunkline.connect(url), int(workers)))
