"""Spark: the log as a table beside Spark's own JSON reader, DuckDB alone, and the limits promised.

All lines share one session and one log of a million events. Rates are medians of turns that each
side takes alternately, after some to warm up: the first runs of a JVM say nothing.
"""

from __future__ import annotations

import asyncio
import functools
import json
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep, time_ns
from typing import Any

from benchmarks.harness import (
    TOPIC,
    MissingPeerError,
    Pair,
    Run,
    least_stolen,
    line,
    payloads,
    percentile,
)
from trunkline.codec import encode_event
from trunkline.event import Event, new_ids
from trunkline.folder import Folder
from trunkline.options import MIB, Limits, TopicOptions
from trunkline.spark.source.columns import COLUMNS, parse_sql

PARTITIONS = 4


def _fill(root: Path, records: int) -> None:
    folder = Folder(str(root))
    folder.define(TOPIC, TopicOptions(partitions=PARTITIONS, segment_bytes=48 * MIB))
    bodies = payloads(1000)
    types = ("order.placed", "order.paid", "order.sent", "user.seen", "cart.changed")
    for start in range(0, records, 1000):
        events = [
            Event(
                id=id_,
                topic=TOPIC,
                type=types[n % 5],
                key=f"c{n % 5000}",
                actor=f"user-{n % 997}",
                space=f"space-{n % 50}",
                idem_key=f"{start + n}",
                payload=body,
            )
            for n, (id_, body) in enumerate(zip(new_ids(1000), bodies, strict=True))
        ]
        data = [encode_event(event, Limits()) for event in events]
        folder.append(TOPIC, start // 1000 % PARTITIONS, data, events)
    folder.close()


async def _log(run: Run, records: int | None = None) -> tuple[Path, int]:
    count = records or run.count(1_000_000, 20_000)

    async def build(folder: Path) -> None:
        await asyncio.to_thread(_fill, folder, count)

    return await run.once(f"spark log {count}", build), count


@functools.cache
def _spark() -> Any:
    try:
        from trunkline.spark import session
    except ImportError as missing:
        raise MissingPeerError(missing.name or "pyspark") from None
    return session("bench", master="local[2]", config={"spark.driver.memory": "3g"})


def _table(root: Path, schema: str = "") -> Any:
    reader = _spark().read.format("trunkline").options(url=f"file:{root}", subscribe=TOPIC)
    return (reader.schema(schema) if schema else reader).load()


def _json(root: Path) -> Any:
    """The same columns by Spark's own reader of JSON."""
    text = "STRING"
    names = [
        "event_id",
        "type",
        "space_id",
        "actor",
        "subject",
        "key",
        "idem_key",
        "trace_id",
        "priority",
        "band",
        "cause",
    ]
    meta = ", ".join(
        [
            *(f"{name}: {text}" for name in names),
            "topic: STRING, ts: TIMESTAMP, not_before: TIMESTAMP",
            "ttl_sec: DOUBLE",
        ]
    )
    shape = f"offset BIGINT, meta STRUCT<{meta}, caps: ARRAY<{text}>>, payload {text}"
    return (
        _spark()
        .read.schema(shape)
        .json(str(root / "wal" / "*.jsonl"))
        .selectExpr("offset", "meta.*", "payload", "0 AS partition", "0 AS timestampType")
    )


def _drop(df: Any) -> None:
    df.write.format("noop").mode("overwrite").save()


def _by_type(df: Any) -> None:
    df.groupBy("type").count().collect()


async def _medians(run: Run, count: int, *sides: Callable[[], None]) -> list[float]:
    """The median rate of each side."""

    async def each() -> list[float]:
        rates = []
        for side in sides:
            started = perf_counter()
            await asyncio.to_thread(side)
            rates.append(count / (perf_counter() - started))
        return rates

    for _ in range(run.count(4, 0)):
        await each()
    found = await least_stolen(run.count(7, 1), each)
    return [statistics.median(rates) for rates in zip(*found, strict=True)]


_scanned: dict[int, list[float]] = {}


async def _scans(run: Run) -> list[float]:
    """All columns, Spark's own reader of JSON, DuckDB alone with the same columns, two columns."""
    if id(run) not in _scanned:
        try:
            import duckdb
        except ImportError:
            raise MissingPeerError("duckdb") from None
        root, count = await _log(run)
        connection = duckdb.connect(config={"threads": 2})
        names = tuple(name for name in COLUMNS if name != "headers")
        query = parse_sql(names, f"{root}/wal/*.jsonl", MIB)
        _scanned[id(run)] = await _medians(
            run,
            count,
            lambda: _drop(_table(root)),
            lambda: _drop(_json(root)),
            lambda: connection.sql(query).to_arrow_table(),
            lambda: _drop(_table(root, "offset bigint, type string")),
        )
    return _scanned[id(run)]


@line("spark-scan", against="spark.read.json", unit="events/s", goal=">= 1.2")
async def spark_scan(run: Run) -> Pair:
    ours, json, _, _ = await _scans(run)
    return Pair(ours, json)


@line("spark-ceiling", against="DuckDB, 2 threads", unit="events/s", goal=">= 0.42")
async def spark_ceiling(run: Run) -> Pair:
    ours, _, ceiling, _ = await _scans(run)
    return Pair(ours, ceiling)


@line("spark-two-columns", against="all columns", unit="events/s", goal=">= 1.8")
async def spark_two_columns(run: Run) -> Pair:
    ours, _, _, two = await _scans(run)
    return Pair(two, ours)


@line("spark-lake", against="log scan, by type", unit="events/s", goal=">= 8")
async def spark_lake(run: Run) -> Pair:
    from trunkline.spark.lake import EVENTS, Lake
    from trunkline.spark.pipelines import find
    from trunkline.spark.pipelines.run import Runner

    root, count = await _log(run)
    lake = Lake(str(run.fresh()))

    def build() -> Any:
        (ran,) = Runner(_spark(), f"file:{root}", lake).run(find(["lake"]))
        if ran.error:
            raise RuntimeError(ran.error)
        return lake.read(_spark(), EVENTS)

    table = await asyncio.to_thread(build)
    rates = await _medians(run, count, lambda: _by_type(table), lambda: _by_type(_table(root)))
    return Pair(*rates)


class _Watch:
    """Appends at a steady pace while a stream runs, and notes when each record was seen."""

    def __init__(self, run: Run, **options: str) -> None:
        self._run = run
        self._options = options
        self.delays: list[float] = []

    def measure(self) -> list[float]:
        root = self._run.fresh()
        _fill(root, 1000)
        check = self._run.fresh()
        stream = (
            _spark()
            .readStream.format("trunkline")
            .options(url=f"file:{root}", subscribe=TOPIC, **self._options)
        )
        writer = stream.load().select("value").writeStream.foreachBatch(self._seen)
        query = writer.option("checkpointLocation", str(check)).start()
        ended = threading.Event()
        try:
            sleep(2 if self._run.quick else 8)  # the first batches are slow
            self.delays.clear()
            publisher = threading.Thread(target=self._publish, args=(root, ended))
            publisher.start()
            sleep(3 if self._run.quick else 20)
            ended.set()
            publisher.join()
            query.processAllAvailable()
        finally:
            ended.set()
            query.stop()
        return self.delays

    def _publish(self, root: Path, ended: threading.Event) -> None:
        folder = Folder(str(root))
        number = 0
        while not ended.wait(0.02):
            events = [Event(topic=TOPIC, payload=time_ns()) for _ in range(4)]
            data = [encode_event(event, Limits()) for event in events]
            folder.append(TOPIC, number % PARTITIONS, data, events)
            number += 1
        folder.close()

    def _seen(self, df: Any, _: int) -> None:
        rows = df.toArrow().column("value").to_pylist()
        now = time_ns()
        self.delays += [(now - int(value)) / 1e6 for value in rows if value.isdigit()]


@functools.cache
def _delays(run_id: int, low: bool) -> list[float]:
    run = _runs[run_id]
    options = {"latencyMode": "low"} if low else {}
    return _Watch(run, **options).measure()


_runs: dict[int, Run] = {}


async def _latency(run: Run, fraction: float, limit_ms: float, *, low: bool = False) -> Pair:
    _spark()
    _runs[id(run)] = run
    delays = await asyncio.to_thread(_delays, id(run), low)
    return Pair(percentile(delays, fraction), limit_ms)


@line("spark-latency-p50", against="limit", unit="ms", goal="<= 1")
async def spark_latency_p50(run: Run) -> Pair:
    """From the append to its being seen in foreachBatch, 200 events a second."""
    return await _latency(run, 0.5, 300.0)


@line("spark-latency-p95", against="limit", unit="ms", goal="<= 1")
async def spark_latency_p95(run: Run) -> Pair:
    return await _latency(run, 0.95, 450.0)


@line("spark-latency-low-p50", against="limit", unit="ms", goal="<= 1")
async def spark_latency_low_p50(run: Run) -> Pair:
    return await _latency(run, 0.5, 150.0, low=True)


def _catch_up(run: Run, root: Path, **options: str) -> list[Any]:
    stream = (
        _spark()
        .readStream.format("trunkline")
        .options(url=f"file:{root}", subscribe=TOPIC, **options)
    )
    writer = stream.load().writeStream.format("noop").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(run.fresh())).start()
    query.awaitTermination()
    return [one for one in query.recentProgress if one["numInputRows"]]


