"""A member of a group that takes records and never settles them; it tells what it took."""

from __future__ import annotations

import asyncio
import sys

from trunkline.bus.connect import open_local


async def main(url: str) -> None:
    async with (
        open_local(url) as bus,
        bus.subscribe("orders", group="billing", max_inflight=10) as stream,
    ):
        async for delivery in stream:
            print(delivery.offset, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
