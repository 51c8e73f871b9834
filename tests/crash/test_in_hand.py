"""Kill -9 of a consumer: what was in its hands counts as a try, what was prefetched does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from trunkline.broker.server import Broker
from trunkline.bus import Outcome
from trunkline.bus.connect import connect, open_local
from trunkline.folder import Folder, upkeep
from trunkline.folder.in_hand import GroupMarks, HandFile
from trunkline.folder.in_hand import read as read_marks
from trunkline.group import Group, Lease
from trunkline.names import GroupKey
from trunkline.options import BrokerOptions, GroupOptions
from trunkline.store import AWAY
from trunkline.store.file import FileStore

from .poisoned import GROUP, POLICY, TOPIC

_NACK = Outcome.NACK
TESTS = str(Path(__file__).parents[1])
KEY = GroupKey(TOPIC, 0, GROUP)
COUNT, BAD = 60, 23


@contextlib.asynccontextmanager
async def consumer(*words: object) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "crash.poisoned", *map(str, words), cwd=TESTS
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def run_until_it_ends_well(*words: object) -> int:
    """Start the consumer again for as long as it is killed; how often that was."""
    for kills in range(20):
        async with consumer(*words) as process, asyncio.timeout(60):
            if await process.wait() == 0:
                return kills
            assert process.returncode == -signal.SIGKILL
    raise AssertionError("the record goes on killing its process")


async def fill(url: str, keys: int) -> None:
    async with connect(url) as bus:
        for n in range(1, COUNT + 1):
            key = f"k{n % keys}" if keys else None
            await bus.publish(TOPIC, "bad" if n == BAD else n, key=key)


async def dead(url: str) -> list[int]:
    async with connect(url) as bus:
        return [letter.origin async for letter in bus.dead_letters(TOPIC).letters()]


@pytest.mark.parametrize(
    ("workers", "how", "keys"), [(1, "handler", 0), (8, "handler", 0), (10, "batches", 2)]
)
async def test_a_record_that_kills_its_process_is_a_dead_letter_alone(
    tmp_path: Path, workers: int, how: str, keys: int
) -> None:
    url = f"file:{tmp_path / 'bus'}"
    await fill(url, keys)
    assert await run_until_it_ends_well(url, workers, how) == POLICY.max_retries + 1
    assert await dead(url) == [BAD]


@pytest.mark.parametrize(("workers", "how"), [(1, "handler"), (8, "handler"), (10, "batches")])
async def test_the_same_behind_a_broker(tmp_path: Path, workers: int, how: str) -> None:
    options = BrokerOptions(url=f"file:{tmp_path / 'bus'}", port=0, metrics_s=0)
    async with Broker(options) as broker:
        await fill(broker.url, 0)
        kills = await run_until_it_ends_well(broker.url, workers, how)
        if how == "batches":  # the acks of a batch leave before the next batch is read
            assert kills == POLICY.max_retries + 1
        else:
            # A killed client takes acks along that waited to be sent: then the broker may take a
            # record that was done for the one in hand, and the try of the bad one goes uncounted.
            assert kills > POLICY.max_retries
        assert await dead(broker.url) == [BAD]


async def test_prefetched_records_of_a_killed_process_count_no_try(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'bus'}"
    await fill(url, 0)
    async with consumer(url, 1, "handler") as process:
        await process.wait()
    folder = Folder(str(tmp_path / "bus"))
    found = folder.look(KEY, lambda group: (dict(group.attempts), set(group.ledger.suspects)))
    assert found == ({BAD: 1}, {BAD})
    folder.close()


@pytest.mark.parametrize(("away", "attempts"), [(False, [2, 1, 1]), (True, [2, 2, 2])])
async def test_prefetched_records_of_a_stopped_process_count_no_try(
    tmp_path: Path, away: bool, attempts: list[int]
) -> None:
    """The marks of a broker say that its clients have records: nobody knows which of them."""
    url, policy = f"file:{tmp_path}", GroupOptions(ack_timeout_s=0.05, backoff_base_s=0.0)
    async with connect(url) as bus:
        for n in (1, 2, 3):
            await bus.publish(TOPIC, n)
    stopped = FileStore(str(tmp_path))
    marks = stopped.in_hand(KEY)
    assert marks is not None

    def take(group: Group) -> list[Lease]:
        now = stopped.clock.monotonic()
        group.define(policy, 0)
        for offset in (1, 2, 3):
            group.offer(offset)
        return group.take(stopped.member, now=now, wall=0.0, limit=3).leases

    for lease in await stopped.change(KEY, take):
        if lease.offset == 1:
            marks.begin(lease.offset)
    if away:
        marks.begin(AWAY)
    async with connect(url) as bus, bus.subscribe(TOPIC, group=GROUP) as stream:
        found = [await anext(stream) for _ in range(3)]
        assert [one.attempt for one in sorted(found, key=lambda one: one.offset)] == attempts
        for one in found:
            await one.ack()
    await stopped.close()


async def test_a_broker_marks_that_its_clients_have_records(tmp_path: Path) -> None:
    options = BrokerOptions(url=f"file:{tmp_path}", port=0, metrics_s=0)
    async with Broker(options) as broker, connect(broker.url) as bus:
        await bus.publish(TOPIC, 1)
        async with bus.subscribe(TOPIC, group=GROUP) as stream:
            await anext(stream)
            (path,) = (tmp_path / "members").glob("*.hand")
            is_in_hand = read_marks(str(path), KEY)
            assert is_in_hand is not None
            assert (is_in_hand(AWAY), is_in_hand(1)) == (True, False)


@pytest.mark.parametrize(
    "plant", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "device"]
)
async def test_what_is_no_file_of_marks_hangs_nobody_who_frees_a_dead_member(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    url = f"file:{tmp_path / 'bus'}"
    await fill(url, 0)
    async with consumer(url, 1, "handler") as process:
        await process.wait()
    (marks,) = (tmp_path / "bus/members").glob("*.hand")
    marks.unlink()
    plant(marks)
    async with asyncio.timeout(20), connect(url) as bus, bus.subscribe(TOPIC, group=GROUP) as one:
        assert (await anext(one)).attempt == 2  # nobody knows what was in hand: each lease counts


async def test_the_marks_of_a_killed_process_go_when_no_group_needs_them(tmp_path: Path) -> None:
    url, place = f"file:{tmp_path / 'bus'}", tmp_path / "bus/members"
    await fill(url, 0)
    async with consumer(url, 1, "handler") as process:
        await process.wait()
    folder = Folder(str(tmp_path / "bus"))
    upkeep.tend(folder)
    assert len(list(place.glob("*.hand"))) == 1  # the group still has leases of that member
    folder.step(KEY, lambda group: None)
    upkeep.tend(folder)
    assert not list(place.glob("*.hand"))
    folder.close()


def marked(path: Path, key: GroupKey = KEY) -> list[int]:
    """The offsets that are marked, of the first 2,000."""
    is_in_hand = read_marks(str(path), key)
    assert is_in_hand is not None
    return [offset for offset in range(1, 2001) if is_in_hand(offset)]


async def test_a_process_that_leaves_takes_its_marks_along(tmp_path: Path) -> None:
    async with open_local(f"file:{tmp_path}") as bus:
        await bus.publish(TOPIC, 1)
        async with bus.subscribe(TOPIC, group=GROUP) as stream:
            delivery = await anext(stream)
            (path,) = (tmp_path / "members").glob("*.hand")
            assert marked(path) == [1]
            await delivery.ack()
            assert marked(path) == []
    assert not os.listdir(tmp_path / "members")


async def test_a_failure_stays_marked_until_it_is_committed(tmp_path: Path) -> None:
    async with open_local(f"file:{tmp_path}") as bus:
        await bus.publish(TOPIC, 1)
        async with bus.subscribe(TOPIC, group=GROUP, policy=POLICY) as stream:
            (await anext(stream)).finish(_NACK)
            (path,) = (tmp_path / "members").glob("*.hand")
            assert marked(path) == [1]
            delivery = await anext(stream)
            assert delivery.attempt == 2
            await delivery.ack()


class TestMarks:
    def test_any_number_of_records_is_kept(self, tmp_path: Path) -> None:
        path, other = tmp_path / "m.hand", KEY._replace(group="other")
        file = HandFile(str(path))
        marks, others = GroupMarks(file, KEY), GroupMarks(file, other)
        for offset in range(1, 2001):
            marks.begin(offset)
        others.begin(5)
        for offset in range(1, 2001, 2):
            marks.end(offset)
        assert marked(path) == list(range(2, 2001, 2))
        assert marked(path, other) == [5]
        for offset in range(2, 2001, 2):
            marks.end(offset)
        assert marked(path) == []
        file.close()
        marks.begin(1)  # a reader that is late
        marks.end(1)

    def test_a_record_is_marked_once(self, tmp_path: Path) -> None:
        path = tmp_path / "m.hand"
        marks = GroupMarks(HandFile(str(path)), KEY)
        for offset in (1, 1, 513, 513):
            marks.begin(offset)
        for offset in (1, 513):
            marks.end(offset)
        assert marked(path) == []

    def test_a_file_that_is_not_there_says_nothing(self, tmp_path: Path) -> None:
        assert read_marks(str(tmp_path / "m.hand"), KEY) is None
