"""Bronze: every topic, every field, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@pipeline(
    "lake",
    about="every record of every topic, in the table events",
    kind="stream",
    topics="",
    echoes=True,
    table="events",
    by=("topic", "date"),
    apart=("partition",),
)
def transform(df: DataFrame) -> DataFrame:
    return df.selectExpr("*", "date_format(timestamp, 'yyyy-MM-dd') AS date")
