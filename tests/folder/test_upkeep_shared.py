"""Several processes tend one folder: none puts back what another removed."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from kit.folders import Opener
from kit.log_events import TOPIC, event, payloads, put
from trunkline.errors import Corrupt
from trunkline.folder import Folder, upkeep
from trunkline.log.segment import pack
from trunkline.options import TopicOptions


def segments(root: str) -> list[str]:
    return sorted(name for name in os.listdir(f"{root}/wal") if ".jsonl" in name)


@pytest.fixture
def filled(folder: Folder) -> Folder:
    """Finished segments of two records each: a value of ``k`` that no other follows, and in each
    one that is superseded.
    """
    folder.define(TOPIC, TopicOptions(segment_records=2))
    for n in range(1, 9):
        put(folder, event(n, key="k" if n == 1 else "x"))
    return folder


def between(action: Callable[[], object]) -> upkeep.Progress:
    """Do something once, after all was read and before anything is written."""
    todo = [action]

    def step(done: int, total: int) -> None:
        if done == total // 2 and todo:
            todo.pop()()

    return step


def test_what_was_removed_while_it_was_compacted_stays_away(
    filled: Folder, opener: Opener, root: str
) -> None:
    other = opener()
    upkeep.compact(other, TOPIC, 0, between(lambda: upkeep.trim(filled, TOPIC, 0, 5)))
    assert segments(root)[0] == "t.00000003.jsonl"
    assert payloads(opener()) == {7: 7, 8: 8}  # the last file is not finished
    assert not list(upkeep.verify(filled, TOPIC, 0))
    assert not [name for name in os.listdir(f"{root}/wal") if name.endswith(".tmp")]


def test_what_was_compacted_away_meanwhile_does_not_come_back(
    filled: Folder, opener: Opener
) -> None:
    def compact() -> None:
        put(filled, event(None, key="k"))
        put(filled, event("y", key="y"), event("z", key="z"))
        put(filled, event("last"))
        upkeep.compact(filled, TOPIC, 0)

    upkeep.compact(opener(), TOPIC, 0, between(compact))
    assert payloads(opener()) == {8: 8, 10: "y", 11: "z", 12: "last"}, "its tombstone is gone, too"


def test_what_was_compacted_while_it_was_compressed_stays_compacted(
    filled: Folder, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(data: bytes) -> bytes:
        upkeep.compact(filled, TOPIC, 0)
        return pack(data)

    monkeypatch.setattr("trunkline.folder.rewrite.pack", slow)
    upkeep.pack_segments(opener(), TOPIC, 0)
    assert payloads(opener()) == {1: 1, 7: 7, 8: 8}
    assert not list(upkeep.verify(filled, TOPIC, 0))


def test_one_that_is_damaged_does_not_keep_the_others_waiting(
    filled: Folder, opener: Opener, root: str
) -> None:
    filled.define(TOPIC, TopicOptions(segment_records=2, compact=True))
    filled.define("u", TopicOptions(segment_records=2, retention_records=2))
    for n in range(8):
        put(filled, event(n, topic="u"))
    path = f"{root}/wal/t.00000001.jsonl"
    with open(path, "r+b") as file:
        file.write(b"?")
    with pytest.raises(Corrupt):
        upkeep.tend(opener())
    assert payloads(opener(), topic="u") == {7: 6, 8: 7}


def test_the_reserve_is_filled_again_where_nobody_publishes(opener: Opener, root: str) -> None:
    folder = opener(reserve_bytes=4096)
    assert folder.make_room()
    assert os.path.getsize(f"{root}/reserve") == 0
    assert folder.is_full
    upkeep.tend(folder)
    assert os.path.getsize(f"{root}/reserve") == 4096
    assert not folder.is_full
