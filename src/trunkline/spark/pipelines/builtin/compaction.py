"""The latest value of each key, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines.declare import table, together

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SAME = ("topic", "partition", "key")
ROW = ("value", "type", "timestamp", "offset")


@table(
    "compaction",
    about="the latest record of each key; a tombstone removes its key",
    columns="topic,key,value,partition,offset,timestamp,type",
    reads_published=True,
    sink="replace",
    reads_once=True,
    entity=SAME,
    chart=("topic", "rows"),
)
def transform(df: DataFrame, table: DataFrame | None = None) -> DataFrame:
    """``versions`` counts the records of a key since it was last removed."""
    from pyspark.sql import functions as f

    came = df.where("key IS NOT NULL").select(
        *SAME, *ROW, f.lit(1).cast("bigint").alias("versions")
    )
    gone = f.max(f.expr("IF(value IS NULL, offset, NULL)"))
    live = f.collect_list(f.struct("offset", "versions"))
    latest = (
        together(table, came)
        .groupBy(*SAME)
        .agg(
            f.max_by(f.struct(*ROW), "offset").alias("last"),
            f.coalesce(gone, f.lit(0)).alias("gone"),
            f.sum("versions").alias("all"),
            f.when(f.count(f.expr("IF(value IS NULL, 1, NULL)")) > 0, live).alias("each"),
        )
    )
    since = "aggregate(filter(each, x -> x.offset > gone), 0L, (n, x) -> n + x.versions)"
    return (
        latest.withColumn("versions", f.expr(f"IF(each IS NULL, all, {since})"))
        .select(*SAME, "last.*", "versions")
        .where("value IS NOT NULL")
    )
