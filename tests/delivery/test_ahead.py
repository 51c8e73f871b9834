"""What a pump keeps in memory of what it has read ahead."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from trunkline.bus.connect import open_local
from trunkline.delivery.prefetch import _AHEAD_BYTES


@pytest.mark.parametrize("before", [0, 3])
async def test_large_records_are_not_all_kept_while_they_wait(tmp_path: Path, before: int) -> None:
    size, count = 200_000, 200
    async with open_local(f"file:{tmp_path}") as bus:
        await bus.publish_many("orders", [{"n": n - before} for n in range(before)])
        for first in range(0, count, 20):
            batch = [{"n": n, "text": "x" * size} for n in range(first, first + 20)]
            await bus.publish_many("orders", batch)
        async with bus.subscribe("orders", group="billing", max_inflight=5) as stream:
            (pump,) = bus._pumps._pumps.values()
            for _ in range(before):  # small ones say nothing of those to come
                await (await anext(stream)).ack()
            held = [await anext(stream) for _ in range(5)]
            most, quiet = 0, 0
            while quiet < 30:  # it reads ahead by itself while we hold what we have
                await asyncio.sleep(0.005)
                quiet = quiet + 1 if len(pump._prefetch.records) == most else 0
                most = max(most, len(pump._prefetch.records))
            seen = []
            for delivery in held:
                seen.append(delivery.event.payload["n"])
                await delivery.ack()
            while len(seen) < count:
                delivery = await anext(stream)
                seen.append(delivery.event.payload["n"])
                await delivery.ack()
    assert seen == list(range(count))
    assert 4 * size < most * size < _AHEAD_BYTES + 2 * size < size * count
