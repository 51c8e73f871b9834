"""Episodes: what one actor did in one space without a long pause, as one thing to remember."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@pipeline(
    "consolidation",
    about="episodes by session window per space and actor, with what happened in each",
    columns="topic,space,actor,type,timestamp,id,band",
    to_topic="hippo",
    to_type="EPISODE",
    chart=("actor", "events"),
)
def transform(df: DataFrame, pause: str = "15 minutes") -> DataFrame:
    from pyspark.sql import functions as f

    return (
        df.where("actor IS NOT NULL")
        .groupBy(
            f.coalesce("space", f.lit("")).alias("space"),
            "actor",
            f.session_window("timestamp", pause).alias("time"),
        )
        .agg(
            f.count("*").alias("events"),
            f.array_sort(f.collect_set("type")).alias("types"),
            f.mode("type").alias("mostly"),
            f.min_by("id", "timestamp").alias("first_id"),
            f.max_by("id", "timestamp").alias("last_id"),
        )
        .select(
            "space",
            "actor",
            "time.start",
            "time.end",
            "events",
            "types",
            "mostly",
            "first_id",
            "last_id",
        )
        .orderBy("start", "actor")
    )
