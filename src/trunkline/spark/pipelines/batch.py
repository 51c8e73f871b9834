"""One batch of one pipeline: stage the files of all its tables, publish its events, commit the
other tables, and its own table last. Each step is done once for a batch, so a batch that died
anywhere is done again, and only what is missing is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from trunkline.errors import Conflict, InvalidOption
from trunkline.spark.lake import EVENTS, EVERYTHING, NOTHING, Replacing
from trunkline.spark.lake.optimize import optimize
from trunkline.spark.lake.table import BUCKET, StagedFiles
from trunkline.spark.pipelines import rules as checks
from trunkline.spark.pipelines.buckets import bucket_of, has_buckets, touched_by
from trunkline.spark.pipelines.context import Context
from trunkline.spark.pipelines.declare import Output, Pipeline, as_events
from trunkline.spark.pipelines.progress import Plan, Progress, new_app
from trunkline.spark.pipelines.results import RunResult, result_of
from trunkline.spark.pipelines.swap import settle, side_partitions
from trunkline.spark.source.columns import CORRUPT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from trunkline.spark.source.offsets import Place

OPTIMIZE_EVERY: Final = 50  # batches
_MICROS_MAX: Final = 2**62
# A moment as text, to the microsecond.
_EXACT: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


@dataclass
class PipelineRun:
    """A pipeline of a run: how far it is, and what it did."""

    pipeline: Pipeline
    progress: Progress
    plan: Plan
    is_open: bool  # whether the plan has still to be done
    place: Place = field(default_factory=dict)
    target: Place = field(default_factory=dict)
    events: int = 0
    published: int = 0
    seconds: float = 0.0
    new_columns: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problem: Exception | None = None

    @property
    def is_behind(self) -> bool:
        return self.problem is None and (self.is_open or self.place != self.target)

    def begin(self, start: dict[str, Any], end: dict[str, Any]) -> None:
        """Note the next batch, unless the last one has still to be done."""
        if not self.is_open:
            plan = Plan(app=self.plan.app, version=self.plan.version + 1, start=start, end=end)
            self.progress.save(plan)
            self.plan, self.is_open = plan, True

    def result(self, context: Context) -> RunResult:
        return result_of(
            context.lake,
            self.pipeline,
            self.seconds,
            self.problem,
            version=self.plan.version,
            published=self.published,
            events=self.events,
            new_columns=tuple(self.new_columns),
            notes=tuple(self.notes),
        )


def open_member(context: Context, pipeline: Pipeline) -> PipelineRun:
    """Where a pipeline is. What a batch or a rebuild that died left behind is removed."""
    if context.sources is None:
        settle(context.lake, pipeline)
    progress = Progress(context.lake, pipeline.name)
    plan = progress.load(pipeline.table)
    if plan is None:
        if context.lake.has(pipeline.table) and pipeline.table != EVENTS:
            raise Conflict(
                f"table {pipeline.table} is there, and nothing says how far it is",
                hint=f"trunkline pipeline run {pipeline.name} --rebuild",
                name=pipeline.table,
            )
        return PipelineRun(pipeline, progress, Plan(app=new_app(pipeline.name)), is_open=False)
    if context.since:
        raise InvalidOption(
            f"{pipeline.name} has begun elsewhere than at {context.since}",
            hint="add --rebuild, or leave --from out",
        )
    is_open = context.lake.version(pipeline.table, plan.app) < plan.version
    if is_open:
        context.lake.sweep(plan.app)
    return PipelineRun(pipeline, progress, plan, is_open=is_open)


@dataclass(frozen=True)
class Scanned:
    """What was read of the log for a batch: the rows, and how many records that should be."""

    rows: DataFrame
    records: int


def write_batch(
    context: Context,
    member: PipelineRun,
    rows: DataFrame,
    history: Callable[[], DataFrame],
    *,
    whole: bool = False,
    scanned: Scanned | None = None,
) -> None:
    """Stage every table of a batch, publish, commit. With ``whole`` every row of the pipeline's
    own table is replaced. What ``scanned`` has more than the rows of a copy is damage.
    """
    pipeline, plan, lake = member.pipeline, member.plan, context.lake
    table, replacing = _before(context, pipeline, rows, whole=whole)
    output = context.transform(pipeline, rows, table, history)
    cached = list(output.cached)
    member.notes += [note for note in output.notes if note not in member.notes]
    try:
        made, side = output.table, dict(output.side_tables)
        if pipeline.rules:
            made = made.persist()
            cached.append(made)
            made, more = checks.apply(pipeline.name, made, pipeline.rules)
            side |= more
        if context.publishes(pipeline) and not (whole and "table" in pipeline.parameters):
            fresh = _not_in(context, pipeline, made) if whole else made
            output = with_events(pipeline, output, fresh)
        if has_buckets(pipeline):
            made = made.withColumn(BUCKET, bucket_of(pipeline))
        own = lake.stage(
            pipeline.table,
            made,
            app=plan.app,
            version=plan.version,
            partition_by=_partition_by(pipeline),
            split_files_by=() if whole else pipeline.split_files_by,
            maker=pipeline.name,
        )
        if scanned is not None and pipeline.table == EVENTS and own.rows < scanned.records:
            side[checks.QUARANTINE] = _damaged(pipeline, scanned.rows)
        staged = [_stage_side(context, member, name, frame) for name, frame in side.items()]
        if output.events is not None and context.publishes(pipeline):
            sent = context.send(pipeline.name, output.events, plan.app, plan.version)
            member.published += sent
        for one in (*filter(None, staged), own):
            new = lake.commit(
                one,
                app=plan.app,
                version=plan.version,
                replacing=replacing if one is own else _refused_before(pipeline, one, whole=whole),
            )
            member.new_columns += [f"{one.table}.{name}" for name in new]
        if not whole and plan.version % OPTIMIZE_EVERY == OPTIMIZE_EVERY - 1:
            lake.sweep(plan.app)
            for name in (*side, pipeline.table):
                optimize(lake, name)
    finally:
        for kept in cached:
            kept.unpersist()
    member.is_open = False


def _not_in(context: Context, pipeline: Pipeline, rows: DataFrame) -> DataFrame:
    """The rows that the table does not have yet, as often as it lacks them."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    lake, table = context.lake, pipeline.table
    if not pipeline.to_topic or not lake.has(table):
        return rows
    before = lake.read(context.spark, table, whole=True)
    names = [name for name in rows.columns if name in before.columns]
    row = f.struct(*[f.col(f"`{name}`") for name in names])
    text = f.to_json(row, _EXACT).alias("_text")
    times = f.row_number().over(Window.partitionBy("_text").orderBy("_text")).alias("_times")
    had = before.select(text).select("_text", times)
    found = rows.select("*", text).select("*", times)
    return found.join(had, ["_text", "_times"], "left_anti").drop("_text", "_times")


