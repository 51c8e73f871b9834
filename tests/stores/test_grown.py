"""A topic that gets more partitions: its groups have them, also those that nobody works for."""

from __future__ import annotations

from pathlib import Path

import pytest

import trunkline
from trunkline.log import upkeep
from trunkline.options import GroupOptions
from trunkline.store import GroupKey
from trunkline.stores.file import FileStore

KEPT = {"retention_records": 2, "segment_records": 5}
KEY = GroupKey("orders", 0, "billing")
POLICY = GroupOptions(max_retries=7)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"file:{tmp_path / 'bus'}"


async def test_retention_waits_for_a_group_that_is_away_in_partitions_that_are_added(
    url: str,
) -> None:
    async with trunkline.connect(url) as bus:
        await bus.define("orders", **KEPT)
        await bus.publish_many("orders", [-1, -2])
        async with bus.subscribe("orders", group="billing") as deliveries:
            for _ in range(2):
                await (await anext(deliveries)).ack()

        await bus.define("orders", **KEPT, partitions=3)
        for number in range(60):
            await bus.publish("orders", number)
        if isinstance(bus.store, FileStore):
            upkeep.tend(bus.store.folder)

        got = set()
        async with bus.subscribe("orders", group="billing") as deliveries:
            async for delivery in deliveries:
                got.add(delivery.event.payload)
                await delivery.ack()
                if len(got) == 60:
                    break
        assert got == set(range(60))


async def test_added_partitions_have_the_policy_and_the_pause_of_their_groups(url: str) -> None:
    async with trunkline.connect(url) as bus:
        await bus.store.update(KEY, lambda group: group.define(POLICY, 0))
        await bus.store.update(KEY, lambda group: group.pause(on=True))

        await bus.define("orders", partitions=2)

        added = KEY._replace(partition=1)
        assert await bus.store.groups() == [KEY, added]
        found = await bus.store.update(added, lambda g: (g.options, g.paused, g.floor))
        assert found == (POLICY, True, 0)
