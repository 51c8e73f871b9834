"""How long it took from publish to delivery to the end, by what the bus wrote about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

AUDIT = """topic STRING, `group` STRING, action STRING, published DOUBLE, delivered DOUBLE,
    settled DOUBLE, attempt INT"""


@pipeline(
    "latency",
    about="publish to delivery to settled, p50 p95 p99 per topic and group",
    topics="system.bus.audit",
    columns="value",
    chart=("topic", "deliver_p95_ms"),
)
def transform(df: DataFrame) -> DataFrame:
    """Audit records say when (epoch seconds) a record was published, delivered and settled."""
    from pyspark.sql import functions as f

    audit = df.select(f.from_json("value", AUDIT).alias("a")).select("a.*").where("topic <> ''")
    deliver, settle = "(delivered - published) * 1000", "(settled - delivered) * 1000"
    parts = [f.count("*").alias("records"), f.avg("attempt").alias("attempts")]
    for name, span in (("deliver", deliver), ("settle", settle)):
        for percent in (50, 95, 99):
            part = f.expr(f"percentile_approx({span}, {percent / 100})")
            parts.append(part.alias(f"{name}_p{percent}_ms"))
    return audit.groupBy("topic", "group").agg(*parts).orderBy("topic", "group")
