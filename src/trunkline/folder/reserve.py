"""The reserve: a file that takes up room, so that acks and retention work on a full device.

When the device is full the reserve is given up, and publishing waits until it is there again.
"""

from __future__ import annotations

import contextlib
import os

from trunkline.errors import StorageFull
from trunkline.log import atomic


class Reserve:
    def __init__(self, root: str, size: int) -> None:
        self.is_full = False  # whether the device was full when this process last wrote
        self._root = root
        self._path = os.path.join(root, "reserve")
        self._size = size

    def fill(self) -> bool:
        """Take up the room. False if the device has not enough of it."""
        try:
            fd = atomic.open_file(self._path, os.O_WRONLY | os.O_CREAT)
        except OSError:
            return False
        try:
            if os.fstat(fd).st_size < self._size:
                os.posix_fallocate(fd, 0, self._size)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
            return False
        finally:
            os.close(fd)
        return True

    def spend(self) -> bool:
        """Give the room up for something that must be written on a full device. False if there is
        none left.
        """
        self.is_full = True
        try:
            if os.stat(self._path).st_size == 0:
                return False
            os.truncate(self._path, 0)
        except OSError:
            return False
        return True

    def check(self) -> None:
        """``StorageFull`` if the device was full and the reserve cannot be filled again."""
        if self.is_full and not self.fill():
            raise StorageFull(
                "no room to write: the reserve cannot be filled again",
                path=self._root,
                hint="free some space; publishing then goes on by itself",
            )

    def look_again(self) -> None:
        """Find out whether a device that was full has room again."""
        if self.is_full:
            self.is_full = not self.fill()

    def note(self, *, full: bool) -> None:
        """Note whether the last write found the device full."""
        self.is_full = full
