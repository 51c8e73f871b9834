"""What the options of a file store do, where another test does not show it already."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from trunkline.bus.connect import open_local
from trunkline.errors import StorageError, StorageFull
from trunkline.event import Receipt
from trunkline.log import atomic
from trunkline.options import StoreOptions
from trunkline.store.file import FileStore


async def test_publish_inflight_bounds_what_waits_for_the_disk(tmp_path: Path) -> None:
    most = 0
    async with open_local(f"file:{tmp_path}", publish_inflight=3) as bus:
        partition = bus.store.committer._partition("orders", 0)  # type: ignore[attr-defined]
        jobs = [asyncio.create_task(bus.publish("orders", 1)) for _ in range(20)]
        while not all(job.done() for job in jobs):
            most = max(most, len(partition.joining.events))
            await asyncio.sleep(0)
        assert (await bus.store.bounds("orders", 0)).next == 21
    assert 0 < most <= 3


@pytest.mark.parametrize("inline_commit_s", [0.0, 10.0])
async def test_no_publisher_overtakes_one_that_waits_for_room(
    tmp_path: Path, inline_commit_s: float
) -> None:
    url = f"file:{tmp_path}"
    async with open_local(url, publish_inflight=3, inline_commit_s=inline_commit_s) as bus:
        jobs: list[asyncio.Task[Receipt]] = []
        while len(jobs) < 60:
            jobs.append(asyncio.create_task(bus.publish("orders", len(jobs))))
            if len(jobs) % 4 == 0:
                await asyncio.sleep(0.0002)
        offsets = [receipt.offset for receipt in await asyncio.gather(*jobs)]
    assert offsets == list(range(1, 61))


async def test_a_publish_that_is_cancelled_while_waiting_for_room_writes_nothing(
    tmp_path: Path,
) -> None:
    async with open_local(f"file:{tmp_path}", publish_inflight=1) as bus:
        jobs = [asyncio.create_task(bus.publish("orders", number)) for number in range(3)]
        await asyncio.sleep(0)
        jobs[1].cancel()
        done = await asyncio.gather(*jobs, return_exceptions=True)
        assert isinstance(done[1], asyncio.CancelledError)
        payloads = [record.event.payload for record in await bus.read("orders")]
    assert payloads == [0, 2]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A device that has no room while the list says True."""
    state = [True]
    write = atomic.write_all

    def write_all(fd: int, data: bytes) -> None:
        if state[0] and b'"offset"' in data:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(fd, data)

    monkeypatch.setattr(atomic, "write_all", write_all)
    return state


async def test_on_full_raise_tells_the_publisher_and_the_health(
    tmp_path: Path, full: list[bool]
) -> None:
    async with open_local(f"file:{tmp_path}", on_full="raise") as bus:
        with pytest.raises(StorageFull):
            await bus.publish("orders", 1)
        assert (await bus.health())["events_storage_full"] is True

        full[0] = False
        assert (await bus.publish("orders", 2)).offset == 1
        assert (await bus.health())["events_storage_full"] is False


async def test_on_full_wait_lets_the_publisher_wait_for_room(
    tmp_path: Path, full: list[bool]
) -> None:
    async with open_local(f"file:{tmp_path}", on_full="wait", poll_s=0.01) as bus:
        job = asyncio.create_task(bus.publish("orders", 1))
        while not (await bus.health())["events_storage_full"]:
            await asyncio.sleep(0)
        assert not job.done()

        full[0] = False
        assert (await job).offset == 1


async def test_upkeep_s_says_how_often_retention_is_applied(tmp_path: Path) -> None:
    async with open_local(f"file:{tmp_path}", upkeep_s=0.01) as bus:
        await bus.define("orders", retention_records=2)
        await bus.publish_many("orders", [1, 2, 3, 4, 5])
        async with asyncio.timeout(10):
            while (await bus.store.bounds("orders", 0)).first < 4:
                await asyncio.sleep(0.005)
        assert [record.event.payload for record in await bus.read("orders", 4)] == [4, 5]


def test_a_network_file_system_is_refused_unless_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "network_kind", lambda _: "nfs4")
    with pytest.raises(StorageError, match="nfs4"):
        FileStore(str(tmp_path))
    assert FileStore(str(tmp_path), allow_network=True).options == StoreOptions(allow_network=True)


async def test_what_waits_for_room_does_not_grow_into_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little room is enough to go on with."""
    options: dict[str, Any] = {"on_full": "wait", "poll_s": 0.001, "publish_inflight": 3}
    async with open_local(f"file:{tmp_path}", **options) as bus:
        folder = bus.store.folder  # type: ignore[attr-defined]
        append, tries = folder.append, list[int]()

        def full(topic: str, partition: int, bodies: list[bytes], *rest: Any) -> Any:
            tries.append(len(bodies))
            if len(tries) < 10:
                raise StorageFull("no room", path=folder.path)
            return append(topic, partition, bodies, *rest)

        monkeypatch.setattr(folder, "append", full)
        done = await asyncio.gather(*(bus.publish("orders", number) for number in range(30)))
    assert [receipt.offset for receipt in done] == list(range(1, 31))
    assert max(tries) <= 2 * 3
