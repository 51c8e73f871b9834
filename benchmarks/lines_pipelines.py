"""Pipelines beside plain PySpark jobs over the same source, by the CPU of the whole process tree.

The log is a world of 24 topics and 14 years. Each pair takes alternate turns in one warm session,
and each turn makes its table anew. A plain job reads the log by ``format("trunkline")`` and writes
by Spark's own Parquet writer: no batches, no rules, nothing that a kill would need. Tables that are
made of ``clean`` are measured from there on, both sides: it is made once, before the first turn.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import statistics
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.harness import MissingPeerError, Pair, Run, line
from benchmarks.lines_spark import _spark
from trunkline.codec import encode_event
from trunkline.event import Event
from trunkline.folder import Folder
from trunkline.options import Limits

TOPICS = 24
BEGIN = datetime(2005, 1, 3, tzinfo=UTC)
YEARS = 14
EVERY = "(?!system[.]).*"
_TICK = os.sysconf("SC_CLK_TCK")


def _events(start: int, count: int, total: int) -> Iterator[Event]:
    rng = random.Random(start)
    step = timedelta(days=365 * YEARS) / total
    for number in range(start, start + count):
        ts = BEGIN + step * number
        common: dict[str, Any] = {"id": f"e{number}", "ts": ts, "actor": f"a{number % 997}"}
        if number % 8 == 0:
            payload = {"action": f"x{number % 5}", "context": "c", "confidence": 0.5}
            yield Event(topic="actions", type="ACTION_DECISION", payload=payload, **common)
        elif number % 8 == 1:
            payload = {"decision": f"e{number - 1}", "ok": number % 3 > 0}
            yield Event(topic="actions", type="ACTION_EXECUTED", payload=payload, **common)
        else:
            yield Event(
                topic=f"topic.{number % (TOPICS - 1)}",
                type=f"t{rng.randint(0, 9)}",
                key=f"k{rng.randint(0, 5000)}",
                payload={"n": number, "text": "x" * 120},
                **common,
            )


def _fill(root: Path, start: int, count: int, total: int) -> None:
    folder = Folder(str(root))
    waiting: dict[str, list[Event]] = {}
    for number, event in enumerate(_events(start, count, total), 1):
        waiting.setdefault(event.topic, []).append(event)
        if number % 5000 == 0 or number == count:
            for topic, events in waiting.items():
                folder.append(topic, 0, [encode_event(e, Limits()) for e in events], events)
            waiting.clear()
    folder.close()


async def _world(run: Run, count: int) -> Path:
    async def build(folder: Path) -> None:
        await asyncio.to_thread(_fill, folder, 0, count, count)

    return await run.once(f"world {count}", build)


def cpu_seconds() -> float:
    """Of this process and all that it started, those that ended included."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                text = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue
            fields = text.rpartition(")")[2].split()
            parents[int(name)] = int(fields[1])
            used[int(name)] = sum(map(int, fields[11:15])) / _TICK
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return sum(used[pid] for pid in mine)


def _cost(job: Callable[[], None]) -> float:
    before = cpu_seconds()
    job()
    return cpu_seconds() - before


async def _costs(run: Run, *sides: Callable[[], None]) -> list[float]:
    """The median CPU of each side, in alternate turns, the first one left out."""
    turns = [
        [await asyncio.to_thread(_cost, side) for side in sides] for _ in range(run.count(3, 1))
    ]
    return [statistics.median(each) for each in zip(*(turns[1:] or turns), strict=True)]


def _run_pipelines(root: Path, place: Path, names: list[str]) -> None:
    from trunkline.spark.lake import Lake
    from trunkline.spark.pipelines import find
    from trunkline.spark.pipelines.run import Runner

    wanted = [one for one in find(names) if not names or one.name in names]
    for ran in Runner(_spark(), f"file:{root}", Lake(str(place))).run(wanted):
        if ran.error:
            raise RuntimeError(f"{ran.name}: {ran.error}")


def _source(root: Path, schema: str = "") -> Any:
    reader = _spark().read.format("trunkline").options(url=f"file:{root}", subscribePattern=EVERY)
    return (reader.schema(schema) if schema else reader).load()


def _passed(place: Path) -> Any:
    return _spark().read.parquet(str(place / "clean"))


def _plain_lake(root: Path) -> Any:
    return _source(root).write.partitionBy("topic")


