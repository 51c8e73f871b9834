"""One line of a file: JSON that ends in the CRC-32 of the bytes in front of it.

::

    {"offset":7,"meta":{…},"payload":{…},"crc":"9f3a12bc"}
    {"offset":8,"meta":{…},"payload":{…},"commit":{"count":2,"durable":4096,"at":…},"crc":"…"}
    {"seal":{"count":8,"first":1,"last":8,"sum":"…","ts":…},"crc":"…"}

The last line of a batch carries the commit: how many lines belong together, how many bytes of the
file were durable before them, and when they were written (epoch µs). A batch without its commit was
never acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from zlib import crc32

import msgspec
from msgspec.structs import force_setattr

from trunkline.event import Event, Record
from trunkline.explain import reason

T = TypeVar("T")

_TAIL = len(b',"crc":"00000000"}')


class Commit(msgspec.Struct, frozen=True):
    count: int
    durable: int
    at: int


class Seal(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a finished segment holds. ``sum`` is the CRC-32 of every byte before the seal's line;
    ``ts`` the latest event time in it, in epoch µs. ``holes`` says that offsets may be missing in
    it because they were compacted away, ``lost`` names those that damage took.
    """

    count: int
    first: int
    last: int
    sum: str
    ts: int
    holes: bool = False
    lost: tuple[tuple[int, int], ...] = ()


class Line(msgspec.Struct):
    offset: int = 0
    meta: Event | None = None
    payload: Any = None
    commit: Commit | None = None
    seal: Seal | None = None


class Damaged(ValueError):
    """These bytes are no line that this package wrote."""


def decode(read: Callable[[bytes], T], data: bytes) -> T:
    """What a decoder makes of bytes; ``Damaged`` whichever way it fails. Every byte that comes from
    a file of a bus is decoded here, or by ``read_records``.
    """
    try:
        return read(data)
    except (*_BROKEN, Damaged) as error:
        raise Damaged(reason(error)) from None


# Not JSON, or other values than expected; not UTF-8; nested too deeply; a number or a time too far.
_BROKEN = (msgspec.DecodeError, ValueError, RecursionError, OverflowError)
_decode = msgspec.json.Decoder(Line).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


def close_line(head: bytes) -> bytes:
    """Finish a JSON object that lacks its closing brace."""
    return b'%b,"crc":"%08x"}\n' % (head, crc32(head))


def frame_batch(first: int, bodies: Sequence[bytes], durable: int, at: int) -> list[bytes]:
    """Number and frame bodies made by ``encode_event``; the last one carries the commit."""
    heads = [b'{"offset":%d,"meta":%b' % numbered for numbered in enumerate(bodies, first)]
    heads[-1] += b',"commit":{"count":%d,"durable":%d,"at":%d}' % (len(bodies), durable, at)
    return [b'%b,"crc":"%08x"}\n' % (head, crc32(head)) for head in heads]


def with_commit(line: bytes, commit: Commit) -> bytes:
    """A line that had none, as one that tells of its batch."""
    return close_line(line[:-_TAIL] + b',"commit":' + _encode(commit))[:-1]


def frame_seal(seal: Seal) -> bytes:
    return close_line(b'{"seal":' + _encode(seal))


def is_intact(line: bytes) -> bool:
    """Whether the checksum fits. Compared as text, so that no other spelling of it passes."""
    return line[-_TAIL:] == b',"crc":"%08x"}' % crc32(memoryview(line)[:-_TAIL])


def parse(line: bytes) -> Line:
    """Read one line, without its newline; ``Damaged`` if it is not what was written."""
    if not is_intact(line):
        raise Damaged("the checksum does not fit")
    parsed = decode(_decode, line)
    if parsed.meta is not None:
        force_setattr(parsed.meta, "payload", parsed.payload)
    elif parsed.seal is None:
        raise Damaged("it is neither a record nor a seal")
    return parsed


def parse_object(line: bytes) -> dict[str, Any]:
    """Read a line of another kind than a record; ``Damaged`` if it is not what was written."""
    if not is_intact(line):
        raise Damaged("the checksum does not fit")
    return decode(_decode_object, line)


def read_records(data: bytes, partition: int, limit: int) -> tuple[list[Record], int]:
    """The first ``limit`` records in ``data``, which starts and ends on a line; and the bytes read,
    which are fewer than given at the limit or at a damaged line. A seal is passed over.
    """
    records: list[Record] = []
    add = records.append
    position = 0
    lines = data.split(b"\n")
    lines.pop()
    for text in lines:
        if len(records) == limit:
            break
        if text[-_TAIL:-2] != b',"crc":"%08x' % crc32(memoryview(text)[:-_TAIL]):
            break
        try:
            line = _decode(text)
        except _BROKEN:
            break
        event = line.meta
        if event is not None:
            force_setattr(event, "payload", line.payload)
            add(Record(event, partition, line.offset))
        elif line.seal is None:
            break
        position += len(text) + 1
    return records, position


def offset_at(start: bytes) -> int | None:
    """The offset of the line that begins with ``start``, from its first few bytes alone."""
    if not start.startswith(b'{"offset":'):
        return None
    digits = start[10:30].partition(b",")[0]
    return int(digits) if digits.isdigit() else None
