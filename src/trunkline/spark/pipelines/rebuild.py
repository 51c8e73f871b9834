"""Making a table anew: beside the old one, in a lake of its own, and put in its place at the end.

``swap`` puts the tables in their place.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import msgspec

from trunkline.spark.pipelines.batch import open_member
from trunkline.spark.pipelines.context import Context
from trunkline.spark.pipelines.declare import RECORDS, Pipeline
from trunkline.spark.pipelines.records import LogRun
from trunkline.spark.pipelines.results import RunResult, aside_of, keep_outcome, result_of
from trunkline.spark.pipelines.silver import SilverRun
from trunkline.spark.pipelines.swap import announce, settle, shadow_of
from trunkline.spark.pipelines.tables import step_table


def rebuild(context: Context, pipeline: Pipeline) -> RunResult:
    """Make the tables of a pipeline beside the old ones, then put them in their place."""
    lake = context.lake
    shadow = shadow_of(lake, pipeline)
    beside = replace(context, lake=shadow, sources=lake, publish=False)
    started = perf_counter()
    try:
        with context.alone(pipeline):
            settle(lake, pipeline)
            result = _make(beside, pipeline)
            if not result.error:
                announce(lake, pipeline)
            settle(lake, pipeline)
    except Exception as error:  # noqa: BLE001 -- Spark's errors have no common base
        return result_of(lake, pipeline, perf_counter() - started, error)
    if result.error:
        return keep_outcome(lake, result)
    counts = {"rows": lake.rows(pipeline.table), **aside_of(lake, pipeline)}
    return keep_outcome(lake, msgspec.structs.replace(result, **counts))


def _make(beside: Context, pipeline: Pipeline) -> RunResult:
    if pipeline.source == RECORDS or pipeline.is_of_silver:
        kind = SilverRun if pipeline.is_of_silver else LogRun
        (result,) = kind(beside).run([pipeline])
        return result
    started = perf_counter()
    member = open_member(beside, pipeline)
    try:
        step_table(beside, member)
    except Exception as error:  # noqa: BLE001 -- Spark's errors have no common base
        member.problem = error
    member.seconds = perf_counter() - started
    return member.result(beside)
