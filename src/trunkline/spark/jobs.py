"""Running pipelines: from the log, through a transform, into the lake and back to the bus.

A pipeline is one streaming query whose checkpoint lies beside its table. A batch first publishes
what it has to say and adds to the other tables, and commits its own table last; each step is done
once for a query and batch. So a batch that died anywhere is simply done again, from the same
records and the same table.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from trunkline.errors import Conflict, LockTimeout, TrunklineError
from trunkline.log import atomic
from trunkline.log.folder import Folder
from trunkline.log.upkeep import LAKE_GROUP
from trunkline.options import StoreOptions
from trunkline.spark.choice import folder_of
from trunkline.spark.columns import COLUMNS, true_name
from trunkline.spark.extents import Catalog
from trunkline.spark.lake import EVENTS, WHOLE, Lake
from trunkline.spark.pipelines import ACTOR, Made, Pipeline, as_events
from trunkline.spark.replay import pick, replay
from trunkline.spark.said import line_of
from trunkline.spark.tidy import tidy
from trunkline.topics import is_dead

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Ran", "Runner", "pick", "read_outcomes", "replay", "topic_shape", "upsert"]

_GROUPS: Final = (
    "topic string, partition int, `group` string, floor bigint, first bigint, next bigint, "
    "lag bigint"
)
_SEGMENTS: Final = "root string, topic string, partition int, segment bigint"
_BATCH: Final = 250_000
_COPIED: Final = 1_000_000  # rows of a batch that is only written: each makes files of its own
_TASKS: Final = 64
_ALIVE: Final = r"(?!.*\.DLQ$)"  # a topic that does not hold dead letters
_TIDY_EVERY: Final = 50  # batches
# Spark gives a worker ten seconds to start, which a busy machine may not keep; a query that failed
# so is simply begun again.
_STARTS: Final = 3
_SLOW_START: Final = "Python worker failed to connect back"


class Ran(msgspec.Struct, frozen=True):
    """How one run of a pipeline ended: the rows its table has now, and the events it read."""

    name: str
    rows: int
    seconds: float
    at: str
    version: int
    published: int = 0
    error: str = ""
    events: int = 0
    set_aside: int = 0  # the rows of the table ``refused``
    refused: str = ""


@dataclass
class Runner:
    """Runs pipelines on one bus and one lake."""

    spark: SparkSession
    url: str
    lake: Lake

    def __post_init__(self) -> None:
        self.root = folder_of({"url": self.url})
        Catalog(self.root).close()
        self._published: dict[str, dict[int, int]] = {}  # by name and batch, until told

    def run(self, pipelines: Iterable[Pipeline]) -> list[Ran]:
        """Run each over what there is now. One that fails does not keep the others."""
        outcomes = []
        for pipeline in pipelines:
            started = perf_counter()
            progress, problem = [], None
            try:
                with self._alone(pipeline):
                    if pipeline.source == "records":
                        progress = self._finish(pipeline).recentProgress
                    else:
                        self._snapshot(pipeline, time.time_ns())
            except Exception as error:  # noqa: BLE001 -- Spark's errors have no common base
                problem = error
            outcomes.append(self._outcome(pipeline, progress, problem, perf_counter() - started))
        return outcomes

    def _finish(self, pipeline: Pipeline) -> StreamingQuery:
        """Run a query over what there is."""
        for attempt in range(_STARTS):
            query = self.follow(pipeline, once=True)
            try:
                query.awaitTermination()
                break
            except Exception as error:
                if _SLOW_START not in str(error) or attempt == _STARTS - 1:
                    raise
        return query

    def keep(
        self,
        pipelines: Iterable[Pipeline],
        done: Callable[[Ran], None] | None = None,
        *,
        every_s: float = 5.0,
        until: Callable[[], bool] = lambda: False,
    ) -> list[Ran]:
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
        done: Callable[[Ran], None] | None,
        every_s: float,
        until: Callable[[], bool],
        gone: tuple[type[Exception], ...],
    ) -> list[Ran]:
        seen: dict[str, int] = {}
        starts: Counter[str] = Counter()
        queries: dict[str, tuple[Pipeline, StreamingQuery]] = {}
        failed: list[Ran] = []

        def tell(outcome: Ran) -> None:
            if done is not None:
                done(outcome)

        def fail(pipeline: Pipeline, problem: Exception | None) -> None:
            queries.pop(pipeline.name, None)
            failed.append(self._outcome(pipeline, [], problem, 0.0))
            tell(failed[-1])

        def start(pipeline: Pipeline) -> None:
            starts[pipeline.name] += 1
            try:
                query = self.follow(pipeline, once=False, every_s=every_s)
            except gone:
                raise
            except Exception as error:  # noqa: BLE001 -- Spark's errors have no common base
                fail(pipeline, error)
            else:
                queries[pipeline.name] = (pipeline, query)

        with ExitStack() as held:
            wanted = list(pipelines)
            for pipeline in wanted:
                held.enter_context(self._alone(pipeline))
            held.callback(_stop, queries)
            for pipeline in wanted:
                start(pipeline)
            while queries and not until():
                time.sleep(0.2)
                for name, (pipeline, query) in list(queries.items()):
                    last = query.lastProgress
                    if not query.isActive:
                        problem = query.exception()
                        if _SLOW_START in str(problem) and starts[name] < _STARTS:
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
        came = progress["numInputRows"] or self._published.get(pipeline.name)
        return pipeline.source != "records" or bool(came)

    def follow(self, pipeline: Pipeline, *, once: bool, every_s: float = 1.0) -> StreamingQuery:
        """Start the query of a pipeline."""
        check = os.path.join(self.lake.path, "_checks", pipeline.name)
        if pipeline.source == "records":
            df = self._stream(pipeline)

            def step(rows: DataFrame, batch: int) -> None:
                self._step(pipeline, rows, batch, _query_id(check))
        else:
            df = self.spark.readStream.format("rate").load()

            def step(rows: DataFrame, batch: int) -> None:  # noqa: ARG001
                self._snapshot(pipeline, time.time_ns())

        writer = df.writeStream.foreachBatch(step).queryName(pipeline.name)
        writer = writer.outputMode("update" if pipeline.sink == "upsert" else "append")
        writer = writer.option("checkpointLocation", check)
        if once:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{max(1, int(every_s * 1000))} milliseconds")
        return writer.start()

    def _stream(self, pipeline: Pipeline) -> DataFrame:
        options = {
            "url": f"file:{self.root}",
            "subscribePattern": topic_shape(pipeline.topics),
            "startingOffsets": "earliest",
            "includeHeaders": "true",
            "maxOffsetsPerTrigger": str(_BATCH),
        }
        if pipeline.into == EVENTS:  # retention can wait for it
            options |= {"groupId": LAKE_GROUP, "maxOffsetsPerTrigger": str(_COPIED)}
        elif self.lake.has(EVENTS):  # what retention removed is there
            options |= {"tier": "auto", "lake": self.lake.path}
        reader = self.spark.readStream.format("trunkline").options(**options)
        if pipeline.columns:
            names = dict.fromkeys([*pipeline.columns.split(","), "actor"])
            reader = reader.schema(
                ", ".join(f"`{name}` {COLUMNS[true_name(name)].ddl}" for name in names)
            )
        df = reader.load()
        if not pipeline.echoes:
            df = df.where(f"actor IS NULL OR NOT startswith(actor, '{ACTOR}')")
        if pipeline.watermark:
            df = df.withWatermark("timestamp", pipeline.watermark)
        if pipeline.stream is not None:
            return pipeline.stream(df)
        if pipeline.asks:
            return df
        made = pipeline.transform(df)
        return made.table if isinstance(made, Made) else made

    def _step(self, pipeline: Pipeline, df: DataFrame, batch: int, query: str) -> None:
        """One batch, once."""
        lake, table = self.lake, pipeline.into
        if lake.version(table, query) >= batch:
            # Done, but Spark may still lack its own state of this batch.
            df.write.format("noop").mode("overwrite").save()
            return
        plain = pipeline.sink == "add" and not (pipeline.asks or pipeline.to_topic)
        df = df if plain else df.persist()
        held = [] if plain else [df]
        try:
            if not plain and lake.has(table) and df.isEmpty():
                return
            made = self._made(pipeline, df)
            held += made.held
            for name, rows in made.beside.items():
                lake.write(name, rows, app=query, version=batch)
            if made.events is not None:
                self._publish(pipeline, made.events, query, batch)
            lake.write(
                table,
                made.table,
                app=query,
                version=batch,
                by=pipeline.by,
                apart=pipeline.apart,
                replacing="" if pipeline.sink == "add" else pipeline.live or WHOLE,
            )
            if batch % _TIDY_EVERY == _TIDY_EVERY - 1:
                for name in (*made.beside, table):
                    tidy(lake, name)
        finally:
            for one in held:
                one.unpersist()

    def _made(self, pipeline: Pipeline, df: DataFrame) -> Made:
        before = None
        if self.lake.has(pipeline.into):
            before = self.lake.read(self.spark, pipeline.into, live=pipeline.live, whole=True)
        if pipeline.asks:
            known = {"table": before, "bus": self.root}
            made = pipeline.transform(df, **{name: known[name] for name in pipeline.asks})
            made = made if isinstance(made, Made) else Made(made)
        else:
            made = Made(upsert(before, df, pipeline.keys) if pipeline.sink == "upsert" else df)
        if pipeline.to_topic and made.events is None:
            key = next((n for n in ("key", *pipeline.keys) if n in df.columns), None)
            rows = made.table if pipeline.asks else df
            events = as_events(rows, pipeline.to_topic, pipeline.to_type, *([key] if key else []))
            made = replace(made, events=events)
        return made

    def _publish(self, pipeline: Pipeline, events: DataFrame, query: str, batch: int) -> None:
        from pyspark.sql import functions as f

        events = events.withColumn("actor", f.lit(f"{ACTOR}{pipeline.name}")).persist()
        try:
            count = events.count()
            if count:
                events.write.format("trunkline").mode("append").options(
                    url=f"file:{self.root}", txnAppId=query, txnVersion=str(batch)
                ).save()
            self._published.setdefault(pipeline.name, {})[batch] = count
        finally:
            events.unpersist()

    # -- pipelines of what is, not of what happened --------------------------------------------

    def _snapshot(self, pipeline: Pipeline, version: int) -> None:
        if pipeline.source == "groups":
            df = self.spark.createDataFrame(self._groups(), _GROUPS)
        else:
            rows = self._segments()
            df = self.spark.createDataFrame(rows, _SEGMENTS)
            df = df.repartition(max(1, min(len(rows), _TASKS)))
        made = pipeline.transform(df)
        table = made.table if isinstance(made, Made) else made
        self.lake.write(pipeline.into, table, app=pipeline.name, version=version, replacing=WHOLE)

    def _segments(self) -> list[tuple[Any, ...]]:
        catalog = Catalog(self.root)
        try:
            return [
                (self.root, topic, partition, number)
                for topic, partitions in catalog.topics().items()
                for partition in range(partitions)
                for number in [s.number for s in catalog.reader(topic, partition).files()] or [0]
            ]
        finally:
            catalog.close()

    def _groups(self) -> list[tuple[Any, ...]]:
        folder = Folder(self.root, StoreOptions(create=False, reserve_bytes=0))
        try:
            rows = []
            for key in folder.groups():
                group = folder.group(key)
                first, end = folder.bounds(key.topic, key.partition)
                rows.append((*key, group.floor, first, end, group.lag(end, first)))
            return rows
        finally:
            folder.close()

    # -- what is known of runs -----------------------------------------------------------------

    @contextmanager
    def _alone(self, pipeline: Pipeline) -> Iterator[None]:
        """Nobody else runs this pipeline on this lake."""
        place = os.path.join(self.lake.path, "_checks")
        atomic.make_dir(place)
        path = os.path.join(place, f"{pipeline.name}.lock")
        fd = atomic.open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            try:
                atomic.lock(fd, 0.0, path)
            except LockTimeout:
                raise Conflict(
                    f"pipeline {pipeline.name} runs already on {self.lake.path}",
                    hint="wait for it, or name another --lake",
                ) from None
            yield
        finally:
            os.close(fd)

    def _outcome(
        self,
        pipeline: Pipeline,
        progress: Sequence[Any],
        problem: BaseException | None,
        seconds: float,
    ) -> Ran:
        error = line_of(problem) if problem is not None else ""
        outcome = Ran(
            name=pipeline.name,
            rows=self.lake.rows(pipeline.into),
            seconds=round(seconds, 2),
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            version=max((one["batchId"] for one in progress), default=-1),
            published=sum(self._published.pop(pipeline.name, {}).values()),
            error=error,
            events=sum(one["numInputRows"] for one in progress),
            set_aside=self.lake.rows(pipeline.refused) if pipeline.refused else 0,
            refused=pipeline.refused,
        )
        known = {one.name: one for one in read_outcomes(self.lake)} | {outcome.name: outcome}
        atomic.make_dir(self.lake.path)
        path = os.path.join(self.lake.path, "_runs.json")
        atomic.replace_file(path, msgspec.json.encode(list(known.values())) + b"\n")
        return outcome


def upsert(table: DataFrame | None, rows: DataFrame, keys: tuple[str, ...]) -> DataFrame:
    """The table in which ``rows`` took the place of those with the same keys."""
    from pyspark.sql import functions as f

    if table is None:
        return rows.orderBy(*keys)
    old = table.select(f.struct(*rows.columns).alias("row"), f.lit(0).alias("new"))
    new = rows.select(f.struct(*rows.columns).alias("row"), f.lit(1).alias("new"))
    latest = f.max_by("row", "new").alias("row")
    same = [f.col(f"row.`{key}`").alias(f"k{at}") for at, key in enumerate(keys)]
    return old.unionByName(new).groupBy(*same).agg(latest).select("row.*").orderBy(*keys)


def topic_shape(pattern: str) -> str:
    """A pattern of topics as a regular expression. None is every topic; ``>`` alone leaves out what
    the bus says of itself; ``*.DLQ`` are the dead letters of every topic, which no pattern has that
    does not end so.
    """
    if not pattern:
        return ".*"
    if pattern == ">":
        return rf"(?!system\.){_ALIVE}.*"
    if pattern == "*.DLQ":
        return r".*\.DLQ"
    words = [re.escape(word) for word in pattern.split(".")]
    if words[-1] == ">":
        words[-1] = ".+"
    shape = r"\.".join(r"[^.]+" if word == r"\*" else word for word in words)
    return shape if is_dead(pattern) else _ALIVE + shape


def read_outcomes(lake: Lake) -> list[Ran]:
    """How each pipeline ended when it last ran."""
    try:
        with open(os.path.join(lake.path, "_runs.json"), "rb") as file:
            return msgspec.json.decode(file.read(), type=list[Ran])
    except FileNotFoundError:
        return []


def _query_id(check: str) -> str:
    """The id that Spark gave the query when its checkpoint was begun."""
    with open(os.path.join(check, "metadata"), "rb") as file:
        return str(msgspec.json.decode(file.read())["id"])


def _stop(queries: dict[str, tuple[Pipeline, StreamingQuery]]) -> None:
    """Stop each between two batches, for Spark is noisy when it is stopped within one."""
    deadline = time.monotonic() + 30
    left = [query for _, query in queries.values()]
    while left := [query for query in left if query.isActive]:
        for query in left:
            if not query.status["isTriggerActive"] or time.monotonic() > deadline:
                query.stop()
        time.sleep(0.02)
