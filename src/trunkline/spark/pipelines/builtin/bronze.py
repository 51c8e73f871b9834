"""Bronze: every topic, every field, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines.declare import table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@table(
    "lake",
    about="every record of every topic, in the table events",
    topics="",
    reads_published=True,
    table="events",
    partition_by=("topic",),
    split_files_by=("partition",),
)
def transform(df: DataFrame) -> DataFrame:
    return df
