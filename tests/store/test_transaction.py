"""Transactions of a group in stores that compare and set, and in those that lock."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from trunkline.errors import Raced, StorageError
from trunkline.folder.group_file import GroupFile
from trunkline.group import Group
from trunkline.names import GroupKey
from trunkline.options import GroupOptions
from trunkline.store import Store
from trunkline.store.file import FileStore
from trunkline.store.memory import MemoryStore
from trunkline.testing.store_contract import BodyFailed

KEY = GroupKey("orders", 0, "billing")


class Racing(MemoryStore):
    """Another member settles the next offset while a transaction is open, as often as told."""

    def __init__(self, races: int) -> None:
        super().__init__()
        self.races = races

    def group(self, key: GroupKey) -> AbstractAsyncContextManager[Group]:
        return _Race(self, key, super().group(key))

    async def settle_next(self, key: GroupKey) -> None:
        async with super().group(key) as group:
            group.settle([group.floor + 1])


class _Race:
    def __init__(
        self, store: Racing, key: GroupKey, plain: AbstractAsyncContextManager[Group]
    ) -> None:
        self.store, self.key, self.plain = store, key, plain

    async def __aenter__(self) -> Group:
        self.group = await self.plain.__aenter__()
        return self.group

    async def __aexit__(self, *error: Any) -> None:
        if not self.store.races or not self.group.ops:
            await self.plain.__aexit__(*error)
            return
        self.store.races -= 1
        raced = Raced()
        await self.plain.__aexit__(Raced, raced, None)
        await self.store.settle_next(self.key)
        raise raced


async def fail(store: Store, *verbs: Callable[[Group], object]) -> None:
    async with store.group(KEY) as group:
        for verb in verbs:
            verb(group)
        raise BodyFailed


async def test_change_runs_again_until_no_member_was_first() -> None:
    store = Racing(0)
    await store.change(KEY, lambda group: group.define(GroupOptions(), 0))
    store.races = 3
    seen: list[int] = []

    def settle_next(group: Group) -> int:
        seen.append(group.floor)
        group.settle([group.floor + 1])
        return group.floor

    assert await store.change(KEY, settle_next) == 4
    assert seen == [0, 1, 2, 3]


async def test_a_lost_race_leaves_no_trace() -> None:
    store = Racing(0)
    await store.change(KEY, lambda group: group.define(GroupOptions(), 0))
    store.races = 1

    async def lose() -> None:
        async with store.group(KEY) as group:
            group.settle([5, 6])
            group.pause(True)

    with pytest.raises(Raced):
        await lose()

    look = await store.change(KEY, lambda group: (group.floor, list(group.settled), group.paused))
    assert look == (1, [], False)


async def test_a_group_in_memory_is_taken_back_from_its_last_saved_state() -> None:
    store = MemoryStore()
    await store.change(KEY, lambda group: group.define(GroupOptions(), 0))
    for offset in range(1, 10_001):
        await store.change(KEY, lambda group, offset=offset: group.settle([2 * offset]))  # type: ignore[misc]
    with pytest.raises(BodyFailed):
        await fail(store, lambda group: group.seek(0))

    settled = await store.change(KEY, lambda group: group.settled.count(0))
    assert settled == 10_000


async def test_a_transaction_that_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(os.fspath(tmp_path), reserve_bytes=0)
    await store.change(KEY, lambda group: group.define(GroupOptions(), 0))

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(GroupFile, "_append", broken)
    with pytest.raises(StorageError):
        async with store.group(KEY) as group:
            group.settle([1])
    monkeypatch.undo()

    assert await store.change(KEY, lambda group: group.floor) == 0
    await store.close()


async def test_a_transaction_that_fails_lets_go_of_the_lock(tmp_path: Path) -> None:
    store, other = (FileStore(os.fspath(tmp_path), reserve_bytes=0) for _ in range(2))
    with pytest.raises(BodyFailed):
        await fail(store, lambda group: group.define(GroupOptions(), 0))

    await other.change(KEY, lambda group: group.define(GroupOptions(), 7))
    assert await store.change(KEY, lambda group: group.floor) == 7
    await store.close()
    await other.close()
