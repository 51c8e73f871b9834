"""Which part of its table a batch of a pipeline reads and writes.

A table of entities has a bucket for each hash of them. A table of what happened when (``span``) has
a bucket for each period of 30 days, and one for the rows that any batch may change: those that are
open, and those that lie in more than one period. A batch touches the buckets its records are in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trunkline.spark.lake.table import BUCKET, Replacing

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from trunkline.spark.pipelines.declare import Pipeline

_HASHES: Final = 16
_PERIOD_US: Final = 30 * 86_400 * 1_000_000
_FIRST: Final = 1_000_000  # the bucket of the period that begins with the year 1970
_OPEN: Final = 0
# Every batch touches these: ``_OPEN``, and what an older version put into buckets by its hash.
_ALWAYS: Final = frozenset(str(number) for number in range(_HASHES))


def has_buckets(pipeline: Pipeline) -> bool:
    return pipeline.sink == "replace" and bool(pipeline.entity or pipeline.span)


def bucket_of(pipeline: Pipeline) -> Column:
    """The bucket of a row of the table."""
    from pyspark.sql import functions as f

    if not pipeline.span:
        return _hash_of(pipeline)
    start, end = (_period_of(f.unix_micros(name)) for name in pipeline.span)
    settled = start == end
    if pipeline.is_open:
        settled &= ~f.expr(pipeline.is_open)
    return f.when(settled, end).otherwise(_OPEN).cast("int")


def touched_by(pipeline: Pipeline, rows: DataFrame, reach_s: float) -> Replacing:
    """The buckets whose rows the records of a batch may change. A record changes rows that are up
    to ``reach_s`` away from it.
    """
    from pyspark.sql import functions as f

    if not pipeline.span:
        found = rows.select(_hash_of(pipeline).alias(BUCKET)).distinct().collect()
        return Replacing(BUCKET, frozenset(str(row[BUCKET]) for row in found))
    at, far = f.unix_micros("timestamp"), round((reach_s + 1) * 1e6)
    near = f.sequence(_period_of(at - far), _period_of(at + far))
    found = rows.select(f.explode(near).alias(BUCKET)).distinct().collect()
    return Replacing(BUCKET, _ALWAYS.union(str(row[BUCKET]) for row in found))


def _period_of(micros: Column) -> Column:
    """The bucket of a moment."""
    from pyspark.sql import functions as f

    return (f.floor(micros / _PERIOD_US) + _FIRST).cast("int")


def _hash_of(pipeline: Pipeline) -> Column:
    """The bucket of an entity."""
    from pyspark.sql import functions as f

    parts = [f.coalesce(f.col(name).cast("string"), f.lit("")) for name in pipeline.entity]
    return f.pmod(f.xxhash64(*parts), f.lit(_HASHES)).cast("int")
