"""Running pipelines: from the log, through a transform, into the lake and back to the bus.

A batch is a range of offsets, noted in the lake before anything is written (see ``progress``), and
written once (see ``batch``). Pipelines of the log are run by ``records``, those of another table by
``tables``, those of what the bus is now by ``snapshots``, and those whose state Spark keeps by
``streams``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from trunkline.errors import TrunklineError
from trunkline.spark.lake import Lake
from trunkline.spark.pipelines.batch import open_member, upsert
from trunkline.spark.pipelines.context import BATCH_ROWS, COPIED_ROWS, Context
from trunkline.spark.pipelines.declare import RECORDS, SNAPSHOTS, Pipeline
from trunkline.spark.pipelines.patterns import topic_shape
from trunkline.spark.pipelines.rebuild import rebuild as rebuild_tables
from trunkline.spark.pipelines.records import LogRun, is_shared, select_log
from trunkline.spark.pipelines.replay import pick, replay
from trunkline.spark.pipelines.results import RunResult, read_outcomes, result_of
from trunkline.spark.pipelines.silver import SilverRun
from trunkline.spark.pipelines.snapshots import take_snapshot
from trunkline.spark.pipelines.streams import SLOW_START, STARTS, Queries, stop_all
from trunkline.spark.pipelines.tables import step_table
from trunkline.spark.source.offsets import catalog_of
from trunkline.spark.source.options import bus_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["RunResult", "Runner", "pick", "read_outcomes", "replay", "topic_shape", "upsert"]


@dataclass
class Runner:
    """Runs pipelines on one bus and one lake. ``Context`` tells what the options mean."""

    spark: SparkSession
    url: str
    lake: Lake
    publish: bool = False
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    since: str = ""
    until: str = ""
    batch_rows: int = BATCH_ROWS
    copied_rows: int = COPIED_ROWS

    def __post_init__(self) -> None:
        self.root = bus_of({"url": self.url})
        catalog_of(select_log(self.root, ".*")).close()
        self.context = Context(
            self.spark,
            self.root,
            self.lake,
            publish=self.publish,
            settings=self.settings,
            since=self.since,
            until=self.until,
            batch_rows=self.batch_rows,
            copied_rows=self.copied_rows,
        )
        self._queries = Queries(self.context)

    def run(
        self,
        pipelines: Iterable[Pipeline],
        done: Callable[[RunResult], None] | None = None,
        *,
        rebuild: bool = False,
    ) -> list[RunResult]:
        """Run each over what there is now, in this order. One that fails does not keep the others.
        ``done`` is told of each when it has ended: of those that read the log together, the one
        that is through first. ``rebuild`` makes each table anew beside the old one, and puts it in
        its place at the end.
        """
        results: list[RunResult] = []

        def tell(result: RunResult) -> None:
            results.append(result)
            if done is not None:
                done(result)

        waiting = list(pipelines)
        names = [one.name for one in waiting]
        while waiting:
            first = waiting[0]
            alike = next((test for test in (is_shared, _is_of_silver) if test(first)), None)
            group = [one for one in waiting if alike(one)] if alike else [first]
            waiting = [one for one in waiting if one not in group]
            if rebuild:
                for one in group:
                    tell(self._rebuild(one))
            elif first.source == RECORDS and not first.is_stream:
                for result in LogRun(self.context).run(group):
                    tell(result)
            elif first.is_of_silver:
                for result in SilverRun(self.context).run(group):
                    tell(result)
            else:
                tell(self._run_one(first))
        return sorted(results, key=lambda one: names.index(one.name))

    def _run_one(self, pipeline: Pipeline) -> RunResult:
        started = perf_counter()
        progress: Sequence[Any] = []
        problem = None
        member = None
        try:
            with self.context.alone(pipeline):
                if pipeline.is_stream:
                    progress = self._queries.finish(pipeline).recentProgress
                elif pipeline.source in SNAPSHOTS:
                    take_snapshot(self.context, pipeline, time.time_ns())
                else:
                    member = open_member(self.context, pipeline)
                    step_table(self.context, member)
        except Exception as error:  # noqa: BLE001 -- Spark's errors have no common base
            problem = error
        if member is not None:
            member.problem, member.seconds = problem, perf_counter() - started
            return member.result(self.context)
        return self._outcome(pipeline, progress, problem, perf_counter() - started)

    def _rebuild(self, pipeline: Pipeline) -> RunResult:
        if pipeline.is_stream or pipeline.source in SNAPSHOTS:
            if pipeline.is_stream:
                self._queries.forget(pipeline)
            return self._run_one(pipeline)
        return rebuild_tables(self.context, pipeline)

    def keep(
        self,
        pipelines: Iterable[Pipeline],
        done: Callable[[RunResult], None] | None = None,
        *,
        every_s: float = 5.0,
        until: Callable[[], bool] = lambda: False,
    ) -> list[RunResult]:
        """Run all of them together, as things happen, until ``until`` or none is left: one that
        fails does not keep the others. Returns those that failed; ``done`` was told of them, too.
        """
        from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]

        gone = (Py4JNetworkError, ConnectionError)
        try:
            return self._keep(pipelines, done, every_s, until, gone)
        except gone as error:
            hint = "run it again: nothing is done twice"
            raise TrunklineError("Spark has ended by itself", hint=hint) from error

    def _keep(
        self,
        pipelines: Iterable[Pipeline],
        done: Callable[[RunResult], None] | None,
        every_s: float,
        until: Callable[[], bool],
        gone: tuple[type[Exception], ...],
    ) -> list[RunResult]:
        seen: dict[str, int] = {}
        starts: Counter[str] = Counter()
        queries: dict[str, tuple[Pipeline, StreamingQuery]] = {}
        failed: list[RunResult] = []

        def tell(outcome: RunResult) -> None:
            if done is not None:
                done(outcome)

        def tell_news(outcome: RunResult) -> None:
            if outcome.error or outcome.events or outcome.version < 0:
                tell(outcome)

        def fail(pipeline: Pipeline, problem: Exception | None) -> None:
            queries.pop(pipeline.name, None)
            failed.append(self._outcome(pipeline, [], problem, 0.0))
            tell(failed[-1])

        def start(pipeline: Pipeline) -> None:
            starts[pipeline.name] += 1
            try:
                query = self._queries.start(pipeline, once=False, every_s=every_s)
            except gone:
                raise
            except Exception as error:  # noqa: BLE001 -- Spark's errors have no common base
                fail(pipeline, error)
            else:
                queries[pipeline.name] = (pipeline, query)

        with ExitStack() as locks:
            wanted = list(pipelines)
            turns = [one for one in wanted if not one.is_stream]
            for pipeline in wanted:
                if pipeline.is_stream:
                    locks.enter_context(self.context.alone(pipeline))
            locks.callback(stop_all, queries)
            for pipeline in wanted:
                if pipeline.is_stream:
                    start(pipeline)
            due = 0.0
            while (queries or turns) and not until():
                if turns and time.monotonic() >= due:
                    due = time.monotonic() + every_s
                    for result in self.run(turns, tell_news):
                        if result.error:
                            turns = [one for one in turns if one.name != result.name]
                            failed.append(result)
                time.sleep(0.05)
                for name, (pipeline, query) in list(queries.items()):
                    last = query.lastProgress
                    if not query.isActive:
                        problem = query.exception()
                        if SLOW_START in str(problem) and starts[name] < STARTS:
                            start(pipeline)
                        else:
                            fail(pipeline, problem)
                    elif (
                        last and seen.get(name) != last["batchId"] and self._is_news(pipeline, last)
                    ):
                        seen[name] = last["batchId"]
                        starts[name] = 0
                        took = last["durationMs"].get("triggerExecution", 0) / 1000
                        tell(self._outcome(pipeline, [last], None, took))
        return failed

    def _is_news(self, pipeline: Pipeline, progress: Any) -> bool:
        """Whether a batch did something: some only move the watermark on."""
        return bool(progress["numInputRows"] or self._queries.published.get(pipeline.name))

    def _outcome(
        self,
        pipeline: Pipeline,
        progress: Sequence[Any],
        problem: BaseException | None,
        seconds: float,
    ) -> RunResult:
        """The result of a run whose batches Spark counted."""
        return result_of(
            self.lake,
            pipeline,
            seconds,
            problem,
            version=max((one["batchId"] for one in progress), default=-1),
            published=sum(self._queries.published.pop(pipeline.name, {}).values()),
            events=sum(one["numInputRows"] for one in progress),
        )


def _is_of_silver(pipeline: Pipeline) -> bool:
    return pipeline.is_of_silver
