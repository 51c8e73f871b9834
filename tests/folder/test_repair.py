"""After damage: what is intact comes back, what is lost is told, and the log goes on."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.folders import Opener
from kit.log_events import TOPIC, at, event, payloads, publish, put
from trunkline.errors import Corrupt
from trunkline.folder import Folder, upkeep
from trunkline.folder.repair import salvage
from trunkline.options import TopicOptions


def damage(root: str, name: str, old: bytes, new: bytes) -> None:
    path = Path(root, "wal", name)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def test_salvage_brings_back_what_can_be_read(folder: Folder, root: str, opener: Opener) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=4))
    publish(folder, ["a", "b", "c", "d", "e"])
    folder.close()
    damage(root, "t.00000001.jsonl", b'"payload":"b"', b'"payload":"B"')
    other = opener()
    with pytest.raises(Corrupt):
        payloads(other)
    assert any(found.severe for found in upkeep.verify(other, TOPIC, 0))
    assert [one.lost for one in salvage(other, TOPIC, 0)] == [[(2, 2)]]
    assert payloads(other) == {1: "a", 3: "c", 4: "d", 5: "e"}
    assert not [found for found in upkeep.verify(other, TOPIC, 0) if found.severe]
    assert b'"payload":"B"' in Path(root, "quarantine/t.00000001.jsonl").read_bytes()


def test_salvage_of_the_last_segment(folder: Folder, root: str, opener: Opener) -> None:
    publish(folder, ["a", "b", "c"])
    folder.close()
    damage(root, "t.00000001.jsonl", b'"payload":"b"', b'"payload":"B"')
    os.unlink(f"{root}/wal/t.head")
    other = opener()
    with pytest.raises(Corrupt) as caught:
        publish(other, ["d"])
    assert caught.value.path.endswith("t.00000001.jsonl.corrupt")
    assert publish(other, ["d"]) == [4]
    with pytest.raises(Corrupt):
        payloads(other)
    assert [one.lost for one in salvage(other, TOPIC, 0)] == [[(2, 2)]]
    assert payloads(other) == {1: "a", 3: "c", 4: "d"}


def test_nothing_is_appended_to_a_line_that_lost_its_end(
    folder: Folder, root: str, opener: Opener
) -> None:
    publish(folder, [1, 2])
    folder.close()
    path = Path(root, "wal/t.00000001.jsonl")
    path.write_bytes(path.read_bytes()[:-1] + b"\x0b")
    other = opener()

    with pytest.raises(Corrupt, match="the last line has no end"):
        publish(other, [3])

    assert publish(other, [3]) == [3]
    salvage(other, TOPIC, 0)
    assert payloads(other)[1] == 1
    assert payloads(other)[3] == 3, "what was acknowledged after the damage is there"


def lost(folder: Folder) -> list[tuple[int, int]]:
    return [span for one in salvage(folder, TOPIC, 0) for span in one.lost]


@pytest.mark.parametrize("gone", [(1,), (2,), (3,), (1, 2), (2, 3), (1, 3), (1, 2, 3)])
def test_the_log_goes_on_without_files_that_are_gone(
    folder: Folder, root: str, opener: Opener, gone: tuple[int, ...]
) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=2))
    publish(folder, range(1, 6))
    folder.close()
    for number in gone:
        os.unlink(f"{root}/wal/t.{number:08d}.jsonl")
    offsets = {2 * number - 1 + i for number in gone for i in (0, 1)} - {6}
    other = opener()

    told = {offset for a, b in lost(other) for offset in range(a, b + 1)}

    assert told == offsets
    assert payloads(other) == {n: n for n in range(1, 6) if n not in offsets}
    assert publish(other, [6]) == [6]
    assert not [found for found in upkeep.verify(other, TOPIC, 0) if found.severe]
    assert salvage(other, TOPIC, 0) == []


@pytest.mark.parametrize("by_index", [True, False])
def test_frames_that_are_intact_come_back(
    by_index: bool, folder: Folder, root: str, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a damaged one, they are found by the index."""
    monkeypatch.setattr("trunkline.folder.rewrite._FRAME", 1)
    folder.define(TOPIC, TopicOptions(segment_records=4))
    publish(folder, range(1, 6))
    upkeep.pack_segments(folder, TOPIC, 0)
    path = Path(root, "wal/t.00000001.jsonl.zst")
    data = bytearray(path.read_bytes())
    data[3 * len(data) // 10] ^= 1
    path.write_bytes(bytes(data))
    if not by_index:
        os.unlink(f"{root}/wal/t.00000001.index")
    other = opener()
    assert lost(other) == [(2, 2) if by_index else (2, 4)]
    assert list(payloads(other)) == ([1, 3, 4, 5] if by_index else [1, 5])
    assert not list(upkeep.verify(other, TOPIC, 0))


def drop_a_line(lines: list[bytes], rng: random.Random) -> None:
    del lines[rng.randrange(len(lines))]


def double_a_line(lines: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    lines.insert(at, lines[at])


def flip_a_bit(lines: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    line = bytearray(lines[at])
    line[rng.randrange(len(line))] ^= 1 << rng.randrange(8)
    lines[at] = bytes(line)


def cut(lines: list[bytes], rng: random.Random) -> None:
    data = b"".join(lines)
    lines[:] = [data[: rng.randrange(len(data))]]


@pytest.mark.parametrize("harm", [drop_a_line, double_a_line, flip_a_bit, cut])
def test_whatever_is_missing_afterwards_was_told(
    harm: Callable[[list[bytes], random.Random], None], folder: Folder, root: str, opener: Opener
) -> None:
    """Plain, compressed and compacted files, up to two of them damaged."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder.define(TOPIC, TopicOptions(segment_records=3))
    for number in range(1, 13):
        put(folder, event(number, key=rng.choice([None, "a", "b"])))
    if rng.random() < 0.5:
        upkeep.compact(folder, TOPIC, 0)
    if rng.random() < 0.5:
        upkeep.pack_segments(folder, TOPIC, 0)
    publish(folder, range(13, 15))
    there = payloads(folder)
    folder.close()
    files = sorted(Path(root, "wal").glob("t.*.jsonl*"))[:-1]
    for path in rng.sample(files, rng.choice([1, 2])):
        lines = path.read_bytes().splitlines(keepends=True)
        harm(lines, rng)
        path.write_bytes(b"".join(lines))
    other = opener()

    told = {offset for a, b in lost(other) for offset in range(a, b + 1)}

    left = payloads(other)
    assert left.items() <= there.items()
    assert there.keys() - left.keys() <= told
    assert not told & left.keys()
    assert publish(other, [15]) == [15]
    assert not [found for found in upkeep.verify(other, TOPIC, 0) if found.severe]


def test_a_compacted_file_without_its_seal(folder: Folder, root: str, opener: Opener) -> None:
    """Nothing else says that offsets may be missing in it."""
    folder.define(TOPIC, TopicOptions(segment_records=2))
    for key in "zyabax":
        put(folder, event(key, key=key))
    upkeep.compact(folder, TOPIC, 0)
    assert list(payloads(folder)) == [1, 2, 4, 5, 6]
    path = Path(root, "wal/t.00000002.jsonl")
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    other = opener()
    assert lost(other) == [(3, 3)]
    assert list(payloads(other)) == [1, 2, 4, 5, 6]


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_reader_that_met_the_damage_sees_that_it_was_mended(
    is_gone: bool, folder: Folder, root: str, opener: Opener
) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=2))
    publish(folder, [1, 2, 3, 4, 5])
    reader = opener()
    if is_gone:
        os.unlink(f"{root}/wal/t.00000002.jsonl")
    else:
        damage(root, "t.00000002.jsonl", b'"payload":4', b'"payload":5')
    for one in (folder, reader):
        with pytest.raises(Corrupt):
            payloads(one)
    seeker = opener()
    if is_gone:
        with pytest.raises(Corrupt):
            seeker.seek(TOPIC, 0, at(1000))
    salvage(opener(), TOPIC, 0)
    for one in (folder, reader):
        assert list(payloads(one)) == ([1, 2, 5] if is_gone else [1, 2, 3, 5])
    assert seeker.seek(TOPIC, 0, at(1000)) == 6