def _refused_before(pipeline: Pipeline, staged: StagedFiles, *, whole: bool) -> Replacing:
    """A table that is made of all rows tells anew which of them it refuses."""
    if whole and staged.table == checks.QUARANTINE:
        return Replacing("pipeline", frozenset({pipeline.name}))
    return NOTHING


def _before(
    context: Context, pipeline: Pipeline, rows: DataFrame, *, whole: bool
) -> tuple[DataFrame | None, Replacing]:
    """What the transform sees of its table, and which rows the batch takes away."""
    if whole:
        return None, EVERYTHING
    if pipeline.sink == "replace":
        return _touched(context, pipeline, rows)
    if "table" in pipeline.parameters and context.lake.has(pipeline.table):
        return _near(context, pipeline, rows), NOTHING
    return None, NOTHING


def _near(context: Context, pipeline: Pipeline, rows: DataFrame) -> DataFrame:
    """What the table holds of the time around the rows, if the pipeline says how far it looks; else
    all of it.
    """
    from pyspark.sql import functions as f

    lake, table = context.lake, pipeline.table
    at = f.unix_micros("timestamp")
    first, last = rows.agg(f.min(at), f.max(at)).collect()[0] if pipeline.reach else (None, None)
    if first is None or last is None:
        return lake.read(context.spark, table, whole=True)
    reach = round((context.reach(pipeline) + 1) * 1e6)
    low, high = max(first - reach, -_MICROS_MAX), min(last + reach, _MICROS_MAX)
    files = lake.files_between(table, "timestamp", low, high)
    df = lake.read(context.spark, table, files=files, whole=True)
    ends = [f.timestamp_micros(f.lit(one)) for one in (low, high)]
    return df.where(f.col("timestamp").between(*ends))


