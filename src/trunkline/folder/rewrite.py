"""Putting a new file in the place of a finished segment.

A finished segment is never changed in place: a new file takes the old one's name, and until it does
the old one counts. Any process may do it at any time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from zlib import crc32

from msgspec.structs import replace

from trunkline.errors import Corrupt
from trunkline.folder import Folder
from trunkline.log import atomic
from trunkline.log.head import Head
from trunkline.log.line import Damaged, Line, Seal, frame_seal, parse
from trunkline.log.segment import DIGEST_SIZE, Entry, Segment, index_line, pack, with_digest

_FRAME = 1024 * 1024


def records(segment: Segment, head: Head) -> Iterator[tuple[Line, bytes]]:
    end = head.end if segment.number == head.segment else segment.size()
    for position, text in segment.lines(0, end):
        try:
            line = parse(text)
        except Damaged as error:
            raise Corrupt(
                f"{os.path.basename(segment.path)} is damaged at byte {position}: {error}",
                path=segment.path,
                position=position,
            ) from None
        if line.seal is None:
            yield line, text


@contextmanager
def unchanged(folder: Folder, topic: str, partition: int, segment: Segment) -> Iterator[None]:
    """Hold the log while a new file takes a segment's place; ``FileNotFoundError`` if the one that
    was read is not there any more.
    """
    writer = folder.writer(topic, partition)
    writer.begin()
    try:
        if os.stat(segment.path).st_ino != os.fstat(segment.open()).st_ino:
            raise FileNotFoundError(segment.path)
        yield
    finally:
        writer.end()


def make_head_durable(folder: Folder, topic: str, partition: int) -> None:
    """Before a segment is rewritten: a head from before it was finished would, after a power cut,
    speak of bytes that are not there any more.
    """
    writer = folder.writer(topic, partition)
    head = writer.begin()
    try:
        writer.save(head, durable=True)
    finally:
        writer.end()


def rewrite(
    segment: Segment,
    lines: Iterable[tuple[Line, bytes]],
    seal: Seal,
    *,
    packed: bool | None = None,
    guard: AbstractContextManager[None] | None = None,
) -> None:
    """Put a new file in the place of a finished segment, with these of its lines. The ``guard`` is
    held while it takes that place.
    """
    packed = segment.packed if packed is None else packed
    blocks: list[bytes] = []
    entries: list[Entry] = []
    block: list[bytes] = []
    size = position = out = latest = sum_ = 0

    def flush() -> None:
        nonlocal size, position, out, sum_
        data = b"".join(block)
        blocks.append(pack(data) if packed else data)
        sum_ = crc32(data, sum_)
        position += size
        out += len(blocks[-1])
        size = 0
        block.clear()

    offset = seal.first
    for line, text in lines:
        if size == 0:
            entries.append(Entry(line.offset, position, latest, out))
        assert line.meta is not None
        latest = max(latest, int(line.meta.ts.timestamp() * 1_000_000))
        offset = line.offset + 1
        block.append(text + b"\n")
        size += len(text) + 1
        if size >= _FRAME:
            flush()
    if block:
        flush()
    sealed = frame_seal(replace(seal, sum=f"{sum_:08x}", ts=latest or seal.ts))
    entries.append(Entry(offset, position, latest, out))
    block.append(sealed)
    size = len(sealed)
    flush()
    entries.append(Entry(max(seal.last, offset) + 1, position, latest, out + DIGEST_SIZE))
    if not packed:
        entries = [replace_entry(entry) for entry in entries[1:-2]]
    target = segment.path if segment.packed or not packed else segment.path + ".zst"
    data = b"".join(blocks)
    files = {target: with_digest(data) if packed else data}
    index = {segment.index_path: b"".join(map(index_line, entries))}
    # The frames of a compressed one are found by the index, so that comes first.
    files = index | files if packed else files | index
    staged: dict[str, str] = {}
    try:
        for path, content in files.items():
            staged[path] = atomic.stage_file(path, content)
        with guard or nullcontext():
            for path in files:
                atomic.move_file(staged.pop(path), path)
            if guard is not None and target != segment.path:
                atomic.remove_files([segment.path])
    except FileNotFoundError:
        raise
    except OSError as error:
        raise atomic.storage_error(error, target) from error
    finally:
        for temp in staged.values():
            os.unlink(temp)


def replace_entry(entry: Entry) -> Entry:
    return entry._replace(packed=0)
