"""Files of groups and topics that nobody needs just now are closed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trunkline.event import Event
from trunkline.folder.topics_file import _made
from trunkline.log import descriptors
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, TopicOptions
from trunkline.store.file import FileStore

MANY = 120


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileStore:
    monkeypatch.setattr(descriptors, "limit", lambda: 320)
    return FileStore(os.fspath(tmp_path / "bus"), reserve_bytes=0)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_groups_give_their_files_back(store: FileStore) -> None:
    before = open_files()
    keys = [GroupKey("orders", 0, f"g{n}") for n in range(MANY)]
    for key in keys:
        await store.change(key, lambda group: group.define(GroupOptions(), 0))
        await store.change(key, lambda group: group.settle([1, 3]))
    assert open_files() - before < 60

    for key in keys:
        settled = await store.change(key, lambda group: (group.floor, list(group.settled)))
        assert settled == (1, [(3, 3)])
    assert open_files() - before < 60
    await store.close()


async def test_a_group_that_somebody_listens_for_stays_open(store: FileStore) -> None:
    key = GroupKey("orders", 0, "mine")
    store.bell.listen(print, "orders", key)
    await store.change(key, lambda group: group.define(GroupOptions(), 0))
    mine = await store.change(key, lambda group: group)
    for n in range(MANY):
        await store.change(GroupKey("orders", 0, f"g{n}"), lambda group: group.floor)
    assert await store.change(key, lambda group: group) is mine
    await store.close()


async def test_topics_give_their_files_back(store: FileStore) -> None:
    before = open_files()
    for turn in range(2):
        for n in range(MANY):
            await store.append(f"t{n}", [Event(topic=f"t{n}", payload=n, idem_key=str(turn))])
    assert open_files() - before < 150
    for n in range(MANY):
        assert await store.bounds(f"t{n}", 0) == (1, 3)
        again = await store.append(f"t{n}", [Event(topic=f"t{n}", payload=n, idem_key="1")])
        assert (again[0].duplicate, again[0].offset) == (True, 2)
    await store.close()


async def test_the_last_of_many_topics_is_defined_as_quickly_as_the_first(
    store: FileStore,
) -> None:
    """Each one was checked anew, field by field, with each that was defined: 74 ms at 1,000."""
    options = TopicOptions(partitions=2, compact=True)
    for n in range(300):
        await store.define(f"t{n}", options)
    calls = _made.cache_info()
    await store.define("last", options)
    made = _made.cache_info().misses - calls.misses
    assert made == 0
    assert len(await store.topics()) == 301
    await store.close()
