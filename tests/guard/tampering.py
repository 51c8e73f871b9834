"""Somebody who can write every file of a bus, but has no signing key, changes its log.

Each change is consistent in itself: checksums, seals and the head fit, so that nothing but the
signed tree can tell.
"""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

from trunkline.log import head as heads
from trunkline.log.line import Seal, close_line, frame_seal, parse

_OFFSET = re.compile(rb'\{"offset":(\d+),(.*),"crc":"[0-9a-f]{8}"\}', re.DOTALL)
_COMMIT = re.compile(rb',"commit":\{[^}]*\}$')
_TEXT = re.compile(rb'"(?:text|actor|type)":"[^"]*"')


class File(NamedTuple):
    """One segment as its records without numbers and checksums."""

    path: Path
    bodies: list[bytes]
    is_sealed: bool


def load(wal: Path, topic: str) -> list[File]:
    files = []
    for path in sorted(wal.glob(f"{topic}.0*.jsonl")):
        lines = path.read_bytes().splitlines()
        is_sealed = lines[-1].startswith(b'{"seal"')
        bodies = []
        for line in lines[: len(lines) - is_sealed]:
            match = _OFFSET.fullmatch(line)
            assert match is not None
            bodies.append(_COMMIT.sub(b"", match[2]))
        files.append(File(path, bodies, is_sealed))
    return files


def store(wal: Path, topic: str, files: list[File], gap: int | None = None) -> None:
    """Write the segments anew, numbered from 1 on, with a head that fits. With ``gap``, that offset
    is left out, as if a compaction had taken it.
    """
    offset = 1
    state = heads.Head()
    for number, (path, bodies, is_sealed) in enumerate(files, 1):
        data = b""
        first = offset
        count = 0
        for body in bodies:
            if offset == gap:
                offset += 1
            commit = b',"commit":{"count":1,"durable":%d,"at":1}' % len(data)
            data += close_line(b'{"offset":%d,%b%b' % (offset, body, commit))
            offset += 1
            count += 1
        last = offset - 1
        if is_sealed:
            if last == (gap or 0) - 1 and number < len(files):
                offset, last = offset + 1, offset
            holes = gap is not None and first <= gap <= last
            digest = f"{crc32(data):08x}"
            state = heads.Head(segment=number + 1, next=offset)
            data += frame_seal(Seal(count, first, last, digest, 2**50, holes=holes))
        else:
            state = heads.Head(
                segment=number,
                records=count,
                next=offset,
                end=len(data),
                durable=len(data),
                sum=crc32(data),
                ts=2**50,
            )
        path.write_bytes(data)
    (wal / f"{topic}.head").write_bytes(heads.encode(state))
    for index in wal.glob(f"{topic}.*.index"):
        index.unlink()


def forged(draw: random.Random, body: bytes) -> bytes:
    """A record's body with one field changed, still JSON."""
    places = list(_TEXT.finditer(body))
    place = draw.choice(places)
    text = place[0]
    name, _, value = text.partition(b":")
    other = b'"%b"' % draw.choice([b"forged", b"x" + value.strip(b'"'), b"0"])
    return body[: place.start()] + name + b":" + other + body[place.end() :]


def edit(draw: random.Random, files: list[File]) -> int | None:
    file = draw.choice([f for f in files if f.bodies])
    at = draw.randrange(len(file.bodies))
    file.bodies[at] = forged(draw, file.bodies[at])
    return None


def delete(draw: random.Random, files: list[File]) -> int | None:
    """Renumber what follows, or leave a hole as a compaction does."""
    sealed = [f for f in files if f.is_sealed and f.bodies]
    if draw.random() < 0.5:
        file = draw.choice(sealed)
        at = draw.randrange(len(file.bodies))
        before = sum(len(f.bodies) for f in files[: files.index(file)])
        del file.bodies[at]
        return before + at + 1
    file = draw.choice([f for f in files if f.bodies])
    del file.bodies[draw.randrange(len(file.bodies))]
    return None


def insert(draw: random.Random, files: list[File]) -> int | None:
    file = draw.choice([f for f in files if f.bodies])
    source = draw.choice(file.bodies)
    body = forged(draw, source) if draw.random() < 0.5 else source
    at = draw.randrange(len(file.bodies))
    if body == file.bodies[at]:  # a copy right before the last record is one appended behind it
        body = forged(draw, body)
    file.bodies.insert(at, body)
    return None


def reorder(draw: random.Random, files: list[File]) -> int | None:
    places = [(f, at) for f in files for at in range(len(f.bodies))]
    (one, at), (two, there) = draw.sample(places, 2)
    one.bodies[at], two.bodies[there] = two.bodies[there], one.bodies[at]
    return None


def truncate(draw: random.Random, files: list[File]) -> int | None:
    """Cut the end off: a few records, or whole segments."""
    total = sum(len(f.bodies) for f in files)
    for _ in range(draw.randint(1, total - 1)):
        last = next(f for f in reversed(files) if f.bodies)
        last.bodies.pop()
    return None


KINDS = {f.__name__: f for f in (edit, delete, insert, reorder, truncate)}


def copy(source: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(source, target)


def is_sound(path: Path) -> bool:
    """Whether every line of a segment has its checksum: a forger who forgets that is no match."""
    lines = path.read_bytes().splitlines()
    return all(parse(line) is not None for line in lines)


def payload_of(body: bytes) -> object:
    return msgspec.json.decode(b"{" + body + b"}")["payload"]
