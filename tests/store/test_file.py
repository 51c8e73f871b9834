"""The file store: publishers that wait together, threads that write, loops that never block."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from trunkline.bus.local import LocalBus
from trunkline.codec import encode_event
from trunkline.errors import Closed, LockTimeout
from trunkline.event import Event
from trunkline.folder import Folder, upkeep
from trunkline.group import Group
from trunkline.log import atomic
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, Limits, StoreOptions, TopicOptions
from trunkline.store.file import FileStore

TOPIC = "t"
KEY = GroupKey(TOPIC, 0, "g")


def event(payload: object, **fields: str) -> Event:
    return Event(topic=TOPIC, payload=payload, **fields)  # type: ignore[arg-type]


@pytest.fixture(params=[10.0, 0.0], ids=["in place", "by threads"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FileStore]:
    store = FileStore(os.fspath(tmp_path), reserve_bytes=0, inline_commit_s=request.param)
    await store.append("warm", [Event(topic="warm")])  # the first one is always done in place
    yield store
    await store.close()


async def test_publishers_that_wait_together_share_a_sync(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.append(TOPIC, [event(0)])
    count = 0
    sync = atomic.sync

    def counted(fd: int) -> None:
        nonlocal count
        count += 1
        sync(fd)

    monkeypatch.setattr(atomic, "sync", counted)
    found = await asyncio.gather(*(store.append(TOPIC, [event(n)]) for n in range(1, 101)))
    assert [receipts[0].offset for receipts in found] == list(range(2, 102))
    assert count <= 5


async def test_offsets_are_in_the_order_of_the_calls(store: FileStore) -> None:
    batches = [[event((n, m)) for m in range(n % 4 + 1)] for n in range(40)]
    found = await asyncio.gather(*(store.append(TOPIC, batch) for batch in batches))
    offsets = [receipt.offset for receipts in found for receipt in receipts]
    assert offsets == list(range(1, len(offsets) + 1))
    records = await store.read(TOPIC, 0, 1, 1000)
    assert [r.event.payload for r in records] == [
        list(e.payload) for batch in batches for e in batch
    ]


async def test_a_publisher_that_gives_up_does_not_disturb_the_others(store: FileStore) -> None:
    tasks = [asyncio.ensure_future(store.append(TOPIC, [event(n)])) for n in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    records = {r.event.payload: r.offset for r in await store.read(TOPIC, 0, 1, 100)}
    for number, result in enumerate(results):
        if isinstance(result, list):
            assert records[number] == result[0].offset
        else:
            assert isinstance(result, asyncio.CancelledError)
    assert sorted(records.values()) == list(range(1, len(records) + 1))


async def test_a_lock_that_another_holds_does_not_stop_the_loop(
    store: FileStore, tmp_path: Path
) -> None:
    other = Folder(os.fspath(tmp_path), StoreOptions(reserve_bytes=0))
    other.append(TOPIC, 0, [encode_event(event(0), Limits())], [event(0)])
    other.writer(TOPIC, 0).begin()
    late = asyncio.ensure_future(store.append(TOPIC, [event(1)]))
    longest = 0.0
    for _ in range(20):
        started = time.perf_counter()
        await asyncio.sleep(0.005)
        longest = max(longest, time.perf_counter() - started)
    assert not late.done()
    assert longest < 0.2
    other.writer(TOPIC, 0).end()
    assert (await late)[0].offset == 2
    other.close()


async def test_a_step_that_has_to_wait_is_taken_by_the_loop_or_not_at_all(
    store: FileStore, tmp_path: Path
) -> None:
    """Nothing that a step looks at may change meanwhile."""
    await store.update(KEY, lambda group: group.define(GroupOptions(), 0))
    taken: list[int] = []

    def step(group: Group) -> None:
        taken.append(threading.get_ident())
        group.settle([len(taken)])

    path = os.fspath(tmp_path / "offsets" / "t__g.lock")
    other = atomic.open_file(path, os.O_RDWR)
    atomic.lock(other, 1.0, path)
    given_up, *others = [asyncio.ensure_future(store.update(KEY, step)) for _ in range(3)]
    await asyncio.sleep(0.05)
    given_up.cancel()
    assert taken == []
    os.close(other)
    await asyncio.wait_for(asyncio.gather(*others), 20)
    assert given_up.cancelled()
    assert taken == [threading.get_ident()] * 2
    again = FileStore(os.fspath(tmp_path))
    assert await again.update(KEY, lambda group: group.floor) == 2
    await again.close()


async def test_a_group_that_stays_locked_is_told(tmp_path: Path) -> None:
    store = FileStore(os.fspath(tmp_path), reserve_bytes=0, lock_timeout_s=0.1)
    await store.update(KEY, lambda group: group.define(GroupOptions(), 0))
    path = os.fspath(tmp_path / "offsets" / "t__g.lock")
    other = atomic.open_file(path, os.O_RDWR)
    atomic.lock(other, 1.0, path)
    with pytest.raises(LockTimeout, match=r"g on t has been locked for 0\.1 s"):
        await store.update(KEY, lambda group: group.floor)
    os.close(other)
    assert await store.update(KEY, lambda group: group.floor) == 0
    await store.close()


async def test_others_are_still_heard_after_a_look_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(os.fspath(tmp_path), reserve_bytes=0, poll_s=0.001)
    failed, rung = asyncio.Event(), asyncio.Event()

    def full(_turn: int) -> set[str]:
        failed.set()
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(store.folder, "noticed", full)
        store.watch()
        await asyncio.wait_for(failed.wait(), 20)
    await asyncio.sleep(0)
    store.bell.listen(lambda topic: rung.set() if topic == TOPIC else None)
    other = Folder(os.fspath(tmp_path), StoreOptions(reserve_bytes=0))
    other.append(TOPIC, 0, [encode_event(event(0), Limits())], [event(0)])
    await asyncio.wait_for(rung.wait(), 20)
    other.close()
    await store.close()


async def test_partitions_by_key_and_in_turn(store: FileStore) -> None:
    await store.define(TOPIC, TopicOptions(partitions=4))
    found = await store.append(TOPIC, [event(n, key=f"k{n % 5}") for n in range(50)])
    by_key: dict[str, set[int]] = {}
    for number, receipt in enumerate(found):
        by_key.setdefault(f"k{number % 5}", set()).add(receipt.partition)
    assert all(len(partitions) == 1 for partitions in by_key.values())
    spread = await store.append(TOPIC, [event(n) for n in range(8)])
    assert {receipt.partition for receipt in spread} == {0, 1, 2, 3}


async def test_close_waits_for_the_publishers_that_wait(store: FileStore, tmp_path: Path) -> None:
    tasks = [asyncio.ensure_future(store.append(TOPIC, [event(n)])) for n in range(10)]
    await asyncio.sleep(0)
    await store.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, list | Closed) for result in results)
    kept = sum(isinstance(result, list) for result in results)
    folder = Folder(os.fspath(tmp_path), StoreOptions(reserve_bytes=0))
    assert folder.bounds(TOPIC, 0).next == kept + 1
    folder.close()
    with pytest.raises(Closed):
        await store.append(TOPIC, [event(1)])


async def test_a_duplicate_of_what_was_removed_has_its_own_id(store: FileStore) -> None:
    await store.define(TOPIC, TopicOptions(dedup_window_s=3600))
    sent = [event(n, idem_key="a") for n in range(3)]
    await store.append(TOPIC, [sent[0], event("next")])

    (kept,) = await store.append(TOPIC, [sent[1]])
    await store.trim(TOPIC, 0, 2)
    (gone,) = await store.append(TOPIC, [sent[2]])

    assert (kept.offset, kept.duplicate, kept.id) == (1, True, sent[0].id)
    assert (gone.offset, gone.duplicate, gone.id) == (1, True, sent[2].id)


async def test_a_new_group_is_done_with_a_log_whose_end_was_compacted_away(tmp_path: Path) -> None:
    got: list[object] = []
    store = FileStore(os.fspath(tmp_path), reserve_bytes=0)
    async with LocalBus(store) as bus:
        await bus.define(TOPIC, compact=True, segment_records=2)
        await bus.publish(TOPIC, "kept", key="a")
        for payload in (1, 2, None):
            await bus.publish(TOPIC, payload, key="b")
        writer = store.folder.writer(TOPIC, 0)
        writer.roll(writer.begin())
        writer.end()
        assert upkeep.compact(store.folder, TOPIC, 0) == 3
        bus.on(TOPIC, group="g")(lambda event: got.append(event.payload))
        await bus.start()
        assert await bus.drain(10)
        assert await store.update(KEY, lambda group: group.floor) == 4
        await bus.publish(TOPIC, "new")
        assert await bus.drain(10)
    assert got == ["kept", "new"]


async def test_short_scripts_alone_tend_what_they_finish(tmp_path: Path) -> None:
    keeps = TopicOptions(segment_records=5, retention_records=5)
    for number in range(23):
        store = FileStore(os.fspath(tmp_path), reserve_bytes=0)
        await store.define(TOPIC, keeps)
        await store.append(TOPIC, [event(number)])
        await store.close()
    folder = Folder(os.fspath(tmp_path), StoreOptions(reserve_bytes=0))
    first, end = folder.bounds(TOPIC, 0)
    assert end == 24
    assert 5 <= end - first < 10
    assert len([name for name in folder.names("wal") if name.endswith(".jsonl")]) <= 3
    folder.close()


async def test_an_upkeep_that_fails_at_the_end_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(os.fspath(tmp_path), reserve_bytes=0)
    await store.define(TOPIC, TopicOptions(segment_records=1, compact=True))
    for number in range(3):
        await store.append(TOPIC, [event(number)])
    path = tmp_path / "wal" / "t.00000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"payload":0', b'"payload":9'))
    await store.close()
    assert "upkeep failed: t.00000001.jsonl is damaged" in caplog.text
