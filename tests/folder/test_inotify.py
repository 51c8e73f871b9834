"""What the kernel tells of a folder, and which of it a process did not do itself."""

from __future__ import annotations

import os
import select
from collections.abc import Set
from pathlib import Path

import pytest

from kit.log_events import event
from trunkline.codec import encode_event
from trunkline.folder import Folder
from trunkline.folder.inotify import Change, Inotify
from trunkline.group.changes import Leased
from trunkline.log.reader import PartitionReader
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, Limits, StoreOptions

KEY = GroupKey("orders", 0, "billing")


def publish(folder: Folder, topic: str = "orders") -> None:
    one = event(1)
    folder.append(topic, 0, [encode_event(one, Limits())], [one])


def told(watch: Inotify) -> Set[Change]:
    select.select([watch.fd], [], [], 5)
    return watch.changes()


def news(folder: Folder, watch: Inotify) -> set[str | GroupKey]:
    return folder.heard(told(watch))


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    Folder(str(tmp_path / "bus")).close()
    return [str(tmp_path / "bus" / name) for name in ("wal", "offsets", "dlq")]


def test_what_is_written_made_moved_and_removed_is_told(tmp_path: Path) -> None:
    watch = Inotify([str(tmp_path)])
    (tmp_path / "a").write_text("1")
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "b").unlink()

    assert told(watch) == {Change(str(tmp_path), "a"), Change(str(tmp_path), "b")}
    assert watch.changes() == set()
    watch.close()


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(FileNotFoundError):
        Inotify([str(tmp_path / "nowhere")])

    assert len(os.listdir("/proc/self/fd")) == before


def test_own_writes_are_no_news(tmp_path: Path, places: list[str]) -> None:
    folder = Folder(str(tmp_path / "bus"))
    publish(folder)
    publish(folder, "orders.DLQ")
    folder.step(KEY, lambda group: group.define(GroupOptions(), 0))
    watch = Inotify(places)
    publish(folder)
    publish(folder, "orders.DLQ")
    folder.step(KEY, lambda group: group.seek(1))

    assert news(folder, watch) == set()
    watch.close()
    folder.close()


def test_own_new_groups_and_their_snapshots_are_no_news(tmp_path: Path, places: list[str]) -> None:
    folder = Folder(str(tmp_path / "bus"), StoreOptions(snapshot_bytes=1024))
    publish(folder)
    watch = Inotify(places)
    folder.step(KEY, lambda group: group.define(GroupOptions(), 0))
    for offset in range(1, 200):
        folder.step(KEY, lambda group, offset=offset: group.seek(offset))  # type: ignore[misc]

    changes = told(watch)
    assert {change.name.rpartition(".")[2] for change in changes} >= {"journal", "json", "tmp"}
    assert [change for change in changes if folder.heard([change])] == []
    watch.close()
    folder.close()


def test_what_another_process_writes_is_news(tmp_path: Path, places: list[str]) -> None:
    ours, theirs = Folder(str(tmp_path / "bus")), Folder(str(tmp_path / "bus"))
    publish(ours)
    ours.step(KEY, lambda group: group.define(GroupOptions(), 0))
    watch = Inotify(places)
    publish(theirs)
    theirs.step(KEY, lambda group: group.seek(1))
    publish(theirs, "new")

    assert news(ours, watch) == ours.noticed() | {"new"} == {"orders", "new", KEY}
    watch.close()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("count", [1, 15, 100])
def test_a_few_looks_see_every_group(tmp_path: Path, count: int) -> None:
    ours, theirs = Folder(str(tmp_path / "bus")), Folder(str(tmp_path / "bus"))
    keys = [KEY._replace(group=f"g{number}") for number in range(count)]
    for key in keys:
        ours.step(key, lambda group: group.define(GroupOptions(), 0))
    for key in (keys[0], keys[-1]):
        theirs.step(key, lambda group: group.seek(1))
        looks = [key in ours.noticed(turn) for turn in range(5)]
        assert any(looks)
        assert looks[0] or count == 100
        ours.step(key, lambda group: group.floor)
        assert not any(ours.noticed(turn) for turn in range(5))
    ours.close()
    theirs.close()


@pytest.mark.parametrize("dies", [False, True])
def test_a_group_that_nobody_works_for_here_is_no_news_at_every_look(
    tmp_path: Path, dies: bool
) -> None:
    ours, theirs = Folder(str(tmp_path / "bus")), Folder(str(tmp_path / "bus"))
    for _ in range(2):
        theirs.step(KEY, lambda group: group.define(GroupOptions(), 0))
        theirs.step(KEY, lambda group: group._do(Leased(theirs.join(), 1e9, [(9, 9)])))
        ours.step(KEY, lambda group: group.floor)
        theirs.abandon() if dies else theirs.step(KEY, lambda group: group.seek(1))
        assert [ours.noticed() for _ in range(3)] == [{KEY}, set(), set()]
        ours.step(KEY, lambda group: group.floor)
        assert ours.noticed() == set()
    ours.close()
    theirs.close()


def test_a_log_that_nobody_reads_here_is_no_news_at_every_look(tmp_path: Path) -> None:
    ours, theirs = Folder(str(tmp_path / "bus")), Folder(str(tmp_path / "bus"))
    assert ours.bounds("orders", 0) == (1, 1)
    for end in (2, 3):
        publish(theirs)
        assert [ours.noticed() for _ in range(3)] == [{"orders"}, set(), set()]
        assert ours.bounds("orders", 0) == (1, end)
        assert ours.noticed() == set()
    ours.close()
    theirs.close()


def test_a_member_that_comes_or_goes_is_news_for_the_groups_it_works_for(tmp_path: Path) -> None:
    ours, theirs = Folder(str(tmp_path / "bus")), Folder(str(tmp_path / "bus"))
    other = KEY._replace(group="other")
    watch = Inotify([str(tmp_path / "bus" / "members")])
    theirs.join()
    theirs.step(KEY, lambda group: group.define(GroupOptions(), 0))
    theirs.step(KEY, lambda group: group._do(Leased(theirs.member, 1e9, [(9, 9)])))
    ours.step(KEY, lambda group: group.floor)
    ours.step(other, lambda group: group.define(GroupOptions(), 0))
    assert {change.name for change in told(watch)} == {theirs.member}
    theirs.close()
    assert news(ours, watch) == {KEY}
    watch.close()
    ours.close()


def test_a_look_bears_topics_that_are_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(str(tmp_path / "bus"))
    for topic in ("a", "b", "c"):
        publish(folder, topic)
        folder.bounds(topic, 0)

    def is_behind(reader: PartitionReader) -> bool:
        if folder.has_topic("c"):
            folder.remove_topic("c")  # as a thread would, which the loop does not wait for
        return reader.topic == "b"

    monkeypatch.setattr(PartitionReader, "is_behind", is_behind)
    assert folder.noticed() == {"b"}
    folder.close()


def test_news_beneath_own_writes_are_news(tmp_path: Path, places: list[str]) -> None:
    ours, theirs = Folder(str(tmp_path / "bus")), Folder(str(tmp_path / "bus"))
    watch = Inotify(places)
    publish(ours)
    publish(theirs)

    assert "orders" in news(ours, watch)
    watch.close()
    ours.close()
    theirs.close()
