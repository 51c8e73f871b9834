"""A set of offsets, kept as ranges: it does what a set does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trunkline.ranges import Ranges, compress

OFFSETS = st.integers(1, 40)
SPANS = st.lists(st.tuples(OFFSETS, st.integers(0, 8)).map(lambda x: (x[0], x[0] + x[1])))


def members(ranges: Ranges) -> set[int]:
    return {offset for first, last in ranges for offset in range(first, last + 1)}


@given(SPANS)
def test_it_holds_what_was_added_and_neighbours_are_one_range(spans: list[tuple[int, int]]) -> None:
    ranges = Ranges(spans)
    wanted = {offset for first, last in spans for offset in range(first, last + 1)}

    assert members(ranges) == wanted
    assert list(ranges) == compress(wanted)
    assert len(ranges) == len(wanted)
    assert bool(ranges) is bool(wanted)
    assert ranges.last == max(wanted, default=0)
    assert [offset in ranges for offset in range(60)] == [offset in wanted for offset in range(60)]


@given(SPANS, OFFSETS)
def test_one_offset_is_taken_out(spans: list[tuple[int, int]], offset: int) -> None:
    ranges = Ranges(spans)
    wanted = members(ranges) - {offset}
    ranges.remove(offset)
    assert list(ranges) == compress(wanted)


@given(SPANS, OFFSETS)
def test_what_reaches_an_offset_is_popped(spans: list[tuple[int, int]], first: int) -> None:
    ranges = Ranges(spans)
    before = members(ranges)

    end = ranges.pop_from(first)

    reach = first - 1
    while reach + 1 in before:
        reach += 1
    if not any(offset < first for offset in before):
        assert end == reach
        assert members(ranges) == {offset for offset in before if offset > end}


@given(SPANS, OFFSETS, st.integers(0, 8))
def test_covers_means_every_one_of_them(
    spans: list[tuple[int, int]], first: int, more: int
) -> None:
    ranges = Ranges(spans)
    wanted = set(range(first, first + more + 1)) <= members(ranges)
    assert ranges.covers(first, first + more) is wanted


def test_offsets_in_any_order_compress_to_ranges() -> None:
    assert compress([5, 1, 2, 9, 3]) == [(1, 3), (5, 5), (9, 9)]
    assert compress([]) == []


@given(SPANS, OFFSETS)
def test_those_behind_an_offset_are_counted(spans: list[tuple[int, int]], after: int) -> None:
    ranges = Ranges(spans)
    assert ranges.count(after) == len({offset for offset in members(ranges) if offset > after})
