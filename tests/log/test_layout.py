"""Names to paths: every name has its own, none leaves the folder."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.log_events import TOPIC, event, put
from trunkline.errors import InvalidName
from trunkline.folder import Folder
from trunkline.folder.inotify import Change
from trunkline.log.layout import (
    group_stem,
    log_stem,
    parse_group_stem,
    parse_segment,
    parse_stem,
    segment_path,
)
from trunkline.names import GroupKey, check_group, check_topic
from trunkline.options import GroupOptions

_token = st.text("aB0_-", min_size=1, max_size=6)
_name = st.lists(_token, min_size=1, max_size=4).map(".".join).filter(lambda n: "__" not in n)
_long = st.tuples(_name, st.integers(0, 190)).map(lambda pair: (pair[0] + "x" * pair[1])[:200])
_group = _long.filter(lambda name: not name.startswith("_"))


@given(_long, st.integers(0, 1023), _group, _long, st.integers(0, 1023), _group)
def test_two_groups_never_share_a_file(
    topic: str, partition: int, group: str, topic2: str, partition2: int, group2: str
) -> None:
    one, two = (topic, partition, group), (topic2, partition2, group2)
    assert (group_stem(*one) == group_stem(*two)) == (one == two)
    stem = group_stem(*one).removeprefix("offsets/")
    assert "/" not in stem
    assert len(stem.encode()) + len(".json.bak.0011aabb.tmp") <= 255
    assert parse_group_stem(stem) in (one, None)


@given(_long, st.integers(0, 1023), st.integers(1, 99_999_999))
def test_a_segment_says_whose_it_is(topic: str, partition: int, number: int) -> None:
    for name in (topic, topic[:190] + ".DLQ"):
        stem = log_stem(name, partition)
        folder, _, file = segment_path(stem, number).partition("/")
        assert "/" not in file
        assert len(file.encode()) + len(".corrupt") <= 255
        for ending, packed in (("", False), (".zst", True)):
            parsed = parse_segment(file + ending, folder == "dlq")
            assert parsed == (stem.partition("/")[2], number, packed)
        assert parse_stem(stem.partition("/")[2], folder == "dlq") == (name, partition)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "../a", "/etc/passwd", "a\0b", "a__b", ".a", "a.", "a..b", "a b", "a~1",
     "ä", "x" * 201, "a\n", "*", ">", "con:", "a\u2028"],
)  # fmt: skip
def test_a_hostile_name_is_refused_and_nothing_is_written(name: str, folder: Folder) -> None:
    before = sorted(os.walk(folder.path))
    with pytest.raises(InvalidName):
        check_topic(name)
    with pytest.raises(InvalidName):
        check_group(name)
    with pytest.raises(InvalidName):
        folder.append(name, 0, [b""], [event(1)])
    with pytest.raises(InvalidName):
        folder.step(GroupKey(TOPIC, 0, name), lambda group: group)
    assert sorted(os.walk(folder.path)) == before


def test_the_longest_names_work(folder: Folder) -> None:
    topic, group = "t" * 200, "g" * 200
    put(folder, event(1, topic=topic))
    key = GroupKey(topic, 0, group)
    folder.step(key, lambda g: g.define(GroupOptions(), 1))
    assert folder.groups() == [key]
    assert folder.topics().keys() == {topic}


STRANGE = (
    "t~x.head",
    "t~99999.head",
    "t~01.head",
    "t~.head",
    "a b.head",
    "a__b.head",
    ".head",
    "x.DLQ.head",
    "x..y.00000001.jsonl",
    "t (copy).00000001.jsonl",
    "notes.txt",
)


def test_files_that_are_not_ours_are_passed_over(folder: Folder, root: str) -> None:
    put(folder, event(1))
    for name in STRANGE:
        for place in ("wal", "dlq"):
            with open(f"{root}/{place}/{name}", "wb") as file:
                file.write(b"?")
    assert list(folder.topics()) == [TOPIC]
    assert folder.heard(Change(f"{root}/wal", name) for name in STRANGE) <= {""}
