"""The holders of claims and for how long, which claims clashed, and which were never released."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trunkline.spark.pipelines.declare import table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@table(
    "claims",
    about="the holders of claims and for how long, conflicts, claims never given back",
    topics="coord.*",
    columns="topic,partition,subject,key,actor,ttl_s,timestamp,offset",
    sink="replace",
    chart=("actor", "claims"),
)
def transform(
    df: DataFrame,
    table: DataFrame | None = None,
    history: Callable[[], DataFrame] | None = None,
) -> DataFrame:
    """A claim ends when its holder gives it back, or another claims the same. One that is open is
    ``abandoned`` once its time to live has run out by the clock of the topics ``coord.*``; at once
    without one.

    The order is ``timestamp, topic, partition, offset``. A record may come late, so what was
    claimed is counted from all of its records.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    every = history() if history is not None and table is not None else df
    moves = every.where("topic IN ('coord.claim', 'coord.release')").withColumn(
        "what", f.coalesce("subject", "key")
    )
    clock = every.agg(f.max("timestamp").alias("clock"))
    order = Window.partitionBy("what").orderBy("timestamp", "topic", "partition", "offset")
    claims = (
        moves.withColumn("next_topic", f.lead("topic").over(order))
        .withColumn("next_actor", f.lead("actor").over(order))
        .withColumn("next_at", f.lead("timestamp").over(order))
        .where("topic = 'coord.claim'")
    )
    released = (f.col("next_topic") == "coord.release") & (f.col("next_actor") == f.col("actor"))
    clashed = (f.col("next_topic") == "coord.claim") & (f.col("next_actor") != f.col("actor"))
    is_open = f.col("next_topic").isNull()
    seconds = f.col("next_at").cast("double") - f.col("timestamp").cast("double")
    over = "held_since + make_dt_interval(0, 0, 0, coalesce(ttl_s, 0)) <= clock"
    return (
        claims.select(
            "actor",
            "what",
            f.when(released, seconds).alias("held_s"),
            f.when(clashed, 1).otherwise(0).cast("bigint").alias("conflicts"),
            f.when(is_open, f.col("timestamp")).alias("held_since"),
            f.when(is_open, f.col("ttl_s")).alias("ttl_s"),
        )
        .groupBy("actor", "what")
        .agg(
            f.count("*").alias("claims"),
            f.sum("held_s").alias("held_s"),
            f.sum("conflicts").alias("conflicts"),
            f.max("held_since").alias("held_since"),
            f.max_by("ttl_s", "held_since").alias("ttl_s"),
        )
        .crossJoin(f.broadcast(clock))
        .withColumn("abandoned", f.expr(f"CAST(coalesce({over}, false) AS INT)"))
        .drop("clock")
        .orderBy(f.desc("claims"), "what", "actor")
    )
