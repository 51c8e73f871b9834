"""Every store passes the suite that is shipped for stores."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import trunkline.store
from trunkline.event import Event
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, TopicOptions
from trunkline.store import Store, open_store
from trunkline.store.file import FileStore
from trunkline.store.memory import MemoryStore
from trunkline.testing import ManualClock, StoreContract
from trunkline.testing.store_contract import Kill, Make


class TestMemoryStore(StoreContract):
    kind = MemoryStore

    @pytest.fixture
    def make(self, clock: ManualClock) -> Make:
        def make(**options: Any) -> Store:
            return MemoryStore(clock=clock, **options)

        return make


class TestFileStore(StoreContract):
    kind = FileStore

    @pytest.fixture
    def make(self, tmp_path: Path, clock: ManualClock) -> Make:
        def make(**options: Any) -> Store:
            return FileStore(str(tmp_path / "bus"), clock=clock, **options)

        return make

    @pytest.fixture
    def kill(self) -> Kill:
        async def kill(store: Store) -> None:
            assert isinstance(store, FileStore)
            store.folder.abandon()

        return kill


class TestFileStoreByThreads(TestFileStore):
    """The same when every commit is handed to a thread, as it is when the disk is slow."""

    @pytest.fixture
    def make(self, tmp_path: Path, clock: ManualClock) -> Make:
        def make(**options: Any) -> Store:
            store = FileStore(str(tmp_path / "bus"), clock=clock, inline_commit_s=0.0, **options)
            store.committer._sync_s = 1.0
            return store

        return make


@pytest.mark.parametrize("place", ["memory:", "file:{}/bus"])
async def test_a_compacted_topic_keeps_the_latest_of_each_key(place: str, tmp_path: Path) -> None:
    options = {} if place == "memory:" else {"upkeep_s": 0.01}
    store = open_store(place.format(tmp_path), **options)
    await store.define("t", TopicOptions(compact=True, segment_records=10))
    key = GroupKey("t", 0, "g")
    await store.update(key, lambda group: group.define(GroupOptions(), 6))
    sent = [(None, "plain"), ("gone", 1), ("gone", None), ("a", 0), ("last", 1), ("a", 1)]
    sent += [("a", n) for n in range(2, 200)]
    for name, payload in sent:
        await store.append("t", [Event(topic="t", key=name, payload=payload)])

    async def read() -> list[tuple[str | None, Any]]:
        found: list[tuple[str | None, Any]] = []
        start = 1
        await store.trim("t", 0, 1)  # nothing; but who reads now holds no file that was replaced
        while records := await store.read("t", 0, start, 1000):
            found += [(r.event.key, r.event.payload) for r in records]
            start = records[-1].offset + 1
        return found

    async with asyncio.timeout(10):
        while (found := await read())[:2] != [(None, "plain"), ("last", 1)]:
            await asyncio.sleep(0.01)
        assert found[2:] == sent[6:], "its group has not settled these"
        await store.update(key, lambda group: group.seek(200))
        for name, payload in sent[-60:]:
            await store.append("t", [Event(topic="t", key=name, payload=payload)])
        while len(await read()) > 100:
            await asyncio.sleep(0.01)
    found = await read()
    assert (found[:2], found[-1]) == ([(None, "plain"), ("last", 1)], ("a", 199))
    assert await store.bounds("t", 0) == (1, 265)
    await store.close()


def implementations() -> set[type]:
    """Each public class in ``trunkline.store`` that has the methods of a store."""
    found: set[type] = set()
    methods = [
        name for name in vars(Store) if not name.startswith("_") and callable(getattr(Store, name))
    ]
    for module in pkgutil.walk_packages(trunkline.store.__path__, "trunkline.store."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if (
                isinstance(value, type)
                and not name.startswith("_")
                and value.__module__ == module.name
                and all(hasattr(value, method) for method in methods)
            ):
                found.add(value)
    return found


def test_no_store_is_left_out() -> None:
    """Each has a suite somewhere: one that needs a server has it in a folder of its own."""
    tests = Path(__file__).parents[1].rglob("test_*.py")
    listed = {
        name
        for path in tests
        if "StoreContract" in (text := path.read_text("utf-8"))
        for name in re.findall(r"^    kind = (\w+)$", text, re.MULTILINE)
    }
    assert {store.__name__ for store in implementations()} == listed
