"""How much of what came when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@pipeline(
    "traffic",
    about="events, bytes, keys and actors per topic, type and hour",
    columns="topic,type,timestamp,key,actor,value",
    keys=("hour", "topic", "type"),
    chart=("topic", "events"),
)
def transform(df: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return df.groupBy("topic", "type", f.date_trunc("hour", "timestamp").alias("hour")).agg(
        f.count("*").alias("events"),
        f.sum(f.octet_length("value")).alias("bytes"),
        f.approx_count_distinct("key").alias("keys"),
        f.approx_count_distinct("actor").alias("actors"),
    )
