"""Who held what for how long, which claims clashed, and which were never given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@pipeline(
    "claims",
    about="who held what how long, conflicts, and claims that were never given back",
    topics="coord.*",
    columns="topic,subject,key,actor,ttl_s,timestamp,offset",
    chart=("actor", "claims"),
)
def transform(df: DataFrame) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    what = f.coalesce("subject", "key")
    order = Window.partitionBy("what").orderBy("timestamp", "offset")
    moves = (
        df.where("topic IN ('coord.claim', 'coord.release')")
        .withColumn("what", what)
        .withColumn("next_topic", f.lead("topic").over(order))
        .withColumn("next_actor", f.lead("actor").over(order))
        .withColumn("next_at", f.lead("timestamp").over(order))
        .where("topic = 'coord.claim'")
    )
    released = (f.col("next_topic") == "coord.release") & (f.col("next_actor") == f.col("actor"))
    clashed = (f.col("next_topic") == "coord.claim") & (f.col("next_actor") != f.col("actor"))
    held = f.col("next_at").cast("double") - f.col("timestamp").cast("double")
    return (
        moves.withColumn("held_s", f.when(released, held))
        .groupBy("actor", "what")
        .agg(
            f.count("*").alias("claims"),
            f.sum("held_s").alias("held_s"),
            f.count_if(clashed).alias("conflicts"),
            f.count_if(f.col("next_topic").isNull()).alias("abandoned"),
        )
        .orderBy(f.desc("claims"))
    )
