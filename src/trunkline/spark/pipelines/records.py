"""Pipelines of the log. Those that are equally far share one scan of it; what the lake has of the
log is read there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Final

from trunkline.folder.upkeep import LAKE_GROUP
from trunkline.spark.lake import EVENTS, event_files
from trunkline.spark.pipelines.batch import PipelineRun, Scanned, open_member, write_batch
from trunkline.spark.pipelines.context import Context
from trunkline.spark.pipelines.declare import ACTOR, RECORDS, Pipeline
from trunkline.spark.pipelines.patterns import topic_shape
from trunkline.spark.pipelines.results import RunResult, result_of
from trunkline.spark.source.catalogs import Catalog, is_remote
from trunkline.spark.source.columns import COLUMNS, CORRUPT, true_name
from trunkline.spark.source.offsets import Place, catalog_of, resolve, spans_between
from trunkline.spark.source.options import Selection, read_options
from trunkline.spark.source.plan import admit_rows
from trunkline.spark.source.progress_group import Mirror

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PLACE: Final = ("topic", "partition", "offset", "timestamp", "actor")


def is_shared(pipeline: Pipeline) -> bool:
    """Whether a pipeline can share a scan of the log."""
    return pipeline.source == RECORDS and not pipeline.is_stream and pipeline.table != EVENTS


def select_log(root: str, pattern: str, **more: str) -> Selection:
    options = {"url": root, "subscribePattern": pattern, **more}
    return read_options(options, stream=False)


@dataclass
class LogRun:
    """One run of pipelines that read the log. The result of each comes when it is done."""

    context: Context

    def run(self, pipelines: Sequence[Pipeline]) -> Iterator[RunResult]:
        with ExitStack() as locks:
            members = []
            for pipeline in pipelines:
                try:
                    locks.enter_context(self.context.alone(pipeline))
                    members.append(open_member(self.context, pipeline))
                except Exception as error:  # noqa: BLE001 -- Spark's errors have no common base
                    yield result_of(self.context.lake, pipeline, 0.0, error)
            catalog = catalog_of(select_log(self.context.root, ".*"))
            try:
                for member in members:
                    self._locate(catalog, member)
            finally:
                catalog.close()
            for member in members:
                if not member.is_behind:
                    yield member.result(self.context)
            while behind := [one for one in members if one.is_behind]:
                for member in self._turn(behind):
                    if not member.is_behind:
                        yield member.result(self.context)

    def _locate(self, catalog: Catalog, member: PipelineRun) -> None:
        """Where a pipeline is, and where the log ends now."""
        context, pipeline = self.context, member.pipeline
        bounds = {"startingTimestamp": context.since} if context.since else {}
        bounds |= {"endingTimestamp": context.until} if context.until else {}
        if bounds:
            bounds["startingOffsetsByTimestampStrategy"] = "latest"
        if bronze := context.bronze(pipeline):
            bounds |= {"tier": "auto", "lake": bronze}
        choice = select_log(context.root, topic_shape(pipeline.topics), **bounds)
        files = event_files(bronze) if bronze else []
        first = resolve(catalog, choice, "starting", files)
        target = resolve(catalog, choice, "ending", files)
        known = member.plan.start if member.is_open else member.plan.end
        if not known and pipeline.table == EVENTS:
            known = self._copied()
        member.place = {
            topic: {p: known.get(topic, {}).get(p, at) for p, at in parts.items()}
            for topic, parts in first.items()
        }
        member.target = {
            topic: {p: max(at, member.place[topic][p]) for p, at in parts.items()}
            for topic, parts in target.items()
        }

    def _copied(self) -> Place:
        """Where the table of events ends, by its own files."""
        place: Place = {}
        lake = self.context.lake
        for file in event_files(lake.path) if lake.has(EVENTS) else []:
            parts = place.setdefault(file.topic, {})
            number = str(file.partition)
            parts[number] = max(parts.get(number, 1), file.last + 1)
        return place

    def _turn(self, behind: list[PipelineRun]) -> Iterator[PipelineRun]:
        """One batch of those that can share it. Each comes when it has done its part."""
        again = next((one for one in behind if one.is_open), None)
        if again is not None:
            yield from self._batch([again], again.plan.start, again.plan.end)
            return
        leader = max(behind, key=lambda one: len(one.target))
        group = [leader, *(one for one in behind if one is not leader and _fits(leader, one))]
        start = _union(one.place for one in group)
        target = _union(one.target for one in group)
        is_copy = leader.pipeline.table == EVENTS
        rows = self.context.copied_rows if is_copy else self.context.batch_rows
        yield from self._batch(group, start, admit_rows(start, target, rows))

    def _batch(self, members: list[PipelineRun], start: Place, end: Place) -> Iterator[PipelineRun]:
        df = self._scan(members, start, end)
        once = len(members) == 1 and self._looks_once(members[0].pipeline)
        df = df if once else df.persist()
        try:
            for member in members:
                began = perf_counter()
                mine = {t: end[t] for t in (member.target or end) if t in end}
                if member.is_open:
                    mine = end
                here = {t: {p: start[t][p] for p in parts} for t, parts in mine.items()}
                try:
                    self._step(member, df, here, mine)
                except Exception as error:  # noqa: BLE001 -- Spark's errors have no common base
                    member.problem = error
                    self.context.lake.sweep(member.plan.app)
                member.seconds += perf_counter() - began
                yield member
        finally:
            if not once:
                df.unpersist()

    def _looks_once(self, pipeline: Pipeline) -> bool:
        """Whether the rows of this batch are looked at once, so that keeping them gains nothing."""
        first = pipeline.reads_once and not self.context.lake.has(pipeline.table)
        return _is_plain(pipeline) or (first and not (pipeline.to_topic or pipeline.rules))

    def _scan(self, members: Sequence[PipelineRun], start: Place, end: Place) -> DataFrame:
        wanted: dict[str, None] = dict.fromkeys(_PLACE)
        for member in members:
            names = member.pipeline.columns.split(",") if member.pipeline.columns else COLUMNS
            wanted |= dict.fromkeys(true_name(name) for name in names)
        bronze = self.context.bronze(members[0].pipeline)
        return self._read(start, end, list(wanted), bronze=bronze, damaged=True)

    def _read(
        self, start: Place | None, end: Place, names: list[str], *, bronze: str, damaged: bool
    ) -> DataFrame:
        words = [f"`{name}` {COLUMNS[name].ddl}" for name in names]
        if damaged:
            words.append(f"{CORRUPT} string")
        offsets = json.dumps(start) if start is not None else "earliest"
        assigned = {topic: sorted(map(int, parts)) for topic, parts in end.items() if parts}
        options = {
            "url": self.context.root,
            "assign": json.dumps(assigned),
            "startingOffsets": offsets,
            "endingOffsets": json.dumps(end),
            "badRecords": "column" if damaged else "skip",
        }
        if bronze:  # what the lake has is read from there
            options |= {"tier": "auto", "lake": bronze}
        reader = self.context.spark.read.format("trunkline").options(**options)
        return reader.schema(", ".join(words)).load()

    def _step(self, member: PipelineRun, df: DataFrame, start: Place, end: Place) -> None:
        """One batch of one pipeline, once."""
        pipeline = member.pipeline
        member.begin(start, end)
        rows = _rows_of(pipeline, df, list(end))

        def history() -> DataFrame:
            """Every record of the pipeline's topics up to the end of this batch."""
            names = [true_name(n) for n in pipeline.columns.split(",")] if pipeline.columns else []
            names = list(dict.fromkeys([*_PLACE, *(names or COLUMNS)]))
            bronze = self.context.bronze(pipeline)
            found = self._read(None, end, names, bronze=bronze, damaged=False)
            return _rows_of(pipeline, found, list(end))

        count = sum(span.end - span.start for span in spans_between(start, end))
        mirror = self._mirror(pipeline)
        if mirror is not None and member.plan.version == 0:
            mirror.begin(start)
        write_batch(self.context, member, rows, history, scanned=Scanned(df, count))
        if mirror is not None:
            mirror.advance(end)
            mirror.close()
        member.place = {**member.place, **end}
        member.events += count

    def _mirror(self, pipeline: Pipeline) -> Mirror | None:
        """The group that retention waits for."""
        if pipeline.table != EVENTS or is_remote(self.context.root):
            return None
        return Mirror(self.context.root, LAKE_GROUP)


