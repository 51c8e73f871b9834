"""Who held what for how long, which claims clashed, and which were never given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline, together

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MOVE = ("what", "actor", "topic", "timestamp", "offset", "ttl_s", "fresh")


@pipeline(
    "claims",
    about="who held what how long, conflicts, and claims that were never given back",
    topics="coord.*",
    columns="topic,subject,key,actor,ttl_s,timestamp,offset",
    sink="replace",
    chart=("actor", "claims"),
)
def transform(df: DataFrame, table: DataFrame | None = None) -> DataFrame:
    """A claim ends when its holder gives it back, or another claims the same. One that is open is
    ``abandoned`` once its time to live has run out by the clock of the log; at once without one.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    moves = (
        df.where("topic IN ('coord.claim', 'coord.release')")
        .withColumn("what", f.coalesce("subject", "key"))
        .withColumn("fresh", f.lit(1).cast("bigint"))
        .select(*_MOVE)
    )
    clock = df.agg(f.max("timestamp").alias("clock"))
    if table is not None:  # what is held goes on from where it stood
        held = table.where("held_since IS NOT NULL").selectExpr(
            "what", "actor", "'coord.claim' AS topic", "held_since AS timestamp",
            "CAST(0 AS BIGINT) AS offset", "ttl_s", "CAST(0 AS BIGINT) AS fresh",
        )  # fmt: skip
        moves = held.unionByName(moves)
    order = Window.partitionBy("what").orderBy("timestamp", "offset")
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
    came = claims.select(
        "actor",
        "what",
        f.col("fresh").alias("claims"),
        f.when(released, seconds).alias("held_s"),
        f.when(clashed, 1).otherwise(0).cast("bigint").alias("conflicts"),
        f.when(is_open, f.col("timestamp")).alias("held_since"),
        f.when(is_open, f.col("ttl_s")).alias("ttl_s"),
    )
    nothing = f.lit(None)
    before = table and table.select(
        "actor", "what", "claims", "held_s", "conflicts",
        nothing.cast("timestamp").alias("held_since"), nothing.cast("double").alias("ttl_s"),
    )  # fmt: skip
    over = "held_since + make_dt_interval(0, 0, 0, coalesce(ttl_s, 0)) <= clock"
    return (
        together(before, came)
        .groupBy("actor", "what")
        .agg(
            f.sum("claims").alias("claims"),
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
