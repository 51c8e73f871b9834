"""When a batch ends."""

from __future__ import annotations

import asyncio

import pytest

from trunkline.batcher import Batcher
from trunkline.testing import ManualClock

Batches = list[tuple[list[str], int]]


@pytest.fixture
def written() -> Batches:
    return []


def make(written: Batches, count_max: float = 99, size_max: float = 99) -> Batcher[str]:
    def write(items: list[str], size: int) -> None:
        written.append((items, size))

    return Batcher(write, count_max=count_max, size_max=size_max)


async def test_the_items_of_one_turn_of_the_loop_are_one_batch(written: Batches) -> None:
    batcher = make(written)
    batcher.add("a", 1)
    batcher.add("b", 2)
    assert written == []
    await asyncio.sleep(0)
    assert written == [(["a", "b"], 3)]
    batcher.add("c")
    await asyncio.sleep(0)
    assert written[1:] == [(["c"], 0)]


async def test_a_batch_ends_when_it_is_full(written: Batches) -> None:
    batcher = make(written, count_max=2)
    for item in "abc":
        batcher.add(item)
    assert written == [(["a", "b"], 0)]
    await asyncio.sleep(0)
    assert written == [(["a", "b"], 0), (["c"], 0)]


async def test_an_item_that_is_too_much_begins_the_next_batch(written: Batches) -> None:
    batcher = make(written, size_max=10)
    batcher.add("a", 6)
    batcher.add("b", 5)
    assert written == [(["a"], 6)]
    batcher.add("alone", 20)
    assert written == [(["a"], 6), (["b"], 5), (["alone"], 20)]
    await asyncio.sleep(0)
    assert len(written) == 3


async def test_a_batch_waits_until_its_most_urgent_item(written: Batches) -> None:
    clock = ManualClock()
    batcher = Batcher[str](
        lambda items, size: written.append((items, size)), call_later=clock.call_later
    )
    batcher.add("slow", wait_s=10)
    batcher.add("quick", wait_s=1)
    await clock.run(0.5)
    assert written == []
    await clock.run(1)
    assert written == [(["slow", "quick"], 0)]
    await clock.run(20)
    assert len(written) == 1
    batcher.add("slow", wait_s=10)
    batcher.add("now")
    await asyncio.sleep(0)
    assert written[1:] == [(["slow", "now"], 0)]


async def test_what_was_taken_back_is_not_written(written: Batches) -> None:
    batcher = make(written, size_max=10)
    batcher.add("a", 6)
    batcher.add("b", 2)
    batcher.remove("a", 6)
    batcher.remove("a", 6)
    batcher.add("c", 7)
    assert written == []
    assert batcher.clear() == ["b", "c"]
    await asyncio.sleep(0)
    assert written == []


async def test_a_planned_end_comes_without_an_item(written: Batches) -> None:
    batcher = make(written)
    batcher.plan()
    batcher.plan(1)
    await asyncio.sleep(0)
    assert written == [([], 0)]
    batcher.flush()
    assert written == [([], 0)]
