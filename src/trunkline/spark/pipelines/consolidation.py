"""Episodes: what one actor did in one space without a long pause, as one thing to remember."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import Made, as_events, pipeline, together

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SUMMARY = (
    "concat(actor, IF(space = '', '', concat(' in ', space)), ': ', events, ' events in ', "
    "CAST(round(CAST(`end` AS DOUBLE) - CAST(start AS DOUBLE)) AS BIGINT), ' s, mostly ', mostly)"
)


@pipeline(
    "consolidation",
    about="episodes by session window per space and actor, with what happened in each",
    columns="space,actor,type,timestamp,id",
    sink="replace",
    live="open",
    to_topic="hippo",
    to_type="HIPPO_ENCODE",
    chart=("actor", "events"),
)
def transform(df: DataFrame, table: DataFrame | None = None, pause_s: float = 900.0) -> Made:
    """``table`` holds the episodes that are ``open``. One is over when its actor began another, or
    the clock of the log is further than the pause: then it is told, once. Nothing that comes late
    is lost: it is an episode of its own.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    who = ["space", "actor"]
    rows = df.where("actor IS NOT NULL").select(
        f.coalesce("space", f.lit("")).alias("space"),
        "actor",
        f.coalesce("type", f.lit("")).alias("type"),
        f.lit(1).cast("bigint").alias("times"),
        f.col("timestamp").alias("start"),
        f.col("timestamp").alias("end"),
        f.col("id").alias("first_id"),
        f.col("id").alias("last_id"),
    )
    clock = df.agg(f.max("timestamp").alias("clock"))
    before = table and table.select(
        *who, f.explode("types").alias("type", "times"), "start", "end", "first_id", "last_id"
    )
    order = Window.partitionBy(*who).orderBy("start", "end")
    reached = f.max("end").over(order.rowsBetween(Window.unboundedPreceding, -1))
    away_s = f.col("start").cast("double") - f.col("reached").cast("double")
    ids = (
        f.min_by("first_id", "start").alias("first_id"),
        f.max_by("last_id", "end").alias("last_id"),
    )
    edges = (f.min("start").alias("start"), f.max("end").alias("end"))
    episodes = (
        together(before, rows)
        .withColumn("reached", reached)
        .withColumn("number", f.count_if(away_s > pause_s).over(order))
        .groupBy(*who, "number", "type")
        .agg(f.sum("times").alias("times"), *edges, *ids)
        .groupBy(*who, "number")
        .agg(
            *edges,
            f.sum("times").alias("events"),
            f.map_from_entries(f.sort_array(f.collect_list(f.struct("type", "times")))).alias(
                "types"
            ),
            f.max_by("type", f.struct("times", "type")).alias("mostly"),
            *ids,
        )
    )
    last = f.max("number").over(Window.partitionBy(*who)) == f.col("number")
    near = f.expr(f"CAST(clock AS DOUBLE) - CAST(`end` AS DOUBLE) <= {pause_s}")
    made = (
        episodes.crossJoin(f.broadcast(clock))
        .withColumn("open", last & near)
        .withColumn("summary", f.expr(SUMMARY))
        .drop("number", "clock")
        .persist()
    )
    over = made.where("NOT open").drop("open")
    return Made(made, events=as_events(over, "hippo", "HIPPO_ENCODE", *who), held=(made,))
