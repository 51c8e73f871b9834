"""Silver: each event once, in time and whole; what is refused is kept with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

REASON = """CASE
    WHEN value IS NOT NULL AND try_parse_json(value) IS NULL THEN 'the payload is no JSON'
    WHEN type IS NULL THEN 'it has no type'
    WHEN ttl_s IS NOT NULL AND timestamp + make_interval(0, 0, 0, 0, 0, 0, ttl_s) < now()
        THEN 'it has expired'
    WHEN place > 1 THEN 'it was published before'
END"""


@pipeline(
    "clean",
    about="each event once by idem_key or id; what is refused with its reason",
    refused="quarantine",
    chart=("topic", "rows"),
)
def transform(df: DataFrame) -> DataFrame:
    """One row per record; ``reason`` is NULL for those that pass."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    same = Window.partitionBy("topic", f.coalesce("idem_key", "id")).orderBy("timestamp", "offset")
    placed = df.where("topic NOT LIKE '%.DLQ' AND topic NOT LIKE 'system.%'").withColumn(
        "place", f.row_number().over(same)
    )
    return placed.withColumn("reason", f.expr(REASON)).drop("place", "timestampType")
