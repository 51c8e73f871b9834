"""What is removed while members are at work: groups and topics begin anew, records wait."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import trunkline
from trunkline.bus.connect import open_local
from trunkline.bus.local import LocalBus
from trunkline.folder import Folder
from trunkline.group import Group
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, StoreOptions

KEY = GroupKey("orders", 0, "billing")
POLICY = GroupOptions(max_retries=1, ordering="none")


async def eventually(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.01)


Remove = Callable[[LocalBus, str], Awaitable[None]]


async def _here(bus: LocalBus, what: str) -> None:
    if what == "group":
        await bus.store.update(KEY, None)
    else:
        await bus.store.define("orders", None)


async def _elsewhere(bus: LocalBus, what: str) -> None:
    path: str = bus.store.folder.path  # type: ignore[attr-defined]
    folder = Folder(path, StoreOptions(create=False))
    folder.remove_group(KEY) if what == "group" else folder.remove_topic("orders")
    folder.close()


@contextlib.asynccontextmanager
async def at_work(url: str) -> AsyncIterator[tuple[LocalBus, list[Any]]]:
    """A bus whose handler has settled three records, and what the handler gets."""
    got: list[Any] = []
    async with open_local(url) as bus:
        await bus.publish_many("orders", [1, 2, 3])
        bus.on("orders", group="billing", policy=POLICY)(lambda event: got.append(event.payload))
        await bus.start()
        await bus.drain()
        yield bus, got


def _place(group: Group) -> tuple[GroupOptions, int]:
    return group.options, group.floor


@pytest.fixture(params=["memory", "file", "another process"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Remove]:
    url = "memory:" if request.param == "memory" else f"file:{os.fspath(tmp_path / 'bus')}"
    return url, _elsewhere if request.param == "another process" else _here


async def test_a_group_that_is_removed_under_its_members_begins_anew(
    place: tuple[str, Remove],
) -> None:
    url, remove = place
    async with at_work(url) as (bus, got):
        await remove(bus, "group")
        await bus.publish("orders", 4)
        await eventually(lambda: got[3:] == [1, 2, 3, 4])
        await bus.drain()
        assert await bus.store.groups() == [KEY]
        assert await bus.store.update(KEY, _place) == (POLICY, 4)


async def test_a_removed_group_begins_anew_where_its_log_does(place: tuple[str, Remove]) -> None:
    url, remove = place
    async with at_work(url) as (bus, got):
        await bus.store.trim("orders", 0, 3)
        await remove(bus, "group")
        await bus.publish("orders", 4)
        await eventually(lambda: got[3:] == [3, 4])
        await bus.drain()
        assert await bus.store.update(KEY, _place) == (POLICY, 4)


async def test_a_topic_that_is_removed_under_its_consumers_begins_anew(
    place: tuple[str, Remove],
) -> None:
    url, remove = place
    got: list[Any] = []
    async with open_local(url) as bus:
        bus.on("orders", group="billing", policy=POLICY)(lambda event: got.append(event.payload))
        await bus.start()
        for turn in range(3):
            await bus.publish_many("orders", [turn, turn])
            await eventually(lambda turn=turn: got == [turn, turn])  # type: ignore[misc]
            await bus.drain()
            assert await bus.store.bounds("orders", 0) == (1, 3)
            got.clear()
            await remove(bus, "topic")


async def test_what_was_read_ahead_of_a_removed_topic_is_not_delivered(
    place: tuple[str, Remove],
) -> None:
    url, remove = place
    got: list[Any] = []
    gate = asyncio.Event()
    async with open_local(url) as bus:

        @bus.on("orders", group="billing", policy=POLICY, max_inflight=1)
        async def bill(event: trunkline.Event) -> None:
            got.append(event.payload)
            await gate.wait()

        await bus.publish_many("orders", ["old"] * 20)
        await bus.start()
        await eventually(lambda: bool(got))
        await remove(bus, "topic")
        await bus.publish_many("orders", ["new"] * 20)
        gate.set()
        await eventually(lambda: got.count("new") == 20)
        assert got.count("old") == 1


async def test_what_lies_unread_of_a_removed_topic_is_not_delivered(
    place: tuple[str, Remove],
) -> None:
    url, remove = place
    async with open_local(url) as bus:
        await bus.publish_many("orders", ["old"] * 1000)
        async with bus.subscribe("orders", group="billing", policy=POLICY) as stream:
            while not stream.is_ready:  # a quick reader finds more than it asked for
                await (await anext(stream)).ack()
            await remove(bus, "topic")
            await eventually(lambda: not stream.is_ready)
            await bus.publish("orders", "new")
            assert (await anext(stream)).event.payload == "new"


async def test_retention_waits_for_what_was_redriven(place: tuple[str, Remove]) -> None:
    url, _ = place
    async with open_local(url, upkeep_s=0.01) as bus:
        await bus.define("orders", retention_records=1)
        await bus.store.update(KEY, lambda group: group.define(POLICY, 0))
        await bus.publish_many("orders", [1, 2, 3])
        await bus.store.update(KEY, lambda group: (group.settle([1, 2, 3]), group.redrive([1])))
        await bus.publish("orders", 4)
        assert [record.event.payload for record in await bus.read("orders")] == [1, 2, 3, 4]


async def test_the_removal_of_a_group_is_heard_at_once(place: tuple[str, Remove]) -> None:
    url, _ = place
    heard: list[str | None] = []
    async with open_local(url) as bus:
        await bus.store.update(KEY, lambda group: group.define(POLICY, 0))
        bus.store.bell.listen(heard.append)
        await _here(bus, "group")
        assert heard in (["orders"], [None])
