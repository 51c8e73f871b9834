"""Small files become few, and nobody can tell by the rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from trunkline.folder import Folder, upkeep
from trunkline.spark.lake import EVENTS, Lake, event_files
from trunkline.spark.lake.optimize import optimize
from trunkline.spark.pipelines import find
from trunkline.spark.pipelines.run import Runner

from .logs import TOPIC, append, make_event, make_log
from .test_source import load

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def rows_of(spark: SparkSession, lake: Lake, table: str) -> Counter[str]:
    return Counter(map(str, lake.read(spark, table, whole=True).collect()))


class Died(Exception):
    """The process ends here."""


def die(*_: object, **__: object) -> None:
    raise Died


def test_small_files_are_merged_and_the_rows_stay(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_log(tmp_path / "bus", 40, partitions=2)
    lake = Lake(str(tmp_path / "lake"))
    job = Runner(spark, root, lake)
    for number in range(3):
        folder = Folder(root)
        for partition in range(2):
            start = 100 * (number + 1) + 50 * partition
            events = [make_event(n, type="t") for n in range(start, start + 10)]
            append(folder, events, partition)
        folder.close()
        assert [one.error for one in job.run(find(["lake", "clean"]))] == ["", ""]
    before = {name: rows_of(spark, lake, name) for name in (EVENTS, "clean")}
    files = len(event_files(lake.path))
    count = lake.rows(EVENTS)

    monkeypatch.setattr("deltalake.DeltaTable.create_write_transaction", die)
    for name in before:
        with pytest.raises(Died):
            optimize(lake, name, many=2)
    monkeypatch.undo()
    assert {name: rows_of(spark, lake, name) for name in before} == before
    gone = {name: optimize(lake, name, many=2) for name in before}

    assert gone[EVENTS] == files
    assert gone["clean"]
    assert {name: rows_of(spark, lake, name) for name in before} == before
    merged = event_files(lake.path)
    assert sorted((f.partition, f.first, f.last) for f in merged) == [(0, 1, 50), (1, 1, 50)]
    assert lake.rows(EVENTS) == count == 100
    assert {name: optimize(lake, name, many=2) for name in before} == {EVENTS: 0, "clean": 0}

    # What batches wrote is still known, and what is read from the lake is found there.
    assert [one.events for one in job.run(find(["lake", "clean"]))] == [0, 0]
    assert {name: rows_of(spark, lake, name) for name in before} == before
    folder = Folder(root)
    upkeep.trim(folder, TOPIC, 0, 31)
    folder.close()
    assert load(spark, root, tier="auto", lake=lake.path).count() == 100


def test_a_table_with_few_files_is_left_alone(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    (tmp_path / "t" / "_delta_log").mkdir(parents=True)  # as left by one that died here
    (tmp_path / "_runs.json").touch()
    assert lake.tables() == []
    lake.write("t", spark.range(10), app="a", version=0)
    version = lake._table("t").version()

    assert optimize(lake, "t") == 0

    assert lake._table("t").version() == version
