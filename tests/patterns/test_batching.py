"""Handlers that take batches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trunkline.bus.local import LocalBus
from trunkline.errors import InvalidOption, Reject, Retry
from trunkline.event import Event
from trunkline.options import GroupOptions
from trunkline.patterns.batching import PartialFailure, batched
from trunkline.store.memory import MemoryStore
from trunkline.testing import ManualClock

AT_ONCE = GroupOptions(backoff_base_s=0.0, max_retries=1)


def make_bus() -> tuple[LocalBus, ManualClock]:
    clock = ManualClock()
    return LocalBus(MemoryStore(clock=clock), clock=clock), clock


async def handled(bus: LocalBus, clock: ManualClock, seen: list[list[Any]], count: int) -> None:
    for _ in range(2000):
        if sum(map(len, seen)) >= count:
            return
        await clock.settle()
        await asyncio.sleep(0.001)
    raise AssertionError(f"{sum(map(len, seen))} of {count} events came: {seen}")


async def test_a_batch_is_complete_by_count_or_by_time() -> None:
    bus, clock = make_bus()
    seen: list[list[int]] = []
    async with bus:

        @batched(bus, "t", group="g", count=3, wait_s=5.0)
        async def handle(events: list[Event]) -> None:
            seen.append([event.payload for event in events])

        await bus.publish_many("t", [1, 2, 3, 4])
        await handled(bus, clock, seen, 3)
        assert seen == [[1, 2, 3]]
        await clock.run(4)
        assert seen == [[1, 2, 3]]
        await clock.run(2)
        await handled(bus, clock, seen, 4)
        assert seen == [[1, 2, 3], [4]]
        assert await bus.drain(10)


async def test_a_batch_is_complete_by_bytes() -> None:
    bus, clock = make_bus()
    seen: list[list[str]] = []
    async with bus:

        @batched(bus, "t", group="g", count=100, bytes=25, wait_s=1.0)
        async def handle(events: list[Event]) -> None:
            seen.append([event.payload for event in events])

        await bus.publish_many("t", ["x" * 8, "y" * 8, "z" * 8, "w" * 50])  # 10 bytes each, 52
        await handled(bus, clock, seen, 2)
        await clock.run(1)
        await handled(bus, clock, seen, 4)
        assert [list(map(len, batch)) for batch in seen] == [[8, 8], [8], [50]]


@pytest.mark.parametrize("how", ["raised", "returned"])
async def test_a_partial_failure_settles_the_rest(how: str) -> None:
    bus, clock = make_bus()
    seen: list[list[str]] = []

    def verdict(name: str, tries: int) -> BaseException | None:
        return {
            "bad": RuntimeError("bad"),
            "never": Reject("never"),
            "later": Retry(0.0) if tries == 1 else None,
        }.get(name)

    async with bus:

        @batched(bus, "t", group="g", count=4, wait_s=1.0, policy=AT_ONCE)
        async def handle(events: list[Event]) -> Any:
            seen.append([event.payload for event in events])
            tries = [sum(b.count(event.payload) for b in seen) for event in events]
            found = [verdict(e.payload, n) for e, n in zip(events, tries, strict=True)]
            if how == "returned":
                return found
            raise PartialFailure({at: one for at, one in enumerate(found) if one is not None})

        await bus.publish_many("t", ["good", "bad", "never", "later"])
        await handled(bus, clock, seen, 6)
        assert await bus.drain(10)
        letters = [one async for one in bus.dead_letters("t").letters()]
    assert seen[0] == ["good", "bad", "never", "later"]
    assert sorted(seen[1:]) == [["bad"], ["later"]]
    told = sorted((one.event.payload, one.reason, one.attempts) for one in letters)
    assert told == [("bad", "retries", 2), ("never", "rejected", 1)]


async def test_one_bad_event_does_not_take_its_batch_to_the_dead_letters() -> None:
    bus, clock = make_bus()
    seen: list[list[int]] = []
    async with bus:

        @batched(bus, "t", group="g", count=3, wait_s=1.0, policy=AT_ONCE)
        def handle(events: list[Event]) -> None:
            seen.append([event.payload for event in events])
            if any(event.payload == 2 for event in events):
                raise RuntimeError("2")

        await bus.publish_many("t", [1, 2, 3])
        await handled(bus, clock, seen, 6)
        assert await bus.drain(10)
        (letter,) = [one async for one in bus.dead_letters("t").letters()]
    assert letter.event.payload == 2
    assert sorted(seen[1:]) == [[1], [2], [3]]


async def test_a_wrong_number_of_results_fails_the_batch() -> None:
    bus, clock = make_bus()
    seen: list[list[int]] = []
    async with bus:

        @batched(bus, "t", group="g", count=2, wait_s=1.0, policy=GroupOptions(max_retries=0))
        async def handle(events: list[Event]) -> list[None]:
            seen.append([event.payload for event in events])
            return [None]

        await bus.publish_many("t", [1, 2])
        await handled(bus, clock, seen, 2)
        assert await bus.drain(10)
        assert len([one async for one in bus.dead_letters("t").letters()]) == 2
        with pytest.raises(InvalidOption):
            batched(bus, "t", group="g", count=0)


@pytest.mark.parametrize("place", [2, -1])
async def test_a_failure_of_no_event_of_the_batch_fails_the_batch(place: int) -> None:
    """It is not known which event failed, so none is settled."""
    bus, clock = make_bus()
    seen: list[list[int]] = []
    async with bus:

        @batched(bus, "t", group="g", count=2, wait_s=1.0, policy=GroupOptions(max_retries=0))
        async def handle(events: list[Event]) -> None:
            seen.append([event.payload for event in events])
            raise PartialFailure({place: ValueError("bad")})

        await bus.publish_many("t", [1, 2])
        await handled(bus, clock, seen, 2)
        assert await bus.drain(10)
        assert len([one async for one in bus.dead_letters("t").letters()]) == 2
