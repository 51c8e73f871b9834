"""The latest value of each key, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline, together

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROW = ("value", "type", "timestamp", "offset")


@pipeline(
    "compaction",
    about="the latest record of each key; a tombstone removes its key",
    columns="topic,key,value,partition,offset,timestamp,type",
    echoes=True,
    sink="replace",
    chart=("topic", "rows"),
)
def transform(df: DataFrame, table: DataFrame | None = None) -> DataFrame:
    from pyspark.sql import functions as f

    came = df.where("key IS NOT NULL").select(
        "topic", "partition", "key", *ROW, f.lit(1).cast("bigint").alias("versions")
    )
    latest = (
        together(table, came)
        .groupBy("topic", "partition", "key")
        .agg(
            f.max_by(f.struct(*ROW), "offset").alias("last"),
            f.sum("versions").alias("versions"),
        )
    )
    return latest.select("topic", "partition", "key", "last.*", "versions").where(
        "value IS NOT NULL"
    )
