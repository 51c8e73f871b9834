"""Segments: the index only hints, and a compressed file is the same lines."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from kit.folders import Opener
from kit.log_events import TOPIC, at, event, payloads, publish, put
from trunkline.errors import Corrupt
from trunkline.folder import Folder, upkeep
from trunkline.log.segment import Entry, Segment, index_frames, index_line, read_index
from trunkline.options import TopicOptions

INDEX = "wal/t.00000001.index"
PLAIN = "wal/t.00000001.jsonl"


@pytest.fixture
def filled(folder: Folder) -> Folder:
    """Forty records in one finished segment, their times not in order."""
    folder.define(TOPIC, TopicOptions(segment_records=40))
    times = random.Random(4)
    for number in range(41):
        put(folder, event(f"{number}:" + "x" * 300, ts=times.randrange(100)))
    return folder


def test_the_index_is_checked_before_it_is_used(filled: Folder, root: str, opener: Opener) -> None:
    want = payloads(filled)
    when = [filled.seek(TOPIC, 0, at(second)) for second in range(101)]
    good = Path(root, INDEX).read_bytes()
    assert len(read_index(f"{root}/{INDEX}")) > 5
    lies = [Entry(n, 17 * n, 1, 0) for n in range(1, 40)]
    for bad in (b"", b"\0" * 99, good[:37], good[37:], b"".join(map(index_line, lies))):
        Path(root, INDEX).write_bytes(bad)
        other = opener()
        assert payloads(other) == want
        assert [r.offset for start in (7, 23, 40) for r in other.read(TOPIC, 0, start, 1)] == [
            7,
            23,
            40,
        ]
        assert [other.seek(TOPIC, 0, at(second)) for second in range(101)] == when


def test_a_flipped_digit_in_the_index_is_no_entry(tmp_path: Path) -> None:
    line = index_line(Entry(12, 3456, 789, 0))
    for position in range(len(line)):
        for bit in range(8):
            bad = bytearray(line)
            bad[position] ^= 1 << bit
            (tmp_path / "index").write_bytes(bytes(bad))
            assert read_index(os.fspath(tmp_path / "index")) == [], (position, bit)


def test_compressed_lines_are_the_same_lines(filled: Folder, root: str, opener: Opener) -> None:
    want = payloads(filled)
    when = [filled.seek(TOPIC, 0, at(second)) for second in range(0, 101, 10)]
    assert upkeep.pack_segments(filled, TOPIC, 0) == 1
    assert not os.path.exists(f"{root}/{PLAIN}")
    assert os.stat(f"{root}/{PLAIN}.zst").st_size < 4000
    index = Path(root, INDEX).read_bytes()
    # Where it is spoilt, or lacks its first line, the frames are found in the file itself.
    for found in (index, b"7 7 7 7 7\n", index.partition(b"\n")[2]):
        Path(root, INDEX).write_bytes(found)
        other = opener()
        assert payloads(other) == want
        assert [other.seek(TOPIC, 0, at(second)) for second in range(0, 101, 10)] == when
        assert not list(upkeep.verify(other, TOPIC, 0))


def test_an_index_of_another_file_is_made_anew(root: str, folder: Folder, opener: Opener) -> None:
    """A crash between the two files of a compaction leaves the new index beside the old file."""
    folder.define(TOPIC, TopicOptions(segment_records=3))
    for number in range(4):
        put(folder, event("x" * 200, key=str(number % 2)))
    upkeep.pack_segments(folder, TOPIC, 0)
    before = Path(root, PLAIN + ".zst").read_bytes()
    assert upkeep.compact(folder, TOPIC, 0) == 2
    Path(root, PLAIN + ".zst").write_bytes(before)
    other = opener()
    assert list(payloads(other)) == [1, 2, 3, 4]


def test_damage_in_a_compressed_file_names_the_byte(filled: Folder, root: str) -> None:
    upkeep.pack_segments(filled, TOPIC, 0)
    data = bytearray(Path(root, PLAIN + ".zst").read_bytes())
    data[len(data) // 2] ^= 4
    Path(root, PLAIN + ".zst").write_bytes(bytes(data))
    filled.forget(TOPIC, 0)
    with pytest.raises(Corrupt) as caught:
        payloads(filled)
    assert caught.value.path.endswith(".zst")
    assert caught.value.position == 0
    with pytest.raises(Corrupt):
        index_frames(f"{root}/{PLAIN}.zst")


def test_a_segment_knows_where_it_began(folder: Folder, root: str) -> None:
    """Also when its first record was compacted away."""
    folder.define(TOPIC, TopicOptions(segment_records=2))
    publish(folder, [1, 2])
    put(folder, event(3, key="k"))
    put(folder, event(4, key="k"))
    publish(folder, [5])
    assert upkeep.compact(folder, TOPIC, 0) == 1
    assert Segment(root, "wal/t", 2).first == 3
    folder.forget(TOPIC, 0)
    assert payloads(folder) == {1: 1, 2: 2, 4: 4, 5: 5}
    assert payloads(folder, 3) == {4: 4, 5: 5}


def test_no_file_stays_open(folder: Folder, root: str) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=1, retention_records=2))

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    publish(folder, range(3))
    upkeep.retain(folder, TOPIC, 0)
    before = count()
    publish(folder, range(20))
    upkeep.retain(folder, TOPIC, 0)
    upkeep.compact(folder, TOPIC, 0)
    assert count() <= before + 1