def _touched(
    context: Context, pipeline: Pipeline, rows: DataFrame
) -> tuple[DataFrame | None, Replacing]:
    """What the table holds that the rows may change, and which of its files that is."""
    lake, table = context.lake, pipeline.table
    if not lake.has(table):
        return None, EVERYTHING
    if not has_buckets(pipeline):
        return lake.read(context.spark, table, whole=True), EVERYTHING
    touched = touched_by(pipeline, rows, context.reach(pipeline))
    df = lake.read(context.spark, table, only=touched.has, whole=True)
    return df.drop(BUCKET), touched


def _stage_side(
    context: Context, member: PipelineRun, name: str, frame: DataFrame
) -> StagedFiles | None:
    """A side table that does not take the rows is told and left out; the others go on. One that
    has the rows already, because the batch died behind it, is left as it is.
    """
    plan = member.plan
    if context.lake.version(name, plan.app) >= plan.version:
        return None
    try:
        return context.lake.stage(
            name, frame, app=plan.app, version=plan.version, partition_by=side_partitions(name),
            maker=member.pipeline.name,
        )  # fmt: skip
    except Conflict as problem:
        if str(problem) not in member.notes:
            member.notes.append(str(problem))
        return None


def _damaged(pipeline: Pipeline, rows: DataFrame) -> DataFrame:
    """The lines that a copy leaves out, as rows of quarantine."""
    from pyspark.sql import functions as f

    bad = rows.where(f"{CORRUPT} IS NOT NULL").withColumn("value", f.col(CORRUPT))
    bad = bad.withColumns({"reason": f.lit(checks.DAMAGED), "_rule": f.lit("whole")})
    return checks.refused(bad, pipeline.name, "_rule")


def with_events(pipeline: Pipeline, made: Output, rows: DataFrame) -> Output:
    """The output with the events of ``to_topic``, unless the transform made events itself."""
    if not pipeline.to_topic or made.events is not None:
        return made
    key = next((n for n in ("key", *pipeline.keys) if n in rows.columns), None)
    events = as_events(rows, pipeline.to_topic, pipeline.to_type, *([key] if key else []))
    return replace(made, events=events)


def _partition_by(pipeline: Pipeline) -> tuple[str, ...]:
    bucket = (BUCKET,) if has_buckets(pipeline) else ()
    return (*bucket, *pipeline.partition_by)


def upsert(table: DataFrame | None, rows: DataFrame, keys: tuple[str, ...]) -> DataFrame:
    """The table in which ``rows`` took the place of those with the same keys."""
    from pyspark.sql import functions as f

    if table is None:
        return rows.orderBy(*keys)
    new = rows.select(f.struct(*rows.columns).alias("row"), f.lit(1).alias("new"))
    missing = [name for name in rows.columns if name not in table.columns]
    table = table.withColumns({n: f.lit(None).cast(rows.schema[n].dataType) for n in missing})
    old = table.select(f.struct(*rows.columns).alias("row"), f.lit(0).alias("new"))
    latest = f.max_by("row", "new").alias("row")
    same = [f.col(f"row.`{key}`").alias(f"k{at}") for at, key in enumerate(keys)]
    return old.unionByName(new).groupBy(*same).agg(latest).select("row.*").orderBy(*keys)
