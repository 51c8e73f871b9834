"""One file of a partition: finding a place in it, and reading bytes from there.

A segment is plain JSONL, or the same cut into zstd frames once it is finished. Beside it lies an
index of every so-many bytes: ``offset position ts packed``, where ``ts`` is the latest event time
before that place. The index only hints: each entry is checked against the line it points at, so
a stale or damaged index costs time and nothing else.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple

from trunkline.errors import Corrupt, InvalidOption
from trunkline.log import atomic, layout
from trunkline.log.line import Damaged, Seal, offset_at, parse

_CHUNK = 64 * 1024


class Entry(NamedTuple):
    offset: int
    position: int
    ts: int
    packed: int = 0


class Segment:
    def __init__(
        self, root: str, stem: str, number: int, *, packed: bool = False, bad: bool = False
    ) -> None:
        self.number = number
        self.packed = packed
        self.bad = bad
        self.path = os.path.join(root, layout.segment_path(stem, number))
        self.index_path = os.path.join(root, f"{stem}.{number:08d}.index")
        if packed:
            self.path += ".zst"
        if bad:
            self.path += ".corrupt"
        self._fd = -1
        self._frame: tuple[int, bytes] = (-1, b"")
        self._entries: list[Entry] = []
        self._index_size = -1
        self._first: int | None = None
        self._seal: Seal | None = None

    @classmethod
    def at(cls, path: str, like: Segment) -> Segment:
        """The segment that ``like`` is, under another path."""
        segment = cls("", "", like.number, packed=like.packed)
        segment.path, segment.index_path = path, like.index_path
        return segment

    def open(self) -> int:
        if self._fd < 0:
            self._fd = atomic.open_file(self.path, os.O_RDONLY)
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def size(self) -> int:
        """How many bytes of lines it holds, before any compression."""
        if not self.packed:
            return os.fstat(self.open()).st_size
        return self.entries()[-1].position

    def read(self, position: int, size: int) -> bytes:
        """At most ``size`` bytes from ``position``; fewer only at the end or at a frame's edge."""
        if not self.packed:
            return os.pread(self.open(), size, position)
        entries = self.entries()
        at = bisect_right(entries, position, key=lambda entry: entry.position) - 1
        if at < 0 or at + 1 >= len(entries):
            return b""
        if self._frame[0] != at:
            start, end = entries[at].packed, entries[at + 1].packed
            self._frame = (at, unpack(os.pread(self.open(), end - start, start)))
        skip = position - entries[at].position
        return self._frame[1][skip : skip + size]

    @property
    def seal(self) -> Seal | None:
        if self._seal is None:
            end = self.size()
            start = max(0, end - _CHUNK)
            data = self.read(start, end - start)
            while self.packed and start + len(data) < end:
                data += self.read(start + len(data), end)
            line = data.rstrip(b"\n").rpartition(b"\n")[2]
            if line.startswith(b'{"seal":') and data.endswith(b"\n"):
                try:
                    self._seal = parse(line).seal
                except Damaged:
                    return None
        return self._seal

    @property
    def first(self) -> int | None:
        """The offset of its first record; None while it has none."""
        if self._first is None:
            offset = offset_at(self.read(0, 64))
            if offset is None or self.holes:
                seal = self.seal
                offset = seal.first if seal else None
            self._first = offset
        return self._first

    @property
    def holes(self) -> bool:
        return self._seal is not None and (self._seal.holes or bool(self._seal.lost))

    def entries(self) -> list[Entry]:
        try:
            size = os.stat(self.index_path).st_size
        except FileNotFoundError:
            size = 0
        if size != self._index_size:
            self._entries = read_index(self.index_path) if size else []
            self._index_size = size
        if self.packed and (not self._entries or self._entries[-1].packed == 0):
            self._entries = index_frames(self.path)
        return self._entries

    def locate(self, offset: int, end: int) -> int:
        """The position of the first line at or after ``offset``, or ``end``."""
        entries = self.entries()
        at = bisect_right(entries, offset, key=lambda entry: entry.offset) - 1
        position = 0
        if at >= 0 and entries[at].position < end:
            hint = entries[at]
            if offset_at(self.read(hint.position, 64)) == hint.offset:
                position = hint.position
        for place, line in self.lines(position, end):
            found = offset_at(line[:64])
            if found is not None and found >= offset:
                return place
        return end

    def lines(self, position: int, end: int) -> Iterator[tuple[int, bytes]]:
        """``(position, line)`` of each whole line in ``[position, end)``, newline left out.
        Bytes after the last newline are given as one more line that ends in NUL.
        """
        rest = b""
        start = position
        while position < end:
            chunk = self.read(position, min(_CHUNK, end - position))
            if not chunk:
                break
            position += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield start, line
                start += len(line) + 1
        if rest:
            yield start, rest + b"\0"


def read_index(path: str) -> list[Entry]:
    with open(path, "rb") as file:
        lines = file.read().split(b"\n")[:-1]
    entries: list[Entry] = []
    for line in lines:
        words = line.split(b" ")
        if len(words) != 4 or not all(word.isdigit() for word in words):
            break
        entry = Entry(*map(int, words))
        if entries and (entry.offset <= entries[-1].offset or entry[1] <= entries[-1][1]):
            break
        entries.append(entry)
    return entries


def index_line(entry: Entry) -> bytes:
    return b"%d %d %d %d\n" % entry


def pack(data: bytes) -> bytes:
    """One zstd frame."""
    packed: bytes = _zstd().ZstdCompressor(level=6, write_checksum=True).compress(data)
    return packed


def unpack(data: bytes) -> bytes:
    try:
        plain: bytes = _zstd().ZstdDecompressor().decompressobj().decompress(data)
    except _zstd().ZstdError as error:
        raise Damaged(str(error)) from None
    return plain


def index_frames(path: str) -> list[Entry]:
    """The index of a compressed segment from the segment itself."""
    with open(path, "rb") as file:
        data = file.read()
    entries: list[Entry] = []
    position = packed = 0
    latest = 0
    offset = 0
    while packed < len(data):
        decoder = _zstd().ZstdDecompressor().decompressobj()
        try:
            plain = decoder.decompress(data[packed:])
        except _zstd().ZstdError as error:
            raise Corrupt(
                f"{os.path.basename(path)} is damaged at byte {packed}: {error}",
                path=path,
                position=packed,
            ) from None
        offset = offset_at(plain[:64]) or offset + 1
        entries.append(Entry(offset, position, latest, packed))
        for text in plain.split(b"\n")[:-1]:
            meta = parse(text).meta
            if meta is not None:
                latest = max(latest, int(meta.ts.timestamp() * 1_000_000))
        position += len(plain)
        packed = len(data) - len(decoder.unused_data)
    entries.append(Entry(offset + 1, position, latest, packed))
    return entries


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError:
        raise InvalidOption(
            "compressed segments need the zstandard package", hint="pip install 'trunkline[zstd]'"
        ) from None
    return zstandard
