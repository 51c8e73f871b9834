"""A sync that fails: whoever waited is told, its file is never used again, the log goes on."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from trunkline.errors import StorageError, StorageFull
from trunkline.folder import Folder
from trunkline.log import atomic
from trunkline.store.file import FileStore

from .plants import sync_tried_again
from .promises import Promises, append, broken, event, records_of, values
from .scenes import KEY, TOPIC, failing, grouped, open_folder

TESTS = str(Path(__file__).parents[1])


class Disk:
    """Counts syncs by file, and fails the n-th."""

    def __init__(self, fail_at: int, code: int) -> None:
        self.count = 0
        self.failed: list[tuple[str, int]] = []
        self.again: list[str] = []
        self._fail_at, self._code = fail_at, code

    def sync(self, fd: int) -> None:
        self.count += 1
        file = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_ino
        if file in self.failed:
            self.again.append(file[0])
        if self.count == self._fail_at:
            self.failed.append(file)
            raise OSError(self._code, os.strerror(self._code))


def play(root: str, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Promises:
    told: list[bytes] = []
    monkeypatch.setattr(atomic, "_fdatasync", disk.sync)
    failing(root, lambda *what: told.append(msgspec.json.encode(what)))
    monkeypatch.undo()
    return Promises(told)


def every_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> tuple[int, list[str]]:
    """Fail each sync of the scene in turn; how many there are, and what went wrong."""
    problems: list[str] = []
    for number in range(1, 1000):
        root = os.fspath(tmp_path / f"bus{number}")
        disk = Disk(number, code)
        kept = play(root, disk, monkeypatch)
        problems += [f"sync {number}: {path} was synced again" for path in disk.again]
        problems += [f"sync {number}: {one}" for one in broken(root, kept)]
        shutil.rmtree(root)
        if disk.count < number:
            return number - 1, problems
    raise AssertionError("the scene never ends")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_no_false_promise_and_no_second_sync(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, problems = every_failure(tmp_path, monkeypatch, code)
    assert not problems, "\n".join(problems)
    assert count > 15


def test_a_sync_that_is_tried_again_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "sync", atomic.sync)  # put back later
    sync_tried_again()
    sync = atomic.sync
    problems: list[str] = []
    for number in range(1, 6):
        disk = Disk(number, errno.EIO)
        told: list[bytes] = []
        with monkeypatch.context() as patch:
            patch.setattr(atomic, "sync", sync)
            patch.setattr(atomic, "_fdatasync", disk.sync)
            failing(os.fspath(tmp_path / str(number)), lambda *w: told.append(b""))  # noqa: B023
        problems += disk.again
    assert problems


@pytest.mark.parametrize(("code", "kind"), [(errno.EIO, StorageError), (errno.ENOSPC, StorageFull)])
def test_the_log_goes_on_in_a_new_segment(
    code: int, kind: type[StorageError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(os.fspath(tmp_path))
    append(folder, TOPIC, [1])
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "_fdatasync", Disk(1, code).sync)
        with pytest.raises(kind) as caught:
            append(folder, TOPIC, [2, 3])
    assert type(caught.value) is kind
    assert values(records_of(folder, TOPIC)) == {1: 1}
    assert append(folder, TOPIC, [4]) == {2: 4}
    assert folder.head(TOPIC, 0).segment == 2
    assert values(records_of(folder, TOPIC)) == {1: 1, 2: 4}
    folder.close()
    again = open_folder(os.fspath(tmp_path))
    assert values(records_of(again, TOPIC)) == {1: 1, 2: 4}
    again.close()


async def test_every_publisher_that_waited_for_the_batch_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(os.fspath(tmp_path), reserve_bytes=0)
    await store.append(TOPIC, [event(TOPIC, 1)])
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "_fdatasync", Disk(1, errno.EIO).sync)
        waiting = [store.append(TOPIC, [event(TOPIC, n)]) for n in range(2, 12)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [StorageError] * 10
    receipts = await store.append(TOPIC, [event(TOPIC, 20)])
    assert receipts[0].offset == 2
    assert values(records_of(store.folder, TOPIC)) == {1: 1, 2: 20}
    await store.close()


def settle_with_a_failing_journal(root: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Folder, int]:
    grouped(root, lambda *_: None)
    folder = open_folder(root)
    folder.step(KEY, lambda group: group.settle([1]))
    before = os.stat(f"{root}/offsets/t__g.journal").st_ino
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "_fdatasync", Disk(1, errno.EIO).sync)
        with pytest.raises(StorageError):
            folder.sync_groups()
        with pytest.raises(StorageError):  # nothing is durable yet, so it must not say so
            folder.sync_groups()
    return folder, before


def test_a_journal_that_fails_to_sync_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = os.fspath(tmp_path)
    folder, before = settle_with_a_failing_journal(root, monkeypatch)
    folder.step(KEY, lambda group: group.settle([2]))
    folder.sync_groups()
    assert os.stat(f"{root}/offsets/t__g.journal").st_ino != before
    folder.abandon()
    assert open_folder(root).group(KEY).floor == 2


def inject(place: Path, number: int, code: str) -> Promises:
    """The same with a kernel that fails a call: strace puts the error in its place."""
    told = place / f"told{number}"
    program = (
        "import sys, msgspec\n"
        "from crash.scenes import failing\n"
        "file = open(sys.argv[2], 'wb', 0)\n"
        "failing(sys.argv[1], lambda *what: file.write(msgspec.json.encode(what) + b'\\n'))\n"
    )
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync"]
    command += ["-e", f"inject=fdatasync:error={code}:when={number}"]
    command += [sys.executable, "-c", program, os.fspath(place / f"bus{number}"), os.fspath(told)]
    subprocess.run(command, cwd=TESTS, check=True)
    return Promises(told.read_bytes().splitlines())


def check_injected(tmp_path: Path, numbers: range, code: str) -> int:
    if shutil.which("strace") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("strace is missing: make tools")
        pytest.skip("strace is missing: make tools")
    failed = 0
    for number in numbers:
        kept = inject(tmp_path, number, code)
        failed += sum(map(len, kept.failed.values()))
        assert not broken(os.fspath(tmp_path / f"bus{number}"), kept), number
    return failed


@pytest.mark.parametrize("code", ["EIO", "ENOSPC"])
def test_the_same_with_a_failing_kernel(code: str, tmp_path: Path) -> None:
    assert check_injected(tmp_path, range(3, 12, 3), code) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("code", ["EIO", "ENOSPC", "EDQUOT"])
def test_every_call_with_a_failing_kernel(code: str, tmp_path: Path) -> None:
    assert check_injected(tmp_path, range(1, 30), code) > 5


def test_a_failed_sync_of_the_head_stops_a_trim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trimmed is out of sight for good only once the head is durable."""
    from trunkline.folder import upkeep

    folder = open_folder(os.fspath(tmp_path))
    append(folder, TOPIC, [1, 2, 3])
    fail: Callable[[int], None] = Disk(1, errno.EIO).sync
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "_fdatasync", fail)
        with pytest.raises(StorageError):
            upkeep.trim(folder, TOPIC, 0, 2)
    with pytest.raises(StorageError):
        upkeep.trim(folder, TOPIC, 0, 3)
    assert append(folder, TOPIC, [4]) == {4: 4}
    folder.close()
