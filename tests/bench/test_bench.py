"""The benchmark's harness: the shape of its file, the choice of lines, the judging of goals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.bench import save
from benchmarks.harness import (
    LINES,
    Line,
    Pair,
    Result,
    Run,
    Steal,
    alternate,
    least_stolen,
    lines_named,
    middle,
    payloads,
)

from trunkline.codec import encode_event
from trunkline.event import Event
from trunkline.log.line import frame_batch
from trunkline.options import Limits

REPOSITORY = Path(__file__).parents[2]
FIELDS = ["name", "ours", "against", "theirs", "unit", "ratio", "goal", "met"]


async def _never(run: Run) -> Pair:
    raise AssertionError("not measured here")


def _line(goal: str) -> Line:
    return Line(name="x", against="y", unit="z", goal=goal, measure=_never)


def _result(name: str, ours: float = 1.0) -> Result:
    return Result(
        name=name, ours=ours, against="a", theirs=1.0, unit="u", ratio=ours, goal=">= 1", met=True
    )


def _bench(*arguments: str, only: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.bench", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "ONLY": only},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


def test_a_quick_run_of_one_line_writes_the_fields_of_the_table(tmp_path: Path) -> None:
    out = tmp_path / "results.json"

    done = _bench("--quick", "--out", str(out), only="publish-64-ceiling")

    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())
    assert list(row) == FIELDS
    assert row["name"] == "publish-64-ceiling"
    assert row["ratio"] == pytest.approx(row["ours"] / row["theirs"], rel=0.01)
    assert "fdatasync: p50" in done.stdout
    assert "the numbers mean nothing" in done.stdout


def test_an_unknown_line_is_refused_by_name() -> None:
    done = _bench("--only", "no-such-line")

    assert done.returncode == 4
    assert "publish-64-ceiling" in done.stderr


def test_a_name_chooses_one_line_and_its_start_chooses_several() -> None:
    assert [line.name for line in lines_named("catch-up-redis")] == ["catch-up-redis"]
    assert {line.name for line in lines_named("growth")} == {
        name for name in LINES if name.startswith("growth")
    }
    assert lines_named(None) == list(LINES.values())
    assert lines_named("no-such-line") == []


def test_saving_one_line_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "results" / "latest.json"
    save(path, [_result("catch-up-nats"), _result("publish-64-ceiling"), _result("elsewhere")])

    save(path, [_result("publish-64-ceiling", ours=2.0)])

    rows = json.loads(path.read_text())
    assert [(row["name"], row["ours"]) for row in rows] == [
        ("publish-64-ceiling", 2.0),
        ("catch-up-nats", 1.0),
        ("elsewhere", 1.0),
    ]


@pytest.mark.parametrize(
    ("goal", "ours", "met"),
    [(">= 0.40", 4.0, True), (">= 0.40", 3.9, False), ("<= 3", 30.0, True), ("<= 3", 31.0, False)],
)
def test_a_goal_bounds_ours_over_theirs(goal: str, ours: float, met: bool) -> None:
    result = _line(goal).judge(Pair(ours, 10.0))

    assert result.ratio == ours / 10
    assert result.met is met


def test_nothing_measured_on_their_side_meets_no_goal() -> None:
    assert not _line(">= 1").judge(Pair(5.0, 0.0)).met


def test_the_round_with_the_median_ratio_counts_however_fast_the_machine_was() -> None:
    rounds = [Pair(10.0, 5.0), Pair(300.0, 100.0), Pair(4.0, 4.0)]

    assert middle(rounds) == Pair(10.0, 5.0)


async def test_sides_take_turns_after_warming_up(tmp_path: Path) -> None:
    turns: list[str] = []

    async def ours(seconds: float) -> float:
        turns.append("ours")
        return float(len(turns))

    async def theirs(seconds: float) -> float:
        turns.append("theirs")
        return float(len(turns))

    pair = await alternate(Run(tmp_path, quick=True), ours, theirs)

    assert turns == ["ours", "theirs", "ours", "theirs"]
    assert pair == Pair(3.0, 4.0)


@pytest.mark.parametrize(
    ("stolen", "counted"),
    [
        ([0.0, 0.0, 0.0], [0, 1, 2]),
        ([0.3, 0.01, 0.0, 0.5, 0.02], [2, 1, 4]),  # two rounds are repeated
        ([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1], [8, 7, 6]),  # none is quiet
    ],
)
async def test_rounds_that_the_host_disturbed_are_taken_anew_up_to_a_bound(
    stolen: list[float], counted: list[int]
) -> None:
    rounds = iter(range(100))

    async def measure() -> int:
        return next(rounds)

    assert await least_stolen(3, measure, iter(stolen).__next__) == counted
    assert next(rounds) == len(stolen)


def test_what_the_host_steals_is_a_share_of_the_time() -> None:
    steal = Steal()

    assert 0 <= steal.share() <= 1


def test_every_event_takes_about_400_bytes_in_the_log() -> None:
    bodies = [encode_event(Event(topic="orders", payload=value), Limits()) for value in payloads()]
    sizes = {len(line) for line in frame_batch(1_000_000, bodies, 0, 0)[:-1]}

    assert min(sizes) >= 390
    assert max(sizes) <= 410
