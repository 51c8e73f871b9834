"""Retention, compaction, compression, verification."""

from __future__ import annotations

import os

import pytest

from kit.folders import Opener
from kit.log_events import TOPIC, event, payloads, publish, put
from trunkline.folder import Folder, upkeep
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, TopicOptions
from trunkline.testing.clock import ManualClock

KEY = GroupKey(TOPIC, 0, "g")


def segments(root: str) -> list[str]:
    return sorted(name for name in os.listdir(f"{root}/wal") if ".jsonl" in name)


def group(folder: Folder, *settled: int) -> None:
    folder.step(KEY, lambda g: g.define(GroupOptions(ordering="none"), 0))
    folder.step(KEY, lambda g: g.settle(settled))


def test_by_count(folder: Folder, root: str) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=2, retention_records=3))
    publish(folder, range(1, 10))
    assert upkeep.retain(folder, TOPIC, 0) == 6
    assert list(payloads(folder)) == [7, 8, 9]
    assert segments(root) == ["t.00000004.jsonl", "t.00000005.jsonl"]
    assert upkeep.retain(folder, TOPIC, 0) == 0


def test_by_age(folder: Folder, clock: ManualClock) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=2, retention_age_s=10.0))
    for second in range(8):
        put(folder, event(second, ts=second))
    clock.advance(14)
    assert upkeep.retain(folder, TOPIC, 0) == 4
    assert list(payloads(folder).values()) == [4, 5, 6, 7]
    clock.advance(100)
    assert upkeep.retain(folder, TOPIC, 0) == 4
    assert payloads(folder) == {}
    assert publish(folder, ["next"]) == [9]


def test_by_bytes(folder: Folder, root: str) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=2, retention_bytes=3000))
    publish(folder, ["x" * 500] * 11)
    assert upkeep.retain(folder, TOPIC, 0) > 0
    assert sum(os.stat(f"{root}/wal/{name}").st_size for name in segments(root)) <= 3000
    assert list(payloads(folder))[-1] == 11


@pytest.mark.parametrize("keep", [True, False])
def test_what_a_group_has_not_settled_stays(keep: bool, folder: Folder) -> None:
    options = TopicOptions(segment_records=1, retention_records=1, retain_unsettled=keep)
    folder.define(TOPIC, options)
    publish(folder, range(1, 6))
    group(folder, 1, 2, 4)
    upkeep.retain(folder, TOPIC, 0)
    assert list(payloads(folder)) == ([3, 4, 5] if keep else [5])


def test_what_was_redriven_stays(folder: Folder) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=1, retention_records=1))
    publish(folder, range(1, 6))
    group(folder, 1, 2, 3, 4, 5)
    folder.step(KEY, lambda g: g.redrive([3]))
    upkeep.retain(folder, TOPIC, 0)
    assert list(payloads(folder)) == [3, 4, 5]


def test_a_group_whose_journal_is_gone_still_counts(folder: Folder, root: str) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=1, retention_records=1))
    publish(folder, range(1, 6))
    group(folder, 1)
    folder.close()
    os.unlink(f"{root}/offsets/t__g.journal")
    again = Folder(root)
    assert again.groups() == [KEY]
    upkeep.retain(again, TOPIC, 0)
    assert list(payloads(again)) == [2, 3, 4, 5]
    again.close()


def test_the_log_goes_on_after_everything_was_trimmed(folder: Folder, opener: Opener) -> None:
    publish(folder, [1, 2, 3])
    assert upkeep.trim(folder, TOPIC, 0, 99) == 3
    os.unlink(os.path.join(folder.path, "wal/t.head"))
    other = opener()
    assert publish(other, ["x"]) == [4]
    assert payloads(other) == {4: "x"}


def test_a_file_that_was_set_aside_is_not_trimmed_with_others(folder: Folder, root: str) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=1))
    publish(folder, range(1, 6))
    os.rename(f"{root}/wal/t.00000004.jsonl", f"{root}/wal/t.00000004.jsonl.corrupt")  # noqa: TID251
    upkeep.trim(folder, TOPIC, 0, 3)
    assert segments(root)[:2] == ["t.00000003.jsonl", "t.00000004.jsonl.corrupt"]
    upkeep.trim(folder, TOPIC, 0, 5)
    assert segments(root) == ["t.00000005.jsonl"]


