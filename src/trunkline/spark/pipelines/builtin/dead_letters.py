"""What fails, and how often: dead letters by the shape of their error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines.declare import table, together

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SAME = ("topic", "group", "reason", "signature")
# What differs between two errors of one kind, and what stands for it: quoted words, hex, numbers.
VARYING = (
    (r"""'[^']*'|"[^"]*\"""", "…"),
    (r"(0x)?[0-9a-fA-F]{8,}(-[0-9a-fA-F]+)*", "#"),
    (r"[0-9]+(\.[0-9]+)?", "#"),
)


@table(
    "dead_letters",
    about="dead letters grouped by what their error comes down to",
    topics="*.DLQ",
    columns="topic,partition,offset,headers,timestamp",
    sink="replace",
    chart=("signature", "letters"),
)
def transform(df: DataFrame, table: DataFrame | None = None) -> DataFrame:
    """``examples`` and ``offsets`` are of the first and the last letter by time. ``by_day`` counts
    the letters of each day.
    """
    from pyspark.sql import functions as f

    letters = df.selectExpr(
        "headers['dlq-topic'] AS topic",
        "headers['dlq-group'] AS `group`",
        "headers['dlq-reason'] AS reason",
        "coalesce(nullif(headers['dlq-error'], ''), '(no error given)') AS error",
        "CAST(headers['dlq-offset'] AS BIGINT) AS origin",
        "timestamp",
        "struct(timestamp, topic AS letters, partition, offset) AS place",
    ).where("topic IS NOT NULL")
    signature = f.col("error")
    for pattern, instead in VARYING:
        signature = f.regexp_replace(signature, pattern, instead)
    came = (
        letters.withColumn("signature", signature)
        .groupBy(*SAME, f.date_format("timestamp", "yyyy-MM-dd").alias("day"))
        .agg(
            f.count("*").alias("letters"),
            f.min(f.struct("place", "error", "origin")).alias("_first"),
            f.max(f.struct("place", "error", "origin")).alias("_last"),
        )
    )
    before = table and table.select(
        *SAME, f.explode("by_day").alias("day", "letters"), "_first", "_last"
    )
    days = (
        together(before, came)
        .groupBy(*SAME, "day")
        .agg(
            f.sum("letters").alias("letters"),
            f.min("_first").alias("_first"),
            f.max("_last").alias("_last"),
        )
    )
    return (
        days.groupBy(*SAME)
        .agg(
            f.sum("letters").alias("letters"),
            f.min("_first").alias("_first"),
            f.max("_last").alias("_last"),
            f.map_from_entries(f.sort_array(f.collect_list(f.struct("day", "letters")))).alias(
                "by_day"
            ),
        )
        .withColumn("first_seen", f.col("_first.place.timestamp"))
        .withColumn("last_seen", f.col("_last.place.timestamp"))
        .withColumn("examples", f.expr("array_distinct(array(_first.error, _last.error))"))
        .withColumn("offsets", f.expr("array_distinct(array(_first.origin, _last.origin))"))
    )
