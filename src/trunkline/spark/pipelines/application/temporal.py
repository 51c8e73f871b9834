"""When things happen: profiles of time per key, bursts, and when the next is to be expected.

What changed is published to ``temporal``, if pipelines may publish. A key that comes regularly and
is overdue by the clock of its own topic raises a trigger on ``prospective``, once for each time it
was expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines.declare import Output, as_events, table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SAME = ["topic", "key"]
REGULAR_EVENTS = 4  # fewer say nothing about a rhythm
REGULAR_SPREAD = 0.5  # of the usual gap: what half of the gaps may differ by
RECENT = 1000  # events of a key whose gaps are looked at, the latest by time


@table(
    "temporal",
    about="time of day and week, bursts and the next expected time per key",
    columns="topic,partition,key,space,timestamp,offset",
    source="clean",
    sink="replace",
    entity=("topic", "key"),
    to_topic="temporal",
    to_type="TEMPORAL_PROFILE",
    publish="asked",
    chart=("key", "events"),
)
def transform(df: DataFrame, table: DataFrame | None = None, burst_s: float = 1.0) -> Output:
    """``by_hour`` counts the hours of the day, ``by_weekday`` the days from Monday on. Gaps and
    bursts are those of the last 1,000 events of a key, by time.
    """
    from pyspark.sql import functions as f

    clock = f.broadcast(df.groupBy("topic").agg(f.max("timestamp").alias("clock")))
    came = count(df.where("key IS NOT NULL"))
    cached: tuple[DataFrame, ...] = ()
    if table is None:
        profiles = profile(came, burst_s).withColumn("changed", f.lit(True))
    else:
        came = came.persist()
        keys = f.broadcast(came.select(*SAME))
        before = table.join(keys, SAME, "left_semi").select(*came.columns)
        known = add_up(before.unionByName(came))
        fresh = profile(known, burst_s).withColumn("changed", f.lit(True))
        # A key of which nothing came has the profile it had, and may be overdue by now.
        others = table.join(keys, SAME, "left_anti").withColumn("changed", f.lit(False))
        profiles = fresh.unionByName(others)
        cached = (came,)
    profiles = overdue(profiles.join(clock, "topic", "left")).persist()
    shown = profiles.drop("clock", "raised", "changed")
    told = profiles.where("changed").select(
        *[name for name in shown.columns if not name.startswith("_")]
    )
    triggers = profiles.where("raised").selectExpr(
        "topic", "key", "space", "next_expected AS expected_at", "last_seen", "usual_gap_s",
        "CAST(clock AS DOUBLE) - CAST(next_expected AS DOUBLE) AS late_s",
        "'overdue' AS reason",
    )  # fmt: skip
    events = as_events(told, "temporal", "TEMPORAL_PROFILE", *SAME).unionByName(
        as_events(triggers, "prospective", "PROSPECTIVE_TRIGGER", *SAME)
    )
    return Output(shown, events=events, cached=(*cached, profiles))


def count(rows: DataFrame) -> DataFrame:
    """What came of each key."""
    from pyspark.sql import functions as f

    return rows.groupBy(*SAME).agg(
        f.max(f.struct("timestamp", "partition", "offset", "space")).alias("_last"),
        f.count("*").alias("events"),
        f.min("timestamp").alias("first_seen"),
        _counts(f.hour("timestamp"), 24).alias("by_hour"),
        _counts(f.weekday("timestamp"), 7).alias("by_weekday"),
        _latest(f.collect_list(f.unix_micros("timestamp"))).alias("_times"),
        f.lit(None).cast("timestamp").alias("_raised_for"),
    )


def add_up(rows: DataFrame) -> DataFrame:
    """One row per key, of what there was and what came."""
    from pyspark.sql import functions as f

    return rows.groupBy(*SAME).agg(
        f.max("_last").alias("_last"),
        f.sum("events").alias("events"),
        f.min("first_seen").alias("first_seen"),
        f.array(*[f.sum(f.col("by_hour")[n]) for n in range(24)]).alias("by_hour"),
        f.array(*[f.sum(f.col("by_weekday")[n]) for n in range(7)]).alias("by_weekday"),
        _latest(f.flatten(f.collect_list("_times"))).alias("_times"),
        f.max("_raised_for").alias("_raised_for"),
    )


def profile(known: DataFrame, burst_s: float) -> DataFrame:
    """What the numbers of a key come to."""
    from pyspark.sql import functions as f

    gaps = (
        "array_sort(transform(sequence(1, size(_times) - 1),"
        " n -> (_times[n - 1] - _times[n]) / 1e6D))"
    )
    part = "element_at(gaps, CAST(ceil(size(gaps) * {0}D) AS INT))"
    top = "CAST(array_position({0}, array_max({0})) - 1 AS INT)"
    due = "timestamp_micros(unix_micros(last_seen) + CAST(usual_gap_s * 1e6 AS BIGINT))"
    return (
        known.withColumn("space", f.col("_last.space"))
        .withColumn("last_seen", f.col("_last.timestamp"))
        .withColumn("gaps", f.expr(f"IF(size(_times) > 1, {gaps}, NULL)"))
        .withColumn(
            "in_bursts",
            f.expr(f"CAST(coalesce(size(filter(gaps, g -> g < {burst_s}D)), 0) AS BIGINT)"),
        )
        .withColumn("in_bursts", f.when(f.col("gaps").isNull(), 0).otherwise(f.col("in_bursts")))
        .withColumn("usual_gap_s", f.expr(part.format(0.5)))
        .withColumn("spread_s", f.expr(f"{part.format(0.75)} - {part.format(0.25)}"))
        .withColumn("usual_hour", f.expr(top.format("by_hour")))
        .withColumn("usual_weekday", f.expr(top.format("by_weekday")))
        .withColumn("next_expected", f.expr(due))
        .drop("gaps")
    )


def overdue(profiles: DataFrame) -> DataFrame:
    """``raised`` is true if a key is overdue by the clock of its topic, and that is new."""
    from pyspark.sql import functions as f

    raised = (
        f"events >= {REGULAR_EVENTS} AND usual_gap_s > 0"
        f" AND spread_s <= {REGULAR_SPREAD} * usual_gap_s AND clock >= next_expected"
        " AND NOT _raised_for <=> next_expected"
    )
    found = profiles.withColumn("raised", f.coalesce(f.expr(raised), f.lit(False)))
    return found.withColumn("_raised_for", f.expr("IF(raised, next_expected, _raised_for)"))


def _latest(times: Column) -> Column:
    """The latest times, newest first."""
    from pyspark.sql import functions as f

    return f.slice(f.sort_array(times, asc=False), 1, RECENT)


def _counts(number: Column, size: int) -> Column:
    """How often each number below ``size`` came."""
    from pyspark.sql import functions as f

    return f.array(*[f.count_if(number == n) for n in range(size)])
