"""What another process does to a group that this one works for, too."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trunkline.bus.local import LocalBus
from trunkline.folder import Folder
from trunkline.folder.group_file import GroupFile
from trunkline.group import Group, Taken
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, StoreOptions
from trunkline.store import lag_of
from trunkline.store.file import FileStore

KEY = GroupKey("orders", 0, "billing")


def take(folder: Folder) -> Taken:
    def step(group: Group) -> Taken:
        group.define(GroupOptions(), 0)
        group.offer(1)
        return group.take(folder.join(), now=folder.clock.monotonic(), wall=0.0, limit=1)

    return folder.step(KEY, step)


def give_back(folder: Folder, taken: Taken) -> None:
    folder.step(KEY, lambda group: group.give_back(taken.leases))


def die(folder: Folder, taken: Taken) -> None:
    folder.abandon()


@pytest.mark.parametrize("act", [give_back, die])
async def test_a_pump_hears_at_once_of_what_somebody_else_here_found(
    tmp_path: Path, act: Callable[[Folder, Taken], None]
) -> None:
    store = FileStore(os.fspath(tmp_path), reserve_bytes=0, poll_s=100.0)
    other = Folder(os.fspath(tmp_path), StoreOptions(reserve_bytes=0))
    async with LocalBus(store) as bus:
        await bus.publish("orders", 1)
        taken = take(other)
        assert [lease.offset for lease in taken.leases] == [1]
        async with bus.subscribe("orders", group="billing") as stream:
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            act(other, taken)
            assert await lag_of(store, KEY) == 1
            assert (await asyncio.wait_for(waiting, 5)).event.payload == 1
    other.close()


async def test_a_pump_hears_at_once_of_what_came_before_its_journal_was_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(os.fspath(tmp_path), reserve_bytes=0, poll_s=100.0, snapshot_bytes=1024)
    other, renew = Folder(os.fspath(tmp_path), StoreOptions(reserve_bytes=0)), GroupFile.renew

    def late(file: GroupFile, segment: int) -> None:
        if not file.group.leases:  # after the last step for now, else the next one shows it
            monkeypatch.undo()
            other.step(KEY, lambda group: group.redrive([1]))
            renew(file, segment)

    async with LocalBus(store) as bus:
        monkeypatch.setattr(GroupFile, "renew", late)
        async with bus.subscribe("orders", group="billing") as stream:
            for number in itertools.count(1):
                await bus.publish("orders", number)
                await (await anext(stream)).ack()
                await asyncio.sleep(0.02)
                if GroupFile.renew is renew:
                    break
            assert (await asyncio.wait_for(anext(stream), 5)).event.payload == 1
    other.close()


async def test_topics_that_are_found_one_after_the_other_hold_up_none_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group that was found woke every pump of the process: 400 topics took ten seconds."""
    steps, step, many = 0, GroupFile.transaction, 60

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal steps
        steps += 1
        return step(*args, **more)

    async with LocalBus(FileStore(os.fspath(tmp_path), reserve_bytes=0, poll_s=100.0)) as bus:
        for number in range(many):
            await bus.publish(f"orders.{number}", number)
        monkeypatch.setattr(GroupFile, "transaction", counted)
        async with bus.subscribe("orders.*", group="billing", start="latest"):
            await asyncio.sleep(0.1)
            assert steps <= 6 * many
