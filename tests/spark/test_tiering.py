"""Times and streams over a log whose old part is in the lake alone."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

import pyarrow.parquet as pq

from trunkline.folder import Folder, upkeep
from trunkline.spark import cause_of
from trunkline.spark.lake import Lake
from trunkline.spark.pipelines import find
from trunkline.spark.pipelines.run import Runner

from .logs import START, TOPIC, append, make_event, make_log
from .test_source import load, offsets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def tiers(spark: SparkSession, tmp_path: Path) -> tuple[str, dict[str, str]]:
    """Offsets 1 to 60 in the lake, 41 to 80 in the log: offset n is of second n - 1."""
    root = make_log(tmp_path / "bus", 60)
    lake = Lake(str(tmp_path / "lake"))
    (ran,) = Runner(spark, root, lake).run(find(["lake"]))
    assert not ran.error
    folder = Folder(root)
    upkeep.trim(folder, TOPIC, 0, 41)
    append(folder, [make_event(n) for n in range(60, 80)])
    folder.close()
    return root, {"tier": "auto", "lake": lake.path}


def test_a_file_of_the_lake_is_not_cut_up_by_the_batches_it_came_in(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(str(tmp_path / "lake"))

    lake.write("numbers", spark.range(0, 45_000, 1, 1), app="test", version=0)  # 10,000 a batch

    (path,) = Path(lake.place("numbers")).glob("*.parquet")
    with pq.ParquetFile(path) as file:
        assert file.num_row_groups == 1
        assert file.read().column("id").to_pylist() == list(range(45_000))


def at(second: float) -> str:
    return (START + timedelta(seconds=second)).isoformat()


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (9.5, 19, range(11, 20)),  # both in the lake
        (9.5, 70, range(11, 71)),  # from the lake into the log
        (39, 45, range(40, 46)),  # the last record that only the lake has
        (50, 70, range(51, 71)),  # both have the beginning
        (-100, 5, range(1, 6)),
    ],
)
def test_a_time_is_found_in_the_tier_that_has_it(
    spark: SparkSession,
    tiers: tuple[str, dict[str, str]],
    begin: float,
    end: float,
    expected: range,
) -> None:
    root, options = tiers
    times = {"startingTimestamp": at(begin), "endingTimestamp": at(end)}

    df = load(spark, root, **options, **times)

    assert offsets(df) == [(0, n) for n in expected]


def test_a_time_that_nothing_has_reached_is_an_error(
    spark: SparkSession, tiers: tuple[str, dict[str, str]]
) -> None:
    root, options = tiers
    with pytest.raises(Exception, match="no record at or after") as caught:
        load(spark, root, **options, startingTimestamp=at(1000)).count()
    assert "startingOffsetsByTimestampStrategy=latest" in (cause_of(caught.value) or "")


def test_a_time_is_found_when_the_log_is_empty_by_now(spark: SparkSession, tmp_path: Path) -> None:
    root = make_log(tmp_path / "bus", 30)
    lake = Lake(str(tmp_path / "lake"))
    Runner(spark, root, lake).run(find(["lake"]))
    folder = Folder(root)
    upkeep.trim(folder, TOPIC, 0, 31)
    folder.close()

    df = load(spark, root, tier="auto", lake=lake.path, startingTimestamp=at(20))

    assert offsets(df) == [(0, n) for n in range(21, 31)]


def test_a_stream_begins_in_the_lake(
    spark: SparkSession, tiers: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    root, options = tiers
    query = (
        spark.readStream.format("trunkline")
        .options(url=f"file:{root}", subscribe=TOPIC, startingOffsets="earliest", **options)
        .option("maxOffsetsPerTrigger", "25")
        .load()
        .writeStream.format("memory")
        .queryName("tiers")
        .option("checkpointLocation", str(tmp_path / "check"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()

    assert offsets(spark.table("tiers")) == [(0, n) for n in range(1, 81)]
    assert len([one for one in query.recentProgress if one["numInputRows"]]) >= 4
