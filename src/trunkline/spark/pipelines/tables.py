"""Pipelines whose source is another table of the lake."""

from __future__ import annotations

from trunkline.errors import Conflict
from trunkline.spark.pipelines.batch import PipelineRun, write_batch
from trunkline.spark.pipelines.context import Context


def step_table(context: Context, member: PipelineRun) -> None:
    """Rows that came to the source since the last run; all of them if some were taken away, or if
    the table is made of whole groups, or made anew.
    """
    pipeline, source = member.pipeline, member.pipeline.source
    newest = context.source_lake.newest(source)
    if newest < 0:
        raise Conflict(
            f"there is no table {source} to make {pipeline.name} of",
            hint="its maker ran and made no such table; has its topic a schema?",
            name=source,
        )
    since = member.plan.end.get("version", -1)
    if not member.is_open:
        if since == newest:
            return
        member.begin({"version": since}, {"version": newest})
    since, newest = member.plan.start["version"], member.plan.end["version"]
    files = context.source_lake.added_since(source, since, newest) if since >= 0 else None
    if pipeline.sink == "upsert" and "table" not in pipeline.parameters:
        files = None  # an aggregate is made of all rows
    rows = context.source_lake.read(context.spark, source, files=files)
    rows = pipeline.prepare(rows) if pipeline.prepare is not None else rows
    whole = files is None
    try:
        write_batch(
            context,
            member,
            rows,
            lambda: context.source_lake.read(context.spark, source),
            whole=whole,
        )
    except Exception:
        context.lake.sweep(member.plan.app)
        raise
    member.events += 0 if whole else rows.count()