@line("spark-catch-up", against="limit", unit="events/s", goal=">= 1")
async def spark_catch_up(run: Run) -> Pair:
    """Batches of 250,000 rows of a stream that is far behind, the first left out."""
    root, _ = await _log(run)
    size = run.count(250_000, 5_000)

    def rate() -> float:
        done = _catch_up(run, root, startingOffsets="earliest", maxOffsetsPerTrigger=str(size))
        later = done[1:] or done
        took = sum(one["durationMs"]["triggerExecution"] for one in later) / 1000
        return float(sum(one["numInputRows"] for one in later) / took)

    rates = [await asyncio.to_thread(rate) for _ in range(run.count(4, 1))]
    return Pair(statistics.median(rates[1:] or rates), 180_000.0)


@line("spark-batch-growth", against="at 50 k records", unit="ms", goal="<= 1.2")
async def spark_batch_growth(run: Run) -> Pair:
    """The cost of a micro-batch of 1,000 records at the end of a long and of a short log."""
    small, _ = await _log(run, run.count(50_000, 2_000))
    large, _ = await _log(run, run.count(5_000_000, 8_000))

    def costs(root: Path) -> list[float]:
        """Of the batches over the last 25,000 records, the first left out."""
        folder = Folder(str(root))
        place = {str(p): folder.bounds(TOPIC, p).next - 25_000 // PARTITIONS for p in range(4)}
        folder.close()
        if run.quick:
            place = dict.fromkeys(place, 1)
        start = json.dumps({TOPIC: place})
        done = _catch_up(run, root, startingOffsets=start, maxOffsetsPerTrigger="1000")
        return [float(one["durationMs"]["triggerExecution"]) for one in done[1:] or done]

    def measure() -> Pair:
        costs(small)
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(run.count(8, 1)):
            ours += costs(large)
            theirs += costs(small)
        return Pair(statistics.median(ours), statistics.median(theirs))

    return await asyncio.to_thread(measure)
