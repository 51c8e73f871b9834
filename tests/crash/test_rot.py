"""Damaged files: every flipped bit and every shorter length is harmless or a typed error."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from trunkline.errors import Corrupt, TrunklineError, UnsupportedFormat
from trunkline.folder import Folder, upkeep
from trunkline.log import recover as recovery

from . import sample
from .promises import OPTIONS, StillClock
from .scenes import TOPIC

WHOLE = {number: number for number in range(1, sample.RECORDS + 1)}
SETTLED = {1, 2, 3, 4, 6, 7}
FILES = (
    "bus.json",
    "topics.json",
    "offsets/t__g.journal",
    "offsets/t__g.json",
    "offsets/t__g.json.bak",
    "wal/t.00000001.jsonl.zst",
    "wal/t.00000001.index",
    "wal/t.00000002.jsonl",
    "wal/t.00000002.index",
    "wal/t.00000003.jsonl",
    "wal/t.head",
)


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = tempfile.mkdtemp(prefix="trunkline-", dir=memory)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def good(place: str) -> dict[str, bytes]:
    sample.make(f"{place}/good")
    files = sample.load(f"{place}/good")
    files.pop("wal/t.00000002.jsonl.zst", None)
    return files


def flips(data: bytes, step: int, start: int) -> Iterator[tuple[str, bytes]]:
    """The data with one bit the other way, for every ``step``-th bit."""
    for at in range(start % step, 8 * len(data), step):
        bad = bytearray(data)
        bad[at // 8] ^= 1 << at % 8
        yield f"bit {at % 8} of byte {at // 8}", bytes(bad)


def lengths(data: bytes, step: int, start: int) -> Iterator[tuple[str, bytes]]:
    for size in range(start % step, len(data), step):
        yield f"cut to {size} bytes", data[:size]


def judge(name: str, files: dict[str, bytes], root: str) -> str:
    """``harmless``, or the error's name; an assertion if it is neither."""
    sample.put(files, root)
    view = sample.look(root)
    for error in view.errors:
        assert isinstance(error, Corrupt | UnsupportedFormat), repr(error)
        assert error.path
        assert isinstance(error, UnsupportedFormat) or isinstance(error.position, int)
    for shown in (view.records, view.repaired):
        if not isinstance(shown, TrunklineError):
            missing = {o: v for o, v in WHOLE.items() if shown.get(o) != v}
            assert not missing, f"{missing} are gone without a word"
    if isinstance(view.added, int):
        assert view.added == sample.RECORDS + 1
    if not isinstance(view.later, TrunklineError):
        assert view.later == [2, 6, 8, 11]
    if not isinstance(view.settled, TrunklineError):
        assert view.settled <= SETTLED, "a record counts as settled that never was"
        if not name.endswith(".journal"):
            assert view.settled == SETTLED
    left = sample.load(root)
    for file in files:
        if file.startswith("wal/t.0000000") and file.endswith((".jsonl", ".zst")):
            kept = left.get(file, left.get(file + ".corrupt"))
            assert kept is not None, f"{file} was removed"
            assert len(kept) >= len(files[file]) or file == "wal/t.00000003.jsonl"
    return type(view.errors[0]).__name__ if view.errors else "harmless"


def survey(name: str, good: dict[str, bytes], place: str, bits: int, sizes: int) -> Counter[str]:
    """Judge a sample of the damage that one file can take; every n-th bit and length."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    found: Counter[str] = Counter()
    cases = [*flips(good[name], bits, seed), *lengths(good[name], sizes, seed)]
    for what, data in cases:
        try:
            found[judge(name, {**good, name: data}, f"{place}/bad")] += 1
        except Exception as error:
            raise AssertionError(f"{name}, {what}: {error!r}") from error
    print(f"{name}: {len(cases)} kinds of damage, {dict(found)}")
    return found


def test_the_sample_shows_what_was_put_in(good: dict[str, bytes], place: str) -> None:
    assert set(FILES) <= good.keys()
    sample.put(good, f"{place}/bad")
    view = sample.look(f"{place}/bad")
    assert view == (WHOLE, [2, 6, 8, 11], SETTLED, WHOLE | {12: 12}, 12)


@pytest.mark.parametrize("name", FILES)
def test_damage_is_harmless_or_named(name: str, good: dict[str, bytes], place: str) -> None:
    size = len(good[name])
    found = survey(name, good, place, max(1, 8 * size // 150), max(1, size // 50))
    if name.startswith("wal/t.0") and not name.endswith(".index"):
        assert found["Corrupt"] > 100
    if name.endswith((".index", ".head", ".bak", ".json")) and name.startswith(("wal", "off")):
        assert not found["Corrupt"], "this file can be made anew from the others"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FILES)
def test_every_bit_and_every_length(name: str, good: dict[str, bytes], place: str) -> None:
    found = survey(name, good, place, 1, 1)
    assert sum(found.values()) == 9 * len(good[name])


@pytest.mark.parametrize("number", [1, 2])
def test_verify_finds_every_flipped_bit_of_a_finished_segment(
    number: int, good: dict[str, bytes], place: str
) -> None:
    name = next(f for f in good if f.startswith(f"wal/t.0000000{number}.jsonl"))
    root = f"{place}/verified"
    sample.put(good, root)
    folder = Folder(root, OPTIONS, StillClock())
    assert not list(upkeep.verify(folder, TOPIC, 0))
    path = os.path.join(root, name)
    for what, data in flips(good[name], 1 if number == 1 else 5, 0):
        Path(path).write_bytes(data)
        assert any(found.severe for found in upkeep.verify(folder, TOPIC, 0)), what
    folder.close()


def test_a_rule_that_cuts_at_the_first_bad_line_is_found(
    good: dict[str, bytes], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The obvious rule, and why it is not the one: it turns damage into silent loss."""
    monkeypatch.setattr(recovery, "_was_durable", lambda *_: False)
    name = "wal/t.00000003.jsonl"
    files = {k: v for k, v in good.items() if k != "wal/t.head"}
    silent = 0
    for _, data in flips(good[name], 7, 0):
        try:
            judge(name, {**files, name: data}, f"{place}/bad")
        except AssertionError:
            silent += 1
    assert silent > 50
