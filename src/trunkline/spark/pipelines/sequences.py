"""What follows what: transitions between types of events, and those that surprise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@pipeline(
    "sequences",
    about="transitions between event types per actor; rare ones are surprising",
    columns="actor,type,timestamp,offset",
    chart=("step", "times"),
)
def transform(df: DataFrame, surprising_bits: float = 5.0) -> DataFrame:
    """``surprise`` is how many bits it takes to say that this followed."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    order = Window.partitionBy("actor").orderBy("timestamp", "offset")
    steps = (
        df.where("actor IS NOT NULL AND type IS NOT NULL")
        .select("actor", f.lag("type").over(order).alias("before"), f.col("type").alias("after"))
        .where("before IS NOT NULL")
    )
    counted = steps.groupBy("before", "after").agg(
        f.count("*").alias("times"), f.approx_count_distinct("actor").alias("actors")
    )
    whole = f.sum("times").over(Window.partitionBy("before"))
    return (
        counted.withColumn("share", f.col("times") / whole)
        .withColumn("surprise", -f.log2("share"))
        .withColumn("surprising", f.col("surprise") >= surprising_bits)
        .withColumn("step", f.concat_ws(" > ", "before", "after"))
        .orderBy(f.desc("times"))
    )
