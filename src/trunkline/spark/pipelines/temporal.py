"""When things happen: profiles of time per key, bursts, and when the next is to be expected.

What changed is published to ``temporal``. A key that comes regularly and is overdue by the clock of
the log raises a trigger on ``prospective``, once for each time it was expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import Made, as_events, pipeline, together

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SAME = ["topic", "key"]
REGULAR_EVENTS = 4  # fewer say nothing about a rhythm
REGULAR_SPREAD = 0.5  # of the usual gap: what half of the gaps may differ by


@pipeline(
    "temporal",
    about="recency, time of day and week, bursts and the next expected time per key",
    columns="topic,key,space,timestamp,offset",
    sink="replace",
    to_topic="temporal",
    to_type="TEMPORAL_PROFILE",
    chart=("key", "events"),
)
def transform(df: DataFrame, table: DataFrame | None = None, burst_s: float = 1.0) -> Made:
    """``by_hour`` counts the hours of the day, ``by_weekday`` the days from Monday on."""
    from pyspark.sql import functions as f

    clock = df.agg(f.max("timestamp").alias("clock"))  # of all rows: one without a key tells time
    came = count(df.where("key IS NOT NULL"), table, burst_s)
    before = table and table.select(
        *[name for name in came.columns if name != "changed"], f.lit(False).alias("changed")
    )
    profiles = profile(add_up(together(before, came)).crossJoin(f.broadcast(clock))).persist()
    shown = profiles.drop("gaps", "clock", "raised", "changed")
    told = profiles.where("changed").select(
        *[name for name in shown.columns if name not in ("raised_for", "recency_s")]
    )
    triggers = profiles.where("raised").selectExpr(
        "topic", "key", "space", "next_expected AS expected_at", "last_seen", "usual_gap_s",
        "CAST(clock AS DOUBLE) - CAST(next_expected AS DOUBLE) AS late_s",
        "'overdue' AS reason",
    )  # fmt: skip
    events = as_events(told, "temporal", "TEMPORAL_PROFILE", *SAME).unionByName(
        as_events(triggers, "prospective", "PROSPECTIVE_TRIGGER", *SAME)
    )
    return Made(shown.orderBy(f.desc("events"), *SAME), events=events, held=(profiles,))


def count(rows: DataFrame, table: DataFrame | None, burst_s: float) -> DataFrame:
    """What came of each key, and the gaps between: the first one's since the table saw it last."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    if table is not None:
        rows = rows.join(table.select(*SAME, f.col("last_seen").alias("stood")), SAME, "left")
    else:
        rows = rows.withColumn("stood", f.lit(None).cast("timestamp"))
    order = Window.partitionBy(*SAME).orderBy("timestamp", "offset")
    before = f.coalesce(f.lag("timestamp").over(order), "stood").cast("double")
    gap = f.col("timestamp").cast("double") - before
    return (
        rows.withColumn("gap_s", f.when(gap >= 0, gap))
        .groupBy(*SAME)
        .agg(
            f.max_by("space", "timestamp").alias("space"),
            f.count("*").alias("events"),
            f.min("timestamp").alias("first_seen"),
            f.max("timestamp").alias("last_seen"),
            f.count_if(f.col("gap_s") < burst_s).alias("in_bursts"),
            _counts(f.hour("timestamp"), 24).alias("by_hour"),
            _counts(f.weekday("timestamp"), 7).alias("by_weekday"),
            f.kll_sketch_agg_double("gap_s").alias("_gaps"),
            f.lit(None).cast("timestamp").alias("raised_for"),
            f.lit(True).alias("changed"),
        )
    )


def add_up(rows: DataFrame) -> DataFrame:
    """One row per key, of what there was and what came."""
    from pyspark.sql import functions as f

    return rows.groupBy(*SAME).agg(
        f.max_by("space", "last_seen").alias("space"),
        f.sum("events").alias("events"),
        f.min("first_seen").alias("first_seen"),
        f.max("last_seen").alias("last_seen"),
        f.sum("in_bursts").alias("in_bursts"),
        f.array(*[f.sum(f.col("by_hour")[n]) for n in range(24)]).alias("by_hour"),
        f.array(*[f.sum(f.col("by_weekday")[n]) for n in range(7)]).alias("by_weekday"),
        f.kll_merge_agg_double("_gaps").alias("_gaps"),
        f.max("raised_for").alias("raised_for"),
        f.max("changed").alias("changed"),
    )


def profile(known: DataFrame) -> DataFrame:
    """What the numbers of a key come to; ``raised`` is true if it is overdue, and that is new."""
    from pyspark.sql import functions as f

    quarters = "kll_sketch_get_quantile_double(_gaps, array(0.25D, 0.5D, 0.75D))"
    top = "CAST(array_position({0}, array_max({0})) - 1 AS INT)"
    due = "timestamp_micros(unix_micros(last_seen) + CAST(usual_gap_s * 1e6 AS BIGINT))"
    raised = (
        f"events >= {REGULAR_EVENTS} AND usual_gap_s > 0"
        f" AND spread_s <= {REGULAR_SPREAD} * usual_gap_s AND clock >= next_expected"
        " AND NOT raised_for <=> next_expected"
    )
    return (
        known.withColumn(
            "gaps", f.expr(f"IF(kll_sketch_get_n_double(_gaps) > 0, {quarters}, NULL)")
        )
        .withColumn("usual_gap_s", f.expr("gaps[1]"))
        .withColumn("spread_s", f.expr("gaps[2] - gaps[0]"))
        .withColumn("usual_hour", f.expr(top.format("by_hour")))
        .withColumn("usual_weekday", f.expr(top.format("by_weekday")))
        .withColumn("next_expected", f.expr(due))
        .withColumn("recency_s", f.expr("CAST(clock AS DOUBLE) - CAST(last_seen AS DOUBLE)"))
        .withColumn("raised", f.coalesce(f.expr(raised), f.lit(False)))
        .withColumn("raised_for", f.expr("IF(raised, next_expected, raised_for)"))
    )


def _counts(number: Column, size: int) -> Column:
    """How often each number below ``size`` came."""
    from pyspark.sql import functions as f

    return f.array(*[f.count_if(number == n) for n in range(size)])
