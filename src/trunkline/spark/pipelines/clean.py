"""Silver: each event once, in time and whole; what is refused is kept with its reason.

``clean`` has every event that passed, its payload as a VARIANT. A topic with a JSON Schema also has
a table ``clean.<topic>``, with a typed column for each member of its payload. ``quarantine`` has
what did not pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.contracts import Contracts, checking, read_contracts, typed
from trunkline.spark.dialects import normalise
from trunkline.spark.pipelines import Made, pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

REFUSED = "quarantine"
WINDOW_S = 24 * 3600.0
PLACE = ("topic", "partition", "offset", "timestamp", "id", "key")
REASON = """CASE
    WHEN wrong IS NOT NULL THEN wrong
    WHEN type IS NULL THEN 'it has no type'
    WHEN ttl_s IS NOT NULL AND NOT lasting
        AND unix_micros(timestamp) + ttl_s * 1e6 <= unix_micros(seen) THEN 'it has expired'
    WHEN again THEN 'it was published before'
END"""


def stamp(df: DataFrame) -> DataFrame:
    """When a batch is looked at is noted with it: done again, it comes to the same."""
    from pyspark.sql import functions as f

    return df.drop("timestampType").withColumn("seen", f.current_timestamp())


@pipeline(
    "clean",
    about="each event once by idem_key or id; what is refused with its reason",
    echoes=True,
    stream=stamp,
    refused=REFUSED,
    by=("topic", "date"),
    chart=("topic", "rows"),
)
def transform(
    df: DataFrame,
    table: DataFrame | None = None,
    bus: str = "",
    window_s: float = WINDOW_S,
    contracts: Contracts | None = None,
) -> Made:
    """An event is a repetition if one of the same topic and ``idem_key`` (else ``id``) that passed
    is at most ``window_s`` older, or newer.
    """
    from pyspark.sql import functions as f

    promised = contracts or read_contracts(bus)
    judged = judge(df, table, promised, window_s).persist()
    refused = judged.where("reason IS NOT NULL").drop("wrong", "again", "lasting")
    passed = judged.where("reason IS NULL")
    beside = {REFUSED: refused}
    for topic, schema in promised.schemas.items():
        shape = typed(schema)
        if shape is not None:
            whole = f.from_json("value", shape).alias("payload")
            rows = passed.where(f.col("topic") == topic).select(*PLACE, whole)
            beside[f"clean.{topic}"] = rows.select(*PLACE, "payload.*")
    kept = (
        passed.withColumn("payload", f.parse_json("value"))
        .withColumn("date", f.date_format("timestamp", "yyyy-MM-dd"))
        .drop("value", "reason", "wrong", "again", "lasting", "seen")
    )
    return Made(kept, beside, held=(judged,))


def judge(
    df: DataFrame, table: DataFrame | None, promised: Contracts, window_s: float
) -> DataFrame:
    """One row per record; ``reason`` is NULL for those that pass."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    shown = normalise(df)
    names = shown.columns
    ddl = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in shown.schema)
    checked = shown.mapInArrow(checking(promised.schemas, names), f"{ddl}, wrong string")
    checked = checked.withColumn("lasting", f.col("topic").isin(*promised.keep_expired))
    first = checked.withColumn("again", f.lit(False)).withColumn("reason", f.expr(REASON))
    same = f.coalesce("idem_key", "id")
    order = Window.partitionBy("topic", same, "ok").orderBy("timestamp", "partition", "offset")
    ago = f.col("timestamp").cast("double") - f.lag("timestamp").over(order).cast("double")
    rows = (
        first.withColumn("ok", f.col("reason").isNull())
        .withColumn("again", f.col("ok") & f.coalesce(ago <= window_s, f.lit(False)))
        .drop("ok")
    )
    if table is not None:
        low, high = df.agg(f.min("timestamp"), f.max("timestamp")).collect()[0]
        rows = _seen(rows, table, low, high, window_s)
    return rows.withColumn("reason", f.expr(REASON))


def _seen(
    rows: DataFrame, table: DataFrame, low: object, high: object, window_s: float
) -> DataFrame:
    """The rows, with ``again`` for those that the table has. Only the days around are read."""
    from pyspark.sql import functions as f

    span = f.expr(f"make_dt_interval(0, 0, 0, {window_s})")
    day = "yyyy-MM-dd"
    near = (
        table.where(f.col("date") >= f.date_format(f.lit(low) - span, day))
        .where(f.col("date") <= f.date_format(f.lit(high) + span, day))
        .select(
            f.col("topic").alias("t"),
            f.coalesce("idem_key", "id").alias("k"),
            f.col("timestamp").alias("at"),
        )
    )
    apart = f.abs(f.col("timestamp").cast("double") - f.col("at").cast("double"))
    same = (
        (f.col("topic") == f.col("t"))
        & (f.coalesce("idem_key", "id") == f.col("k"))
        & (apart <= window_s)
    )
    known = rows.join(near, same, "left_semi").select("topic", "partition", "offset")
    marked = known.withColumn("had", f.lit(True))
    return (
        rows.join(marked, ["topic", "partition", "offset"], "left")
        .withColumn("again", f.col("again") | f.coalesce("had", f.lit(False)))
        .drop("had")
        .select(*rows.columns)
    )
