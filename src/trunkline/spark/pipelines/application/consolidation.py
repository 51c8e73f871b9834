"""Episodes: what one actor did in one space without a long pause, as one thing to remember."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines.declare import Output, as_events, table, together

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

WHO = ("space", "actor")
SUMMARY = (
    "concat(actor, IF(space = '', '', concat(' in ', space)), ': ', events, ' events in ', "
    "CAST(round(CAST(`end` AS DOUBLE) - CAST(start AS DOUBLE)) AS BIGINT), ' s, mostly ', mostly)"
)


@table(
    "consolidation",
    about="episodes by session window per space and actor, with what happened in each",
    columns="topic,partition,offset,space,actor,type,timestamp,id",
    source="clean",
    sink="replace",
    span=("start", "end"),
    reach="pause_s",
    is_open="open",
    to_topic="hippo",
    to_type="HIPPO_ENCODE",
    publish="asked",
    chart=("actor", "events"),
)
def transform(df: DataFrame, table: DataFrame | None = None, pause_s: float = 900.0) -> Output:
    """An episode is ``open`` until its actor begins another. A record that comes late joins the
    episodes it lies between. An episode that is over is told; one that changes is told again.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    place = f.struct("timestamp", "topic", "partition", "offset", "id")
    rows = df.where("actor IS NOT NULL").select(
        f.coalesce("space", f.lit("")).alias("space"),
        "actor",
        f.coalesce("type", f.lit("")).alias("type"),
        f.lit(1).cast("bigint").alias("times"),
        f.col("timestamp").alias("start"),
        f.col("timestamp").alias("end"),
        place.alias("_first"),
        place.alias("_last"),
        f.lit(False).alias("told"),
    )
    before = table and table.select(
        *WHO, f.explode("types").alias("type", "times"), "start", "end", "_first", "_last",
        (~f.col("open")).alias("told"),
    )  # fmt: skip
    order = Window.partitionBy(*WHO).orderBy("start", "end")
    reached = f.max("end").over(order.rowsBetween(Window.unboundedPreceding, -1))
    away_s = f.col("start").cast("double") - f.col("reached").cast("double")
    ends = (
        f.min("start").alias("start"),
        f.max("end").alias("end"),
        f.min("_first").alias("_first"),
        f.max("_last").alias("_last"),
        f.min("told").alias("told"),
    )
    episodes = (
        together(before, rows)
        .withColumn("reached", reached)
        .withColumn("number", f.count_if(away_s > pause_s).over(order))
        .groupBy(*WHO, "number", "type")
        .agg(f.sum("times").alias("times"), *ends)
        .groupBy(*WHO, "number")
        .agg(
            *ends,
            f.sum("times").alias("events"),
            f.map_from_entries(f.sort_array(f.collect_list(f.struct("type", "times")))).alias(
                "types"
            ),
            f.max_by("type", f.struct("times", "type")).alias("mostly"),
        )
    )
    last = f.max("number").over(Window.partitionBy(*WHO)) == f.col("number")
    made = (
        episodes.withColumn("open", last)
        .withColumn("first_id", f.col("_first.id"))
        .withColumn("last_id", f.col("_last.id"))
        .withColumn("summary", f.expr(SUMMARY))
        .drop("number")
        .persist()
    )
    over = made.where("NOT open AND NOT told").drop("open", "told")
    events = as_events(over, "hippo", "HIPPO_ENCODE", *WHO)
    return Output(made.drop("told"), events=events, cached=(made,))
