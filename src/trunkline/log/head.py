"""Where a partition's log ends: one small line in a file that is never replaced.

The file is also the partition's lock. The process that holds it may append; when the bytes are
durable the holder writes the new end here, and only then does any reader look at them. The line is
written after the data it speaks of, so it may be late after a crash but it never promises too much.
"""

from __future__ import annotations

import errno
import os

import msgspec

from trunkline.errors import UnsupportedFormat
from trunkline.log import atomic, layout, line

FORMAT = 1
_SIZE = 320


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """``end`` is what may be read of the last segment, ``durable`` what a power cut leaves of it.

    ``start`` is the first offset that still counts, ``sum`` the CRC-32 of the segment so far,
    ``ts`` the latest event time in it, ``indexed`` the last position noted in its index. ``epoch``
    rises when visible records were lost, or may have been, so that a group notices that offsets
    were used again: from ``since`` on in the last epoch, from ``reused`` on in any. ``boot`` names
    the boot under which records may lie in the log without having been synced.
    """

    format: int = FORMAT
    epoch: int = 1
    segment: int = 1
    records: int = 0
    start: int = 1
    next: int = 1
    end: int = 0
    durable: int = 0
    sum: int = 0
    ts: int = 0
    indexed: int = 0
    reused: int = 0
    since: int = 0
    boot: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Head).decode


def encode(head: Head) -> bytes:
    text = _encode(head)[:-1].removesuffix(b',"boot":""')
    text = text.removesuffix(b',"since":0').removesuffix(b',"reused":0')
    return line.close_line(text).ljust(_SIZE - 1) + b"\n"


def decode(raw: bytes, path: str = "") -> Head | None:
    """None for an empty or damaged line: the log's own files then say where it ends."""
    text = raw.partition(b"\n")[0]
    if not text:
        return None
    if not line.is_intact(text):
        return None
    try:
        head = line.decode(_decode, text)
    except line.Damaged:
        return None
    if head.format > FORMAT:
        folder, name = os.path.split(path)
        place = layout.parse_stem(name.removesuffix(".head"), folder.endswith("dlq"))
        named = "{}/{}".format(*place) if place else name
        raise UnsupportedFormat(
            f"{named} has format {head.format}, this version reads up to {FORMAT}: see {path}",
            path=path,
            hint="upgrade trunkline",
        )
    return head


class HeadFile:
    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = -1
        self.opened = 0  # how often; once more means that the log was removed meanwhile
        self._seen: tuple[bytes, Head | None] = (b"", None)
        self._is_poisoned = False

    def open(self, *, create: bool) -> bool:
        """False if there is no such file. Opens it anew if the one held was removed meanwhile."""
        if self.fd >= 0:
            if os.fstat(self.fd).st_nlink:
                return True
            self.close()
        try:
            self.fd = self._open(may_write=create)
        except FileNotFoundError:
            if not create:
                return False
            try:
                self.fd = atomic.create_file(self.path)
            except FileExistsError:
                self.fd = atomic.open_file(self.path, os.O_RDWR)
        self.opened += 1
        return True

    def _open(self, *, may_write: bool) -> int:
        """Open it for writing as well: a reader may append later. If that is refused, to read."""
        try:
            return atomic.open_file(self.path, os.O_RDWR)
        except OSError as error:
            if may_write or error.errno not in atomic.READ_ONLY:
                raise
            return atomic.open_file(self.path, os.O_RDONLY)

    def lock(self, timeout_s: float) -> None:
        """Open and lock the file under its present name."""
        while True:
            self.open(create=True)
            atomic.lock(self.fd, timeout_s, self.path)
            if os.fstat(self.fd).st_nlink:
                return
            self.close()

    def unlock(self) -> None:
        if self.fd >= 0:
            atomic.unlock(self.fd)

    def load(self) -> Head | None:
        raw = os.pread(self.fd, _SIZE, 0)
        seen, head = self._seen
        if raw != seen or head is None:
            head = decode(raw, self.path)
            if head is None and raw:  # perhaps it was read while it was written
                raw = os.pread(self.fd, _SIZE, 0)
                head = decode(raw, self.path)
            self._seen = (raw, head)
        return head

    @property
    def last(self) -> Head | None:
        """The head as it was last seen here."""
        return self._seen[1]

    def is_changed(self) -> bool:
        """Whether the line is not the one that was last seen here."""
        return self.peek() != self._seen[0]

    def peek(self) -> bytes:
        """What the file holds now, without taking notice of it."""
        try:
            return os.pread(self.fd, _SIZE, 0)
        except OSError:  # it is not open, and was not there when it was looked for
            return b"?" if os.path.exists(self.path) else b""

    def store(self, head: Head) -> None:
        raw = encode(head)
        written = os.pwrite(self.fd, raw, 0)
        while written < len(raw):
            written += os.pwrite(self.fd, raw[written:], written)
        self._seen = (raw, head)

    def clear(self) -> None:
        os.ftruncate(self.fd, 0)
        self._seen = (b"", None)

    def sync(self) -> None:
        """Make the line durable. After a failure never again: see ``atomic.sync``."""
        try:
            if self._is_poisoned:
                raise OSError(errno.EIO, "it could not be synced before")
            atomic.sync(self.fd)
        except OSError as error:
            self._is_poisoned = True
            raise atomic.storage_error(error, self.path) from error

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._seen = (b"", None)
