"""A batch reads and writes only the part of a table that its records may change."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from trunkline.event import Event
from trunkline.folder import Folder
from trunkline.spark.lake import Lake
from trunkline.spark.lake.table import BUCKET, _files
from trunkline.spark.pipelines import batch, find
from trunkline.spark.pipelines.run import Runner

from .logs import append
from .recompute import Recomputed
from .test_right import found

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

    from trunkline.spark.pipelines.declare import Pipeline

TABLES = ("consolidation", "traffic")
YEAR = datetime(2024, 1, 1, tzinfo=UTC)


def publish(root: Path, *days: float) -> None:
    """Three events of each of two actors on each of these days of the year, ten minutes apart."""
    with_times = [
        Event(
            topic=f"notes.{actor}",
            type="note",
            actor=actor,
            key="k",
            payload={"n": n},
            ts=YEAR + timedelta(days=day, minutes=10 * n),
        )
        for day in days
        for actor in ("ann", "bob")
        for n in range(3)
    ]
    folder = Folder(str(root))
    for actor in ("ann", "bob"):
        append(folder, [event for event in with_times if event.actor == actor])
    folder.close()


def run(spark: SparkSession, root: Path, lake: Lake) -> None:
    results = Runner(spark, str(root), lake).run(find(["clean", *TABLES]))
    assert {one.name: one.error for one in results if one.error} == {}
    wanted = Recomputed(str(root))
    for table in TABLES:
        assert found(spark, lake, table) == getattr(wanted, table)()


def buckets(lake: Lake, table: str) -> dict[str, set[str]]:
    files: dict[str, set[str]] = {}
    for path, values in _files(lake._table(table)):
        files.setdefault(str(values[BUCKET]), set()).add(path)
    return files


def test_an_increment_leaves_the_files_of_other_times_alone(
    spark: SparkSession, tmp_path: Path
) -> None:
    root, lake = tmp_path / "bus", Lake(str(tmp_path / "lake"))
    publish(root, *range(0, 360, 15))
    run(spark, root, lake)
    before = {table: buckets(lake, table) for table in TABLES}

    publish(root, 360, 361, 105.015)  # the last belongs to an episode of the day 105

    run(spark, root, lake)
    for table in TABLES:
        after = buckets(lake, table)
        same = {name for name in before[table] if before[table][name] == after.get(name)}
        changed = before[table].keys() - same
        assert len(same) >= 8, table
        assert 1 <= len(changed) <= 4, table


def test_a_table_in_buckets_of_an_older_version_is_moved(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql import functions as f

    def by_hash(pipeline: Pipeline) -> Column:
        key = "actor" if pipeline.name == "consolidation" else "topic"
        return f.pmod(f.xxhash64(key), f.lit(16)).cast("int")

    root, lake = tmp_path / "bus", Lake(str(tmp_path / "lake"))
    publish(root, *range(0, 120, 15))
    with monkeypatch.context() as older:
        older.setattr(batch, "bucket_of", by_hash)
        run(spark, root, lake)

    publish(root, 120, 30.015)

    run(spark, root, lake)
    for table in TABLES:
        assert buckets(lake, table).keys().isdisjoint(str(number) for number in range(1, 16))
