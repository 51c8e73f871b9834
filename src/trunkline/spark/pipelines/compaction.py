"""The latest value of each key, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@pipeline(
    "compaction",
    about="the latest record of each key; a tombstone removes its key",
    columns="topic,key,value,partition,offset,timestamp,type",
    chart=("topic", "rows"),
)
def transform(df: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    latest = (
        df.where("key IS NOT NULL")
        .groupBy("topic", "partition", "key")
        .agg(
            f.max_by(f.struct("value", "type", "timestamp", "offset"), "offset").alias("last"),
            f.count("*").alias("versions"),
        )
    )
    return latest.select("topic", "partition", "key", "last.*", "versions").where(
        "value IS NOT NULL"
    )
