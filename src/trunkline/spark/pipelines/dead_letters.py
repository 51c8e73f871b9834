"""What fails, and how often: dead letters by the shape of their error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# What differs between two errors of one kind: hex, numbers, quoted words, paths.
SIGNATURE = (
    r"regexp_replace(regexp_replace(regexp_replace(error, '\'[^\']*\'|\"[^\"]*\"', '…'),"
    r" '(0x)?[0-9a-fA-F]{8,}(-[0-9a-fA-F]+)*', '#'), '[0-9]+(\\.[0-9]+)?', '#')"
)


@pipeline(
    "dead_letters",
    about="dead letters grouped by what their error comes down to",
    topics="*.DLQ",
    columns="headers,timestamp",
    keys=("topic", "group", "reason", "signature"),
    chart=("signature", "letters"),
)
def transform(df: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    letters = df.selectExpr(
        "headers['dlq-topic'] AS topic",
        "headers['dlq-group'] AS `group`",
        "headers['dlq-reason'] AS reason",
        "coalesce(headers['dlq-error'], '') AS error",
        "CAST(headers['dlq-offset'] AS BIGINT) AS origin",
        "timestamp",
    ).where("topic IS NOT NULL")
    first_and_last = "array_distinct(array(min_by({0}, timestamp), max_by({0}, timestamp)))"
    return (
        letters.withColumn("signature", f.expr(SIGNATURE))
        .groupBy("topic", "group", "reason", "signature")
        .agg(
            f.count("*").alias("letters"),
            f.min("timestamp").alias("first_seen"),
            f.max("timestamp").alias("last_seen"),
            f.expr(first_and_last.format("error")).alias("examples"),
            f.expr(first_and_last.format("origin")).alias("offsets"),
        )
    )
