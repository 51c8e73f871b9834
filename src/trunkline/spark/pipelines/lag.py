"""How far behind each group is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@pipeline(
    "lag",
    about="records each group has not settled, per topic",
    source="groups",
    chart=("group", "lag"),
)
def transform(df: DataFrame) -> DataFrame:
    """``df`` has a row per group and partition: topic, partition, group, floor, first, next."""
    from pyspark.sql import functions as f

    return (
        df.groupBy("topic", "group")
        .agg(
            f.sum("lag").alias("lag"),
            f.max("lag").alias("lag_of_worst_partition"),
            f.count("*").alias("partitions"),
            f.sum(f.greatest(f.lit(0), f.col("first") - 1 - f.col("floor"))).alias("lost"),
        )
        .orderBy(f.desc("lag"), "topic", "group")
    )
