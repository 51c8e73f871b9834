"""How long it took from publish to delivery to the end, by what the bus wrote about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

AUDIT = """what STRING, topic STRING, `group` STRING, attempt INT, waited_s DOUBLE,
    held_s DOUBLE"""
SETTLED = ("ack", "nack", "term")


@pipeline(
    "latency",
    about="publish to delivery to settled, p50 p95 p99 per topic and group",
    topics="system.bus.audit",
    columns="value",
    keys=("topic", "group"),
    chart=("topic", "deliver_p95_ms"),
)
def transform(df: DataFrame) -> DataFrame:
    """An audit record of a settled delivery says how long it had waited since it was published, and
    how long it was held.
    """
    from pyspark.sql import functions as f

    settled = (
        df.select(f.from_json("value", AUDIT).alias("a"))
        .select("a.*")
        .where(f.col("what").isin(*SETTLED) & f.col("waited_s").isNotNull())
    )
    parts = [
        f.count("*").alias("records"),
        f.count_if(f.col("what") == "ack").alias("acked"),
        f.avg("attempt").alias("attempts"),
    ]
    for name, span in (("deliver", "waited_s"), ("settle", "held_s")):
        for percent in (50, 95, 99):
            part = f.expr(f"percentile_approx({span} * 1000, {percent / 100}, 1000)")
            parts.append(part.alias(f"{name}_p{percent}_ms"))
    return settled.groupBy("topic", "group").agg(*parts)
