"""One file of a partition: finding a place in it, and reading bytes from there.

A segment is plain JSONL, or the same cut into zstd frames once it is finished. Beside it lies an
index of every so-many bytes: ``offset position ts packed crc``, where ``ts`` is the latest event
time before that place. The index only hints: each entry is checked against the line it points at,
so a stale or damaged index costs time and nothing else.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from zlib import crc32

from trunkline.errors import Corrupt, InvalidOption, StorageError
from trunkline.log import atomic, layout
from trunkline.log.line import Damaged, Seal, is_intact, offset_at, parse

_CHUNK = 64 * 1024
_LINE_BYTES = 256 * 1024 * 1024
_NEAR = 256 * 1024  # more than lies between two entries of an index
_DIGEST = b"\x50\x2a\x4d\x18\x04\0\0\0"  # begins a frame of four bytes that zstd passes over
DIGEST_SIZE = len(_DIGEST) + 4


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
            # It may have been rewritten since it was last open: only where it begins stays.
            self._frame, self._entries, self._index_size = (-1, b""), [], -1
            self._seal = None
        return self._fd

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    @property
    def is_replaced(self) -> bool:
        """Whether what is open has another file in its place by now, or none."""
        return self.is_open and os.fstat(self._fd).st_nlink == 0

    @contextmanager
    def _glance(self) -> Iterator[None]:
        """A look keeps no file open that was not: a log may have more than a process may open."""
        was_open = self.is_open
        try:
            yield
        finally:
            if not was_open:
                self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()  # many are made for a single look

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
        if self._frame[0] != at and not self._unpack(at):
            return self.read(position, size)  # by the index that the file itself gave
        skip = position - entries[at].position
        return self._frame[1][skip : skip + size]

    def _unpack(self, at: int) -> bool:
        """Have a frame at hand; False if the index was wrong about it and was made anew."""
        here, following = self._entries[at : at + 2]
        data = os.pread(self.open(), following.packed - here.packed, here.packed)
        try:
            plain = unpack(data)
        except Damaged:
            plain = b""
        if len(plain) != following.position - here.position:
            self._entries = self._make_index()
            return False
        self._frame = (at, plain)
        return True

    def pieces(self) -> Iterator[bytes | None]:
        """All it holds, in pieces that are read each on its own; None for one that cannot be."""
        data = atomic.read_file(self.path)
        if not self.packed:
            yield data
            return
        known = [entry.packed for entry in read_index(self.index_path)]
        at = 0
        while at < len(data) and not data.startswith(_DIGEST, at):
            decoder = _zstd().ZstdDecompressor().decompressobj()
            plain = None
            try:
                found = decoder.decompress(data[at:])
                plain = found if decoder.eof else None
            except _zstd().ZstdError:
                pass
            yield plain
            behind = (place for place in known if place > at)
            at = next(behind, len(data)) if plain is None else len(data) - len(decoder.unused_data)

    def is_sound(self) -> bool:
        """Whether every byte of a compressed file is as it was written."""
        data = self._all()
        return data == with_digest(data[:-DIGEST_SIZE])

    def _make_index(self) -> list[Entry]:
        return index_frames(self.path, self._all())

    def _all(self) -> bytes:
        """Every byte of the file that is open."""
        size = os.fstat(self.open()).st_size
        if size > atomic.FILE_BYTES:
            said = f"{os.path.basename(self.path)} has {size} bytes: a bus writes no such file"
            raise Corrupt(said, path=self.path, position=atomic.FILE_BYTES)
        return os.pread(self._fd, size, 0)

    @property
    def seal(self) -> Seal | None:
        if self._seal is None:
            with self._glance():
                end = self.size()
                start = max(0, end - _CHUNK)
                data = part = self.read(start, end - start)
                while part and start + len(data) < end:
                    part = self.read(start + len(data), end)
                    data += part
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
            # The first line may have been compacted away; the seal still knows where it began.
            with self._glance():
                self.open()
                seal = self.seal
                self._first = seal.first if seal else offset_at(self.read(0, 64))
        return self._first

    @property
    def holes(self) -> bool:
        return self._seal is not None and (self._seal.holes or bool(self._seal.lost))

    def entries(self) -> list[Entry]:
        """What the index says. Of a compressed segment it must fit the open file, since the frames
        are found by it: else it is one that a crash left behind, and is made anew.
        """
        if self.packed:
            if not self._entries:
                self._entries = read_index(self.index_path)
                size = os.fstat(self.open()).st_size
                known = self._entries
                if len(known) < 2 or known[0].position or known[-1].packed != size:
                    self._entries = self._make_index()
            return self._entries
        try:
            size = os.stat(self.index_path).st_size
        except FileNotFoundError:
            size = 0
        if size != self._index_size:
            self._entries = read_index(self.index_path) if size else []
            self._index_size = size
        return self._entries

    def points_at(self, entry: Entry) -> bool:
        """Whether an entry is right: the line at its position has its offset."""
        return offset_at(self.read(entry.position, 64)) == entry.offset

    def locate(self, offset: int, end: int) -> int:
        """The position of the first line at or after ``offset``, or ``end``."""
        entries = self.entries()
        at = bisect_right(entries, offset, key=lambda entry: entry.offset) - 1
        position = 0
        if at >= 0 and entries[at].position < end and self.points_at(entries[at]):
            position = entries[at].position
        near = self.read(position, max(0, min(_NEAR, end - position)))
        mark = b'\n{"offset":%d,' % offset  # no other line holds it: JSON escapes its newlines
        if near.startswith(mark[1:]):
            return position
        if (step := near.find(mark)) >= 0:
            return position + step + 1
        hurt: int | None = None  # a damaged line that may be the one
        for place, line in self.lines(position, end):
            found = offset_at(line[:64])
            if not is_intact(line):
                hurt = place if hurt is None else hurt
            elif found is not None and found < offset:
                hurt = None
            elif found is not None:
                return place if hurt is None else hurt
        return end if hurt is None else hurt

    def lines(self, position: int, end: int) -> Iterator[tuple[int, bytes]]:
        """``(position, line)`` of each whole line in ``[position, end)``, newline left out.
        Bytes after the last newline are given as one more line that ends in NUL, and so is the
        begin of a line that is longer than any a bus writes; then there are no more.
        """
        rest: list[bytes] = []
        start = position
        while position < end and position - start <= _LINE_BYTES:
            chunk = self.read(position, min(_CHUNK, end - position))
            if not chunk:
                break
            position += len(chunk)
            if b"\n" not in chunk:
                rest.append(chunk)
                continue
            *lines, last = b"".join([*rest, chunk]).split(b"\n")
            rest = [last] if last else []
            for line in lines:
                yield start, line
                start += len(line) + 1
        if rest:
            yield start, b"".join(rest) + b"\0"


def read_index(path: str) -> list[Entry]:
    """The entries up to the first that is damaged: the index only hints."""
    try:
        lines = atomic.read_file(path).split(b"\n")[:-1]
    except (FileNotFoundError, StorageError):
        return []
    entries: list[Entry] = []
    for line in lines:
        words = line.split(b" ")
        if len(words) != 5 or not all(word.isdigit() for word in words[:4]):
            break
        entry = Entry(*map(int, words[:4]))
        if index_line(entry) != line + b"\n":
            break
        if entries and (entry.offset <= entries[-1].offset or entry[1] <= entries[-1][1]):
            break
        entries.append(entry)
    return entries


def index_line(entry: Entry) -> bytes:
    words = b"%d %d %d %d" % entry
    return b"%b %08x\n" % (words, crc32(words))


def pack(data: bytes) -> bytes:
    """One zstd frame."""
    packed: bytes = _zstd().ZstdCompressor(level=6, write_checksum=True).compress(data)
    return packed


def with_digest(data: bytes) -> bytes:
    """Frames, and the CRC-32 of all their bytes: zstd does not notice every flipped bit."""
    return data + _DIGEST + crc32(data).to_bytes(4, "little")


def unpack(data: bytes) -> bytes:
    try:
        plain: bytes = _zstd().ZstdDecompressor().decompressobj().decompress(data)
    except _zstd().ZstdError as error:
        raise Damaged(str(error)) from None
    return plain


def index_frames(path: str, data: bytes | None = None) -> list[Entry]:
    """The index of a compressed segment from the segment itself."""
    if data is None:
        data = atomic.read_file(path)
    entries: list[Entry] = []
    position = packed = 0
    latest = 0
    offset = 0
    size = len(data)
    data = data[:-DIGEST_SIZE]
    while packed < len(data):
        decoder = _zstd().ZstdDecompressor().decompressobj()
        try:
            plain = decoder.decompress(data[packed:])
            why = "" if decoder.eof else "it ends too early"
        except _zstd().ZstdError as error:
            why = str(error)
        if why:
            raise Corrupt(
                f"{os.path.basename(path)} is damaged at byte {packed}: {why}",
                path=path,
                position=packed,
            )
        offset = offset_at(plain[:64]) or offset + 1
        entries.append(Entry(offset, position, latest, packed))
        for text in plain.split(b"\n")[:-1]:
            try:
                meta = parse(text).meta
            except Damaged as error:
                raise Corrupt(
                    f"{os.path.basename(path)} is damaged at byte {packed}: {error}",
                    path=path,
                    position=packed,
                ) from None
            if meta is not None:
                latest = max(latest, int(meta.ts.timestamp() * 1_000_000))
        position += len(plain)
        packed = len(data) - len(decoder.unused_data)
    entries.append(Entry(offset + 1, position, latest, size))
    return entries


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError:
        raise InvalidOption(
            "compressed segments need the zstandard package", hint="pip install 'trunkline[zstd]'"
        ) from None
    return zstandard
