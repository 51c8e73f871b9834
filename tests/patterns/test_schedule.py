"""A schedule fires each period once, in one process."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import trunkline
from trunkline import Bus, InvalidOption
from trunkline.bus.connect import open_local
from trunkline.bus.local import LocalBus
from trunkline.patterns.schedule import Tick, plan_of
from trunkline.store.memory import MemoryStore
from trunkline.testing import ManualClock

START = datetime(2030, 1, 1, tzinfo=UTC)


def minutes(ticks: list[Tick]) -> list[float]:
    return [(tick.due - START).total_seconds() / 60 for tick in ticks]


async def test_two_processes_fire_each_period_once() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    fired: list[Tick] = []

    def process() -> Bus:
        bus = LocalBus(store, clock=clock)

        @bus.every("5m", name="clean")
        async def clean(tick: Tick) -> None:
            fired.append(tick)

        return bus

    one, two = process(), process()
    await one.start()
    await two.start()
    for _ in range(16):
        await clock.run(60)
    assert minutes(fired) == [5, 10, 15]
    await one.close()
    await two.close()


@pytest.mark.parametrize(("missed", "wanted"), [("skip", [5, 25]), ("all", [5, 10, 15, 20, 25])])
async def test_periods_without_a_process_are_skipped_or_caught_up(
    missed: Any, wanted: list[float]
) -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    fired: list[Tick] = []

    async def life(minutes: int) -> None:
        bus = LocalBus(store, clock=clock)

        @bus.every("5m", name="clean", missed=missed)
        async def clean(tick: Tick) -> None:
            fired.append(tick)

        await bus.start()
        for _ in range(minutes):
            await clock.run(60)
        await bus.stop()

    await life(6)
    clock.advance(16 * 60)
    await life(5)
    assert minutes(fired) == wanted


async def test_a_process_that_stood_still_does_not_fire_again_what_another_fired() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    fired: list[Tick] = []
    bus = LocalBus(store, clock=clock)

    @bus.every("5m", name="clean")
    async def clean(tick: Tick) -> None:
        fired.append(tick)

    async with bus:
        await clock.run(1)
        due = START + timedelta(minutes=5)
        await bus.publish("schedule.clean", Tick("clean", due))  # by a quicker process
        clock.advance(9 * 60)
        await clock.run(1)
        assert minutes(fired) == [5]


async def test_a_function_without_arguments_is_called() -> None:
    clock = ManualClock()
    fired = []
    async with open_local("memory:", clock=clock) as bus:

        @bus.every(timedelta(seconds=30))
        def plain() -> None:
            fired.append(1)

        for _ in range(4):
            await clock.run(10)
        assert await bus.drain(20)
        assert [one.topic for one in bus.handlers()] == ["schedule.plain"]
    assert fired == [1]


def test_a_cron_expression_knows_its_time_zone_and_its_summer_time() -> None:
    plan = plan_of("30 2 * * *", "Europe/Berlin")
    winter = plan.after(datetime(2026, 1, 10, 12, tzinfo=UTC))
    summer = plan.after(datetime(2026, 7, 10, 12, tzinfo=UTC))
    assert (winter, summer) == (
        datetime(2026, 1, 11, 1, 30, tzinfo=UTC),
        datetime(2026, 7, 11, 0, 30, tzinfo=UTC),
    )
    # The night in which 02:30 does not exist has a firing, and one alone.
    day = datetime(2026, 3, 28, 23, tzinfo=UTC)
    first = plan.after(day)
    assert first - day < timedelta(hours=3)
    assert plan.after(first) == datetime(2026, 3, 30, 0, 30, tzinfo=UTC)


@pytest.mark.parametrize("period", ["5 minutes", "", "0s", 0.5, -1, "61 * * * *", "* * *", None])
def test_what_is_no_period_is_refused(period: Any) -> None:
    with pytest.raises(InvalidOption):
        plan_of(period)


async def test_other_arguments_are_checked_too() -> None:
    bus = trunkline.connect("memory:")
    with pytest.raises(InvalidOption, match="no time zone"):
        bus.every("0 3 * * *", tz="Berlin")
    with pytest.raises(InvalidOption, match="missed"):
        bus.every("5m", missed="some")(lambda: None)  # type: ignore[arg-type]
