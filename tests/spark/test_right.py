"""Every table is right, row for row, however the log is cut into batches and whatever dies."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from trunkline.spark.lake import Lake
from trunkline.spark.pipelines import find, records
from trunkline.spark.pipelines.run import Runner

from .recompute import Recomputed, Rows
from .test_orphans import orphans
from .world import FLIGHTS, make_world

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from trunkline.spark.source.offsets import Place

NAMES = (
    "lake", "clean", "traffic", "compaction", "consolidation", "sequences", "temporal", "decisions",
    "learning", "claims",
)  # fmt: skip
MICROS = "unix_micros({})"
COLUMNS = {
    "events": ("topic", "partition", "offset", "value", "unix_micros(timestamp)",
               "unix_micros(appended_at)"),
    "traffic": ("unix_micros(hour)", "topic", "type", "events", "bytes", "keys", "actors"),
    "compaction": ("topic", "partition", "key", "value", "offset", "versions"),
    "consolidation": ("space", "actor", "unix_micros(start)", "unix_micros(`end`)", "events",
                      "first_id", "last_id", "open"),
    "sequences": ("actor", "before", "after", "times"),
    "temporal": ("topic", "key", "events", "unix_micros(first_seen)", "unix_micros(last_seen)",
                 "CAST(round(usual_gap_s * 1e6) AS BIGINT)"),
    "decisions": ("ref", "action", "context", "unix_micros(decided)", "too_late", "ok"),
    "claims": ("actor", "what", "claims", "conflicts", "unix_micros(held_since)"),
}  # fmt: skip


class Died(BaseException):
    """The process ends here: no handler of errors runs."""


def found(spark: SparkSession, lake: Lake, table: str) -> Rows:
    df = lake.read(spark, table)
    df = df.where("decided IS NOT NULL") if table == "decisions" else df
    if table == "events":
        df = df.where("NOT startswith(topic, 'system.')")
    return sorted((tuple(row) for row in df.selectExpr(*COLUMNS[table]).collect()), key=repr)


def places(df: DataFrame) -> set[tuple[str, int, int]]:
    rows = df.where("NOT startswith(topic, 'system.')").select("topic", "partition", "offset")
    return {tuple(row) for row in rows.collect()}


def check(spark: SparkSession, lake: Lake, root: str) -> None:
    """Every table of the lake is what DuckDB makes of the segments."""
    wanted = Recomputed(root)
    for table in COLUMNS:
        rows = found(spark, lake, table)
        expected = getattr(wanted, table)()
        assert len(rows) == len(expected), table
        assert [pair for pair in zip(rows, expected, strict=True) if pair[0] != pair[1]][:3] == []
    passed = lake.read(spark, "clean")
    assert places(passed) == wanted.clean()
    assert passed.where("NOT startswith(topic, 'system.')").count() == len(wanted.clean())
    refused = lake.read(spark, "quarantine").where("pipeline = 'clean'")
    assert places(refused).isdisjoint(places(passed))
    assert len(places(passed)) + len(places(refused)) == len(wanted.events())
    typed = lake.read(spark, f"clean.{FLIGHTS[0]}")
    assert typed.count() == passed.where(f"topic = '{FLIGHTS[0]}'").count()
    assert typed.where("payload IS NOT NULL AND payload.id IS NULL").count() == 0
    sums = lake.read(spark, "learning").selectExpr("sum(decisions)", "sum(too_late)")
    (rates,) = sums.collect()
    decided = wanted.decisions()
    assert tuple(rates) == (len(decided), sum(row[4] for row in decided))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_world(tmp_path_factory.mktemp("world") / "bus", 20_000)


def test_all_tables_are_what_the_segments_say(
    spark: SparkSession, tmp_path: Path, world: str
) -> None:
    before = size(world)
    lake = Lake(str(tmp_path / "lake"))

    results = Runner(spark, world, lake).run(find(list(NAMES)))

    assert {one.name: one.error for one in results if one.error} == {}
    check(spark, lake, world)
    (row,) = (
        lake.read(spark, f"clean.{FLIGHTS[0]}")
        .where("payload IS NOT NULL")
        .selectExpr(
            "payload.`dep.delay`", "payload.`air time`", "payload.Origin", "payload.origin_2",
            "payload.`Zürich`", "payload._h", "payload.legs[0].A_2", "payload.`offset`", "offset",
        )
        .limit(1)
        .collect()
    )  # fmt: skip
    assert (row.Origin, row.origin_2, row._h, row[6], row[7]) == ("EWR", "ewr", 7, "one", -1)
    assert size(world) == before, "a plain run adds nothing to the bus"
    files = list((tmp_path / "lake" / "events").rglob("*.parquet"))
    assert len(files) <= 60


def size(root: str) -> int:
    return sum(path.stat().st_size for path in Path(root, "wal").iterdir())


def cut(
    spark: SparkSession, root: str, lake: Lake, batches: int, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Run in random batches, killed between and within them. Returns how often it was killed."""
    rng = random.Random(batches)
    commit: Callable[..., Any] = Lake.commit
    turns = itertools.count(1)

    def some(start: Place, end: Place, rows: int) -> Place:
        if next(turns) % batches == 0:
            return end
        share = rng.random() * 2 / batches
        place: Place = {}
        for topic, parts in end.items():
            for part, last in parts.items():
                first = start[topic][part]
                more = max(1, round(rng.random() * 2 * share * last)) if last > first else 0
                place.setdefault(topic, {})[part] = min(last, first + more)
        return place

    def dying(self: Lake, staged: Any, **options: Any) -> Any:
        chance = rng.random()
        if chance < 0.03:
            raise Died
        made = commit(self, staged, **options)
        if chance > 0.97:
            raise Died
        return made

    monkeypatch.setattr(records, "admit_rows", some)
    monkeypatch.setattr(Lake, "commit", dying)
    for died in range(30 * batches):
        try:
            results = Runner(spark, root, lake).run(find(list(NAMES)))
        except Died:
            continue
        monkeypatch.undo()
        assert {one.name: one.error for one in results if one.error} == {}
        check(spark, lake, root)
        assert orphans(lake) == set()
        return died
    pytest.fail("it died each time")


@pytest.mark.timeout(900)
def test_a_log_in_four_batches_gives_the_same_tables(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_world(tmp_path / "bus", 1_500)
    assert cut(spark, root, Lake(str(tmp_path / "lake")), 4, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_thousand_events_in_four_batches_give_the_same_tables(
    spark: SparkSession, tmp_path: Path, world: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cut(spark, world, Lake(str(tmp_path / "lake")), 4, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_a_large_log_in_forty_batches_gives_the_same_tables(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``WORLD_EVENTS`` and ``WORLD_BATCHES`` make it smaller."""
    count = int(os.environ.get("WORLD_EVENTS", "800000"))
    batches = int(os.environ.get("WORLD_BATCHES", "40"))
    root = make_world(tmp_path / "bus", count)
    lake = Lake(str(tmp_path / "once"))

    began = time.perf_counter()
    results = Runner(spark, root, lake).run(find(list(NAMES)))
    assert {one.name: one.error for one in results if one.error} == {}
    check(spark, lake, root)
    once = time.perf_counter() - began
    died = cut(spark, root, Lake(str(tmp_path / "cut")), batches, monkeypatch)
    took = time.perf_counter() - began - once
    print(f"{count} events: 1 batch {once:.0f} s; {batches} batches, {died} kills {took:.0f} s")
