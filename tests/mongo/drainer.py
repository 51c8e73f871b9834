"""A drainer of an outbox, to be killed; both the outbox and the bus are in one database."""

from __future__ import annotations

import asyncio
import sys

from pymongo import AsyncMongoClient

from trunkline.bus.connect import open_local
from trunkline.patterns.mongo_outbox import MongoOutbox
from trunkline.patterns.outbox import Drainer


async def main(url: str) -> None:
    client: AsyncMongoClient[dict[str, object]] = AsyncMongoClient(url, tz_aware=True)
    outbox = MongoOutbox(client.get_default_database()["outbox"])
    async with (
        open_local(url) as bus,
        Drainer(outbox, bus, batch=7, lease_s=1.0, poll_s=0.05),
    ):
        print("ready", flush=True)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
