"""A full disk: a typed error, nothing torn in sight, acks go on, publishing resumes by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import trunkline
from trunkline.errors import StorageFull, TrunklineError
from trunkline.folder import Folder, upkeep
from trunkline.log import atomic
from trunkline.log.writer import PartitionWriter
from trunkline.options import GroupOptions, StoreOptions, TopicOptions

from .promises import OPTIONS, Promises, Say, StillClock, append, broken, publish, records_of
from .promises import values as values_of
from .scenes import GROUP, KEY, TOPIC, take


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file may grow beyond ``size``: a write up to it is short, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def squeezed(root: str, size: int, say: Say) -> set[str]:
    """Three records, a rollover and an ack while no file may grow; then once more with room."""
    folder = Folder(root, OPTIONS, StillClock())
    folder.define(TOPIC, TopicOptions(segment_records=2))
    errors: set[str] = set()

    def tried(action: Callable[[], object]) -> bool:
        try:
            action()
        except TrunklineError as error:
            errors.add(type(error).__name__)
            return False
        return True

    publish(folder, say, TOPIC, 1)
    policy = GroupOptions(ordering="none")
    folder.step(KEY, lambda group: group.define(policy, 0))
    with file_limit(size):
        for number in (2, 3, 4):
            if not tried(lambda n=number: publish(folder, say, TOPIC, n, 10 + n)):  # type: ignore[misc]
                say("failed", TOPIC, [number, 10 + number])
                assert folder.is_full
        reader = Folder(root, OPTIONS, StillClock())
        seen = values_of(records_of(reader, TOPIC))
        assert list(seen) == list(range(1, len(seen) + 1))
        say("means", TOPIC, GROUP, [1])
        if tried(lambda: take(folder, 1)) and tried(
            lambda: folder.step(KEY, lambda group: group.settle([1]))
        ):
            say("settled", TOPIC, GROUP, [1])
    publish(folder, say, TOPIC, 5)
    assert not folder.is_full
    folder.close()
    return errors


def play(root: str, size: int) -> tuple[set[str], list[str]]:
    told: list[bytes] = []
    errors = squeezed(root, size, lambda *what: told.append(msgspec.json.encode(what)))
    return errors, broken(root, Promises(told))


def check_limits(place: Path, sizes: range) -> set[str]:
    seen: set[str] = set()
    root = os.fspath(place / "bus")
    for size in sizes:
        shutil.rmtree(root, ignore_errors=True)
        errors, problems = play(root, size)
        assert not problems, f"with files of {size} bytes: {problems}"
        seen |= errors
    return seen


@pytest.fixture(autouse=True)
def no_signal() -> Iterator[None]:
    """Python ignores SIGXFSZ, so that a file too large is an error and not the end."""
    import signal

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGXFSZ, before)


def test_a_disk_that_is_full_at_any_byte(tmp_path: Path) -> None:
    assert check_limits(tmp_path, range(150, 900, 5)) == {"StorageFull"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_disk_that_is_full_at_every_byte(tmp_path: Path) -> None:
    assert check_limits(tmp_path, range(1200)) == {"StorageFull"}


def test_a_torn_write_that_is_left_behind_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(self: PartitionWriter, head: object) -> None:
        self._close_segment()

    def hopeful(self: PartitionWriter, head: object) -> bool:
        return True

    monkeypatch.setattr(PartitionWriter, "_roll_back", careless)
    monkeypatch.setattr(PartitionWriter, "_fits", hopeful)
    found = []
    for size in range(200, 400, 20):
        shutil.rmtree(tmp_path / "bus", ignore_errors=True)
        found += play(os.fspath(tmp_path / "bus"), size)[1]
    assert found


def fill(path: Path) -> None:
    """Leave no byte on the device."""
    with open(path, "ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (65536, 4096, 512, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    place = tmp_path / "device"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", os.fspath(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can be mounted only as root")
    yield place
    subprocess.run(["umount", "-l", os.fspath(place)], check=True)


def test_acks_and_retention_work_from_the_reserve(device: Path) -> None:
    root = os.fspath(device / "bus")
    folder = Folder(root, StoreOptions(reserve_bytes=1 << 20), StillClock())
    folder.define(TOPIC, TopicOptions(segment_records=2, retention_records=1))
    append(folder, TOPIC, [1, 2])
    append(folder, TOPIC, [3, 4])
    append(folder, TOPIC, [5])
    folder.step(KEY, lambda group: group.define(GroupOptions(ordering="none"), 0))
    fill(device / "filler")
    with pytest.raises(StorageFull) as caught:
        append(folder, TOPIC, range(100, 200))
    assert caught.value.hint
    assert folder.is_full
    leases = take(folder, 5)
    assert len(leases) == 5
    assert folder.step(KEY, lambda group: group.settle(range(1, 6))) == [1, 2, 3, 4, 5]
    assert upkeep.retain(folder, TOPIC, 0) == 4
    assert upkeep.trim(folder, TOPIC, 0, 6) == 1
    with pytest.raises(StorageFull):  # the reserve is for acks, so publishing waits for it
        append(folder, TOPIC, [6])
    os.unlink(device / "filler")
    assert append(folder, TOPIC, [6]) == {6: 6}
    assert not folder.is_full
    assert os.stat(f"{root}/reserve").st_size == 1 << 20
    folder.close()
    again = Folder(root, OPTIONS, StillClock())
    assert values_of(records_of(again, TOPIC)) == {6: 6}
    assert again.group(KEY).floor == 5
    again.close()


async def test_a_group_begins_from_the_reserve(device: Path) -> None:
    async with trunkline.connect(f"file:{device}/bus") as bus:
        await bus.publish(TOPIC, 1)
        fill(device / "filler")
        async with bus.subscribe(TOPIC, group=GROUP) as stream:
            delivery = await asyncio.wait_for(anext(stream), timeout=30.0)
            await delivery.ack()
        os.unlink(device / "filler")
        assert (await bus.publish(TOPIC, 2)).offset == 2


async def test_health_shows_it_and_publishing_resumes(device: Path) -> None:
    async with trunkline.connect(f"file:{device}/bus") as bus:
        await bus.publish(TOPIC, 1)
        fill(device / "filler")
        with pytest.raises(StorageFull):
            await bus.publish(TOPIC, "x" * 100_000)
        health = await bus.health()
        assert health["events_storage_full"] is True
        assert health["ok"] is False
        os.unlink(device / "filler")
        assert (await bus.publish(TOPIC, 2)).offset == 2
        assert (await bus.health())["events_storage_full"] is False


async def test_a_publisher_that_waits_goes_on_by_itself(device: Path) -> None:
    url = f"file:{device}/bus"
    async with trunkline.connect(url, on_full="wait", poll_s=0.01) as bus:
        await bus.publish(TOPIC, 1)
        fill(device / "filler")
        late = [asyncio.ensure_future(bus.publish(TOPIC, "x" * 50_000)) for _ in range(3)]
        done, _ = await asyncio.wait(late, timeout=0.2)
        assert not done
        assert (await bus.health())["events_storage_full"] is True
        os.unlink(device / "filler")
        receipts = await asyncio.wait_for(asyncio.gather(*late), timeout=1.0)
        assert sorted(receipt.offset for receipt in receipts) == [2, 3, 4]


def test_no_room_for_a_new_topic_is_typed_too(device: Path) -> None:
    folder = Folder(os.fspath(device / "bus"), OPTIONS, StillClock())
    fill(device / "filler")
    with pytest.raises(StorageFull):
        append(folder, "fresh", [1])
    with pytest.raises(StorageFull):
        folder.define("fresh", TopicOptions(partitions=2))
    os.unlink(device / "filler")
    assert append(folder, "fresh", [1]) == {1: 1}
    folder.close()


def test_the_limit_is_what_the_kernel_makes_of_it(tmp_path: Path) -> None:
    """That the tests above see short writes at all."""
    program = (
        "import os, resource, signal\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3, 3))\n"
        f"fd = os.open({os.fspath(tmp_path / 'x')!r}, os.O_WRONLY | os.O_CREAT)\n"
        "print(os.write(fd, b'12345'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "3\n"
    with open(tmp_path / "x", "rb") as file:
        assert file.read() == b"123"
    assert atomic.FULL
