"""A clock that moves when it is told to."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from trunkline.clock import Clock
from trunkline.store.memory import MemoryStore
from trunkline.testing import ManualClock, PassingClock

CLOCKS: tuple[Clock, ...] = (ManualClock(), PassingClock())  # the type checker reads this line


def test_it_stands_still_until_told() -> None:
    clock = ManualClock(datetime(2031, 5, 6, tzinfo=UTC), monotonic=7.0, boot="b1")
    assert (clock.now(), clock.monotonic(), clock.boot) == (
        datetime(2031, 5, 6, tzinfo=UTC),
        7.0,
        "b1",
    )
    clock.advance(1.5)
    assert clock.now() == datetime(2031, 5, 6, 0, 0, 1, 500_000, tzinfo=UTC)
    assert clock.monotonic() == 8.5


def test_timers_fire_in_order_each_at_its_own_time() -> None:
    clock = ManualClock(monotonic=0.0)
    fired: list[tuple[str, float]] = []

    def note(name: str) -> None:
        fired.append((name, clock.monotonic()))
        if name == "b":
            clock.call_later(1, lambda: note("from b"))

    clock.call_later(5, lambda: note("late"))
    clock.call_later(2, lambda: note("b"))
    clock.call_later(1, lambda: note("a"))
    clock.call_later(2, lambda: note("c"))
    assert clock.timers == 4

    clock.advance(4)

    assert fired == [("a", 1.0), ("b", 2.0), ("c", 2.0), ("from b", 3.0)]
    assert clock.timers == 1


def test_a_timer_that_is_cancelled_never_fires() -> None:
    clock = ManualClock()
    fired: list[int] = []
    timer = clock.call_later(1, lambda: fired.append(1))
    timer.cancel()
    clock.advance(2)
    assert (fired, clock.timers) == ([], 0)


async def test_what_is_due_at_once_comes_with_the_next_turn() -> None:
    clock = ManualClock()
    fired: list[int] = []
    clock.call_later(0, lambda: fired.append(1))
    clock.call_later(-1, lambda: fired.append(2)).cancel()
    assert fired == []
    await asyncio.sleep(0)
    assert fired == [1]


async def test_sleepers_wake_when_their_time_has_come() -> None:
    clock = ManualClock()
    woken: list[str] = []

    async def sleeper(name: str, *seconds: float) -> None:
        for one in seconds:
            await clock.sleep(one)
            woken.append(name)

    tasks = [asyncio.create_task(sleeper("a", 1, 1, 1)), asyncio.create_task(sleeper("b", 1.5))]
    await clock.run()
    assert woken == []
    await clock.run(2)
    assert woken == ["a", "b", "a"]
    await clock.run(1)
    assert woken == ["a", "b", "a", "a"]
    await asyncio.gather(*tasks)


async def test_a_sleeper_that_is_cancelled_leaves_no_timer() -> None:
    clock = ManualClock()
    task = asyncio.create_task(clock.sleep(10))
    await clock.settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert clock.timers == 0


def test_the_wall_clock_may_jump_alone() -> None:
    clock = ManualClock()
    before, reading = clock.now(), clock.monotonic()
    clock.jump(-3600)
    assert clock.now() - before == timedelta(hours=-1)
    assert clock.monotonic() == reading


async def test_the_passing_clock_really_waits() -> None:
    clock = PassingClock()
    before = clock.monotonic()
    await clock.run(0.06)
    await clock.settle()
    assert clock.monotonic() - before >= 0.1


async def test_settling_waits_for_the_calls_of_a_remote_store() -> None:
    class Remote(MemoryStore):
        calls = 3

        async def idle(self) -> bool:
            was, self.calls = self.calls, max(0, self.calls - 1)
            await asyncio.sleep(0.001)
            return was == 0

    clock, store = ManualClock(), Remote()
    clock.wait_for(store)
    await clock.settle()
    assert store.calls == 0
