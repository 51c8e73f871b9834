"""Records of a log, or of the lake, sent to a topic once more."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from trunkline.errors import InvalidOption
from trunkline.spark.lake import EVENTS
from trunkline.spark.source.options import _moment

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from trunkline.spark.lake import Lake

_OWN = ("offset", "partition", "id", "idem_key", "cause", "timestampType", "appended_at")


def replay(
    spark: SparkSession,
    source: dict[str, str],
    target: dict[str, str],
    *,
    where: str = "",
    lake: Lake | None = None,
    speed: float = 0.0,
    now: datetime | None = None,
) -> int:
    """Send records once more, in the order of their time. Returns how many.

    ``source`` and ``target`` are options of the reader and the writer; ``startingTimestamp`` and
    ``endingTimestamp`` count for the lake too. With ``speed`` they are delivered with the pauses
    they had, that many times as fast: each record is held back until its moment by ``not_before``,
    so the pace outlives this process. ``txnAppId`` and ``txnVersion`` in the target make a replay
    that is tried again do nothing twice.
    """
    from pyspark.sql import functions as f

    if speed < 0:
        raise InvalidOption("speed is a number above 0, or 0 for all at once", value=speed)
    df = _stored(spark, source, lake) if lake is not None else _logged(spark, source)
    if where:
        df = pick(df, where)
    rows = df.orderBy("timestamp", "partition", "offset")
    columns = [column for column in rows.columns if column not in _OWN]
    rows = rows.select(*columns, rows.id.alias("cause"))
    if "topic" in target:
        rows = rows.drop("topic")
    rows = rows.persist()
    try:
        count, first = rows.agg(f.count("*"), f.min(f.unix_micros("timestamp"))).collect()[0]
        if speed and count:
            begin = int((now or datetime.now(UTC)).timestamp() * 1e6)
            passed = f"(unix_micros(timestamp) - {first}) / {speed!r}"
            due = f.expr(f"timestamp_micros({begin} + CAST({passed} AS BIGINT))")
            rows = rows.withColumn("not_before", due)
        # One task keeps the order of time.
        rows.coalesce(1).write.format("trunkline").options(**target).mode("append").save()
    finally:
        rows.unpersist()
    return int(count)


def _logged(spark: SparkSession, source: dict[str, str]) -> DataFrame:
    return spark.read.format("trunkline").options(**({"includeHeaders": "true"} | source)).load()


def _stored(spark: SparkSession, source: dict[str, str], lake: Lake) -> DataFrame:
    df = lake.read(spark, EVENTS)
    if source.get("subscribe"):
        df = df.where(df.topic.isin(source["subscribe"].split(",")))
    if source.get("startingTimestamp"):
        df = df.where(df.timestamp >= _moment("startingTimestamp", source["startingTimestamp"]))
    if source.get("endingTimestamp"):
        df = df.where(df.timestamp < _moment("endingTimestamp", source["endingTimestamp"]))
    return df


def pick(df: DataFrame, where: str) -> DataFrame:
    """The rows that a ``where`` wants: the same text as in subscribe and on the command line."""
    from trunkline.filters.where import to_spark

    other = {"ts": "timestamp", "payload": "value"}
    extra = {name: df[column] for name, column in other.items() if name not in df.columns}
    return df.withColumns(extra).where(to_spark(where)).drop(*extra)
