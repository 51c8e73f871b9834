"""When things happen: profiles of time per key, bursts, and when the next is to be expected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@pipeline(
    "temporal",
    about="recency, time of day and week, bursts and the next expected time per key",
    columns="topic,key,type,timestamp",
    to_topic="temporal",
    to_type="TEMPORAL_PROFILE",
    chart=("key", "events"),
)
def transform(df: DataFrame, burst_s: float = 1.0) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    order = Window.partitionBy("topic", "key").orderBy("timestamp")
    gap = f.col("timestamp").cast("double") - f.lag("timestamp").over(order).cast("double")
    seen = (
        df.where("key IS NOT NULL")
        .withColumn("gap_s", gap)
        .groupBy("topic", "key")
        .agg(
            f.count("*").alias("events"),
            f.max("timestamp").alias("last_seen"),
            f.expr("percentile_approx(gap_s, 0.5)").alias("usual_gap_s"),
            f.mode(f.hour("timestamp")).alias("usual_hour"),
            f.mode(f.weekday("timestamp")).alias("usual_weekday"),
            f.count_if(f.col("gap_s") < burst_s).alias("in_bursts"),
        )
    )
    following = "timestamp_micros(unix_micros(last_seen) + CAST(usual_gap_s * 1e6 AS BIGINT))"
    return seen.withColumn("next_expected", f.expr(following)).orderBy(f.desc("events"))
