"""Streams from the log: limits, restarts, groups, and writing back to it exactly once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from trunkline.folder import Folder
from trunkline.names import GroupKey
from trunkline.options import TopicOptions
from trunkline.spark import cause_of

from .logs import TOPIC, append, make_event, make_log, read_log
from .test_source import load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def follow(spark: SparkSession, root: str, **options: str) -> DataFrame:
    given = {"url": f"file:{root}", "subscribe": TOPIC, "startingOffsets": "earliest"} | options
    return spark.readStream.format("trunkline").options(**given).load()


class Sizes:
    """Runs a query to its end and keeps what each batch held."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int]]] = []

    def run(self, df: DataFrame, checkpoint: Path) -> StreamingQuery:
        query = (
            df.writeStream.foreachBatch(self._take)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return query

    def _take(self, df: DataFrame, _: int) -> None:
        rows = df.select("partition", "offset").collect()
        self.batches.append(sorted((row.partition, row.offset) for row in rows))

    @property
    def all(self) -> list[tuple[int, int]]:
        return sorted(pair for batch in self.batches for pair in batch)


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ({"minOffsetsPerTrigger": "100"}, 100),
        ({"minOffsetsPerTrigger": "101"}, 0),
        ({"minOffsetsPerTrigger": "101", "maxTriggerDelay": "0s"}, 100),
    ],
)
def test_a_stream_waits_for_as_many_records_as_asked_but_not_longer_than_allowed(
    spark: SparkSession, tmp_path: Path, options: dict[str, str], read: int
) -> None:
    root = make_log(tmp_path / "bus", 100, partitions=2)
    seen = Sizes()

    seen.run(follow(spark, root, **options), tmp_path / "check")

    assert len(seen.all) == read


def test_a_stream_reads_each_record_once_within_its_limit_and_goes_on_where_it_was(
    spark: SparkSession, tmp_path: Path
) -> None:
    root = make_log(tmp_path / "bus", 100, partitions=2)
    seen = Sizes()
    seen.run(follow(spark, root, maxOffsetsPerTrigger="40"), tmp_path / "check")
    assert [len(batch) for batch in seen.batches] == [40, 40, 20]
    folder = Folder(root)
    append(folder, [make_event(n) for n in range(100, 105)], 1)
    folder.close()

    query = seen.run(follow(spark, root, maxOffsetsPerTrigger="40"), tmp_path / "check")

    expected = [(0, n) for n in range(1, 51)] + [(1, n) for n in range(1, 56)]
    assert seen.all == expected
    assert len(seen.batches[-1]) == 5
    source = query.recentProgress[-1]["sources"][0]
    assert json.loads(source["latestOffset"]) == {TOPIC: {"0": 51, "1": 56}}


def test_a_limit_in_bytes_and_the_group_that_shows_the_progress(
    spark: SparkSession, tmp_path: Path
) -> None:
    root = make_log(tmp_path / "bus", 100)
    seen = Sizes()

    df = follow(spark, root, maxBytesPerTrigger="8k", groupId="spark.copy")
    seen.run(df, tmp_path / "check")

    assert seen.all == [(0, n) for n in range(1, 101)]
    assert len(seen.batches) > 1
    folder = Folder(root)
    group = folder.group(GroupKey(TOPIC, 0, "spark.copy"))
    assert (group.floor, group.lag(101)) == (100, 0)
    folder.close()


def test_low_latency_reads_in_the_driver(spark: SparkSession, tmp_path: Path) -> None:
    root = make_log(tmp_path / "bus", 30, partitions=2)
    seen = Sizes()
    query = (
        follow(spark, root, latencyMode="low")
        .writeStream.foreachBatch(seen._take)
        .option("checkpointLocation", str(tmp_path / "check"))
        .start()
    )
    try:
        query.processAllAvailable()
        folder = Folder(root)
        append(folder, [make_event(30)], 1)
        folder.close()
        query.processAllAvailable()
    finally:
        query.stop()

    assert seen.all == [(0, n) for n in range(1, 21)] + [(1, n) for n in range(1, 12)]


