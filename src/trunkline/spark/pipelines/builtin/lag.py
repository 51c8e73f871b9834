"""How far behind each group is, now and in earlier runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines.declare import Output, table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

HISTORY = "lag.history"


@table(
    "lag",
    about="records each group has not settled, per topic; lag.history has each run",
    source="groups",
    chart=("group", "lag"),
)
def transform(df: DataFrame) -> Output:
    """``df`` has a row per group and partition: topic, partition, group, floor, first, next."""
    from pyspark.sql import functions as f

    now = (
        df.groupBy("topic", "group")
        .agg(
            f.sum("lag").alias("lag"),
            f.max("lag").alias("lag_of_worst_partition"),
            f.count("*").alias("partitions"),
            f.sum(f.greatest(f.lit(0), f.col("first") - 1 - f.col("floor"))).alias("lost"),
        )
        .orderBy(f.desc("lag"), "topic", "group")
    )
    seen = now.select(f.current_timestamp().alias("at"), "topic", "group", "lag")
    return Output(now, {HISTORY: seen})
