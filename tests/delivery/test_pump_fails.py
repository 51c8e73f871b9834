"""The pump when something fails halfway: nothing that was said or taken is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trunkline.bus.local import LocalBus
from trunkline.errors import InvalidFilter, StorageError, StorageFull
from trunkline.event import Event, Receipt, Record
from trunkline.folder.group_file import GroupFile
from trunkline.group import Group
from trunkline.names import GroupKey
from trunkline.options import GroupOptions
from trunkline.store.file import FileStore
from trunkline.store.memory import MemoryStore
from trunkline.testing import ManualClock

KEY = GroupKey("orders", 0, "billing")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class Slow(MemoryStore):
    """Letters wait until they may be written, or fail."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.fails = 0

    async def append(self, topic: str, events: Sequence[Event]) -> list[Receipt]:
        if topic.endswith(".DLQ"):
            await self.may_write.wait()
            self.fails -= 1
            if self.fails >= 0:
                raise StorageFull("no room")
        return await super().append(topic, events)


async def soon(stream: Any) -> Any:
    return await asyncio.wait_for(anext(stream), 10)


async def test_an_ack_that_could_not_be_written_is_written_later(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[int] = []
    append = GroupFile._append
    full = False

    def refuse(self: GroupFile, *args: Any) -> None:
        if full:
            raise StorageFull("no room", path="")
        append(self, *args)

    monkeypatch.setattr(GroupFile, "_append", refuse)
    async with LocalBus(FileStore(str(tmp_path), clock=clock), clock=clock) as bus:
        await bus.publish("orders", 1)
        async with bus.subscribe("orders", group="billing") as stream:
            delivery = await soon(stream)
            full = True
            await delivery.ack()
            await asyncio.sleep(0.02)
            full = False
            await clock.run(1.0)
            settled.append(await bus.store.update(KEY, lambda group: group.floor))
    assert settled == [1]


async def test_a_subscriber_that_comes_after_a_filter_failed_is_served(clock: ManualClock) -> None:
    async with LocalBus(MemoryStore(clock=clock), clock=clock) as bus:
        await bus.publish_many("orders", [1, 0, 2])

        def fussy(event: Event) -> bool:
            return bool(1 / event.payload)

        async with bus.subscribe("orders", group="billing", where=fussy) as stream:
            await (await soon(stream)).ack()
            with pytest.raises(InvalidFilter):
                await soon(stream)
            await bus.store.change(KEY, lambda group: group.edit(GroupOptions()))
            async with bus.subscribe("orders", group="billing") as later:
                got = [await soon(later), await soon(later)]
    assert [(delivery.event.payload, delivery.attempt) for delivery in got] == [(0, 1), (2, 1)]


@pytest.mark.parametrize("fails", [1, 99])
async def test_an_ack_that_cannot_be_written_at_the_end_is_tried_again_and_told(
    tmp_path: Path,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: int,
) -> None:
    append, left = GroupFile._append, fails

    def refuse(self: GroupFile, *args: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise StorageError("the journal cannot be written")
        append(self, *args)

    async with LocalBus(FileStore(str(tmp_path), clock=clock), clock=clock) as bus:
        await bus.publish("orders", 1)
        async with bus.subscribe("orders", group="billing") as stream:
            delivery = await soon(stream)
            await clock.settle()
            monkeypatch.setattr(GroupFile, "_append", refuse)
            await delivery.ack()
        monkeypatch.undo()
        is_settled = await bus.store.update(KEY, lambda group: group.is_settled(1))
    assert is_settled == (fails == 1)
    assert ("may come again" in caplog.text) == (fails > 1)


async def test_acks_are_written_at_the_end_also_where_letters_cannot_be(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, fails = Slow(clock), 1
    enter = store.group

    def refuse(key: GroupKey) -> Any:
        nonlocal fails
        if store.fails and fails:
            fails -= 1
            raise StorageFull("no room")
        return enter(key)

    async with LocalBus(store, clock=clock) as bus:
        await bus.publish_many("orders", [1, 2])
        async with bus.subscribe("orders", group="billing") as stream:
            one, two = await soon(stream), await soon(stream)
            store.fails = 99
            await one.term("no")
            await clock.settle()
            monkeypatch.setattr(store, "group", refuse)
            await two.ack()
        assert fails == 0
        assert await store.change(KEY, lambda group: list(group.settled)) == [(2, 2)]


async def test_what_expired_is_a_letter_also_when_its_subscriber_left(clock: ManualClock) -> None:
    store = Slow(clock)
    async with LocalBus(store, clock=clock) as bus:
        await bus.define("orders", ttl_policy="dlq")
        await bus.publish("orders", 1, ttl_s=1.0)
        clock.advance(2)
        store.fails = 1
        async with bus.subscribe("orders", group="billing") as stream:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.05)
        letters = [letter async for letter in bus.dead_letters("orders").letters()]
    assert [letter.reason for letter in letters] == ["expired"]


async def test_what_could_not_be_given_up_is_not_told_to_be_dead(clock: ManualClock) -> None:
    store = Slow(clock)
    told: list[tuple[int, int]] = []  # with the end of the dead letters then

    class Observer:
        def on_dead_letter(self, _key: GroupKey, record: Record, *_why: str) -> None:
            told.append((record.offset, store._partition("orders.DLQ", 0).next))

    async with LocalBus(store, clock=clock, middleware=[Observer()]) as bus:
        await bus.publish("orders", 1)
        store.fails = 2
        async with bus.subscribe("orders", group="billing") as stream:
            await (await soon(stream)).term("no")
            await clock.run(1.0)
    assert told == [(1, 2)]


async def test_a_letter_from_before_a_seek_settles_nothing(clock: ManualClock) -> None:
    store = Slow(clock)
    async with LocalBus(store, clock=clock) as bus:
        await bus.publish("orders", 1)
        async with bus.subscribe("orders", group="billing") as stream:
            store.may_write.clear()
            await (await soon(stream)).term("no")
            await clock.settle()
            await store.update(KEY, lambda group: group.seek(0))
            async with bus.subscribe("orders", group="billing"):
                pass  # when it leaves the group is told, and its era is seen
            store.may_write.set()
            assert (await soon(stream)).event.payload == 1
            assert not await store.update(KEY, lambda group: Group.is_settled(group, 1))
