"""The folder as a whole: opening, options, members, topics."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.folders import Opener
from kit.log_events import TOPIC, at, event, payloads, publish, put
from trunkline.codec import encode_event
from trunkline.errors import (
    Closed,
    Conflict,
    Corrupt,
    LockTimeout,
    NoBus,
    NotFound,
    OutOfRange,
    StorageError,
    TrunklineError,
    UnsupportedFormat,
)
from trunkline.folder import Folder, upkeep
from trunkline.folder.group_file import GroupFile
from trunkline.group import Group
from trunkline.log import atomic
from trunkline.names import GroupKey
from trunkline.options import Durability, GroupOptions, Limits, StoreOptions, TopicOptions

KEY = GroupKey(TOPIC, 0, "g")


def test_a_folder_is_made_only_if_asked_for(root: str) -> None:
    with pytest.raises(NoBus):
        Folder(root, StoreOptions(create=False))
    assert not os.path.exists(root)
    one = Folder(root)
    two = Folder(root, StoreOptions(create=False))
    assert one.id == two.id
    one.close()
    two.close()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", Corrupt),
        (b"{", Corrupt),
        (b"\xff\xfe", Corrupt),
        (b"[1]", Corrupt),
        (b'{"format":99}', UnsupportedFormat),
    ],
)
def test_a_bad_marker_is_refused_and_nothing_changes(
    data: bytes, kind: type[TrunklineError], root: str
) -> None:
    Folder(root).close()
    Path(root, "bus.json").write_bytes(data)
    before = {path: path.stat().st_mtime_ns for path in Path(root).rglob("*") if path.is_file()}
    with pytest.raises(kind):
        Folder(root)
    after = {path: path.stat().st_mtime_ns for path in Path(root).rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"t":1}', b"\xff", b'{"t":{"nope":1}}'])
def test_bad_topic_options_are_an_error(data: bytes, folder: Folder, root: str) -> None:
    Path(root, "topics.json").write_bytes(data)
    with pytest.raises((Corrupt, UnsupportedFormat)):
        folder.topics()


def test_options_are_shared(folder: Folder, opener: Opener) -> None:
    other = opener()
    folder.define(TOPIC, TopicOptions(partitions=2))
    assert other.topics()[TOPIC].partitions == 2
    other.define(TOPIC, TopicOptions(partitions=3))
    assert folder.topics()[TOPIC].partitions == 3
    with pytest.raises(Conflict):
        folder.define(TOPIC, TopicOptions(partitions=2))


def test_a_removed_topic_begins_anew(folder: Folder, opener: Opener) -> None:
    other = opener()
    publish(folder, [1, 2])
    publish(other, [3])
    key = GroupKey(TOPIC, 0, "g")
    folder.step(key, lambda group: group.define(GroupOptions(), 0))
    folder.remove_topic(TOPIC)
    assert folder.topics() == {}
    assert folder.groups() == []
    assert publish(other, ["new"]) == [1]
    assert payloads(other) == {1: "new"}
    with pytest.raises(NotFound):
        folder.remove_topic("never")


def test_what_was_removed_elsewhere_is_never_written_to(folder: Folder, opener: Opener) -> None:
    other = opener()
    publish(folder, ["a"])
    assert payloads(folder) == {1: "a"}
    other.remove_topic(TOPIC)
    publish(other, ["b"])  # a log of the very same length
    assert publish(folder, ["c"]) == [2]
    assert payloads(folder) == payloads(opener()) == {1: "b", 2: "c"}


def test_what_was_removed_elsewhere_is_never_read_again(folder: Folder, opener: Opener) -> None:
    other = opener()
    publish(folder, ["a1", "a2", "a3"])
    assert payloads(folder) == {1: "a1", 2: "a2", 3: "a3"}
    other.remove_topic(TOPIC)
    assert payloads(folder) == {}
    publish(other, ["b1", "b2"])
    assert payloads(folder) == {1: "b1", 2: "b2"}


def test_a_removed_topic_has_seen_no_key(folder: Folder, opener: Opener) -> None:
    options, other = TopicOptions(dedup_window_s=60.0), opener()
    folder.define(TOPIC, options)
    put(folder, event(1, idem_key="k"))
    other.remove_topic(TOPIC)
    other.define(TOPIC, options)
    publish(other, ["x", "y"])
    assert put(folder, event(2, idem_key="k")).duplicates == {}
    assert payloads(folder) == {1: "x", 2: "y", 3: 2}


def test_all_partitions_go_with_a_topic_whose_options_were_lost(folder: Folder, root: str) -> None:
    folder.define(TOPIC, TopicOptions(partitions=3))
    for partition in range(3):
        folder.append(TOPIC, partition, [encode_event(event(1), Limits())], [event(1)])
    os.unlink(f"{root}/topics.json")
    folder.remove_topic(TOPIC)
    assert folder.topics() == {}
    assert os.listdir(f"{root}/wal") == []


def test_a_batch_is_whole_or_not_there(folder: Folder, root: str, opener: Opener) -> None:
    put(folder, *(event(n) for n in range(3)))
    size = os.stat(f"{root}/wal/t.00000001.jsonl").st_size
    put(folder, *(event(n) for n in range(3, 6)))
    folder.abandon()
    path = f"{root}/wal/t.00000001.jsonl"
    data = Path(path).read_bytes()
    for cut in range(size, len(data)):  # a writer that died in the middle of its write
        Path(path).write_bytes(data[:cut])
        os.unlink(f"{root}/wal/t.head") if os.path.exists(f"{root}/wal/t.head") else None
        assert list(payloads(opener()).values()) == [0, 1, 2], cut


def test_a_closed_folder_says_so(folder: Folder) -> None:
    publish(folder, [1])
    folder.close()
    folder.close()
    with pytest.raises(Closed):
        publish(folder, [2])
    with pytest.raises(Closed):
        folder.step(GroupKey(TOPIC, 0, "g"), lambda group: group)


def test_a_close_takes_no_lock_from_a_thread_that_tends_the_log(
    folder: Folder, opener: Opener
) -> None:
    publish(opener(), [1])
    writer = folder.writer(TOPIC, 0)
    writer.begin()  # as retention does, in a thread that nobody waits for
    closing = threading.Thread(target=folder.close)
    closing.start()
    closing.join(0.1)
    with pytest.raises(LockTimeout):
        opener().writer(TOPIC, 0).begin(timeout_s=0.0)
    writer.end()
    closing.join()
    assert publish(opener(), [2]) == [2]


def test_members_tidy_up_after_the_dead(folder: Folder, opener: Opener, root: str) -> None:
    folder.join()
    other = opener()
    other.join()
    assert set(os.listdir(f"{root}/members")) == {folder.member, other.member}
    assert other.is_alive(folder.member)
    folder.abandon()
    assert not other.is_alive(folder.member)
    third = opener()
    third.join()
    assert set(os.listdir(f"{root}/members")) == {other.member, third.member}
    third.close()
    assert set(os.listdir(f"{root}/members")) == {other.member}


def test_a_topic_is_there_as_long_as_its_records_are(folder: Folder, root: str) -> None:
    folder.define(TOPIC, TopicOptions(partitions=3))
    put(folder, event(1))
    folder.append(TOPIC, 2, [encode_event(event(2), Limits())], [event(2)])
    os.unlink(f"{root}/topics.json")
    os.unlink(f"{root}/wal/{TOPIC}.head")
    os.unlink(f"{root}/wal/{TOPIC}~2.head")

    again = Folder(root)

    assert again.topics()[TOPIC].partitions == 3
    assert again.has_topic(TOPIC)
    assert [record.event.payload for record in again.read(TOPIC, 2, 1, 9)] == [2]
    again.close()


@pytest.mark.parametrize("data", [b"\0" * 3001, b"garbage", b"garbage\n", None])
def test_a_file_in_the_place_of_the_next_segment_takes_no_record_along(
    data: bytes | None, root: str
) -> None:
    with contextlib.closing(Folder(root)) as folder:
        folder.define(TOPIC, TopicOptions(segment_records=5))
        publish(folder, range(1, 6))
        one, two = (Path(root, "wal", f"{TOPIC}.{number:08d}.jsonl") for number in (1, 2))
        two.write_bytes(one.read_bytes() if data is None else data)
        if data is None:  # records, which are not cut off but set aside
            with pytest.raises(Corrupt, match="offset 1 stands where 6 belongs"):
                publish(folder, [6])
        publish(folder, range(6, 9))
        assert payloads(folder, 6) == {offset: offset for offset in range(6, 9)}
    with contextlib.closing(Folder(root)) as folder:
        assert payloads(folder, 6) == {offset: offset for offset in range(6, 9)}


def test_a_topic_that_is_not_there_is_no_news(folder: Folder, opener: Opener) -> None:
    folder.bounds(TOPIC, 0)
    assert folder.noticed() == set()
    publish(opener(), [1])
    assert folder.noticed() == {TOPIC}


def test_readers_and_writers_outlive_the_removal_of_their_topic(folder: Folder) -> None:
    """A thread removes it: what the loop is just using must not be closed beneath it."""
    publish(folder, range(1, 4))
    reader, writer = folder.reader(TOPIC, 0), folder.writer(TOPIC, 0)
    assert len(reader.read(1)) == 3
    folder.remove_topic(TOPIC)
    assert reader.bounds() == (1, 1)
    publish(folder, ["new"])
    assert [record.event.payload for record in reader.read(1)] == ["new"]
    assert (folder.reader(TOPIC, 0), folder.writer(TOPIC, 0)) == (reader, writer)


@pytest.fixture
def member(folder: Folder, opener: Opener) -> Folder:
    """Another process, which works for a group on three records."""
    publish(folder, range(1, 4))
    other = opener()
    other.step(KEY, lambda group: group.define(GroupOptions(), 0))
    return other


def test_what_the_system_refuses_is_an_error_of_the_storage(folder: Folder, root: str) -> None:
    os.mkdir(os.path.join(root, "wal", f"{TOPIC}.head"))
    for ask in (folder.bounds, folder.head):
        with pytest.raises(StorageError, match="Is a directory"):
            ask(TOPIC, 0)
    for place, look in (("wal", folder.topics), ("offsets", folder.groups)):
        shutil.rmtree(os.path.join(root, place))
        Path(root, place).touch()
        with pytest.raises(StorageError, match="Not a directory"):
            look()


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_group_that_cannot_be_read_hides_none_of_the_others(
    folder: Folder, member: Folder, root: str, make: Callable[[str], None]
) -> None:
    other = KEY._replace(group="h")
    member.close()
    folder.step(other, lambda group: group.define(GroupOptions(), 0))
    path = os.path.join(root, "offsets", f"{TOPIC}__g.journal")
    os.remove(path)
    make(path)
    assert folder.groups() == [KEY, other]
    with pytest.raises(StorageError):
        folder.group(KEY)


def lose(root: str, keep: int) -> None:
    """What a power cut may do to a log that is not synced."""
    path = Path(root, "wal", f"{TOPIC}.00000001.jsonl")
    os.truncate(path, len(b"".join(path.read_bytes().splitlines(keepends=True)[:keep])))


@pytest.mark.parametrize("begins", ["after", "during"])
def test_a_group_of_a_topic_made_anew_notices_records_that_are_lost_there(
    opener: Opener, root: str, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, unsafe, remove = opener(), TopicOptions(durability="os"), Folder.remove_group
    member.define(TOPIC, unsafe)
    publish(member, range(1, 4))
    lose(root, 2)
    member = opener()
    publish(member, ["epoch 2"])
    member.step(KEY, lambda group: group.define(GroupOptions(), 0))

    def beside(other: Folder, key: GroupKey) -> None:
        remove(other, key)
        if begins == "during":
            member.step(KEY, lambda group: group.floor)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "remove_group", beside)
        opener().remove_topic(TOPIC)
    member.define(TOPIC, unsafe)
    publish(member, range(1, 5))
    member.step(KEY, Group.begin_anew)
    member.step(KEY, lambda group: group.settle([1, 2, 3, 4]))
    assert member.head(TOPIC, 0).epoch == 1
    member.abandon()
    lose(root, 2)

    publish(opener(), ["new", "new"])
    assert opener().step(KEY, lambda group: group.floor) == 2


def test_a_look_at_a_group_whose_log_lost_records_makes_none(opener: Opener, root: str) -> None:
    member, policy = opener(), GroupOptions(max_retries=7)
    member.define(TOPIC, TopicOptions(durability="os"))
    publish(member, range(1, 4))
    member.step(KEY, lambda group: group.floor)
    lose(root, 2)
    publish(opener(), ["epoch 2"])

    opener().step(KEY, lambda group: group.floor)
    assert opener().groups() == []
    opener().step(KEY, lambda group: group.define(policy, 0))
    assert opener().step(KEY, lambda group: group.options) == policy


def is_of_log(paths: list[str]) -> bool:
    return any(os.path.dirname(path).endswith("wal") for path in paths)


def test_what_members_do_while_a_topic_is_removed_settles_nothing_in_the_next(
    folder: Folder, member: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = atomic.remove_files

    def work(group: Group) -> None:
        end = member.bounds(TOPIC, 0).next
        group.begin_anew()
        group.settle(range(1, end))

    def beside(paths: list[str]) -> None:
        if is_of_log(paths):
            member.step(KEY, work)
        remove(paths)

    monkeypatch.setattr(atomic, "remove_files", beside)
    folder.remove_topic(TOPIC)
    publish(folder, ["new"])
    assert folder.look(KEY, lambda group: group.floor) == 0
    assert member.step(KEY, lambda group: group.floor) == 0


def test_a_topic_that_is_removed_takes_no_group_of_the_next_along(
    folder: Folder, member: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = atomic.remove_files

    def beside(paths: list[str]) -> None:
        remove(paths)
        if any(path.endswith(".head") for path in paths):
            publish(member, ["new"])
            member.step(KEY, lambda group: group.define(GroupOptions(), 0))
            member.step(KEY, lambda group: group.settle([1]))

    monkeypatch.setattr(atomic, "remove_files", beside)
    folder.remove_topic(TOPIC)
    assert payloads(member) == {1: "new"}
    assert member.step(KEY, lambda group: group.floor) == 1


def test_a_group_that_goes_before_its_topic_finds_no_record_to_begin_anew_with(
    folder: Folder, member: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = Folder.remove_group
    found: list[object] = []

    def beside(mine: Folder, gone: GroupKey) -> None:
        remove(mine, gone)
        with contextlib.suppress(OutOfRange):
            found.extend(member.read(TOPIC, 0, 1, 9))

    monkeypatch.setattr(Folder, "remove_group", beside)
    folder.remove_topic(TOPIC)
    assert found == []
    assert folder.topics() == {}
    assert folder.groups() == []


@pytest.mark.parametrize("what", ["its group", "the topic"])
def test_a_topic_is_removed_also_if_somebody_else_removes(
    folder: Folder, member: Folder, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    topics, groups = folder.topics, folder.groups

    def before() -> dict[str, TopicOptions]:
        if what == "the topic" and member.has_topic(TOPIC):
            member.remove_topic(TOPIC)
        return topics()

    def after(**more: bool) -> list[GroupKey]:
        found = groups(**more)
        if member.has_group(KEY):
            member.remove_group(KEY)
        return found

    monkeypatch.setattr(folder, "topics", before)
    monkeypatch.setattr(folder, "groups", after)
    folder.remove_topic(TOPIC)
    assert member.topics() == {}
    assert member.groups() == []


def test_a_removal_that_is_cut_short_leaves_a_topic_that_goes_on(
    folder: Folder, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, other = GroupKey(TOPIC, 0, "g"), opener()
    publish(folder, range(1, 4))
    other.step(key, lambda group: group.define(GroupOptions(), 0))
    other.step(key, lambda group: group.settle([1, 2, 3]))
    remove = atomic.remove_files

    def die(paths: list[str]) -> None:
        remove(paths)
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "remove_files", die)
    with pytest.raises(KeyboardInterrupt):
        folder.remove_topic(TOPIC)
    monkeypatch.undo()
    publish(other, [4])
    assert payloads(folder) == {4: 4}
    assert folder.step(key, lambda group: group.lag(5)) == 1
    folder.remove_topic(TOPIC)
    assert other.topics() == {}
    assert other.groups() == []


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_nothing_is_acknowledged_into_a_file_that_was_deleted(
    folder: Folder, opener: Opener, root: str, durability: Durability
) -> None:
    folder.define(TOPIC, TopicOptions(durability=durability))
    publish(folder, [1, 2, 3])
    os.remove(os.path.join(root, "wal", f"{TOPIC}.00000001.jsonl"))
    if durability == "fsync":
        with pytest.raises(Corrupt, match="segment 1 is gone"):
            publish(folder, ["not written"])
    for number in range(4, 8):
        publish(folder, [number])
    first = 4 if durability == "fsync" else 1  # what was never synced may go, and is numbered anew
    found = opener().read(TOPIC, 0, first, 9)
    assert [record.event.payload for record in found] == [4, 5, 6, 7]
    assert folder.head(TOPIC, 0).epoch == (1 if durability == "fsync" else 2)


@pytest.mark.parametrize("gone", range(1, 4))
def test_files_that_a_removal_left_behind_are_no_damage(
    folder: Folder, root: str, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=1))
    for number in range(1, 4):
        publish(folder, [number])

    def die(_: list[str]) -> None:
        os.remove(os.path.join(root, "wal", f"{TOPIC}.{gone:08}.jsonl"))
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "remove_files", die)
    with pytest.raises(KeyboardInterrupt):
        folder.remove_topic(TOPIC)
    for end in (4, 5):
        assert not [found for found in upkeep.verify(folder, TOPIC, 0) if found.severe]
        assert folder.seek(TOPIC, 0, at(0)) == 4
        assert folder.bounds(TOPIC, 0) == (4, end)
        publish(folder, ["next"])


def test_groups_are_listed_while_one_is_removed(
    folder: Folder, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, other = GroupKey(TOPIC, 0, "one"), GroupKey(TOPIC, 0, "two"), opener()
    for key in (one, two):
        other.step(key, lambda group: group.define(GroupOptions(), 0))
    names = folder._root.names

    def slowly(place: str) -> list[str]:
        found = names(place)
        other.remove_group(one)
        return found

    monkeypatch.setattr(folder._root, "names", slowly)
    assert folder.groups() == [two]


def test_a_group_that_is_removed_while_a_step_waits_for_it_leaves_no_file_open(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, step = GroupKey(TOPIC, 0, "g"), GroupFile.transaction
    publish(folder, [1])
    folder.step(key, lambda group: group.define(GroupOptions(), 0))
    before = len(os.listdir("/proc/self/fd"))

    def late(*args: Any, **more: Any) -> Any:
        monkeypatch.undo()
        removes = threading.Thread(target=folder.remove_group, args=(key,))
        removes.start()
        removes.join()
        return step(*args, **more)

    for _ in range(3):
        monkeypatch.setattr(GroupFile, "transaction", late)
        folder.step(key, Group.begin_anew)
        assert folder.step(key, lambda group: group.created)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_with_other_files_does_not_become_a_bus(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "wal").mkdir()
    (tmp_path / "wal" / "000001").write_text("of a database")
    link = tmp_path.with_name(tmp_path.name + "-link")
    link.symlink_to(tmp_path)

    for path in (tmp_path, link):
        with pytest.raises(NoBus, match=r"other files: 'notes.txt'"):
            Folder(str(path))

    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "wal"]


@pytest.mark.parametrize("name", [".gitignore", "lost+found", "members"])
def test_a_folder_with_nothing_of_anybody_becomes_a_bus(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    Folder(str(tmp_path)).close()
    assert (tmp_path / "bus.json").exists()
