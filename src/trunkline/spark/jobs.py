"""Running pipelines: from the log, through a transform, into the lake and back to the bus.

Each table carries the version of the log it was made from, each record sent back does too, so a run
that died is simply run again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from trunkline.errors import TrunklineError
from trunkline.log.atomic import replace_file
from trunkline.log.folder import Folder
from trunkline.options import StoreOptions
from trunkline.spark.choice import folder_of
from trunkline.spark.extents import Catalog
from trunkline.spark.lake import EVENTS, DeltaSource, Lake
from trunkline.spark.pipelines import Pipeline, all_pipelines
from trunkline.spark.said import cause_of
from trunkline.spark.sink import sent_version
from trunkline.topics import matches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_GROUPS = (
    "topic string, partition int, `group` string, floor bigint, first bigint, next bigint, "
    "lag bigint"
)


class Ran(msgspec.Struct, frozen=True):
    """How one run of a pipeline ended."""

    name: str
    rows: int
    seconds: float
    at: str
    version: int
    published: int = 0
    error: str = ""


@dataclass
class Runner:
    """Runs pipelines on one bus and one lake."""

    spark: SparkSession
    url: str
    lake: Lake

    def __post_init__(self) -> None:
        self.root = folder_of({"url": self.url})
        Catalog(self.root).close()
        self.spark.dataSource.register(DeltaSource)

    def run(
        self, pipelines: Iterable[Pipeline], done: Callable[[Ran], None] | None = None
    ) -> list[Ran]:
        """Run each to its end. One that fails is reported and does not keep the others."""
        outcomes = []
        for pipeline in pipelines:
            outcome = self._one(pipeline)
            outcomes.append(outcome)
            self._note(outcome)
            if done is not None:
                done(outcome)
        return outcomes

    def _one(self, pipeline: Pipeline) -> Ran:
        started = perf_counter()
        version = self.version()
        rows = published = 0
        error = ""
        try:
            if pipeline.kind == "stream":
                query = self.follow(pipeline, once=True)
                query.awaitTermination()
                rows = sum(p["numInputRows"] for p in query.recentProgress)
            else:
                rows, published = self._table(pipeline, version)
        except Exception as problem:  # noqa: BLE001 -- Spark's errors have no common base
            error = cause_of(problem) or _first_line(problem)
        return Ran(
            pipeline.name,
            rows,
            round(perf_counter() - started, 2),
            datetime.now(UTC).isoformat(timespec="seconds"),
            version,
            published,
            error,
        )

    def version(self) -> int:
        """A number that grows with the log, apart from what pipelines publish themselves."""
        own = {pipeline.to_topic for pipeline in all_pipelines().values()}
        catalog = Catalog(self.root)
        try:
            return sum(
                catalog.reader(topic, partition).head().next
                for topic, partitions in catalog.topics().items()
                if topic not in own
                for partition in range(partitions)
            )
        finally:
            catalog.close()

    def _table(self, pipeline: Pipeline, version: int) -> tuple[int, int]:
        df = self.source(pipeline)
        if df is None:
            return 0, 0
        result = pipeline.transform(df)
        if pipeline.refused:
            result = result.cache()
            refused = result.where("reason IS NOT NULL")
            self.lake.replace(pipeline.refused, refused, app=pipeline.name, version=version)
            result = result.where("reason IS NULL").drop("reason")
        rows = self.lake.replace(pipeline.name, result, app=pipeline.name, version=version)
        published = 0
        if pipeline.to_topic and rows:
            published = self._publish(pipeline, version)
        return rows, published

    def _publish(self, pipeline: Pipeline, version: int) -> int:
        """Send the table's rows back as events, once for each version. Returns how many."""
        app = f"pipeline.{pipeline.name}"
        if sent_version(self.root, app) >= version:
            return 0
        df = self.lake.read(self.spark, pipeline.name)
        key = next((n for n in ("key", "actor", "action", "topic") if n in df.columns), None)
        events = df.selectExpr(
            "to_json(struct(*)) AS value",
            f"CAST(`{key}` AS STRING) AS key" if key else "CAST(NULL AS STRING) AS key",
            f"'{pipeline.to_type}' AS type",
            f"'pipeline.{pipeline.name}' AS actor",
        )
        writer = events.write.format("trunkline").mode("append")
        writer.options(
            url=f"file:{self.root}",
            topic=pipeline.to_topic,
            txnAppId=app,
            txnVersion=str(version),
        ).save()
        return events.count()

    def follow(self, pipeline: Pipeline, *, once: bool) -> StreamingQuery:
        """Start a pipeline of kind ``stream``."""
        source = self.spark.readStream.format("trunkline").options(
            url=f"file:{self.root}",
            subscribePattern=".*",
            startingOffsets="earliest",
            includeHeaders="true",
            groupId=f"pipeline.{pipeline.name}",
            maxOffsetsPerTrigger="250000",
        )
        writer = (
            pipeline.transform(source.load())
            .writeStream.format("trunkline_lake")
            .queryName(pipeline.name)
            .options(path=self.lake.place(EVENTS), partitionBy="topic,date", apart="partition")
            .option("checkpointLocation", os.path.join(self.lake.path, "_checks", pipeline.name))
        )
        writer = (
            writer.trigger(availableNow=True) if once else writer.trigger(processingTime="1 second")
        )
        return writer.start()

    def source(self, pipeline: Pipeline) -> DataFrame | None:
        """What a pipeline reads; None if the bus has nothing of it."""
        if pipeline.source == "groups":
            return self.spark.createDataFrame(self._groups(), _GROUPS)
        catalog = Catalog(self.root)
        try:
            topics = catalog.topics()
        finally:
            catalog.close()
        if pipeline.source == "segments":
            rows = [(self.root, t, p) for t, count in topics.items() for p in range(count)]
            return self.spark.createDataFrame(rows, "root string, topic string, partition int")
        own = {one.to_topic for one in all_pipelines().values()}
        picked = [t for t in topics if _wanted(pipeline.topics, t) and t not in own]
        if not picked:
            return None
        reader = self.spark.read.format("trunkline").options(
            url=f"file:{self.root}", subscribe=",".join(picked), includeHeaders="true"
        )
        if pipeline.columns:
            reader = reader.schema(_schema(pipeline.columns))
        return reader.load()

    def _groups(self) -> list[tuple[Any, ...]]:
        folder = Folder(self.root, StoreOptions(create=False, reserve_bytes=0))
        try:
            rows = []
            for key in folder.groups():
                group = folder.group(key)
                first, end = folder.bounds(key.topic, key.partition)
                rows.append((*key, group.floor, first, end, group.lag(end)))
            return rows
        finally:
            folder.close()

    def _note(self, outcome: Ran) -> None:
        os.makedirs(self.lake.path, exist_ok=True)
        known = {one.name: one for one in read_outcomes(self.lake)}
        known[outcome.name] = outcome
        path = os.path.join(self.lake.path, "_runs.json")
        replace_file(path, msgspec.json.encode(list(known.values())) + b"\n")