def test_a_segment_that_was_given_up_goes_in_its_turn(folder: Folder, root: str) -> None:
    """One whose sync failed has no seal."""
    publish(folder, [1])
    writer = folder.writer(TOPIC, 0)
    head = writer.begin()
    writer._abandon(head)
    writer.end()
    publish(folder, [2, 3])
    assert segments(root) == ["t.00000001.jsonl", "t.00000002.jsonl"]
    upkeep.trim(folder, TOPIC, 0, 3)
    assert segments(root) == ["t.00000002.jsonl"]


def test_compaction_keeps_the_latest_of_each_key(folder: Folder) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=2))
    for number, key in enumerate(["a", "b", "a", None, "b", "a"]):
        put(folder, event(number, key=key))
    assert upkeep.compact(folder, TOPIC, 0) == 3
    folder.forget(TOPIC, 0)
    assert payloads(folder) == {4: 3, 5: 4, 6: 5}
    assert not list(upkeep.verify(folder, TOPIC, 0))


def test_a_tombstone_removes_its_key_and_then_itself(folder: Folder) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=1))
    put(folder, event(1, key="a"))
    put(folder, event(None, key="a"))
    put(folder, event(3, key="b"))
    group(folder, 1)
    assert upkeep.compact(folder, TOPIC, 0) == 1
    folder.forget(TOPIC, 0)
    assert payloads(folder) == {2: None, 3: 3}
    folder.step(KEY, lambda g: g.settle([2]))
    assert upkeep.compact(folder, TOPIC, 0) == 1
    folder.forget(TOPIC, 0)
    assert payloads(folder) == {3: 3}


def test_compaction_leaves_what_a_group_has_not_settled(folder: Folder) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=1))
    for number in range(4):
        put(folder, event(number, key="k"))
    group(folder, 1)
    assert upkeep.compact(folder, TOPIC, 0) == 1
    folder.forget(TOPIC, 0)
    assert list(payloads(folder)) == [2, 3, 4]


def test_what_a_power_cut_may_take_replaces_nothing(folder: Folder) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=1))
    put(folder, event("old", key="k"))
    folder.define(TOPIC, TopicOptions(segment_records=10, durability="os"))
    put(folder, event("other"))
    put(folder, event("new", key="k"))
    assert upkeep.compact(folder, TOPIC, 0) == 0
    assert payloads(folder) == {1: "old", 2: "other", 3: "new"}


def test_tend_does_what_the_options_ask_for(folder: Folder, root: str) -> None:
    options = TopicOptions(segment_records=2, retention_records=5, compact=True, compress=True)
    folder.define(TOPIC, options)
    publish(folder, range(9), key="k")
    upkeep.tend(folder)
    folder.forget(TOPIC, 0)
    assert list(payloads(folder)) == [9]
    assert segments(root)[0].endswith(".zst")


@pytest.mark.parametrize("gone", [(1,), (2,), (3,), (1, 2), (2, 3), (1, 2, 3)])
def test_verify_misses_a_file_wherever_it_was(
    folder: Folder, root: str, opener: Opener, gone: tuple[int, ...]
) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=2))
    publish(folder, range(1, 6))
    assert list(upkeep.verify(folder, TOPIC, 0)) == []
    folder.close()
    for number in gone:
        os.unlink(f"{root}/wal/t.{number:08d}.jsonl")

    found = list(upkeep.verify(opener(), TOPIC, 0))

    assert any(finding.severe for finding in found)


def test_verify_finds_nothing_missing_where_it_was_removed_on_purpose(folder: Folder) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=2, retention_records=3))
    publish(folder, range(1, 10))
    upkeep.retain(folder, TOPIC, 0)
    assert list(upkeep.verify(folder, TOPIC, 0)) == []
    upkeep.trim(folder, TOPIC, 0, 9)
    assert list(upkeep.verify(folder, TOPIC, 0)) == []
    upkeep.trim(folder, TOPIC, 0, 10)
    assert list(upkeep.verify(folder, TOPIC, 0)) == []
