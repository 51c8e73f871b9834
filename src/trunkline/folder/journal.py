"""A group's journal, ``offsets/<name>.journal``: one line for each change of the group.

The first line, the header, says which generation the journal is and where the generation before
ended. Only a snapshot that reaches that place, or a later one, is a base to replay the journal on.

A line ``{"synced":n}`` says that the first ``n`` bytes were durable when it was written. A line
that does not fit behind the last such mark was torn by a power cut and is cut off. Before the mark
it is damage.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from trunkline.errors import StorageError
from trunkline.folder import snapshot
from trunkline.group.changes import Anchored, AnyOp
from trunkline.log import atomic, layout
from trunkline.log.line import Damaged, close_line, is_intact, parse_object
from trunkline.log.line import decode as decode_line

_encode = msgspec.json.Encoder().encode
_decode_op: Callable[[bytes], AnyOp] = msgspec.json.Decoder(AnyOp).decode
_MARK = b'{"synced":'


class Header(msgspec.Struct, frozen=True):
    """The first line of a journal, as far as it is read."""

    generation: int = 0
    after: int = 0
    format: int = 0
    epoch: int = 0
    anchor: Anchored | None = None
    topic: str = ""
    partition: int = 0
    group: str = ""


class _Mark(msgspec.Struct, frozen=True):
    synced: int = 0


_decode_header = msgspec.json.Decoder(Header).decode
_decode_mark = msgspec.json.Decoder(_Mark).decode


class Journal:
    """One journal, read up to ``position`` by this process. The group's lock is held for every
    call but ``sync``, ``is_behind`` and ``close``.
    """

    def __init__(self, path: str, *, read_only: bool) -> None:
        self.path = path
        self.position = 0
        self.generation = 1
        self._read_only = read_only
        self._fd = -1
        self._inode = 0  # of the file that is open: no other file can have it meanwhile
        self._written = 0  # the position behind this process's last change
        self._synced = 0  # the first bytes that are durable
        self._marked = 0  # the first bytes that a mark in the journal says are durable
        self._poisoned = 0  # the inode of a journal that could not be synced
        self._descriptor = threading.Lock()  # another thread may sync the journal

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    @property
    def is_poisoned(self) -> bool:
        """Whether a sync of this file failed: the file must not be relied upon any more."""
        return bool(self._poisoned) and self._inode == self._poisoned

    def is_behind(self) -> bool:
        """Whether another process may have written since this process read, if it ever did."""
        try:
            return self._fd >= 0 and os.stat(self.path).st_size != self.position
        except OSError:  # it was removed
            return True

    def file_size(self) -> int:
        """The size of the file that is open; 0 if another file, or none, has its name."""
        try:
            here = os.stat(self.path)
        except FileNotFoundError:
            return 0
        return here.st_size if here.st_ino == self._inode else 0

    def open(self) -> int:
        """Open the file and return its size; ``FileNotFoundError`` if there is none."""
        flags = os.O_RDONLY if self._read_only else os.O_RDWR | os.O_APPEND
        self._swap(atomic.open_file(self.path, flags))
        return os.fstat(self._fd).st_size

    def header(self) -> tuple[Header, int] | None:
        """The first line, and the position behind it; None if it is the only line and torn."""
        line, newline, _ = os.pread(self._fd, 4096, 0).partition(b"\n")
        if newline and is_intact(line):
            try:
                header = decode_line(_decode_header, line)
            except Damaged as error:
                raise snapshot.damaged(self.path, 0, str(error)) from None
            snapshot.check_format(self.path, header.format)
            if not header.generation:
                raise snapshot.damaged(self.path, 0, "its first line is missing")
            return header, len(line) + 1
        is_alone = os.fstat(self._fd).st_size == len(line) + len(newline)
        # A torn write leaves out the end, or blocks that read as zeros. It makes up no bytes.
        is_torn = is_alone and line.isascii() and (not newline or b"\0" in line)
        if not is_torn:
            raise snapshot.damaged(self.path, 0, "its first line is damaged")
        return None

    def start_at(self, generation: int, position: int) -> None:
        """Go on behind ``position``: a snapshot holds what comes before it."""
        self.generation = generation
        self.position = position

    def read(self, size: int) -> Iterator[AnyOp]:
        """The changes from ``position`` up to ``size``, which is the end of the file. A torn line
        at the end is cut off.
        """
        if size <= self.position:
            return
        data = os.pread(self._fd, size - self.position, self.position)
        lines = data.split(b"\n")
        torn = lines.pop()
        for index, line in enumerate(lines):
            if not is_intact(line):
                if any(_mark(later) > self.position for later in lines[index + 1 :]):
                    raise snapshot.damaged(self.path, self.position, "the checksum does not fit")
                torn = line or b"\n"
                break
            if line.startswith(_MARK):
                self._marked = max(self._marked, _mark(line))
            else:
                yield self._decode_change(line)
            self.position += len(line) + 1
        if torn and not self._read_only:
            os.ftruncate(self._fd, self.position)

    def _decode_change(self, line: bytes) -> AnyOp:
        try:
            return decode_line(_decode_op, line)
        except Damaged as error:
            if isinstance(error.__context__, msgspec.ValidationError):
                raise error.__context__ from None  # it is JSON: a newer version wrote it
            raise snapshot.damaged(self.path, self.position, str(error)) from None

    def append(self, changes: list[AnyOp], make_room: Callable[[], bool] | None) -> None:
        """Write the changes, all or none. ``make_room`` is asked once when the device is full."""
        data = b"".join([close_line(_encode(change)[:-1]) for change in changes])
        marks = self._synced > self._marked
        if marks:
            data = close_line(b"%b%d" % (_MARK, self._synced)) + data
        try:
            atomic.write_all(self._fd, data)
        except OSError as error:
            os.ftruncate(self._fd, self.position)
            if error.errno not in atomic.FULL or make_room is None or not make_room():
                raise atomic.storage_error(error, self.path) from error
            self.append(changes, None)
            return
        self.position += len(data)
        self._written = self.position
        if marks:
            self._marked = self._synced

    def begin(self, header: dict[str, Any]) -> None:
        """Replace the journal by a new generation, which has a header and no change."""
        line = close_line(_encode(header)[:-1])
        self.close()
        atomic.replace_file(self.path, line)
        self._swap(atomic.open_file(self.path, os.O_RDWR | os.O_APPEND))
        self.position = len(line)
        self.generation = header["generation"]
        self._poisoned = 0

    def sync(self) -> None:
        """Make this process's changes durable. After a failure this file is not synced again: the
        next generation takes its place.
        """
        with self._descriptor:
            if self._written <= self._synced or self._fd < 0:
                return
            if self.is_poisoned:
                raise StorageError("the journal could not be synced", path=self.path)
            position = self.position
            try:
                atomic.sync(self._fd)
            except OSError as error:
                self._poisoned = self._inode
                raise atomic.storage_error(error, self.path) from error
            self._synced = position

    def forget(self) -> None:
        """Close the file, and read it from the start next time."""
        self.close()
        self.position = 0
        self.generation = 1

    def close(self) -> None:
        self._swap(-1)

    def _swap(self, fd: int) -> None:
        """Have another file open, or none."""
        with self._descriptor:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = fd
            self._inode = os.fstat(fd).st_ino if fd >= 0 else 0
            self._written = self._synced = self._marked = 0


def _mark(line: bytes) -> int:
    """How many bytes a line says were durable; 0 if the line is no mark, or is damaged."""
    if not line.startswith(_MARK) or not is_intact(line):
        return 0
    try:
        return decode_line(_decode_mark, line).synced
    except Damaged:
        return 0


def is_first_generation(path: str) -> bool:
    """Whether a journal is of the first generation, which needs no snapshot."""
    try:
        line = atomic.read_file(path).partition(b"\n")[0]
    except FileNotFoundError:
        return False
    return is_intact(line) and parse_object(line).get("generation") == 1


def group_of(path: str, *, looked_at: bool = False) -> tuple[str, int, str] | None:
    """The topic, partition and group that a journal or a snapshot belongs to; None where the file
    is too damaged to tell. A file that only a look at the group left behind is None too, unless
    ``looked_at`` asks for those.
    """
    stem = path.rpartition(".")[0]
    try:
        with os.fdopen(atomic.open_file(path, os.O_RDONLY), "rb") as file:
            start = file.read(4096)
        made = b'{"op":"created"' in start or os.path.exists(stem + ".json")
    except FileNotFoundError:
        raise
    except (StorageError, OSError):  # the caller that opens the group is told why
        start, made = b"", True
    name = layout.parse_group_stem(os.path.basename(stem))
    if name is None:  # the name was too long for a file
        try:
            header = decode_line(_decode_header, start.partition(b"\n")[0])
        except Damaged:
            return None
        name = (header.topic, header.partition, header.group) if header.topic else None
        if name is None:
            return None
    return name if made or looked_at else None
