"""``format("trunkline")`` in a real session."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import DataSourceReader

from trunkline.folder import Folder, upkeep
from trunkline.options import TopicOptions
from trunkline.spark import cause_of
from trunkline.spark.source.readers import BatchReader

from .logs import TOPIC, append, as_row, decoded, make_event, make_log, read_log
from .test_scan import flip

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def load(spark: SparkSession, root: str, schema: str = "", **options: str) -> DataFrame:
    reader = spark.read.format("trunkline").options(url=f"file:{root}", **options)
    if "subscribePattern" not in options and "assign" not in options:
        reader = reader.option("subscribe", options.get("subscribe", TOPIC))
    return (reader.schema(schema) if schema else reader).load()


def offsets(df: DataFrame) -> list[tuple[int, int]]:
    return sorted((row.partition, row.offset) for row in df.select("partition", "offset").collect())


def test_the_data_frame_is_what_the_log_reads(spark: SparkSession, tmp_path: Path) -> None:
    root = str(tmp_path)
    folder = Folder(root)
    folder.define(TOPIC, TopicOptions(partitions=2, segment_records=40))
    for start in range(0, 200, 10):
        events = [
            make_event(
                n,
                key=f"k{n % 9}",
                type="a" if n % 2 else None,
                headers={"h": "x"} if n % 5 == 0 else {},
                caps=("read",) if n % 7 == 0 else (),
                payload={"text": "héllo ☃", "n": [n, None, n / 3]},
            )
            for n in range(start, start + 10)
        ]
        append(folder, events, start // 10 % 2)
    upkeep.compact(folder, TOPIC, 0)
    upkeep.pack_segments(folder, TOPIC, 1)
    folder.close()
    expected = [as_row(r) for p in (0, 1) for r in read_log(root, TOPIC, p)]
    assert 100 < len(expected) < 200

    rows = load(spark, root, includeHeaders="true", minPartitions="5").collect()

    found = [decoded(row.asDict(recursive=True)) for row in rows]
    found.sort(key=lambda row: (row["partition"], row["offset"]))
    assert found == [{**row, "timestamp": naive(row["timestamp"])} for row in expected]


def naive(when: datetime) -> datetime:
    """As Spark hands a timestamp to Python: in the local time zone, without saying so."""
    return when.astimezone().replace(tzinfo=None)


def test_there_is_no_filter_push_down(spark: SparkSession, tmp_path: Path) -> None:
    """Spark 4.1 to 4.3 go on using a pushed filter for other queries on the same DataFrame."""
    assert "pushFilters" not in vars(BatchReader)
    assert BatchReader.pushFilters is DataSourceReader.pushFilters
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        df = load(spark, make_log(tmp_path, 30))

        assert df.count() == 30
        assert df.where("offset = 3").count() == 1
        assert df.count() == 30
        assert df.where("offset = 3").crossJoin(df.select("id")).count() == 30
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_a_data_frame_is_a_snapshot(spark: SparkSession, tmp_path: Path) -> None:
    root = make_log(tmp_path, 20)
    df = load(spark, root)
    assert df.count() == 20
    folder = Folder(root)
    append(folder, [make_event(20)])
    folder.close()

    assert df.count() == 20
    assert load(spark, root).count() == 21


def test_columns_are_chosen_by_schema_also_under_their_other_names(
    spark: SparkSession, tmp_path: Path
) -> None:
    root = make_log(tmp_path, 3)

    df = load(spark, root, schema="offset bigint, event_id string, payload string, ts timestamp")

    first = df.orderBy("offset").first()
    assert first is not None
    assert first.asDict() == {
        "offset": 1,
        "event_id": "e0",
        "payload": '{"n":0}',
        "ts": naive(as_row(read_log(root)[0])["timestamp"]),
    }


def test_ranges_types_and_spaces(spark: SparkSession, tmp_path: Path) -> None:
    root = make_log(tmp_path, 40, partitions=2)
    ranged = {
        "startingOffsets": '{"orders":{"0":5,"1":-2}}',
        "endingOffsets": '{"orders":{"0":8,"1":3}}',
    }

    assert offsets(load(spark, root, **ranged)) == [(0, 5), (0, 6), (0, 7), (1, 1), (1, 2)]
    picked = load(spark, root, eventTypes="t1", spaces="s0")
    assert picked.count() == sum(n % 3 == 1 and n % 2 == 0 for n in range(40))
    assert load(spark, root, assign='{"orders":[1]}').count() == 20


def test_sql_knows_the_log(spark: SparkSession, tmp_path: Path) -> None:
    root = make_log(tmp_path, 30)
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW events USING trunkline "
        f"OPTIONS (url 'file:{root}', subscribe '{TOPIC}')"
    )

    rows = spark.sql("SELECT type, count(*) AS n FROM events GROUP BY type ORDER BY type").collect()

    assert [(row.type, row.n) for row in rows] == [("t0", 10), ("t1", 10), ("t2", 10)]


def test_damaged_records_have_a_column_of_their_own(spark: SparkSession, tmp_path: Path) -> None:
    root = make_log(tmp_path, 30)
    flip(f"{root}/wal/orders.00000001.jsonl", b'"event_id":"e12"')

    df = load(spark, root, badRecords="column")

    assert df.columns[-1] == "_corrupt_record"
    assert [row.offset for row in df.where("_corrupt_record IS NOT NULL").collect()] == [13]
    with pytest.raises(Exception, match="checksum") as caught:
        load(spark, root).count()
    said = cause_of(caught.value) or ""
    assert said.startswith("wal/orders.00000001.jsonl is damaged at byte")
    assert said.endswith("(run 'trunkline verify', or read with option badRecords=column)")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subscribe": "nope"}, "there is no topic nope ('trunkline topic ls' lists them)"),
        ({"startingOffset": "1"}, "there is no option startingoffset (did you mean"),
        ({"startingOffsets": '{"orders":{"0":99}}'}, "orders/0 has offsets 1 to 3, not 99"),
    ],
)
def test_an_error_comes_down_to_one_line(
    spark: SparkSession, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    root = make_log(tmp_path, 3)

    with pytest.raises(Exception, match="trunkline") as caught:
        load(spark, root, **options).count()

    assert said in (cause_of(caught.value) or "")
