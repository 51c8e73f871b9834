"""What follows what: transitions between types of events, and those that surprise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline, together

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

START = "(start)"  # in the place of a type, before an actor's first event


@pipeline(
    "sequences",
    about="transitions between event types per actor; rare ones are surprising",
    columns="actor,type,timestamp,offset",
    sink="replace",
    chart=("step", "times"),
)
def transform(
    df: DataFrame, table: DataFrame | None = None, surprising_bits: float = 5.0
) -> DataFrame:
    """``surprise`` is how many bits it takes to say that this followed, over all actors. Where an
    actor stands is what its latest transition led to.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    rows = df.where("actor IS NOT NULL AND type IS NOT NULL").select(
        "actor", "type", "timestamp", "offset"
    )
    if table is not None:
        stands = table.groupBy("actor").agg(f.max_by("after", "last_seen").alias("stands"))
        rows = rows.join(stands, "actor", "left")
    else:
        rows = rows.withColumn("stands", f.lit(None).cast("string"))
    order = Window.partitionBy("actor").orderBy("timestamp", "offset")
    before = f.coalesce(f.lag("type").over(order), "stands", f.lit(START))
    came = rows.select(
        "actor",
        before.alias("before"),
        f.col("type").alias("after"),
        f.lit(1).cast("bigint").alias("times"),
        f.col("timestamp").alias("last_seen"),
    )
    counted = (
        together(table and table.select(*came.columns), came)
        .groupBy("actor", "before", "after")
        .agg(f.sum("times").alias("times"), f.max("last_seen").alias("last_seen"))
    )
    step = f.sum("times").over(Window.partitionBy("before", "after"))
    whole = f.sum("times").over(Window.partitionBy("before"))
    return (
        counted.withColumn("share", step / whole)
        .withColumn("surprise", -f.log2("share"))
        .withColumn("surprising", f.col("surprise") >= surprising_bits)
        .withColumn("step", f.concat_ws(" > ", "before", "after"))
        .orderBy(f.desc("times"), "actor", "step")
    )
