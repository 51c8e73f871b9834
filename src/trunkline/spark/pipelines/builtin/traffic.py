"""How much came when: events, bytes, keys and actors per topic, type and hour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines.declare import table, together

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SAME = ("hour", "topic", "type")
EXACT = 4096  # different keys of one hour that are counted exactly; more are estimated


@table(
    "traffic",
    about="events, bytes, keys and actors per topic, type and hour",
    columns="topic,type,timestamp,key,actor,value",
    sink="replace",
    reads_once=True,
    span=("hour", "hour"),
    reach=3600.0,
    chart=("topic", "events"),
)
def transform(df: DataFrame, table: DataFrame | None = None) -> DataFrame:
    """``keys`` and ``actors`` are exact up to 4,096 of them in an hour, and estimated beyond:
    ``is_estimate`` says so.

    Of each hour the table keeps the smallest hashes of its keys. They are those of all of its
    records, however the log was cut into batches.
    """
    from pyspark.sql import functions as f

    came = df.groupBy("topic", "type", f.date_trunc("hour", "timestamp").alias("hour")).agg(
        f.count("*").alias("events"),
        f.coalesce(f.sum(f.octet_length("value")), f.lit(0)).alias("bytes"),
        _smallest("key").alias("_keys"),
        _smallest("actor").alias("_actors"),
        f.max("timestamp").alias("last_event"),
    )
    before = table and table.select(*came.columns)
    whole = (
        together(before, came)
        .groupBy(*SAME)
        .agg(
            f.sum("events").alias("events"),
            f.sum("bytes").alias("bytes"),
            _merged("_keys").alias("_keys"),
            _merged("_actors").alias("_actors"),
            f.max("last_event").alias("last_event"),
        )
    )
    return whole.withColumns(
        {
            "keys": _count("_keys"),
            "actors": _count("_actors"),
            "is_estimate": (f.size("_keys") >= EXACT) | (f.size("_actors") >= EXACT),
        }
    )


def _smallest(name: str) -> Column:
    """The smallest hashes of a column's values."""
    from pyspark.sql import functions as f

    hashes = f.collect_set(f.when(f.col(name).isNotNull(), f.xxhash64(name)))
    return f.slice(f.array_sort(hashes), 1, EXACT)


def _merged(name: str) -> Column:
    from pyspark.sql import functions as f

    every = f.array_sort(f.array_distinct(f.flatten(f.collect_list(name))))
    return f.slice(every, 1, EXACT)


def _count(name: str) -> Column:
    """How many different values there were: as many as hashes, or as dense as those are."""
    from pyspark.sql import functions as f

    dense = (
        f"CAST(({EXACT} - 1) / ((element_at({name}, {EXACT}) / 18446744073709551616D) + 0.5D)"
        " AS BIGINT)"
    )
    return f.expr(f"IF(size({name}) < {EXACT}, CAST(size({name}) AS BIGINT), {dense})")
