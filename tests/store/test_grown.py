"""A topic that gets more partitions: its groups have them, also those that nobody works for."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TypedDict

import pytest

from trunkline.bus.connect import open_local
from trunkline.folder import Folder, upkeep
from trunkline.log import atomic
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, StoreOptions, TopicOptions
from trunkline.store.file import FileStore


class _Kept(TypedDict):
    retention_records: int
    segment_records: int


KEPT: _Kept = {"retention_records": 2, "segment_records": 5}
KEY = GroupKey("orders", 0, "billing")
POLICY = GroupOptions(max_retries=7)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"file:{tmp_path / 'bus'}"


async def test_retention_waits_for_a_group_that_is_away_in_partitions_that_are_added(
    url: str,
) -> None:
    async with open_local(url) as bus:
        await bus.define("orders", **KEPT)
        await bus.publish_many("orders", [-1, -2])
        async with bus.subscribe("orders", group="billing") as deliveries:
            for _ in range(2):
                await (await anext(deliveries)).ack()

        await bus.define("orders", partitions=3, **KEPT)
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
    async with open_local(url) as bus:
        await bus.store.update(KEY, lambda group: group.define(POLICY, 0))
        await bus.store.update(KEY, lambda group: group.pause(on=True))

        await bus.define("orders", partitions=2)

        added = KEY._replace(partition=1)
        assert await bus.store.groups() == [KEY, added]
        found = await bus.store.update(added, lambda g: (g.options, g.paused, g.floor))
        assert found == (POLICY, True, 0)


def test_partitions_that_are_added_hold_no_files_open(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path), StoreOptions(reserve_bytes=0))
    for number in range(3):
        key = KEY._replace(group=f"g{number}")
        folder.step(key, lambda group: group.define(POLICY, 0))
    before = len(os.listdir("/proc/self/fd"))
    folder.define("orders", TopicOptions(partitions=20))
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(folder.groups()) == 60
    folder.close()


async def test_a_definition_that_has_to_wait_does_not_stop_the_loop(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path), reserve_bytes=0)
    fd = os.open(tmp_path, os.O_RDONLY)
    atomic.lock(fd, 1.0, str(tmp_path))  # another process defines a topic
    late = asyncio.ensure_future(store.define("orders", TopicOptions(partitions=2)))
    await asyncio.sleep(0.01)
    assert not late.done()
    os.close(fd)
    await late
    assert (await store.topics())["orders"].partitions == 2
    await store.close()