def read_outcomes(lake: Lake) -> list[Ran]:
    """How each pipeline ended when it last ran."""
    try:
        with open(os.path.join(lake.path, "_runs.json"), "rb") as file:
            return msgspec.json.decode(file.read(), type=list[Ran])
    except FileNotFoundError:
        return []


def replay(
    spark: SparkSession,
    source: dict[str, str],
    target: dict[str, str],
    *,
    where: str = "",
    lake: Lake | None = None,
) -> int:
    """Send records of a log, or of the lake, to a topic once more. Returns how many."""
    if lake is not None:
        df = lake.read(spark, EVENTS).drop("date", "timestampType")
        if source.get("subscribe"):
            df = df.where(df.topic.isin(source["subscribe"].split(",")))
    else:
        given = {"includeHeaders": "true"} | source
        df = spark.read.format("trunkline").options(**given).load().drop("timestampType")
    df = pick(df, where) if where else df
    own = ("offset", "partition", "id", "idem_key", "cause", "date")
    columns = [column for column in df.columns if column not in own]
    rows = df.orderBy("timestamp", "partition", "offset").select(*columns, df.id.alias("cause"))
    if "topic" in target:
        rows = rows.drop("topic")
    count = df.count()
    rows.coalesce(1).write.format("trunkline").options(**target).mode("append").save()
    return count


def pick(df: DataFrame, where: str) -> DataFrame:
    """The rows that a ``where`` wants: the same text as in subscribe and on the command line."""
    from trunkline.where import to_spark

    other = {"ts": "timestamp", "payload": "value"}
    extra = {name: df[column] for name, column in other.items() if name not in df.columns}
    return df.withColumns(extra).where(to_spark(where)).drop(*extra)


def _wanted(pattern: str, topic: str) -> bool:
    if pattern == ">":
        return not topic.startswith("system.") and not topic.endswith(".DLQ")
    if pattern.endswith(".DLQ"):
        return topic.endswith(".DLQ")
    return matches(pattern, topic)


def _schema(columns: str) -> str:
    from trunkline.spark.columns import COLUMNS, true_name

    return ", ".join(f"`{name}` {COLUMNS[true_name(name)].ddl}" for name in columns.split(","))


def _first_line(problem: BaseException) -> str:
    if isinstance(problem, TrunklineError):
        return str(problem)
    return next((line for line in str(problem).splitlines() if line.strip()), repr(problem))[:300]
