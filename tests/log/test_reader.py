"""Reading: by offset and by time, beside a writer, across everything that happens to files."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from pathlib import Path

import pytest

from kit.folders import Opener
from kit.log_events import TOPIC, at, event, payloads, publish, put
from trunkline.errors import Corrupt, NoBus, OutOfRange, StorageError
from trunkline.folder import Folder, upkeep
from trunkline.log.reader import list_segments
from trunkline.log.segment import Segment
from trunkline.options import TopicOptions


def test_a_file_that_is_listed_and_never_there_is_an_error_of_the_storage(
    folder: Folder, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(folder, range(5))
    reader = opener().reader(TOPIC, 0)

    def gone(*_: object) -> bytes:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "wal/x")

    monkeypatch.setattr(Segment, "read", gone)
    with pytest.raises(StorageError, match="x: No such file or directory"):
        reader.read(1)
    os.truncate(os.path.join(folder.path, "wal", f"{TOPIC}.head"), 0)
    with pytest.raises(StorageError, match="x: No such file or directory"):
        opener().bounds(TOPIC, 0)


def test_a_look_goes_on_while_others_remove_files_one_by_one(
    folder: Folder, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=1))
    publish(folder, range(5))
    places = [2, 3, 4]

    def listed(root: str, stem: str) -> list[Segment]:
        found = list_segments(root, stem)
        if places:  # each time one of those that were just listed goes
            upkeep.trim(folder, TOPIC, 0, places.pop(0))
        return found

    monkeypatch.setattr("trunkline.log.reader.list_segments", listed)
    assert opener().reader(TOPIC, 0).segment_of(4) == 4
    assert not places


def test_seek_by_time_agrees_with_looking_at_everything(folder: Folder, opener: Opener) -> None:
    """Event times in any order, as producers set them."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder.define(TOPIC, TopicOptions(segment_records=7))
    times: list[float] = []
    for _ in range(60):
        batch = [rng.choice([rng.random() * 100, len(times)]) for _ in range(rng.randint(1, 3))]
        put(folder, *(event("x" * rng.choice([1, 700]), ts=ts) for ts in batch))
        times += batch
    upkeep.trim(folder, TOPIC, 0, 9)
    upkeep.pack_segments(folder, TOPIC, 0)
    other = opener()
    for second in [*times[::5], -1.0, 50.5, 1000.0]:
        want = next((o for o, ts in enumerate(times, 1) if o >= 9 and ts >= second), len(times) + 1)
        assert other.seek(TOPIC, 0, at(second)) == want


def test_a_reader_sees_what_was_appended_since(folder: Folder, opener: Opener) -> None:
    other = opener()
    assert other.read(TOPIC, 0, 1, 10) == []
    assert other.bounds(TOPIC, 0) == (1, 1)
    for number in range(1, 6):
        publish(folder, [number])
        assert list(payloads(other)) == list(range(1, number + 1))


def test_a_reader_keeps_up_with_files_that_others_replace(folder: Folder, opener: Opener) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=2))
    publish(folder, range(9), key="k")
    other = opener()
    assert len(payloads(other)) == 9
    upkeep.pack_segments(folder, TOPIC, 0)
    assert len(payloads(other)) == 9
    upkeep.trim(folder, TOPIC, 0, 6)
    assert list(payloads(other)) == [6, 7, 8, 9]
    with pytest.raises(OutOfRange) as caught:
        other.read(TOPIC, 0, 5, 1)
    assert (caught.value.first, caught.value.next) == (6, 10)
    assert [r.offset for r in other.reader(TOPIC, 0).read(1, 1, strict=False)] == [6]


def open_files(root: str) -> list[str]:
    """The files under ``root`` that this process has open, as the kernel names them."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in links if link.startswith(os.path.realpath(root)) and "jsonl" in link]


def test_a_log_may_have_more_files_than_a_process_may_open(
    folder: Folder, root: str, opener: Opener
) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=1))
    publish(folder, range(150))
    other = opener()
    reader = other.reader(TOPIC, 0)
    assert reader.segment_of(149) == 149
    assert len(open_files(root)) < 10, "who only looks where each begins"
    assert len(payloads(other)) == reader.count() == 150
    assert len(open_files(root)) < 80
    assert upkeep.compact(other, TOPIC, 0) == 0
    assert upkeep.pack_segments(other, TOPIC, 0) == 149
    assert len(payloads(other)) == 150
    assert len(open_files(root)) < 80


def test_files_are_not_listed_to_see_where_a_log_ends(
    folder: Folder, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing holds the files of all topics: one for each takes long where there are many."""
    folder.define(TOPIC, TopicOptions(segment_records=3))
    publish(folder, range(5))
    reader = opener().reader(TOPIC, 0)
    with monkeypatch.context() as patch:
        patch.setattr("trunkline.log.reader.list_segments", None)
        assert reader.bounds() == (1, 6)
        assert [reader.segment_of(offset) for offset in (5, 4)] == [2, 2]
    assert [reader.segment_of(offset) for offset in (3, 1, 0)] == [1, 1, 1]


def test_a_reader_lets_go_of_files_that_others_rewrote(
    folder: Folder, root: str, opener: Opener
) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=2))
    put_keys(folder, "aabbab")
    other = opener()
    assert len(payloads(other)) == 6
    assert upkeep.compact(folder, TOPIC, 0) == 4
    put_keys(folder, "c")  # begins another file
    assert list(payloads(other)) == [5, 6, 7]
    assert not [name for name in open_files(root) if name.endswith("(deleted)")]


