"""Changes in folders as the kernel tells them: inotify, through libc.

A hint and no more: a process that waits for changes also looks now and then, and where there is
no inotify that is all it does.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Set
from typing import NamedTuple

_MODIFY, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x80, 0x100, 0x200
_SHORT, _KNOWN = 512, 64
_HEADER = struct.Struct("iIII")


class Change(NamedTuple):
    """A file that was written, made, moved in or removed. No name: some changes went untold."""

    folder: str
    name: str


class Inotify:
    def __init__(self, folders: Iterable[str]) -> None:
        """Begin to watch. ``OSError`` where it cannot be done."""
        import ctypes  # here, because most commands never wait

        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "inotify_init1"):
            raise OSError(errno.ENOSYS, "this system has no inotify")
        self.fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._folders: dict[int, str] = {}
        self._known: dict[bytes, Set[Change]] = {}  # a busy log says the same over and over
        for folder in folders:
            mask = _MODIFY | _MOVED_TO | _CREATE | _DELETE
            number = libc.inotify_add_watch(self.fd, os.fsencode(folder), mask)
            if number < 0:
                error = ctypes.get_errno()
                self.close()
                raise OSError(error, os.strerror(error), folder)
            self._folders[number] = folder

    def changes(self) -> Set[Change]:
        """What changed since this was last asked; it does not wait. ``fd`` is readable when there
        is something.
        """
        try:
            data = os.read(self.fd, 64 * 1024)
        except BlockingIOError:
            return set()
        known = self._known.get(data)
        if known is not None:
            return known
        found: set[Change] = set()
        position = 0
        while position < len(data):
            number, _, _, size = _HEADER.unpack_from(data, position)
            position += _HEADER.size
            name = data[position : position + size].rstrip(b"\0")
            position += size
            found.add(Change(self._folders.get(number, ""), os.fsdecode(name)))
        if len(data) <= _SHORT:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[data] = found
        return found

    def close(self) -> None:
        os.close(self.fd)
