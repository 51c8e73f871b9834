"""Records that are not due stand in nobody's way, and have figures of their own."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from pathlib import Path

import pytest

import trunkline
from trunkline.cli import main
from trunkline.group import Group, Saved, load
from trunkline.group.agenda import Agenda
from trunkline.options import GroupOptions

LATER = 100_000
HOUR_S = 3600.0


@pytest.mark.parametrize("scheme", ["memory", "file"])
async def test_due_records_behind_100_000_delayed_ones_are_delivered(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "memory:" if scheme == "memory" else f"file:{tmp_path / 'bus'}"
    handled: list[int] = []
    async with trunkline.connect(url) as bus:
        begun = bus.clock.now().timestamp()
        for _ in range(0, LATER, 5000):
            await bus.publish_many("orders", [None] * 5000, delay_s=HOUR_S)
        await bus.publish_many("orders", list(range(100)))

        @bus.on("orders", group="billing")
        async def handle(event: trunkline.Event) -> None:
            handled.append(event.payload)

        assert await bus.drain(timeout_s=120)
        assert handled == list(range(100))
        (one,) = await bus.groups("orders", "billing")
        assert (one.lag, one.scheduled, one.floor) == (0, LATER, 0)
        assert one.next_due is not None
        assert 0 <= one.next_due - begun - HOUR_S < 600
        assert await bus.lag("orders", "billing") == 0
    if scheme == "file":  # a process that does not read the log
        assert await asyncio.to_thread(main, ["group", "ls", "--json", "--url", url]) == 0
        row = json.loads(capsys.readouterr().out)
        assert (row["lag"], row["scheduled"]) == (0, LATER)
        due = datetime.fromisoformat(row["next_due"]).timestamp()
        assert abs(due - one.next_due) <= 1
        await asyncio.to_thread(main, ["doctor", "--url", url])
        assert f"{LATER} records are not due" in capsys.readouterr().out
        await asyncio.to_thread(main, ["metrics", "--url", url])
        found = capsys.readouterr().out
        place = '{topic="orders",partition="0",group="billing"}'
        assert f"trunkline_group_scheduled_records{place} {LATER}" in found
        assert f"trunkline_group_lag_records{place} 0" in found
        assert f"trunkline_group_next_due_seconds{place}" in found


def offered(count: int, due: float) -> Group:
    group = Group(GroupOptions())
    for offset in range(1, count + 1):
        group.offer(offset, due=due + offset)
    return group


def test_a_snapshot_tells_which_records_are_not_due() -> None:
    group = offered(10, 1000.0)
    group.offer(11)
    seen = load(Saved(**group.dump()))
    assert seen.outlook(1000.0) == (10, 1001.0, 12)
    assert seen.lag(12, wall=1000.0) == 1
    assert seen.lag(20, wall=1000.0) == 9  # records that nobody has read count as due


def test_a_snapshot_does_not_hide_records_that_have_come_due() -> None:
    seen = load(Saved(**offered(10, 1000.0).dump()))
    assert seen.lag(11, wall=1001.0) == 10
    assert seen.outlook(1001.0).scheduled == 0


def test_a_seek_ends_what_the_snapshot_says() -> None:
    seen = load(Saved(**offered(10, 1000.0).dump()))
    seen.seek(10)
    assert seen.outlook(0.0).scheduled == 0
    seen.seek(0)
    assert seen.lag(11) == 10


def test_settled_records_are_not_counted_as_scheduled() -> None:
    seen = load(Saved(**offered(10, 1000.0).dump()))
    seen.skip(1, 8)
    assert seen.outlook(0.0).scheduled == 2
    assert seen.lag(11) == 0


def test_a_snapshot_without_scheduled_records_is_as_before() -> None:
    group = Group(GroupOptions())
    group.offer(1)
    assert not {"scheduled", "next_due", "read_to"} & group.dump().keys()


def test_records_that_came_due_count_before_they_are_read_again() -> None:
    group = offered(40_000, 1000.0)
    assert group.lag(40_001, wall=1000.0) == 0
    assert group.lag(40_001, wall=31_000.0) == 30_000
    assert group.outlook(31_000.0).scheduled == 10_000
    group.take("a", now=0.0, wall=31_000.0, limit=1)
    assert group.lag(40_001, wall=31_000.0) == 30_000


def test_an_agenda_counts_what_is_due_in_runs_and_in_its_heap() -> None:
    agenda = Agenda()
    for offset in range(40_000):
        agenda.add(float(offset * 7919 % 40_000), offset)
    assert agenda.count_due(-1.0) == 0
    assert agenda.count_due(9_999.0) == 10_000
    assert len(agenda.pop_due(9_999.0, 4_000)) == 4_000
    assert agenda.count_due(9_999.0) == 6_000
    agenda.keep(lambda offset: offset * 7919 % 40_000 % 2 == 0)
    assert agenda.count_due(9_999.0) == 3_000
    popped = agenda.pop_due(1e9, 40_000)
    assert [offset * 7919 % 40_000 for offset in popped] == list(range(4_000, 40_000, 2))
