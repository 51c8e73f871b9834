"""The lock of one group: one process at a time, and one thread of it, changes the group."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator

from trunkline.errors import LockTimeout
from trunkline.log import atomic


class GroupLock:
    """A file lock, with a thread lock in front: the file lock keeps no other thread of this
    process out. ``removed`` is called if the group was removed while this process waited.
    """

    def __init__(self, path: str, removed: Callable[[], None], *, read_only: bool) -> None:
        self._path = path
        self._removed = removed
        self._read_only = read_only
        self._fd = -1
        self._thread = threading.Lock()

    @contextlib.contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        self.acquire(timeout_s)
        try:
            yield
        finally:
            self.release()

    def acquire(self, timeout_s: float) -> None:
        if not self._thread.acquire(timeout=timeout_s):
            name = os.path.basename(self._path)
            raise LockTimeout(f"a thread has held {name} for {timeout_s} s", path=self._path)
        try:
            self._lock_file(timeout_s)
        except BaseException:
            self._thread.release()
            raise

    def release(self) -> None:
        try:
            if self._fd >= 0:
                atomic.unlock(self._fd)
        finally:
            self._thread.release()

    def close(self) -> None:
        """Close the file. That ends the file lock, also in a forked child, which shares it with
        its parent.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lock_file(self, timeout_s: float) -> None:
        flags = os.O_RDONLY if self._read_only else os.O_RDWR | os.O_CREAT
        while True:
            if self._fd < 0:
                try:
                    self._fd = atomic.open_file(self._path, flags)
                except OSError as error:
                    if self._read_only and error.errno == errno.ENOENT:
                        return  # the first transaction makes the file, so there was none yet
                    raise atomic.storage_error(error, self._path) from error
            atomic.lock(self._fd, timeout_s, self._path, shared=self._read_only)
            if os.fstat(self._fd).st_nlink:
                return
            self.close()
            self._removed()