def _plain_clean(root: Path) -> Any:
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    same = Window.partitionBy("topic", "partition", "id").orderBy("offset")
    rows = _source(root).withColumn("before", f.lag("timestamp").over(same))
    over = f.expr("unix_micros(timestamp) + ttl_s * 1e6 <= unix_micros(appended_at)")
    rows = rows.where(f.col("before").isNull() & ~f.coalesce(over, f.lit(False)))
    return rows.withColumn("payload", f.parse_json("value")).drop("value").write


def _plain_traffic(root: Path) -> Any:
    from pyspark.sql import functions as f

    shape = "topic string, type string, key string, actor string, value string, timestamp timestamp"
    by = [f.date_trunc("hour", "timestamp").alias("hour"), "topic", "type"]
    return _source(root, shape).groupBy(*by).agg(
        f.count("*"), f.sum(f.octet_length("value")), f.count_distinct("key"),
        f.count_distinct("actor"),
    ).write  # fmt: skip


def _plain_sequences(place: Path) -> Any:
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    order = Window.partitionBy("actor").orderBy("timestamp", "topic", "partition", "offset")
    rows = _passed(place).where("actor IS NOT NULL AND type IS NOT NULL")
    rows = rows.withColumn("before", f.coalesce(f.lag("type").over(order), f.lit("(start)")))
    return rows.groupBy("actor", "before", "type").count().write


def _plain_compaction(root: Path) -> Any:
    from pyspark.sql import functions as f

    shape = "topic string, partition int, offset bigint, key string, value string"
    rows = _source(root, f"{shape}, timestamp timestamp").where("key IS NOT NULL")
    last = f.max_by(f.struct("value", "offset", "timestamp"), "offset")
    return rows.groupBy("topic", "partition", "key").agg(last, f.count("*")).write


def _plain_learning(place: Path) -> Any:
    from pyspark.sql import functions as f

    rows = _passed(place)
    said = rows.where("type = 'ACTION_DECISION'").select(
        f.col("id").alias("ref"), f.get_json_object("value", "$.action").alias("action"),
        f.get_json_object("value", "$.context").alias("context"),
    )  # fmt: skip
    came = rows.where("type = 'ACTION_EXECUTED'").select(
        f.get_json_object("value", "$.decision").alias("ref"),
        f.get_json_object("value", "$.ok").cast("boolean").alias("ok"), "timestamp",
    )  # fmt: skip
    first = came.groupBy("ref").agg(f.min_by("ok", "timestamp").alias("ok"))
    both = said.join(first, "ref", "left").groupBy("action", "context")
    return both.agg(f.count("*"), f.count("ok"), f.avg(f.col("ok").cast("double"))).write


_PLAIN: dict[str, tuple[Callable[[Path], Any], list[str], str]] = {
    "lake": (_plain_lake, ["lake"], "<= 0.8"),
    "clean": (_plain_clean, ["clean"], "<= 1.5"),
    "traffic": (_plain_traffic, ["traffic"], "<= 1.7"),
    "sequences": (_plain_sequences, ["sequences"], "<= 1.7"),
    "compaction": (_plain_compaction, ["compaction"], "<= 1.7"),
    "learning": (_plain_learning, ["decisions", "learning"], "<= 3"),
}


def _declare(name: str) -> None:
    plain, names, goal = _PLAIN[name]

    of_silver = name in ("sequences", "learning")

    @line(f"pipeline-{name}", against="plain PySpark", unit="CPU s", goal=goal)
    async def measure(run: Run) -> Pair:
        root = source = await _world(run, run.count(200_000, 2_000))
        _spark()
        if of_silver:

            async def build(folder: Path) -> None:
                await asyncio.to_thread(_run_pipelines, root, folder, ["clean"])

            source = await run.once("silver", build)

        def ours() -> None:
            place = run.fresh()
            if of_silver:
                shutil.copytree(source, place, copy_function=os.link, dirs_exist_ok=True)
            _run_pipelines(root, place, names)
            shutil.rmtree(place)

        def theirs() -> None:
            place = run.fresh()
            plain(source).mode("overwrite").parquet(str(place / "table"))
            shutil.rmtree(place)

        return Pair(*await _costs(run, ours, theirs))


for _name in _PLAIN:
    _declare(_name)


