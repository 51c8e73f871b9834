"""Lines of the log for readers on other machines: as they are stored, each with its time.

A line is ``{"offset":7,"meta":{…},"payload":…,"commit":{"at":…}}``: the stored text without its
checksum, and with the time of the commit that its batch ends with.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from trunkline.errors import Corrupt
from trunkline.log.extents import Extent, list_extents
from trunkline.log.line import is_intact, offset_at
from trunkline.log.reader import PartitionReader

_CRC: Final = 18  # bytes of ,"crc":"…"}
_COMMIT: Final = re.compile(rb',"commit":\{"count":\d+,"durable":\d+,"at":(\d+)\}\Z')
_COMMIT_MAX: Final = 96  # bytes
_LOOKS: Final = 3


class RawLines(NamedTuple):
    """Lines in order, and the offset to go on with."""

    data: bytes
    next: int


def read_lines(
    root: str, topic: str, partition: int, start: int, end: int, bytes_max: int
) -> RawLines:
    """The records ``start <= offset < end`` that there are, about ``bytes_max`` of them at most."""
    reader = PartitionReader(root, topic, partition)
    try:
        for left in range(_LOOKS, 0, -1):
            try:
                return _read(reader, start, end, bytes_max)
            except FileNotFoundError:  # replaced or removed since it was listed
                if left == 1:
                    raise
                reader.forget()
        raise AssertionError
    finally:
        reader.close()


def _read(reader: PartitionReader, start: int, end: int, bytes_max: int) -> RawLines:
    head = reader.head()
    start, end = max(start, head.start), min(end, head.next)
    found: list[bytes] = []
    left = bytes_max
    for extent in list_extents(reader, head, start):
        low, high = max(start, extent.first), min(end, extent.after)
        if low < high:
            lines, start = _lines(extent, low, high, left)
            found += lines
            left -= sum(map(len, lines))
        if left <= 0:
            break
    else:
        start = max(start, end)
    return RawLines(b"".join(found), start)


def _lines(extent: Extent, low: int, high: int, bytes_max: int) -> tuple[list[bytes], int]:
    """Whole batches of one segment, and the offset behind them."""
    segment = extent.segment
    begin = 0 if low == extent.first else segment.locate(low, extent.size)
    found: list[bytes] = []
    batch: list[bytes] = []
    size = 0
    following = low
    for position, line in segment.lines(begin, extent.size):
        if not is_intact(line):
            raise Corrupt(
                f"{segment.path} is damaged at byte {position}",
                path=segment.path,
                position=position,
                hint="run 'trunkline verify'",
            )
        offset = offset_at(line[:64])
        if offset is None:  # the seal
            break
        text = line[:-_CRC]
        commit = _COMMIT.search(text[-_COMMIT_MAX:])
        if commit is not None:
            text = text[: len(text) - len(commit[0])]
        if low <= offset < high:
            batch.append(text)
            following = offset + 1
        if commit is not None:
            end = b',"commit":{"at":%b}}\n' % commit[1]
            found += [text + end for text in batch]
            size += sum(map(len, batch))
            batch = []
            if following >= high or size >= bytes_max:
                break
    found += [text + b"}\n" for text in batch]
    return found, following if size >= bytes_max and following < high else high
