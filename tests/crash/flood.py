"""One process of several around a group that never runs dry.

::

    python -m crash.flood publish FOLDER           critical events, so that some always wait
    python -m crash.flood consume FOLDER AGING_S   prints what came and when, until killed
"""

from __future__ import annotations

import asyncio
import sys
import time

import trunkline
from trunkline.folder import Folder
from trunkline.names import GroupKey
from trunkline.options import GroupOptions

TOPIC, GROUP = "t", "g"
KEY = GroupKey(TOPIC, 0, GROUP)
WAITING = 100  # so that a busy machine does not empty it
_AT_ONCE = 20
_WORK_S = 0.002


async def publish(folder: str) -> None:
    async with trunkline.connect(f"file:{folder}") as bus:
        look = Folder(folder)
        while True:
            while look.group(KEY).lag(look.bounds(TOPIC, 0).next) > WAITING:
                await asyncio.sleep(0.002)
            await bus.publish_many(TOPIC, [time.monotonic()] * _AT_ONCE, priority="critical")


async def consume(folder: str, aging_s: float) -> None:
    policy = GroupOptions(aging_s=aging_s)
    async with (
        trunkline.connect(f"file:{folder}") as bus,
        bus.subscribe(TOPIC, group=GROUP, policy=policy, max_inflight=1) as stream,
    ):
        async for delivery in stream:
            print(delivery.event.priority, delivery.event.payload, time.monotonic(), flush=True)
            await asyncio.sleep(_WORK_S)
            await delivery.ack()


if __name__ == "__main__":
    if sys.argv[1] == "publish":
        asyncio.run(publish(sys.argv[2]))
    else:
        asyncio.run(consume(sys.argv[2], float(sys.argv[3])))
