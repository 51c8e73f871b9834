"""The few ways in which this package touches a disk.

Files are made 0600, folders 0700, links are not followed. A name is durable only after its folder
was synced, so every function that makes, replaces or removes a name syncs the folder as well.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable

from trunkline.errors import Corrupt, LockTimeout, StorageError, StorageFull

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
READ_ONLY = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
FILE_BYTES = 1 << 30  # a segment has a tenth of it
_BASE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in a file's place must not hang us
_fdatasync = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


def make_dir(path: str) -> None:
    """Make ``path`` and its missing parents, each of them durable."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(os.path.abspath(path))
    make_dir(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    sync_dir(parent)


def open_file(path: str, flags: int) -> int:
    """Open a regular file that is ours alone: a link or a device in its place is refused."""
    try:
        fd = os.open(path, flags | _BASE, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StorageError(f"not a plain file: {path}", path=path) from None
        raise
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(fd)
        raise StorageError(f"not a plain file: {path}", path=path)
    return fd


def is_plain(path: str) -> bool:
    """Whether ``open_file`` would open it, or nothing is there."""
    try:
        about = os.lstat(path)
    except FileNotFoundError:
        return True
    return stat.S_ISREG(about.st_mode) and about.st_nlink == 1


def read_file(path: str, most: int = FILE_BYTES) -> bytes:
    """All bytes of a plain file. One of more than ``most`` was not written by a bus."""
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            said = f"{path} has {size} bytes: a bus writes no file of more than {most}"
            raise Corrupt(said, path=path, position=most)
        return file.read(size)


def create_file(path: str, flags: int = os.O_RDWR) -> int:
    """Make a new file whose name is durable when this returns."""
    fd = open_file(path, flags | os.O_CREAT | os.O_EXCL)
    sync_dir(os.path.dirname(path))
    return fd


def write_all(fd: int, data: bytes) -> None:
    """Write every byte; a short write is continued, not forgotten."""
    written = os.write(fd, data)
    if written < len(data):
        view = memoryview(data)
        while written < len(data):
            written += os.write(fd, view[written:])


def sync(fd: int) -> None:
    """Wait until the file's bytes are on the device. Never call it twice after a failure: the
    kernel has dropped the pages by then and the second call would lie.
    """
    _fdatasync(fd)


def sync_dir(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: str, data: bytes) -> None:
    """Put ``data`` in the place of whatever ``path`` is now: all of it or none, durably."""
    temp = stage_file(path, data)
    try:
        move_file(temp, path)
    except OSError as error:
        raise storage_error(error, path) from error


def stage_file(path: str, data: bytes) -> str:
    """Write a file that may be moved to ``path``; its name."""
    temp = f"{path}.{os.urandom(4).hex()}.tmp"
    try:
        fd = open_file(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            write_all(fd, data)
            sync(fd)
        except OSError:
            os.unlink(temp)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        raise storage_error(error, path) from error
    return temp


def move_file(source: str, target: str) -> None:
    """Rename within one folder, durably."""
    os.rename(source, target)  # noqa: TID251 -- this is the one place
    sync_dir(os.path.dirname(target))


def remove_files(paths: list[str]) -> None:
    """Remove names of one folder, durably; those that are gone already are fine."""
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue
    if paths:
        sync_dir(os.path.dirname(paths[0]))


def storage_error(error: OSError, path: str) -> StorageError:
    if error.errno in FULL:
        return StorageFull(
            f"no room to write {os.path.basename(path)}: {error.strerror}",
            path=path,
            hint="free some space; publishing then goes on by itself",
        )
    said = f"{os.path.basename(path)}: {error.strerror}"
    hint = f"see its permissions: ls -l {path}" if error.errno == errno.EACCES else ""
    return StorageError(said, path=path, errno=error.errno, hint=hint)


def lock(fd: int, timeout_s: float, path: str, *, shared: bool = False) -> None:
    """Take the lock of an open file, alone or shared with others. The kernel gives it back when
    the process ends.
    """
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    try:
        fcntl.flock(fd, kind)
        return
    except BlockingIOError:
        pass
    deadline = time.monotonic() + timeout_s
    pause = 0.0001
    while True:
        if timeout_s:
            time.sleep(pause)
        try:
            fcntl.flock(fd, kind)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise LockTimeout(
                    f"{os.path.basename(path)} has been locked for {timeout_s} s",
                    path=path,
                    hint="another process holds it: is one of them stopped?",
                ) from None
            pause = min(pause * 1.5, 0.005)


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


def remove_unlocked(path: str, unless: Iterable[str] = ()) -> None:
    """Remove a lock file that no process holds, if none of some other files is there. A process
    that opened it meanwhile finds it unlinked.
    """
    try:
        fd = os.open(path, os.O_RDONLY | _BASE)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Others remove it too: what has the name by now may be another file, which somebody holds.
        if os.fstat(fd).st_nlink and not any(map(os.path.lexists, unless)):
            os.unlink(path)
    except (BlockingIOError, FileNotFoundError):
        return
    finally:
        os.close(fd)


def is_locked(path: str) -> bool:
    """Whether some process holds the lock of ``path``; a missing file is held by nobody."""
    try:
        fd = os.open(path, os.O_RDONLY | _BASE)
    except FileNotFoundError:
        return False
    except PermissionError:  # another user's: nobody can tell from here
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


_NETWORK = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "lustre", "gluster", "fuse.sshfs", "beegfs")


def network_kind(path: str) -> str | None:
    """The file system's type if it is one on which locks cannot be trusted."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    path = os.path.realpath(path)
    best, kind = "", ""
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split(" ")[4].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split(" ")[0]
    return kind if kind.startswith(_NETWORK) else None