def copy(spark: SparkSession, source: str, target: str, checkpoint: Path, **options: str) -> Any:
    df = follow(spark, source, maxOffsetsPerTrigger="30", includeHeaders="true")
    return (
        df.select("key", "value", "type", "timestamp", "id", "headers")
        .writeStream.format("trunkline")
        .options(url=f"file:{target}", topic="copies", **options)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def topic(root: str, partitions: int = 1, name: str = "copies") -> str:
    folder = Folder(root)
    folder.define(name, TopicOptions(partitions=partitions))
    folder.close()
    return root


def test_a_stream_written_back_keeps_fields_and_the_order_of_each_key(
    spark: SparkSession, tmp_path: Path
) -> None:
    root = topic(make_log(tmp_path / "bus", 100), partitions=3)

    copy(spark, root, root, tmp_path / "check").awaitTermination()

    records = [r for p in range(3) for r in read_log(root, "copies", p)]
    assert sorted(int(r.event.id[1:]) for r in records) == list(range(100))
    for key in {r.event.key for r in records}:
        mine = [r for r in records if r.event.key == key]
        assert len({r.partition for r in mine}) == 1
        numbers = [r.event.payload["n"] for r in mine]
        assert numbers == sorted(numbers)
    by_id = {r.event.id: r.event for r in records}
    assert by_id["e8"].type == "t2"
    assert by_id["e8"].ts == read_log(root)[8].event.ts
    assert not list((tmp_path / "bus" / "spark" / "sinks" / "staged").iterdir())


def test_a_batch_that_is_tried_again_is_in_the_log_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The checkpoint forgets that the last batch was done, as after a crash before that note."""
    root = topic(make_log(tmp_path / "bus", 60), partitions=2)
    copy(spark, root, root, tmp_path / "check").awaitTermination()
    for name in ("1", ".1.crc"):
        (tmp_path / "check" / "commits" / name).unlink(missing_ok=True)

    copy(spark, root, root, tmp_path / "check").awaitTermination()

    ids = [r.event.id for p in (0, 1) for r in read_log(root, "copies", p)]
    assert sorted(ids) == sorted(f"e{n}" for n in range(60))


def test_a_data_frame_becomes_records(spark: SparkSession, tmp_path: Path) -> None:
    root = topic(str(tmp_path))
    df = spark.createDataFrame(
        [("k1", '{"a":1}', "made", {"h": "x"}, 5.0), ("k2", None, None, None, None)],
        "key string, value string, type string, headers map<string,string>, ttl_s double",
    )

    df.coalesce(1).write.format("trunkline").options(url=root, topic="copies").mode("append").save()

    one, two = read_log(root, "copies")
    assert (one.event.key, one.event.payload, one.event.type) == ("k1", {"a": 1}, "made")
    assert (one.event.headers["h"], one.event.ttl_s) == ("x", 5.0)
    assert (two.event.key, two.event.payload, two.event.headers) == ("k2", None, {})
    assert load(spark, root, subscribe="copies").count() == 2


def test_a_batch_with_a_version_is_written_once(spark: SparkSession, tmp_path: Path) -> None:
    root = topic(str(tmp_path))
    df = spark.range(5).selectExpr("to_json(struct(id)) AS value")

    def write(version: int) -> None:
        writer = df.write.format("trunkline").options(url=root, topic="copies")
        writer.options(txnAppId="nightly", txnVersion=str(version)).mode("append").save()

    for version in (1, 1, 2, 1):
        write(version)

    assert len(read_log(root, "copies")) == 10


@pytest.mark.parametrize(
    ("select", "said"),
    [
        ("id AS value", "column value is bigint (make it string or binary, for example by to_json"),
        ("'x' AS value, 1 AS colour", "a record has no column 'colour'"),
        ("'x' AS key", "there is no column value"),
        ("'not json' AS value", "write to_json(struct(...)), or set option valueFormat=text"),
    ],
)
def test_what_cannot_be_a_record_is_refused_with_a_hint(
    spark: SparkSession, tmp_path: Path, select: str, said: str
) -> None:
    root = topic(str(tmp_path))
    writer = spark.range(2).selectExpr(*select.split(", ")).write.format("trunkline")

    with pytest.raises(Exception, match="trunkline") as caught:
        writer.options(url=root, topic="copies").mode("append").save()

    assert said in (cause_of(caught.value) or "")
    assert read_log(root, "copies") == []
