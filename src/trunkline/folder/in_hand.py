"""The records that this process's handlers have in hand, in a file that outlives the process.

The file ``members/<id>.hand`` is a mapped table of 8-byte slots. A mark is one store into memory:
no system call and no sync. The kernel keeps the page when the process is killed. The members that
are left read it then: a record that a handler had in hand counts as a try, a record that was only
prefetched does not. They read it also when a lease runs out of a process that is stopped or busy.
A power cut takes the table; then every lease of the member counts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from array import array
from binascii import crc32
from collections.abc import Callable

from trunkline.errors import StorageError
from trunkline.log import atomic, layout
from trunkline.names import GroupKey

SUFFIX = ".hand"
_SLOTS = 512  # one page; an offset has its place there by its last bits
_MASK = _SLOTS - 1
_OFFSET = 0xFFFF_FFFF
_BYTES = 8


class HandFile:
    """The marks of one member. A mark whose place is taken goes to any other free slot."""

    __slots__ = ("_displaced", "_free", "_path", "slots")

    def __init__(self, path: str) -> None:
        self._path = path
        self._displaced: dict[int, int] = {}  # slots by mark
        self._free: list[int] = []  # slots behind the first page
        self.slots = self._map(_SLOTS)

    def _map(self, count: int) -> memoryview:
        """Map ``count`` slots. They are written first: a store into a hole of a file ends the
        process if the device is full.
        """
        fd = atomic.open_file(self._path, os.O_RDWR | os.O_CREAT)
        try:
            have = os.fstat(fd).st_size
            os.lseek(fd, have, os.SEEK_SET)
            atomic.write_all(fd, bytes(count * _BYTES - have))
            found = mmap.mmap(fd, count * _BYTES)
        finally:
            os.close(fd)
        return memoryview(found).cast("Q")

    def displace(self, mark: int, place: int) -> None:
        """Keep a mark whose place is taken by another one."""
        if self.slots[place] == mark or mark in self._displaced:
            return
        if not self._free:
            count = len(self.slots)
            try:
                self.slots = self._map(2 * count)
            except (OSError, StorageError):
                return  # the device is full: the record goes uncounted if the process is killed
            self._free = list(range(count, 2 * count))
        slot = self._displaced[mark] = self._free.pop()
        self.slots[slot] = mark

    def remove(self, mark: int) -> None:
        slot = self._displaced.pop(mark, None)
        if slot is not None:
            self.slots[slot] = 0
            self._free.append(slot)

    def close(self) -> None:
        """Let go of the file. Marks that come later are kept nowhere."""
        slots, self.slots = self.slots, memoryview(bytearray(len(self.slots) * _BYTES)).cast("Q")
        slots.release()

    def remove_file(self) -> None:
        self.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class GroupMarks:
    """The marks of one group and partition in a member's file."""

    __slots__ = ("_file", "_shift", "_tag")

    def __init__(self, file: HandFile, key: GroupKey) -> None:
        self._file = file
        self._tag = _tag(key)
        self._shift = self._tag >> 32

    def begin(self, offset: int) -> None:
        """A handler has the record now."""
        self.begin_all([offset])

    def begin_all(self, offsets: list[int]) -> None:
        """A handler has these records now."""
        file, shift, tag = self._file, self._shift, self._tag
        slots = file.slots
        for offset in offsets:
            place = (offset + shift) & _MASK
            if slots[place]:
                file.displace(tag | offset & _OFFSET, place)
                slots = file.slots  # it may be larger now
            else:
                slots[place] = tag | offset & _OFFSET

    def end(self, offset: int) -> None:
        """No handler has the record any more. It may never have been marked."""
        self.end_all([offset])

    def end_all(self, offsets: list[int]) -> None:
        """No handler has these records any more. They may never have been marked."""
        file, shift, tag = self._file, self._shift, self._tag
        slots = file.slots
        for offset in offsets:
            place = (offset + shift) & _MASK
            mark = tag | offset & _OFFSET
            if slots[place] == mark:
                slots[place] = 0
            else:
                file.remove(mark)


def _tag(key: GroupKey) -> int:
    """The upper half of a group's marks. Never zero: an empty slot is."""
    return (crc32(layout.group_stem(*key).encode()) | 0x8000_0000) << 32


def read(path: str, key: GroupKey) -> Callable[[int], bool] | None:
    """Whether a member has an offset of this group in hand; None if its file is not there or cannot
    be read.
    """
    try:
        data = atomic.read_file(path)
    except (OSError, StorageError):
        return None
    marks = array("Q", data[: len(data) // _BYTES * _BYTES])
    tag = _tag(key)
    found = frozenset(marks)
    return lambda offset: tag | offset & _OFFSET in found