async def _grown(run: Run, count: int, more: int) -> tuple[float, float, int]:
    """The CPU of a first run of all pipelines and of one with ``more`` new events, and by how many
    bytes the first run made the bus grow.
    """
    root, place = run.fresh(), run.fresh()
    await asyncio.to_thread(_fill, root, 0, count, count)
    before = _size(root)
    first = await asyncio.to_thread(_cost, lambda: _run_pipelines(root, place, []))
    grown = _size(root) - before
    await asyncio.to_thread(_fill, root, count, more, count)
    second = await asyncio.to_thread(_cost, lambda: _run_pipelines(root, place, []))
    shutil.rmtree(root)
    shutil.rmtree(place)
    return first, second, grown


def _size(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "wal").glob("*.jsonl"))


_runs: dict[tuple[int, int], tuple[float, float, int]] = {}


async def _all(run: Run, count: int) -> tuple[float, float, int]:
    """All pipelines at a size, once for the lines that share it. A small run warms the session."""
    _spark()
    more = run.count(8_000, 50)
    if not _runs:
        await _grown(run, run.count(2_000, 200), 50)
    if (id(run), count) not in _runs:
        _runs[id(run), count] = await _grown(run, count, more)
    return _runs[id(run), count]


@line("pipelines-increment", against="first run", unit="CPU s", goal="<= 0.15")
async def pipelines_increment(run: Run) -> Pair:
    """All pipelines with 1 % new events."""
    first, second, _ = await _all(run, run.count(800_000, 1_000))
    return Pair(second, first)


@line("pipelines-increment-growth", against="at 50 k", unit="CPU s", goal="<= 1.3")
async def pipelines_increment_growth(run: Run) -> Pair:
    """The same increment on a long and on a short log."""
    _, long, _ = await _all(run, run.count(800_000, 1_000))
    _, short, _ = await _all(run, run.count(50_000, 500))
    return Pair(long, short)


@line("pipelines-bus-growth", against="bytes before", unit="bytes", goal="<= 0")
async def pipelines_bus_growth(run: Run) -> Pair:
    """What a plain run adds to the bus."""
    _, _, grown = await _all(run, run.count(50_000, 500))
    return Pair(float(grown), 1.0)


def _servers(run: Run, kind: str) -> tuple[str, Callable[[], None]]:
    """The URL of an empty bus on a server, and what stops it."""
    if kind == "nats":
        from trunkline.bus.nats.server import Servers

        try:
            server = Servers(run.fresh(), sync="2m")
            server.__enter__()
        except Exception as missing:
            raise MissingPeerError(f"nats-server: {missing}") from None
        return server.url, lambda: server.__exit__(None, None, None)
    url = os.environ.get("MONGO_URL")
    if not url:
        raise MissingPeerError("MONGO_URL")
    return f"{url.partition('?')[0].rstrip('/')}/bench{os.getpid()}", lambda: None


async def _server_scan(run: Run, kind: str) -> Pair:
    from trunkline.bus.sync import SyncBus

    count = run.count(200_000, 2_000)
    url, stop = _servers(run, kind)
    here = f"file:{run.fresh()}"

    def measure() -> Pair:
        for bus_url in (url, here):
            with SyncBus(bus_url) as bus:
                bus.define("scan", partitions=2)
                for start in range(0, count, 500):
                    many = [
                        Event(topic="scan", key=f"k{n}", payload={"n": n, "text": "x" * 120})
                        for n in range(start, start + 500)
                    ]
                    bus.publish_many("scan", many)
        rates: list[list[float]] = []
        for _ in range(run.count(4, 1)):
            turn = []
            for bus_url in (url, here):
                reader = _spark().read.format("trunkline").options(url=bus_url, subscribe="scan")
                began = perf_counter()
                reader.load().write.format("noop").mode("overwrite").save()
                turn.append(count / (perf_counter() - began))
            rates.append(turn)
        ours, theirs = zip(*(rates[1:] or rates), strict=True)
        return Pair(statistics.median(ours), statistics.median(theirs))

    try:
        return await asyncio.to_thread(measure)
    finally:
        stop()


@line("spark-scan-nats", against="file:", unit="events/s", goal=">= 0.03")
async def spark_scan_nats(run: Run) -> Pair:
    return await _server_scan(run, "nats")


@line("spark-scan-mongo", against="file:", unit="events/s", goal=">= 0.05")
async def spark_scan_mongo(run: Run) -> Pair:
    return await _server_scan(run, "mongo")
