"""One process of many on one folder: a program, so that each has an interpreter of its own.

::

    python -m crash.crowd publish FOLDER NAME COUNT
    python -m crash.crowd consume FOLDER GROUP           until SIGTERM; prints its member name
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import trunkline
from trunkline.bus.connect import open_local
from trunkline.options import GroupOptions

TOPIC = "t"
_MANY = 50


async def publish(folder: str, name: str, count: int) -> None:
    """Singly, side by side, and in batches, in turn."""
    async with open_local(f"file:{folder}") as bus:
        sent = 0
        while sent < count:
            part = [{"by": name, "n": n} for n in range(sent, min(sent + _MANY, count))]
            if sent // _MANY % 2:
                await bus.publish_many(TOPIC, part, key=name)
            else:
                await asyncio.gather(*(bus.publish(TOPIC, payload) for payload in part))
            sent += len(part)


async def consume(folder: str, group: str) -> None:
    bus = open_local(f"file:{folder}", snapshot_bytes=1 << 40, journal_sync_s=0.2)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    policy = GroupOptions(ordering="none", ack_timeout_s=300.0)
    async with bus, bus.subscribe(TOPIC, group=group, policy=policy, max_inflight=50) as stream:
        print(bus.store.member, flush=True)
        work = asyncio.ensure_future(_work(stream))
        await stop.wait()
        work.cancel()


async def _work(stream: trunkline.Subscription) -> None:
    async for delivery in stream:
        await asyncio.sleep(0.0005)  # so that some are always in hand
        await delivery.ack()


if __name__ == "__main__":
    os.setpgrp()
    if sys.argv[1] == "publish":
        asyncio.run(publish(sys.argv[2], sys.argv[3], int(sys.argv[4])))
    else:
        asyncio.run(consume(sys.argv[2], sys.argv[3]))