def _rows_of(pipeline: Pipeline, df: DataFrame, topics: list[str]) -> DataFrame:
    """What a pipeline gets of a scan that others share."""
    from pyspark.sql import functions as f

    rows = df.where(f.col("topic").isin(topics)) if pipeline.topics not in ("", ">") else df
    if pipeline.topics == ">":
        rows = rows.where(f.col("topic").rlike(f"^{topic_shape('>')}$"))
    if not pipeline.reads_published:
        rows = rows.where(f"actor IS NULL OR NOT startswith(actor, '{ACTOR}')")
    if CORRUPT in rows.columns and not pipeline.reads_damaged:
        rows = rows.where(f"{CORRUPT} IS NULL").drop(CORRUPT)
    if pipeline.columns:
        names = [name for name in pipeline.columns.split(",") if name not in _PLACE]
        extra = [CORRUPT] if CORRUPT in rows.columns else []
        rows = rows.select(*_PLACE, *(f.col(true_name(n)).alias(n) for n in names), *extra)
    return pipeline.prepare(rows) if pipeline.prepare is not None else rows


def _is_plain(pipeline: Pipeline) -> bool:
    """Whether its rows are looked at once."""
    return pipeline.sink == "add" and not (
        pipeline.parameters or pipeline.to_topic or pipeline.rules
    )


def _fits(leader: PipelineRun, other: PipelineRun) -> bool:
    """Whether two are equally far wherever both read."""
    common = leader.place.keys() & other.place.keys()
    return all(leader.place[topic] == other.place[topic] for topic in common)


def _union(places: Iterable[Place]) -> Place:
    found: Place = {}
    for place in places:
        for topic, parts in place.items():
            found.setdefault(topic, {}).update(parts)
    return {topic: found[topic] for topic in sorted(found)}
