"""How long it took from the append to the delivery to the end, by the bus's own audit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from trunkline.spark.pipelines.declare import table, together

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SAME = ("hour", "topic", "group")
AUDIT = """what STRING, topic STRING, `group` STRING, partition INT, offset BIGINT, attempt INT,
    waited_s DOUBLE, held_s DOUBLE"""
SETTLED = ("ack", "nack", "term")
STEP = 1.02  # two latencies that are less than this apart may be told as one


@table(
    "latency",
    about="append to delivery to settled, p50 p95 p99 per hour, topic and group",
    topics="system.bus.audit",
    columns="value,timestamp",
    sink="replace",
    chart=("topic", "deliver_p95_ms"),
)
def transform(df: DataFrame, table: DataFrame | None = None, bus: str = "") -> DataFrame:
    """An audit record of a settled delivery names the record and how long it was held. The time it
    waited is counted from the append, as the log has it, not from the event's own time.

    Percentiles are right to two percent: the table keeps how many latencies fell into each step.
    """
    from pyspark.sql import functions as f

    settled = (
        df.select(f.from_json("value", AUDIT).alias("a"), "timestamp")
        .select("a.*", "timestamp")
        .where(f.col("what").isin(*SETTLED) & f.col("held_s").isNotNull())
    )
    came = (
        _waited(settled, bus)
        .withColumn("hour", f.date_trunc("hour", "timestamp"))
        .groupBy(*SAME)
        .agg(
            f.count("*").alias("records"),
            f.count_if(f.col("what") == "ack").alias("acked"),
            f.sum("attempt").alias("_attempts"),
            _steps("deliver_s").alias("_deliver"),
            _steps("held_s").alias("_settle"),
        )
    )
    before = table and table.select(*came.columns)
    whole = (
        together(before, came)
        .groupBy(*SAME)
        .agg(
            f.sum("records").alias("records"),
            f.sum("acked").alias("acked"),
            f.sum("_attempts").alias("_attempts"),
            f.flatten(f.collect_list("_deliver")).alias("_deliver"),
            f.flatten(f.collect_list("_settle")).alias("_settle"),
        )
        .withColumns({name: _added_up(name) for name in ("_deliver", "_settle")})
        .withColumn("attempts", f.expr("_attempts / records"))
    )
    for name in ("deliver", "settle"):
        for percent in (50, 95, 99):
            whole = whole.withColumn(f"{name}_p{percent}_ms", _percentile(f"_{name}", percent))
    return whole


def _waited(settled: DataFrame, bus: str) -> DataFrame:
    """The deliveries, each with ``deliver_s``: from the append to the delivery."""
    from pyspark.sql import functions as f

    if not bus:
        return settled.withColumn("deliver_s", f.col("waited_s"))
    spans = (
        settled.where("partition IS NOT NULL AND offset IS NOT NULL")
        .groupBy("topic", "partition")
        .agg(f.min("offset").alias("low"), f.max("offset").alias("high"))
        .collect()
    )
    records = _records(settled, bus, spans)
    if records is None:
        return settled.withColumn("deliver_s", f.lit(None).cast("double"))
    same = ["topic", "partition", "offset"]
    delivered = f.expr("CAST(timestamp AS DOUBLE) - held_s - CAST(appended_at AS DOUBLE)")
    return settled.join(records, same, "left").withColumn(
        "deliver_s", f.greatest(delivered, f.lit(0.0))
    )


def _records(settled: DataFrame, bus: str, spans: list[Any]) -> DataFrame | None:
    """When the records that were delivered were appended."""
    from trunkline.spark.source.catalogs import open_catalog
    from trunkline.spark.source.options import token_of

    catalog = open_catalog(bus, token_of({}))
    starts: dict[str, dict[str, int]] = {}
    ends: dict[str, dict[str, int]] = {}
    try:
        known = catalog.topics()
        for row in spans:
            if row.partition >= known.get(row.topic, 0):
                continue
            head = catalog.reader(row.topic, row.partition).head()
            low, high = max(row.low, head.start), min(row.high + 1, head.next)
            if low < high:
                starts.setdefault(row.topic, {})[str(row.partition)] = low
                ends.setdefault(row.topic, {})[str(row.partition)] = high
    finally:
        catalog.close()
    if not ends:
        return None
    reader = settled.sparkSession.read.format("trunkline").options(
        url=bus,
        assign=json.dumps({t: sorted(map(int, parts)) for t, parts in ends.items()}),
        startingOffsets=json.dumps(starts),
        endingOffsets=json.dumps(ends),
        badRecords="skip",
        failOnDataLoss="false",
    )
    shape = "topic string, partition int, offset bigint, appended_at timestamp"
    return reader.schema(shape).load()


def _steps(name: str) -> Column:
    """How often each step of latency came: (step, times)."""
    from pyspark.sql import functions as f

    # Microseconds are the least that counts.
    step = f"CAST(ceil(ln(greatest({name} * 1e6, 1)) / ln({STEP})) AS INT)"
    one = f"IF({name} IS NULL, NULL, named_struct('step', {step}, 'n', 1L))"
    return f.collect_list(f.expr(one))


def _added_up(name: str) -> Column:
    from pyspark.sql import functions as f

    return f.expr(
        f"transform(array_sort(array_distinct(transform({name}, x -> x.step))), s ->"
        f" named_struct('step', s, 'n', aggregate(filter({name}, x -> x.step = s), 0L,"
        " (a, x) -> a + x.n)))"
    )


def _percentile(name: str, percent: int) -> Column:
    """The middle of the first step at which that part of all is reached, in milliseconds."""
    from pyspark.sql import functions as f

    total = f"aggregate({name}, 0L, (a, x) -> a + x.n)"
    found = (
        f"aggregate({name}, named_struct('n', 0L, 'step', CAST(NULL AS INT)), (a, x) -> IF("
        f"a.step IS NOT NULL, a, named_struct('n', a.n + x.n, 'step',"
        f" IF(a.n + x.n >= {total} * {percent / 100}D, x.step, NULL)))).step"
    )
    return f.expr(f"pow({STEP}D, {found} - 0.5D) / 1000")
