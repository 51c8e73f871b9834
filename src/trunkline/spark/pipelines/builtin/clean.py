"""Silver: each event once, in time and whole; what is refused is kept with its reason.

``clean`` has every event that passed. A topic with a JSON Schema also has a table
``clean.<topic>``: the place of each event, and one struct ``payload`` of the schema's types.
``quarantine`` has what did not pass, ``rules`` how often each check failed.

The checks are rules: ``whole`` (the line is intact), ``schema``, ``type``, ``ttl`` and
``repetition``. ``--set clean.type=quarantine`` switches one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from trunkline.errors import InvalidOption
from trunkline.spark.pipelines.declare import Output, table
from trunkline.spark.pipelines.envelopes import normalise
from trunkline.spark.pipelines.rules import DAMAGED, ON_FAIL, QUARANTINE, RULES, refused
from trunkline.spark.source.columns import CORRUPT
from trunkline.spark.source.schemas import (
    Contracts,
    checking,
    read_contracts,
    typed,
    typing,
    validator_of,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

WINDOW_S = 24 * 3600.0
PLACE = ("topic", "partition", "offset", "timestamp", "id", "key")
WHERE = ("topic", "partition", "offset")


@table(
    "clean",
    about="each event once by idem_key or id; what is refused with its reason",
    reads_published=True,
    reads_damaged=True,
    partition_by=("topic",),
    reach="window_s",
    chart=("topic", "rows"),
)
def transform(
    df: DataFrame,
    table: DataFrame | None = None,
    bus: str = "",
    window_s: float = WINDOW_S,
    envelopes: bool = False,
    schema: str = "quarantine",
    type: str = "keep",
    ttl: str = "quarantine",
    repetition: str = "quarantine",
    contracts: Contracts | None = None,
) -> Output:
    """In each partition, in the order of its offsets, an event is a repetition if an event of the
    same ``idem_key`` (else ``id``) that passed is at most ``window_s`` older, or newer. It has
    expired if its time to live was over when it was appended.
    """
    from pyspark.sql import functions as f

    promised, notes = _usable(contracts or read_contracts(bus))
    on_fail = {"whole": "quarantine", "schema": schema, "type": type, "ttl": ttl}
    on_fail |= {"repetition": repetition}
    for name, what in on_fail.items():
        if what not in ON_FAIL:
            raise InvalidOption(f"rule {name}: {what!r}", hint=" or ".join(ON_FAIL))
    rows = normalise(df) if envelopes else df
    alone = _judged_alone(rows, promised, on_fail)
    again = repeated(alone.where("rule IS NULL"), table, window_s).persist()
    judged = _with_repetitions(alone, again, on_fail)
    cached = [again]
    if promised.schemas:  # payloads are held against a schema once; all else costs less anew
        cached.append(judged.persist())
    passed = judged.where("rule IS NULL").drop("rule", "reason", "failed")
    apart = [name for name, what in on_fail.items() if what == "quarantine"]
    side = {
        QUARANTINE: refused(judged.where(f.col("rule").isin(apart)), "clean", "rule"),
        RULES: counted(judged, on_fail),
    }
    for topic, promise in promised.schemas.items():
        kind = typed(promise)
        if kind is not None:
            place = ", ".join(f"`{n}` {passed.schema[n].dataType.simpleString()}" for n in PLACE)
            own = passed.where(f.col("topic") == topic).select(*PLACE, "value")
            side[f"clean.{topic}"] = own.mapInArrow(typing(kind), f"{place}, payload {kind.ddl}")
    if "fail" in on_fail.values():
        _refuse(judged, [name for name, what in on_fail.items() if what == "fail"])
    return Output(passed.drop("timestampType"), side, cached=tuple(cached), notes=notes)


def _usable(promised: Contracts) -> tuple[Contracts, tuple[str, ...]]:
    """What topics promise, without the schemas that are none; and a line on each of those."""
    notes = []
    schemas = {}
    for topic, schema in promised.schemas.items():
        try:
            validator_of(schema)
            schemas[topic] = schema
        except ValueError as problem:
            notes.append(f"topic {topic} is not checked and not typed: no JSON Schema: {problem}")
    return msgspec.structs.replace(promised, schemas=schemas), tuple(notes)


def judge(
    df: DataFrame,
    table: DataFrame | None,
    promised: Contracts,
    window_s: float,
    on_fail: dict[str, str],
) -> DataFrame:
    """One row per record. ``failed`` are the rules it fails, ``rule`` the first of them that takes
    it away, ``reason`` what is said about that; both are NULL for a row that stays.
    """
    rows = _judged_alone(df, promised, on_fail)
    again = repeated(rows.where("rule IS NULL"), table, window_s)
    return _with_repetitions(rows, again, on_fail)


def _judged_alone(df: DataFrame, promised: Contracts, on_fail: dict[str, str]) -> DataFrame:
    """What each record is by itself, whatever others there are."""
    from pyspark.sql import functions as f

    rows = _checked(df, promised)
    if CORRUPT not in rows.columns:
        rows = rows.withColumn(CORRUPT, f.lit(None).cast("string"))
    damaged = f.col(CORRUPT).isNotNull()
    lasting = f.col("topic").isin(*promised.keep_expired)
    appended = f.col("appended_at") if "appended_at" in df.columns else f.lit(None)
    over = f.expr("unix_micros(timestamp) + ttl_s * 1e6") <= f.unix_micros(
        appended.cast("timestamp")
    )
    found = {
        "whole": (damaged, f.lit(DAMAGED)),
        "schema": (f.col("wrong").isNotNull(), f.col("wrong")),
        "type": (f.col("type").isNull() & ~damaged, f.lit("it has no type")),
        "ttl": (f.coalesce(over, f.lit(False)) & ~lasting, f.lit("it had expired")),
    }
    rows = rows.withColumn("value", f.coalesce("value", CORRUPT))
    return _named(rows, found, on_fail).drop("wrong", CORRUPT)


def _with_repetitions(rows: DataFrame, again: DataFrame, on_fail: dict[str, str]) -> DataFrame:
    """The rows, with the rule ``repetition`` for the places ``again``. Those are some of one batch,
    so they are sent to the rows: rows with their payloads are not moved.
    """
    from pyspark.sql import functions as f

    rows = rows.join(f.broadcast(again.withColumn("again", f.lit(True))), list(WHERE), "left")
    said = f.lit("it was published before")
    failed = f.coalesce("again", f.lit(False))
    takes = f.lit(on_fail["repetition"] != "keep")
    return (
        rows.withColumn(
            "failed",
            f.when(failed, f.array_append("failed", f.lit("repetition"))).otherwise(
                f.col("failed")
            ),
        )
        .withColumn("reason", f.when(failed & takes, said).otherwise(f.col("reason")))
        .withColumn("rule", f.when(failed & takes, f.lit("repetition")).otherwise(f.col("rule")))
        .drop("again")
    )


def _checked(df: DataFrame, promised: Contracts) -> DataFrame:
    """The rows, with ``wrong``: what a schema says about the value. Only topics that have a schema
    are looked at.
    """
    from pyspark.sql import functions as f

    nothing = df.withColumn("wrong", f.lit(None).cast("string"))
    if not promised.schemas:
        return nothing
    has_schema = f.col("topic").isin(*promised.schemas)
    shape = ", ".join(f"`{x.name}` {x.dataType.simpleString()}" for x in df.schema)
    checked = df.where(has_schema).mapInArrow(checking(promised.schemas), f"{shape}, wrong string")
    return nothing.where(~has_schema).unionByName(checked)


def _named(
    rows: DataFrame, found: dict[str, tuple[Column, Column]], on_fail: dict[str, str]
) -> DataFrame:
    from pyspark.sql import functions as f

    failed = f.filter(
        f.array(*[f.when(fails, f.lit(name)) for name, (fails, _) in found.items()]),
        lambda one: one.isNotNull(),
    )
    rule: Column = f.lit(None).cast("string")
    reason: Column = f.lit(None).cast("string")
    for name, (fails, said) in reversed(found.items()):
        if on_fail[name] != "keep":
            rule = f.when(fails, f.lit(name)).otherwise(rule)
            reason = f.when(fails, said).otherwise(reason)
    return rows.withColumns({"failed": failed, "rule": rule, "reason": reason})


def repeated(rows: DataFrame, table: DataFrame | None, window_s: float) -> DataFrame:
    """The places of rows that repeat one that passed. In each partition the log's own order
    decides, so it does not matter where the log was cut into batches.
    """
    from pyspark.sql import functions as f

    same = ("topic", "partition", "same")
    keyed = rows.select(*WHERE, "timestamp", f.coalesce("idem_key", "id").alias("same"))
    member = f.struct("offset", f.unix_micros("timestamp").alias("at"))
    if table is None:  # only what came more than once; a count needs no sorting
        often = keyed.groupBy(*same).count().where("count > 1").drop("count")
        keyed = keyed.join(f.broadcast(often), list(same), "left_semi")
    groups = keyed.groupBy(*same).agg(f.array_sort(f.collect_list(member)).alias("came"))
    none = f.array().cast("array<bigint>")
    if table is None:
        groups = groups.where("size(came) > 1").withColumn("passed", none)
    else:
        before = table.select(*same[:2], f.coalesce("idem_key", "id").alias("same"), "timestamp")
        times = f.collect_list(f.unix_micros("timestamp")).alias("passed")
        passed = before.groupBy(*same).agg(times)
        groups = groups.join(passed, list(same), "left").where(
            "size(came) > 1 OR passed IS NOT NULL"
        )
        groups = groups.withColumn("passed", f.coalesce("passed", none))
    fold = f"""aggregate(came, named_struct('ok', passed, 'bad', CAST(array() AS ARRAY<BIGINT>)),
        (a, x) -> IF(exists(a.ok, t -> abs(x.at - t) <= {window_s}D * 1e6),
            named_struct('ok', a.ok, 'bad', array_append(a.bad, x.offset)),
            named_struct('ok', array_append(a.ok, x.at), 'bad', a.bad))).bad"""
    return groups.select("topic", "partition", f.explode(f.expr(fold)).alias("offset"))


def counted(judged: DataFrame, on_fail: dict[str, str]) -> DataFrame:
    """How often each rule failed, per topic."""
    from pyspark.sql import functions as f

    names = list(on_fail)
    counts = [f.count_if(f.array_contains("failed", name)).alias(name) for name in names]
    stack = ", ".join(f"'{name}', '{what}', `{name}`" for name, what in on_fail.items())
    return (
        judged.groupBy("topic")
        .agg(f.count("*").alias("checked"), *counts)
        .selectExpr(
            "'clean' AS pipeline",
            "topic",
            "checked",
            f"stack({len(names)}, {stack}) AS (rule, on_fail, failed)",
        )
        .withColumn("at", f.current_timestamp())
    )


def _refuse(judged: DataFrame, names: list[str]) -> None:
    from pyspark.sql import functions as f

    bad = judged.where(f.col("rule").isin(names)).limit(1).collect()
    if bad:
        row = bad[0]
        raise InvalidOption(
            f"rule {row.rule} failed: {row.topic}/{row.partition} offset {row.offset}: "
            f"{row.reason}",
            hint=f"--set clean.{row.rule}=quarantine keeps such events apart",
        )
