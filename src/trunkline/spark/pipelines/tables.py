"""Pipelines whose source is another table of the lake."""

from __future__ import annotations

from trunkline.errors import Conflict
from trunkline.spark.lake.table import Values
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
        if since == newest or (since >= 0 and _is_the_same(context, source, since, newest)):
            return
        member.begin({"version": since}, {"version": newest})
    lake, files = context.source_lake, _added(context, member)
    reads_all = files is None or "history" in pipeline.parameters
    if reads_all and not lake.has_version(source, member.plan.end["version"]):
        # A batch died, and the rows it was to have are erased by now, or merged for long.
        member.is_open = False
        member.begin(member.plan.start, {"version": newest})
        files = _added(context, member)
    until = member.plan.end["version"]
    rows = lake.read(context.spark, source, files=files, version=until)
    rows = pipeline.prepare(rows) if pipeline.prepare is not None else rows
    whole = files is None
    try:
        write_batch(
            context,
            member,
            rows,
            lambda: lake.read(context.spark, source, version=until),
            whole=whole,
        )
    except Exception:
        context.lake.sweep(member.plan.app)
        raise
    member.events += 0 if whole else rows.count()


def _is_the_same(context: Context, source: str, since: int, until: int) -> bool:
    """Whether a table has the same rows in two versions: a batch without rows, or a merge."""
    return context.source_lake.added_since(source, since, until) == {}


def _added(context: Context, member: PipelineRun) -> dict[str, Values] | None:
    """The files with the rows of the batch; None if it has all rows."""
    pipeline, plan = member.pipeline, member.plan
    since, until = plan.start["version"], plan.end["version"]
    is_aggregate = pipeline.sink == "upsert" and "table" not in pipeline.parameters
    if since < 0 or is_aggregate:
        return None
    return context.source_lake.added_since(pipeline.source, since, until)
