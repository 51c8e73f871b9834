"""Rules: what rows are expected to be, and what becomes of a row that is not.

``expect("delay_known", "value IS NOT NULL", on_fail="quarantine")`` is a condition in Spark's SQL.
Each rule is counted in the table ``rules``, per run and topic. A row that fails is kept, dropped,
put into ``quarantine``, or fails the batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from trunkline.errors import InvalidEvent, InvalidOption
from trunkline.spark.session.errors import line_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

OnFail = Literal["keep", "drop", "quarantine", "fail"]
ON_FAIL: Final = get_args(OnFail)
QUARANTINE: Final = "quarantine"
RULES: Final = "rules"
DAMAGED: Final = "its line in the log is damaged"
# One shape for every pipeline: a row that has no such column has NULL there.
REFUSED: Final = {
    "pipeline": "string", "rule": "string", "reason": "string", "topic": "string",
    "partition": "int", "offset": "bigint", "timestamp": "timestamp", "id": "string",
    "key": "string", "type": "string", "value": "string",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Expectation:
    name: str
    condition: str
    on_fail: OnFail = "keep"


def expect(name: str, condition: str, on_fail: OnFail = "keep") -> Expectation:
    """A condition that each row of a table fulfils; NULL does not."""
    if not re.fullmatch(r"\w+", name):
        raise InvalidOption(f"rule {name!r}", hint="a name has letters, digits and _")
    if on_fail not in ON_FAIL:
        raise InvalidOption(f"rule {name}: on_fail={on_fail!r}", hint=" or ".join(ON_FAIL))
    return Expectation(name, condition, on_fail)


def rules_of(expected: Mapping[str, str] | Sequence[Expectation]) -> tuple[Expectation, ...]:
    """The rules of a declaration; a condition by its name is only counted."""
    if isinstance(expected, Mapping):
        return tuple(expect(name, condition) for name, condition in expected.items())
    return tuple(expected)


def first_failed(rules: Sequence[Expectation]) -> str:
    """The name of the first rule that a row fails, as SQL; rules that drop come before others."""
    whens = " ".join(
        f"WHEN NOT coalesce(({rule.condition}), false) THEN '{rule.name}'" for rule in rules
    )
    return f"CASE {whens} END" if rules else "CAST(NULL AS STRING)"


def apply(
    pipeline: str, rows: DataFrame, rules: Sequence[Expectation]
) -> tuple[DataFrame, dict[str, DataFrame]]:
    """The rows that stay, and the rows for ``quarantine`` and ``rules``. ``rows`` is persisted.
    ``InvalidOption`` names a rule that is no condition over the rows.
    """
    from pyspark.errors import AnalysisException

    try:
        return _apply(pipeline, rows, rules)
    except AnalysisException:
        for rule in rules:
            try:
                rows.where(f"NOT coalesce(({rule.condition}), false)")
            except AnalysisException as problem:
                raise InvalidOption(
                    f"rule {rule.name} of table {pipeline}: {rule.condition}: {line_of(problem)}",
                    hint=f"a rule sees what the function returns: {', '.join(rows.columns)}",
                ) from problem
        raise


def _apply(
    pipeline: str, rows: DataFrame, rules: Sequence[Expectation]
) -> tuple[DataFrame, dict[str, DataFrame]]:
    from pyspark.sql import functions as f

    fails = {rule.name: f.expr(f"NOT coalesce(({rule.condition}), false)") for rule in rules}
    topic = f.col("topic") if "topic" in rows.columns else f.lit(None).cast("string")
    counts = [f.count_if(failed).alias(f"failed_{name}") for name, failed in fails.items()]
    found = rows.groupBy(topic.alias("topic")).agg(f.count("*").alias("checked"), *counts)
    stack = ", ".join(f"'{rule.name}', '{rule.on_fail}', `failed_{rule.name}`" for rule in rules)
    counted = found.selectExpr(
        f"'{pipeline}' AS pipeline", "topic", "checked",
        f"stack({len(rules)}, {stack}) AS (rule, on_fail, failed)",
    ).withColumn("at", f.current_timestamp())  # fmt: skip
    for rule in rules:
        if rule.on_fail == "fail":
            example = rows.where(fails[rule.name]).limit(1).collect()
            if example:
                raise InvalidEvent(
                    f"rule {rule.name} failed: {rule.condition}; for example {example[0]}"[:400],
                    hint="on_fail=quarantine keeps such rows apart",
                )
    leaving = [rule for rule in rules if rule.on_fail in ("drop", "quarantine")]
    if not leaving:
        return rows, {RULES: counted}
    marked = rows.withColumn("_failed", f.expr(first_failed(leaving)))
    kept = marked.where("_failed IS NULL").drop("_failed")
    apart = [rule.name for rule in leaving if rule.on_fail == "quarantine"]
    side = {RULES: counted}
    if apart:
        bad = marked.where(f.col("_failed").isin(apart))
        reason = f.concat(f.lit("it fails the rule "), f.col("_failed"))
        value = f.to_json(f.struct(*[f.col(f"`{name}`") for name in rows.columns]))
        side[QUARANTINE] = refused(
            bad.withColumn("value", value).withColumn("reason", reason), pipeline, "_failed"
        )
    return kept, side


def refused(rows: DataFrame, pipeline: str, rule: str) -> DataFrame:
    """Rows in the shape of ``quarantine``; ``rule`` names the column with the rule's name. A column
    of the same name that means something else, as its type shows, is NULL there.
    """
    from pyspark.sql import functions as f

    columns = []
    for name, kind in REFUSED.items():
        if name == "pipeline":
            column = f.lit(pipeline)
        elif name == "rule":
            column = f.col(rule)
        elif name in rows.columns and _is_like(rows.schema[name].dataType, kind):
            column = f.col(name)
        else:
            column = f.lit(None)
        columns.append(column.cast(kind).alias(name))
    return rows.select(*columns)


def _is_like(found: DataType, kind: str) -> bool:
    """Whether each value of a column can be one of ``kind``."""
    from pyspark.sql import types as t

    if kind == "string":
        return True
    if kind == "timestamp":
        return isinstance(found, t.TimestampType | t.TimestampNTZType | t.DateType)
    return found.simpleString() in ("tinyint", "smallint", "int", kind)