def test_at_least_one_record_however_large(folder: Folder) -> None:
    publish(folder, ["x" * 300_000, "y" * 300_000, "z"])
    assert [record.offset for record in folder.read(TOPIC, 0, 1, 10, bytes_max=1000)] == [1]
    assert [record.offset for record in folder.read(TOPIC, 0, 3, 10, bytes_max=1000)] == [3]


def test_what_is_not_shown_by_the_head_is_not_read(folder: Folder, root: str) -> None:
    publish(folder, [1])
    with open(f"{root}/wal/t.00000001.jsonl", "ab") as file:
        file.write(Path(root, "wal/t.00000001.jsonl").read_bytes().replace(b":1,", b":2,", 1))
    assert list(payloads(folder)) == [1]


def test_records_of_a_failed_sync_do_not_count(folder: Folder, root: str, opener: Opener) -> None:
    """The file could not even be cut: the next segment's first offset overrules what it holds."""
    publish(folder, [1, 2])
    head = folder.head(TOPIC, 0)
    writer = folder.writer(TOPIC, 0)
    writer.begin()
    writer._abandon(head)
    writer.end()
    with open(f"{root}/wal/t.00000001.jsonl", "ab") as file:
        first = Path(root, "wal/t.00000001.jsonl").read_bytes().split(b"\n")[0]
        from trunkline.log.line import close_line

        file.write(close_line(first[:-18].replace(b'"offset":1', b'"offset":3')))
    publish(folder, [3])
    for reader in (folder, opener()):
        assert payloads(reader) == {1: 1, 2: 2, 3: 3}


def test_a_gap_is_an_error_and_not_an_end(folder: Folder, root: str, opener: Opener) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=1))
    publish(folder, [1, 2, 3])
    os.unlink(f"{root}/wal/t.00000002.jsonl")
    other = opener()
    assert [record.offset for record in other.read(TOPIC, 0, 1, 1)] == [1]
    with pytest.raises(Corrupt) as caught:
        other.read(TOPIC, 0, 2, 1)
    assert caught.value.offset == 2
    with pytest.raises(Corrupt):
        other.seek(TOPIC, 0, at(1))
    assert [record.offset for record in other.read(TOPIC, 0, 3, 1)] == [3]


def test_a_folder_that_was_moved_away_is_not_an_empty_one(folder: Folder, root: str) -> None:
    publish(folder, [1])
    shutil.move(root, root + ".old")
    with pytest.raises(NoBus):
        folder.fresh_reader(TOPIC, 0).read(1)
    shutil.move(root + ".old", root)
    assert payloads(folder) == {1: 1}


def test_a_file_that_was_emptied_is_not_passed_over(folder: Folder, root: str) -> None:
    """Not even behind one in which offsets may be missing."""
    folder.define(TOPIC, TopicOptions(segment_records=2))
    put_keys(folder, "aabcdef")
    upkeep.compact(folder, TOPIC, 0)
    os.truncate(f"{root}/wal/t.00000002.jsonl", 0)
    with pytest.raises(Corrupt, match="offset 3 of t/0 is in no readable file"):
        payloads(folder)
    assert list(payloads(folder, 5)) == [5, 6, 7]


@pytest.mark.parametrize("start", [1, 2, 3, 4])
def test_a_damaged_line_is_not_passed_over_where_offsets_may_be_missing(
    start: int, folder: Folder, root: str
) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=5))
    put_keys(folder, "azazbcd")
    upkeep.compact(folder, TOPIC, 0)  # 3, 4 and 5 are left
    path = Path(root, "wal/t.00000001.jsonl")
    path.write_bytes(path.read_bytes().replace(b'{"offset":3,', b'{"offset":1,'))
    if start == 4:
        assert list(payloads(folder, start)) == [4, 5, 6, 7]
    else:
        with pytest.raises(Corrupt, match="the checksum does not fit"):
            payloads(folder, start)


def put_keys(folder: Folder, keys: str) -> None:
    for key in keys:
        put(folder, event(key, key=key))


def test_a_log_that_is_removed_while_it_is_read_is_not_damaged(
    folder: Folder, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = opener()
    publish(folder, range(1, 4))

    def late(root: str, stem: str) -> list[Segment]:
        monkeypatch.undo()
        other.remove_topic(TOPIC)
        return list_segments(root, stem)

    reading = folder.reader(TOPIC, 0)
    assert reading.bounds() == (1, 4)
    monkeypatch.setattr("trunkline.log.reader.list_segments", late)
    assert reading.read(1) == []


@pytest.mark.parametrize("has_head", [True, False])
def test_a_log_that_is_removed_while_its_end_is_looked_for_is_empty(
    folder: Folder, opener: Opener, monkeypatch: pytest.MonkeyPatch, has_head: bool
) -> None:
    folder.define(TOPIC, TopicOptions(durability="os"))
    publish(folder, range(1, 4))
    if not has_head:
        os.unlink(os.path.join(folder.path, "wal", f"{TOPIC}.head"))

    def late(segment: Segment) -> int:
        monkeypatch.undo()
        folder.remove_topic(TOPIC)
        return segment.open()

    reading = opener().reader(TOPIC, 0)
    monkeypatch.setattr(Segment, "open", late)
    assert reading.bounds() == (1, 1)
