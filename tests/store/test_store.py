"""Opening a store by its URL, choosing a partition, and the bell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from trunkline.errors import InvalidOption, NoBus, StorageError
from trunkline.event import Event
from trunkline.log.writer import PartitionWriter
from trunkline.names import GroupKey, partition_for
from trunkline.options import GroupOptions, StoreOptions, TopicOptions
from trunkline.store import Bell, Store, open_store, pick_partition
from trunkline.store.file import FileStore
from trunkline.store.memory import MemoryStore
from trunkline.testing import ManualClock

STORES: tuple[type[Store], ...] = (MemoryStore, FileStore)  # the type checker reads this line


async def test_a_store_is_opened_by_its_url(tmp_path: Path) -> None:
    memory = open_store("memory:")
    file = open_store(f"file:{tmp_path / 'bus'}", poll_s=0.5)
    with_slashes = open_store(f"file://{tmp_path / 'bus'}")
    assert (type(memory), type(file)) == (MemoryStore, FileStore)
    assert isinstance(file, FileStore)
    assert isinstance(with_slashes, FileStore)
    assert file.options == StoreOptions(poll_s=0.5)
    assert with_slashes.folder.path == file.folder.path
    for store in (memory, file, with_slashes):
        await store.close()


async def test_a_tilde_in_a_url_is_the_home_and_no_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    await open_store("file:~/bus").close()
    await open_store("file:./~").close()
    assert (tmp_path / "home" / "bus" / "bus.json").exists()
    assert (tmp_path / "~" / "bus.json").exists()


def test_a_url_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    for url in ("file:", "file://bus", "file://host/bus", "carrier-pigeon:x", "", "orders"):
        with pytest.raises(InvalidOption):
            open_store(url)
    with pytest.raises(InvalidOption):
        open_store("memory:", colour="red")
    with pytest.raises(NoBus):
        open_store(f"file:{tmp_path / 'none'}", create=False)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("place", ["file", "file/bus"])
@pytest.mark.parametrize("create", [True, False])
def test_a_file_is_no_bus(tmp_path: Path, place: str, create: bool) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NoBus) as caught:
        open_store(f"file:{tmp_path / place}", create=create)
    assert (caught.value.path, caught.value.hint) == (str(tmp_path / place), "a bus is a folder")


def test_a_place_that_cannot_be_used_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be opened: File name too long"):
        open_store(f"file:{tmp_path / ('x' * 300)}")


def test_a_partition_is_chosen_by_key_then_by_idempotency_key_then_in_turn() -> None:
    def pick(turn: int, **fields: str) -> int:
        return pick_partition(Event(topic="orders", **fields), 4, turn)  # type: ignore[arg-type]

    assert pick(0, key="c42") == pick(3, key="c42") == partition_for("c42", 4)
    assert pick(1, key="c42", idem_key="x") == partition_for("c42", 4)
    assert pick(1, idem_key="x") == pick(2, idem_key="x") == partition_for("x", 4)
    assert [pick(turn) for turn in range(6)] == [0, 1, 2, 3, 0, 1]
    assert pick_partition(Event(topic="orders", key="c42"), 1, 7) == 0


def test_a_bell_rings_for_the_listeners_of_a_topic() -> None:
    bell = Bell()
    all_: list[str | None] = []
    orders: list[str | None] = []
    bell.listen(all_.append)
    bell.listen(orders.append, "orders")

    bell.ring("orders")
    bell.ring("refunds")
    bell.ring()

    assert all_ == ["orders", "refunds", None]
    assert orders == ["orders", None]
    bell.ignore(orders.append)
    bell.ignore(orders.append)


def test_reminders_reach_everybody_in_turn() -> None:
    bell = Bell()
    heard: list[int] = []
    for number in range(7):
        bell.listen(lambda _, number=number: heard.append(number), "orders")  # type: ignore[misc]
    counts = []
    for turn in range(3):
        before = len(heard)
        bell.remind(turn, 3)
        counts.append(len(heard) - before)
    assert sorted(heard) == list(range(7))
    assert max(counts) == 3


def test_a_listener_may_leave_while_the_bell_rings() -> None:
    bell = Bell()
    heard: list[str | None] = []

    def once(topic: str | None) -> None:
        heard.append(topic)
        bell.ignore(once)

    bell.listen(once)
    bell.ring("a")
    bell.ring("b")
    assert heard == ["a"]


async def kept(store: Store) -> list[int]:
    first, end = await store.bounds("orders", 0)
    return [record.offset for record in await store.read("orders", 0, first, end)]


async def test_memory_keeps_to_a_topics_retention() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await store.define("orders", TopicOptions(retention_records=3))
    for _ in range(5):
        await store.append("orders", [Event(topic="orders", ts=clock.now())])
    assert await kept(store) == [3, 4, 5]

    await store.define("orders", TopicOptions(retention_age_s=60.0))
    clock.advance(61)
    await store.append("orders", [Event(topic="orders", ts=clock.now())])
    assert await kept(store) == [6]

    await store.define("orders", TopicOptions(retention_bytes=4000))
    for _ in range(5):
        await store.append("orders", [Event(topic="orders", ts=clock.now(), payload="x" * 900)])
    assert await kept(store) == [9, 10, 11]


@pytest.mark.parametrize("retain_unsettled", [True, False])
async def test_memory_keeps_what_a_group_has_not_settled(retain_unsettled: bool) -> None:
    store = MemoryStore(clock=ManualClock())
    await store.define(
        "orders", TopicOptions(retention_records=1, retain_unsettled=retain_unsettled)
    )
    key = GroupKey("orders", 0, "billing")
    await store.update(key, lambda group: group.define(GroupOptions(), 0))
    await store.append("orders", [Event(topic="orders") for _ in range(4)])
    assert await kept(store) == ([1, 2, 3, 4] if retain_unsettled else [4])

    await store.update(key, lambda group: group.settle([1, 2]))
    await store.append("orders", [Event(topic="orders")])
    assert await kept(store) == ([3, 4, 5] if retain_unsettled else [5])


async def test_an_append_that_only_some_partitions_kept_tells_their_receipts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(os.fspath(tmp_path), reserve_bytes=0)
    await store.define("t", TopicOptions(partitions=2))
    append = PartitionWriter.append

    def broken(self: PartitionWriter, *args: Any) -> Any:
        if self.partition == 1:
            raise StorageError("no disk", path="p")
        return append(self, *args)

    monkeypatch.setattr(PartitionWriter, "append", broken)
    keys = ["a", "b", "c", "d"]
    events = [Event(topic="t", key=key, payload=key) for key in keys]
    with pytest.raises(StorageError, match="no disk") as caught:
        await store.append("t", events)
    monkeypatch.undo()

    kept = [None if one is None else one.id for one in caught.value.receipts]
    expected = [e.id if partition_for(e.key or "", 2) == 0 else None for e in events]
    assert kept == expected
    assert None in kept
    assert any(kept)
    assert (await store.bounds("t", 0)).next - 1 == len([one for one in kept if one])
    await store.close()
