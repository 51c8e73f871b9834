"""How a disk is touched: modes, links, locks, network file systems."""

from __future__ import annotations

import builtins
import fcntl
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.log_events import TOPIC, publish
from trunkline.errors import LockTimeout, StorageError, StorageFull
from trunkline.folder import Folder, upkeep
from trunkline.log import atomic
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, StoreOptions, TopicOptions


@pytest.fixture
def wide_open() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_files_are_ours_alone(wide_open: None, root: str) -> None:
    folder = Folder(root, StoreOptions(reserve_bytes=4096))
    folder.define(TOPIC, TopicOptions(segment_records=1))
    publish(folder, [1, 2, 3])
    upkeep.pack_segments(folder, TOPIC, 0)
    key = GroupKey(TOPIC, 0, "g")
    folder.step(key, lambda group: group.define(GroupOptions(), 0))
    folder.join()
    folder._groups._files[key].renew(1)
    seen = set()
    for place, _, files in os.walk(root):
        assert stat.S_IMODE(os.stat(place).st_mode) == 0o700, place
        for name in files:
            assert stat.S_IMODE(os.stat(os.path.join(place, name)).st_mode) == 0o600, name
            seen.add(name.rpartition(".")[2])
    assert {"head", "jsonl", "zst", "index", "journal", "json", "bak", "lock", "reserve"} <= seen
    folder.close()


def plant(kind: str, path: Path, tmp_path: Path) -> Path:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path.unlink(missing_ok=True)
    if kind == "symlink":
        path.symlink_to(victim)
    elif kind == "hard link":
        os.link(victim, path)
    else:
        os.mkfifo(path)
    return victim


@pytest.mark.parametrize("kind", ["symlink", "hard link", "fifo"])
@pytest.mark.parametrize(
    "name", ["wal/t.00000001.jsonl", "wal/t.head", "offsets/t__g.journal", "offsets/t__g.lock"]
)
def test_what_was_planted_is_refused(kind: str, name: str, root: str, tmp_path: Path) -> None:
    Folder(root, StoreOptions(reserve_bytes=0)).close()
    victim = plant(kind, Path(root, name), tmp_path)
    folder = Folder(root, StoreOptions(reserve_bytes=0))
    key = GroupKey(TOPIC, 0, "g")
    with pytest.raises((StorageError, OSError)):
        publish(folder, [1]) if name.startswith("wal") else folder.step(
            key, lambda group: group.define(GroupOptions(), 0)
        )
    assert victim.read_bytes() == b"precious"
    folder.abandon()


def test_a_link_in_the_place_of_a_file_is_neither_read_nor_written(
    root: str, tmp_path: Path
) -> None:
    Folder(root, StoreOptions(reserve_bytes=0)).close()
    victim = plant("symlink", Path(root, "topics.json"), tmp_path)
    victim.write_bytes(b"{}")
    folder = Folder(root, StoreOptions(reserve_bytes=0))
    with pytest.raises(StorageError, match="not a plain file"):
        folder.define(TOPIC, TopicOptions(partitions=2))
    assert victim.read_bytes() == b"{}"
    folder.close()


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("22 1 0:3 / {} rw - nfs4 server:/x rw", "nfs4"),
        ("22 1 0:3 / {} rw - fuse.sshfs host: rw", "fuse.sshfs"),
        ("22 1 0:3 / {} rw shared:1 - cifs //server/x rw", "cifs"),
        ("22 1 0:3 / {} rw - ext4 /dev/vda rw", None),
        ("22 1 0:3 / /elsewhere rw - nfs4 server:/x rw", None),
    ],
)
def test_a_network_file_system_is_refused_unless_forced(
    line: str, kind: str | None, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.open
    mounts = "1 0 0:1 / / rw - ext4 /dev/vda rw\n" + line.format(os.path.dirname(root)) + "\n"

    def fake(path: Any, *args: Any, **options: Any) -> Any:
        return (
            io.StringIO(mounts) if path == "/proc/self/mountinfo" else real(path, *args, **options)
        )

    monkeypatch.setattr(builtins, "open", fake)
    assert atomic.network_kind(root) == kind
    if kind is None:
        Folder(root, StoreOptions(reserve_bytes=0)).close()
        return
    with pytest.raises(StorageError, match=kind):
        Folder(root, StoreOptions(reserve_bytes=0))
    Folder(root, StoreOptions(reserve_bytes=0, allow_network=True)).close()


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.fspath(tmp_path / "x")
    atomic.replace_file(path, b"old")

    def full(fd: int, data: bytes) -> None:
        os.write(fd, data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "write_all", full)
    with pytest.raises(StorageFull):
        atomic.replace_file(path, b"new")
    assert os.listdir(tmp_path) == ["x"]
    assert Path(path).read_bytes() == b"old"


def test_a_lock_is_waited_for_and_then_an_error(tmp_path: Path) -> None:
    path = os.fspath(tmp_path / "lock")
    one, two = (atomic.open_file(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    atomic.lock(one, 0.0, path)
    assert atomic.is_locked(path)
    with pytest.raises(LockTimeout) as caught:
        atomic.lock(two, 0.02, path)
    assert caught.value.path == path
    atomic.unlock(one)
    atomic.lock(two, 0.0, path)
    os.close(one)
    os.close(two)
    assert not atomic.is_locked(path)
    assert not atomic.is_locked(path + "x")


def test_only_a_lock_that_nobody_holds_is_removed(tmp_path: Path) -> None:
    path = os.fspath(tmp_path / "lock")
    fd = atomic.open_file(path, os.O_RDWR | os.O_CREAT)
    atomic.lock(fd, 0.0, path)
    atomic.remove_unlocked(path)
    assert os.path.exists(path)
    os.close(fd)
    atomic.remove_unlocked(path)
    atomic.remove_unlocked(path)
    assert not os.path.exists(path)


def test_a_lock_that_was_made_anew_meanwhile_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.fspath(tmp_path / "lock")
    os.close(atomic.open_file(path, os.O_RDWR | os.O_CREAT))
    holds = -1

    def delayed(fd: int, how: int) -> None:
        nonlocal holds
        monkeypatch.undo()
        atomic.remove_unlocked(path)  # by another process, and a third one takes it
        holds = atomic.open_file(path, os.O_RDWR | os.O_CREAT)
        atomic.lock(holds, 0.0, path)
        fcntl.flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", delayed)
    atomic.remove_unlocked(path)
    assert atomic.is_locked(path)
    os.close(holds)


def test_folders_are_made_with_their_parents(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c"
    atomic.make_dir(os.fspath(path))
    atomic.make_dir(os.fspath(path))
    assert path.is_dir()


@pytest.mark.parametrize("call", ["open", "rename", "fsync"])
def test_whatever_fails_is_a_storage_error(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    path = os.fspath(tmp_path / "x")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StorageError) as caught:
            atomic.replace_file(path, b"new")
    assert caught.value.path == path
