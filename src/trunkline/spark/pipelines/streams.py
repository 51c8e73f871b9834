"""Pipelines whose state Spark keeps: joins and windows with a watermark, as streaming queries."""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING, Final

import msgspec

from trunkline.errors import InvalidOption
from trunkline.spark.lake import EVENTS, EVERYTHING, NOTHING
from trunkline.spark.lake.optimize import optimize
from trunkline.spark.pipelines import rules as checks
from trunkline.spark.pipelines.batch import OPTIMIZE_EVERY, upsert, with_events
from trunkline.spark.pipelines.context import Context
from trunkline.spark.pipelines.declare import ACTOR, Output, Pipeline
from trunkline.spark.pipelines.patterns import topic_shape
from trunkline.spark.pipelines.swap import side_partitions
from trunkline.spark.source.columns import COLUMNS, true_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

# Spark gives a worker ten seconds to start, which a busy machine may not keep; a query that failed
# so is simply begun again.
STARTS: Final = 3
SLOW_START: Final = "Python worker failed to connect back"


class Queries:
    """Starts the queries of pipelines, and counts the events that their batches published."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.published: dict[str, dict[int, int]] = {}  # by name and batch, until told

    def finish(self, pipeline: Pipeline) -> StreamingQuery:
        """Run a query over what there is."""
        for attempt in range(STARTS):
            query = self.start(pipeline, once=True)
            try:
                query.awaitTermination()
                break
            except Exception as error:
                if SLOW_START not in str(error) or attempt == STARTS - 1:
                    raise
        return query

    def start(self, pipeline: Pipeline, *, once: bool, every_s: float = 1.0) -> StreamingQuery:
        """Start the query of a pipeline."""
        if self.context.since or self.context.until:
            raise InvalidOption(
                f"pipeline {pipeline.name} keeps its state in Spark and reads the whole log",
                hint="run it without --from and --to",
            )
        check = self._check(pipeline)
        df = self._rows(pipeline)
        swept: set[str] = set()

        def step(rows: DataFrame, batch: int) -> None:
            query = _query_id(check)
            if query not in swept:  # what a killed run left behind
                self.context.lake.sweep(query)
                swept.add(query)
            self._step(pipeline, rows, batch, query)

        writer = df.writeStream.foreachBatch(step).queryName(pipeline.name)
        writer = writer.outputMode("update" if pipeline.sink == "upsert" else "append")
        writer = writer.option("checkpointLocation", check)
        if once:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{max(1, int(every_s * 1000))} milliseconds")
        return writer.start()

    def forget(self, pipeline: Pipeline) -> None:
        """Spark's own state is begun anew, and the table with it."""
        shutil.rmtree(self._check(pipeline), ignore_errors=True)
        self.context.lake.drop(pipeline.table)

    def _check(self, pipeline: Pipeline) -> str:
        """Where Spark keeps the state of a query."""
        lake = self.context.lake
        if not lake.storage.is_local:
            raise InvalidOption(
                f"pipeline {pipeline.name} keeps its state in Spark, which needs a local lake",
                hint="let its transform take df and table, or name a folder as --lake",
            )
        return os.path.join(lake.path, "_checks", pipeline.name)

    def _rows(self, pipeline: Pipeline) -> DataFrame:
        context = self.context
        options = {
            "url": context.root,
            "subscribePattern": topic_shape(pipeline.topics),
            "startingOffsets": "earliest",
            "includeHeaders": "true",
            "badRecords": "skip",
            "maxOffsetsPerTrigger": str(context.batch_rows),
        }
        if context.lake.has(EVENTS):  # what retention removed is there
            options |= {"tier": "auto", "lake": context.lake.path}
        reader = context.spark.readStream.format("trunkline").options(**options)
        if pipeline.columns:
            names = dict.fromkeys([*pipeline.columns.split(","), "actor"])
            reader = reader.schema(
                ", ".join(f"`{name}` {COLUMNS[true_name(name)].ddl}" for name in names)
            )
        df = reader.load()
        if not pipeline.reads_published:
            df = df.where(f"actor IS NULL OR NOT startswith(actor, '{ACTOR}')")
        if pipeline.watermark:
            df = df.withWatermark("timestamp", pipeline.watermark)
        if pipeline.stream is not None:
            return pipeline.stream(df)
        return df if pipeline.parameters else context.transform(pipeline, df, None).table

    def _step(self, pipeline: Pipeline, df: DataFrame, batch: int, query: str) -> None:
        """One batch of a streaming query, once."""
        lake, table = self.context.lake, pipeline.table
        if lake.version(table, query) >= batch:
            # Done, but Spark may still lack its own state of this batch.
            df.write.format("noop").mode("overwrite").save()
            return
        df = df.persist()
        cached = [df]
        try:
            if lake.has(table) and df.isEmpty():
                return
            before = lake.read(self.context.spark, table, whole=True) if lake.has(table) else None
            if pipeline.parameters:
                output = self.context.transform(pipeline, df, before)
                output = with_events(pipeline, output, output.table)
            else:
                rows = upsert(before, df, pipeline.keys) if pipeline.sink == "upsert" else df
                output = with_events(pipeline, Output(rows), df)
            cached += output.cached
            side, own = dict(output.side_tables), output.table
            if pipeline.rules:
                own = own.persist()
                cached.append(own)
                own, more = checks.apply(pipeline.name, own, pipeline.rules)
                side |= more
            if output.events is not None and self.context.publishes(pipeline):
                count = self.context.send(pipeline.name, output.events, query, batch)
                self.published.setdefault(pipeline.name, {})[batch] = count
            for name, frame in side.items():
                lake.write(
                    name,
                    frame,
                    app=query,
                    version=batch,
                    partition_by=side_partitions(name),
                    maker=pipeline.name,
                )
            lake.write(
                table,
                own,
                app=query,
                version=batch,
                partition_by=pipeline.partition_by,
                replacing=NOTHING if pipeline.sink == "add" else EVERYTHING,
                maker=pipeline.name,
            )
            if batch % OPTIMIZE_EVERY == OPTIMIZE_EVERY - 1:
                optimize(lake, table)
        except Exception:
            lake.sweep(query)
            raise
        finally:
            for frame in cached:
                frame.unpersist()


def _query_id(check: str) -> str:
    """The id that Spark gave the query when its checkpoint was begun."""
    with open(os.path.join(check, "metadata"), "rb") as file:
        return str(msgspec.json.decode(file.read())["id"])


def stop_all(queries: dict[str, tuple[Pipeline, StreamingQuery]]) -> None:
    """Stop each between two batches, for Spark is noisy when it is stopped within one."""
    deadline = time.monotonic() + 30
    left = [query for _, query in queries.values()]
    while left := [query for query in left if query.isActive]:
        for query in left:
            if not query.status["isTriggerActive"] or time.monotonic() > deadline:
                query.stop()
        time.sleep(0.02)
