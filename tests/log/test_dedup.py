"""Repeated publishes are one record: for every process, across restarts, within the window."""

from __future__ import annotations

import pytest

from kit.folders import Opener
from kit.log_events import TOPIC, event, payloads, put
from trunkline.folder import Folder, upkeep
from trunkline.options import TopicOptions
from trunkline.testing.clock import ManualClock


@pytest.fixture
def folder(opener: Opener) -> Folder:
    folder = opener()
    folder.define(TOPIC, TopicOptions(dedup_window_s=60.0, segment_records=3))
    return folder


def keyed(folder: Folder, *keys: str | None, size: int = 1) -> tuple[list[int], set[int]]:
    """Publish one batch: the offsets, and the positions that were repeats."""
    placed = put(folder, *(event("x" * size, idem_key=key) for key in keys))
    return placed.offsets(), set(placed.duplicates)


def test_a_repeat_names_the_first(folder: Folder, opener: Opener) -> None:
    assert keyed(folder, "a") == ([1], set())
    assert keyed(folder, "a") == ([1], {0})
    assert keyed(opener(), "a") == ([1], {0})
    folder.close()
    assert keyed(opener(), "a", "b", "a") == ([1, 2, 1], {0, 2})


def test_repeats_within_one_batch(folder: Folder) -> None:
    assert keyed(folder, "a", "a", None, None, "b", "a") == ([1, 1, 2, 3, 4, 1], {1, 5})
    assert len(payloads(folder)) == 4


def test_no_key_is_never_a_repeat(folder: Folder) -> None:
    assert keyed(folder, None, None) == ([1, 2], set())


def test_two_processes_in_turn(folder: Folder, opener: Opener) -> None:
    other = opener()
    for number in range(10):
        key = f"k{number}"
        assert keyed(folder if number % 2 else other, key)[1] == set()
        assert keyed(other if number % 2 else folder, key) == ([number + 1], {0})


def test_the_window_ends(folder: Folder, opener: Opener, clock: ManualClock) -> None:
    keyed(folder, "a")
    clock.advance(59.9)
    assert keyed(folder, "a") == ([1], {0})
    clock.advance(0.2)
    assert keyed(opener(), "a") == ([2], set())
    assert keyed(folder, "a") == ([2], {0})


def test_the_window_ends_for_a_batch_that_the_index_points_into(
    folder: Folder, opener: Opener, clock: ManualClock
) -> None:
    """The time of a batch is in its last line, perhaps behind the place an index entry names."""
    keyed(folder, *(f"k{n}" for n in range(20)), size=300)
    clock.advance(61)
    other = opener()
    keyed(other, "new")
    assert keyed(other, *(f"k{n}" for n in range(20)))[1] == set()


def test_the_event_time_does_not_matter(folder: Folder, clock: ManualClock) -> None:
    put(folder, event(1, idem_key="a", ts=1e6))
    clock.advance(61)
    assert put(folder, event(1, idem_key="a", ts=1e6)).duplicates == {}


def test_the_number_of_keys_is_bounded(opener: Opener) -> None:
    folder = opener()
    folder.define(TOPIC, TopicOptions(dedup_window_s=60.0, dedup_keys=3))
    keyed(folder, "a", "b", "c", "d")
    assert keyed(folder, "d") == ([4], {0})
    assert keyed(folder, "a") == ([5], set())
    assert keyed(opener(), "a") == ([5], {0})


def test_files_that_others_replaced(folder: Folder, opener: Opener) -> None:
    """Another process compresses and trims while this one remembers."""
    for number in range(8):
        keyed(folder, f"k{number}")
    other = opener()
    upkeep.pack_segments(other, TOPIC, 0)
    assert keyed(folder, "k1", "k7") == ([2, 8], {0, 1})
    fresh = opener()
    assert keyed(fresh, "k1", "k7") == ([2, 8], {0, 1})
    upkeep.trim(other, TOPIC, 0, 5)
    keyed(other, "z")
    assert keyed(fresh, "z")[1] == {0}
    assert keyed(folder, "z")[1] == {0}


@pytest.mark.parametrize("seconds", [30, 3600])
def test_compaction_leaves_the_time_of_a_batch_of_which_it_leaves_a_record(
    folder: Folder, opener: Opener, clock: ManualClock, seconds: int
) -> None:
    """The last line of a batch tells when it was written, and may go."""
    folder.define(TOPIC, TopicOptions(dedup_window_s=60.0, segment_records=3))
    put(folder, event(1, key="a", idem_key="ia"), event(2, key="b", idem_key="ib"))
    clock.advance(seconds)
    for n, key in ((3, "c"), (4, "b"), (5, "e"), (6, "d"), (7, "d")):
        put(folder, event(n, key=key))
        upkeep.compact(folder, TOPIC, 0)
    again = opener()
    assert list(payloads(again)) == [1, 3, 4, 5, 7]
    assert not list(upkeep.verify(again, TOPIC, 0))
    found = put(again, event(9, key="a", idem_key="ia")).duplicates
    assert found == ({0: 1} if seconds < 60 else {})
