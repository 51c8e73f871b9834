"""The tools for a damaged folder name the damage: no traceback, no hang, not all memory."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from trunkline.cli import main

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "folder-0.1.tar.gz"
COMMANDS = (
    ["verify"],
    ["doctor"],
    ["get", "work", "1:"],
    ["get", "packed", "1:"],
    ["tail", "work", "-n", "3"],
    ["topic", "ls"],
    ["group", "ls"],
    ["doctor", "--salvage"],
    ["verify"],
)
MEMORY = 2 << 30  # less than a sparse file has


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("whole")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(place, filter="data")
    return place / "bus"


@contextmanager
def bounded(seconds: int) -> Iterator[None]:
    """At most so long, and with at most `MEMORY` more than this process has already."""

    def late(*_: object) -> None:
        raise AssertionError(f"it hung for {seconds} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, before[1]))
    was = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, was)
        resource.setrlimit(resource.RLIMIT_AS, before)


def run(path: Path, *args: str) -> int:
    with bounded(30):
        return main([*args, "--url", f"file:{path}"])


def signed(line: bytes) -> bytes:
    """A line with the checksum that fits."""
    return line + b',"crc":"%08x"}' % crc32(line)


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")


def resign(path: Path, change: Callable[[bytes], bytes], at: int = 0) -> None:
    """Change one line of a file, and let its checksum fit."""
    found = lines(path)
    tail = found[at].rindex(b',"crc":"')
    padding = found[at][len(found[at].rstrip(b" ")) :]
    found[at] = signed(change(found[at][:tail])) + padding
    path.write_bytes(b"\n".join(found))


def in_place(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(3 << 30)


DEEP = b'{"x":' + b"[" * 200_000
PLANTED: dict[str, Callable[[Path], object]] = {
    "text": lambda bus: resign(
        bus / "wal/work.00000001.jsonl", lambda line: line.replace(b'"ann"', b'"\xed\xa0\x80"'), 2
    ),
    "text of a group": lambda bus: resign(
        bus / "offsets/work__billing.journal",
        lambda line: line.replace(b'"billing"', b'"\xed\xa0\x80"'),
    ),
    "text of a snapshot": lambda bus: resign(
        bus / "offsets/work__billing.json",
        lambda line: line.replace(b'"billing"', b'"\xed\xa0\x80"'),
    ),
    "text of the head": lambda bus: resign(
        bus / "wal/work.head", lambda line: line + b',"x":"\xed\xa0\x80"'
    ),
    "deep bus.json": lambda bus: (bus / "bus.json").write_bytes(DEEP[:60_000]),
    "large bus.json": lambda bus: (bus / "bus.json").write_bytes(DEEP),
    "deep topics.json": lambda bus: (bus / "topics.json").write_bytes(DEEP),
    "deep record": lambda bus: resign(
        bus / "wal/work.00000001.jsonl", lambda line: line + b',"y":' + DEEP[5:], 2
    ),
    "deep journal": lambda bus: resign(
        bus / "offsets/work__billing.journal", lambda line: line + b',"y":' + DEEP[5:]
    ),
    "no meta": lambda bus: resign(
        bus / "wal/work.00000001.jsonl", lambda _: b'{"offset":3,"payload":1', 2
    ),
    "no object": lambda bus: resign(bus / "offsets/work__billing.json", lambda _: b"[1"),
    "bytes for a journal": lambda bus: (bus / "offsets/work__billing.journal").write_bytes(
        b"\xff\xfe" * 200
    ),
    "strange header": lambda bus: resign(
        bus / "offsets/work__billing.journal", lambda _: b'{"format":"x","generation":[]'
    ),
    "strange mark": lambda bus: resign(
        bus / "offsets/work__billing.journal", lambda _: b'{"synced":"x"', -2
    ),
}
for place in (
    *("bus.json", "topics.json", "wal/work.head", "wal/work.00000001.jsonl"),
    *("wal/work.00000001.index", "wal/packed.00000001.index", "wal/packed.00000001.jsonl.zst"),
    *("offsets/work__billing.journal", "offsets/work__billing.json", "dlq/work.dlq.jsonl"),
    "offsets/work__billing.lock",
):
    PLANTED[f"pipe {place}"] = lambda bus, at=place: in_place(bus / at, os.mkfifo)  # type: ignore[misc]
    PLANTED[f"device {place}"] = lambda bus, at=place: in_place(bus / at, zeros)  # type: ignore[misc]
    PLANTED[f"folder {place}"] = lambda bus, at=place: in_place(bus / at, os.mkdir)  # type: ignore[misc]
    PLANTED[f"sparse {place}"] = lambda bus, at=place: in_place(bus / at, sparse)  # type: ignore[misc]

# The log goes on without these: they only hint, or another file says the same.
UNHARMED = {"strange mark", "text of the head", "text of a snapshot", "no object"}


@pytest.mark.parametrize("damage", PLANTED)
def test_damage_is_named(damage: str, whole: Path, tmp_path: Path, capsys: Any) -> None:
    bus = tmp_path / "bus"
    shutil.copytree(whole, bus)
    PLANTED[damage](bus)
    codes = [run(bus, *command) for command in COMMANDS]
    if "billing" in damage or "journal" in damage:
        reader = ["sub", "work", "--group", "billing", "--count", "1", "--wait", "0.1"]
        codes.append(run(bus, *reader))
    assert set(codes) <= {0, 1, 3}
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    if damage not in UNHARMED and "sparse" not in damage:
        assert codes[0] == 1, "verify found nothing"


def mutate(dice: random.Random, bus: Path) -> str:
    """Damage one file at random; where it is lines, often with a checksum that fits."""
    files = sorted(path for path in bus.rglob("*") if path.is_file() and path.stat().st_size)
    path = dice.choice(files)
    data = bytearray(path.read_bytes())
    way = dice.choice(["flip", "cut", "insert", "value", "value", "value", "key"])
    if way in ("value", "key") and b',"crc":"' in data:
        found = lines(path)
        at = dice.randrange(len(found) - 1)
        try:
            value = json.loads(found[at])
        except ValueError:
            value = None
        if isinstance(value, dict):
            value.pop("crc", None)
            name = dice.choice(sorted(value) or ["x"])
            if way == "key":
                value.pop(name, None)
            else:
                value[name] = dice.choice([None, -1, 1 << 80, "x", [], {}, [[1]], 1e300, True])
            text = json.dumps(value, separators=(",", ":")).encode()[:-1] or b"{"
            found[at] = signed(text)
            path.write_bytes(b"\n".join(found))
            return f"{way} {name} of line {at} of {path.name}"
    spot = dice.randrange(len(data))
    if way == "cut":
        del data[spot:]
    elif way == "insert":
        data[spot:spot] = dice.randbytes(dice.randrange(1, 50))
    else:
        data[spot] ^= 1 << dice.randrange(8)
    path.write_bytes(data)
    return f"{way} {spot} of {path.name}"


@pytest.mark.parametrize("seed", range(40))
def test_no_damage_is_too_much(seed: int, whole: Path, tmp_path: Path, capsys: Any) -> None:
    bus = tmp_path / "bus"
    shutil.copytree(whole, bus)
    dice = random.Random(seed)
    done = [mutate(dice, bus) for _ in range(dice.randrange(1, 4))]
    for command in COMMANDS:
        try:
            code = run(bus, *command)
        except Exception as error:
            raise AssertionError(f"{command} after {done}") from error
        assert code in (0, 1, 3), (command, done)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
