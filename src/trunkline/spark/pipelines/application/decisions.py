"""Decisions and what came of them: one row for each, whichever came first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines.declare import table, together

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DECISION = "action_id STRING, action STRING, context STRING, confidence DOUBLE"
OUTCOME = "action_id STRING, decision STRING, ok BOOLEAN, status STRING, reward DOUBLE"
KEPT = 16  # outcomes of one decision that are kept, the earliest


def prepare(df: DataFrame) -> DataFrame:
    """A decision has type ACTION_DECISION. Its outcome, ACTION_EXECUTED, names it: by ``action_id``
    in both payloads, by ``decision`` in its own, or as its cause.
    """
    from pyspark.sql import functions as f

    place = ("timestamp", "topic", "partition", "offset")
    rows = df.where("type IN ('ACTION_DECISION', 'ACTION_EXECUTED')").withColumns(
        {
            "made": f.col("type") == "ACTION_DECISION",
            "d": f.from_json("value", DECISION),
            "o": f.from_json("value", OUTCOME),
        }
    )
    return rows.select(
        f.expr(
            "IF(made, coalesce(d.action_id, id), coalesce(o.action_id, o.decision, cause))"
        ).alias("ref"),
        f.when(
            f.col("made"),
            f.struct(
                *place,
                f.coalesce("d.action", f.lit("")).alias("action"),
                f.coalesce("d.context", f.lit("")).alias("context"),
                f.coalesce("d.confidence", f.lit(0.5)).alias("confidence"),
            ),
        ).alias("decision"),
        f.when(
            ~f.col("made"),
            f.struct(
                *place,
                f.coalesce("o.ok", f.col("o.status") == "ok").alias("ok"),
                f.col("o.reward").alias("reward"),
            ),
        ).alias("outcome"),
    ).where("ref IS NOT NULL")


@table(
    "decisions",
    about="each decision once, with its first outcome, or one that came too late",
    columns="topic,partition,offset,id,type,value,timestamp,cause",
    prepare=prepare,
    source="clean",
    sink="replace",
    entity=("ref",),
    chart=("action", "rows"),
)
def transform(df: DataFrame, table: DataFrame | None = None, within_s: float = 3600.0) -> DataFrame:
    """The first record of a decision counts, and its first outcome that is not older than it. An
    outcome more than ``within_s`` later is ``too_late`` and does not count. Rows without a decision
    wait for theirs (``decided`` is NULL).
    """
    from pyspark.sql import functions as f

    came = df.groupBy("ref").agg(
        f.min("decision").alias("_decision"),
        f.array_sort(f.collect_list("outcome")).alias("_outcomes"),
    )
    before = table and table.select("ref", "_decision", "_outcomes")
    known = (
        together(before, came)
        .groupBy("ref")
        .agg(
            f.min("_decision").alias("_decision"),
            f.slice(f.array_sort(f.flatten(f.collect_list("_outcomes"))), 1, KEPT).alias(
                "_outcomes"
            ),
        )
    )
    first = "filter(_outcomes, o -> o.timestamp >= _decision.timestamp)[0]"
    late = f"unix_micros(first.timestamp) - unix_micros(decided) > {within_s}D * 1e6"
    return (
        known.withColumn("first", f.expr(f"get({first.removesuffix('[0]')}, 0)"))
        .withColumn("decided", f.col("_decision.timestamp"))
        .withColumn("action", f.col("_decision.action"))
        .withColumn("context", f.col("_decision.context"))
        .withColumn("confidence", f.col("_decision.confidence"))
        .withColumn("too_late", f.coalesce(f.expr(late), f.lit(False)))
        .withColumn("has_outcome", f.expr("first IS NOT NULL AND NOT too_late"))
        .withColumn("executed", f.expr("IF(has_outcome, first.timestamp, NULL)"))
        .withColumn("ok", f.expr("IF(has_outcome, first.ok, NULL)"))
        .withColumn("reward", f.expr("IF(has_outcome, first.reward, NULL)"))
        .drop("first")
    )
