"""The log of a broker, of NATS and of MongoDB: the same rows as those of a folder, for all that
Spark does with a log. Each server is a real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("starlette")
pytest.importorskip("nats")
pytest.importorskip("pymongo")

from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from kit.mongod import mongo_url
from trunkline.bus.nats.server import Servers
from trunkline.bus.sync import SyncBus
from trunkline.errors import InvalidOption, OutOfRange, TrunklineError
from trunkline.event import Event
from trunkline.spark.lake import Lake
from trunkline.spark.pipelines import find
from trunkline.spark.pipelines.run import Runner
from trunkline.spark.sink import remote as sinking
from trunkline.spark.sink.remote import StagedRows
from trunkline.spark.sink.writers import StreamSink, sent_version
from trunkline.spark.source.catalogs import open_catalog
from trunkline.spark.source.columns import COLUMNS
from trunkline.spark.source.offsets import catalog_of, resolve
from trunkline.spark.source.options import read_options
from trunkline.spark.source.scan import OffsetRange, ScanOptions, scan

from .logs import START

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["mongo_url"]

TOPIC, PARTS = "orders", 2
KINDS = ("broker", "nats", "mongo")
PAYLOADS: tuple[Any, ...] = (
    None, "text", "\u001f\u2028\"\\", 1e5, 12345678901234567, -0.0, [], {}, [1, None, 2.5],
    {"a.b": {"": 1}, "payload": {"n": "é"}}, {"commit": {"count": 1, "at": 5}}, True,
)  # fmt: skip


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Servers(tmp_path_factory.mktemp("nats"), sync="2m") as servers:
        yield servers.url


@contextmanager
def broker(root: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "trunkline.broker", "--json", "--url", f"file:{root}", "--port=0"],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path, nats_server: str) -> Iterator[str]:
    """An empty bus on a server."""
    name = f"s{os.getpid()}-{time.time_ns() % 10**9}"
    if request.param == "broker":
        with SyncBus(f"file:{tmp_path / 'behind'}"):
            pass
        with broker(str(tmp_path / "behind")) as found:
            yield found
    elif request.param == "nats":
        yield f"{nats_server}/{name}"
    else:
        server = request.getfixturevalue("mongo_url")
        base, _, query = server.partition("?")
        yield f"{base.rstrip('/')}/{name}" + (f"?{query}" if query else "")


def event(number: int) -> Event:
    return Event(
        topic=TOPIC, id=f"e{number}", ts=START + timedelta(microseconds=number * 1_000_003),
        key=f"k{number % 7}", type=f"t{number % 3}", space=f"s{number % 2}",
        actor="a" if number % 4 else None, ttl_s=60.0 if number % 4 == 0 else None,
        caps=("read", "write") if number % 6 == 0 else (), cause=f"e{number - 1}",
        headers={"h": "é", "payload": "x"} if number % 3 == 0 else {},
        payload=PAYLOADS[number % len(PAYLOADS)],
    )  # fmt: skip


def fill(url: str, count: int, start: int = 0) -> None:
    with SyncBus(url) as bus:
        bus.define(TOPIC, partitions=PARTS)
        for first in range(start, start + count, 400):
            many = [event(n) for n in range(first, min(start + count, first + 400))]
            bus.publish_many(TOPIC, many)


def rows_of(root: str) -> dict[int, list[dict[str, Any]]]:
    """The rows of each partition, without the time of the append, which is there."""
    found: dict[int, list[dict[str, Any]]] = {}
    catalog = open_catalog(root)
    for partition in range(PARTS):
        head = catalog.reader(TOPIC, partition).head()
        span = OffsetRange(TOPIC, partition, head.start, head.next)
        batches = scan(span, ScanOptions(root=root, names=tuple(COLUMNS)))
        rows = [row for batch in batches for row in batch.to_pylist()]
        assert all(row.pop("appended_at") is not None for row in rows)
        found[partition] = rows
    catalog.close()
    return found


def check_parity(url: str, here: str, count: int) -> None:
    fill(url, count)
    fill(f"file:{here}", count)
    root = read_options({"url": url, "subscribe": TOPIC}, stream=False).root
    wanted, found = rows_of(here), rows_of(root)
    assert sum(map(len, found.values())) == count
    for partition, rows in wanted.items():
        assert len(found[partition]) == len(rows)
        pairs = zip(found[partition], rows, strict=True)
        assert [pair for pair in pairs if pair[0] != pair[1]][:1] == []


def test_every_row_is_that_of_a_folder(url: str, tmp_path: Path) -> None:
    check_parity(url, str(tmp_path / "here"), 2000)
    for offsets in ("earliest", '{"orders":{"0":5,"1":-2}}'):
        places = []
        for bus in (url, f"file:{tmp_path / 'here'}"):
            choice = read_options(
                {"url": bus, "subscribe": TOPIC, "startingOffsets": offsets}, stream=False
            )
            catalog = catalog_of(choice)
            places.append([resolve(catalog, choice, edge) for edge in ("starting", "ending")])
            catalog.close()
        assert places[0] == places[1]
    with pytest.raises(OutOfRange, match="has offsets 1 to"):
        list(
            scan(OffsetRange(TOPIC, 0, 1, 9999), ScanOptions(root=root_of(url), names=("offset",)))
        )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_of_200_000_rows_is_that_of_a_folder(url: str, tmp_path: Path) -> None:
    began = time.perf_counter()
    check_parity(url, str(tmp_path / "here"), 200_000)
    print(f"200,000 rows of {url.partition(':')[0]} in {time.perf_counter() - began:.0f} s")


def root_of(url: str) -> str:
    return read_options({"url": url, "subscribe": TOPIC}, stream=False).root


SHAPE = StructType([StructField("key", StringType()), StructField("value", StringType())])


def staged(sink: StreamSink, start: int, end: int) -> list[StagedRows]:
    import pyarrow as pa

    columns = [[f"k{n % 5}" for n in range(start, end)], [str(n) for n in range(start, end)]]
    batch = pa.RecordBatch.from_arrays([pa.array(c) for c in columns], names=["key", "value"])
    found = sink.write(iter([batch]))
    assert isinstance(found, StagedRows)
    return [found]


class Died(BaseException):
    """The process ends here."""


def test_a_batch_is_written_once_whenever_its_writer_dies(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies behind each of its first publishes, then between batches; rows may be equal."""
    monkeypatch.setattr(sinking, "_AT_ONCE", 10)
    options = {"url": url, "topic": "out", "txnAppId": "query"}
    many = SyncBus.publish_many
    for version, kills in enumerate((0, 1, 2, 5)):
        for left in range(kills, -1, -1):
            published = 0

            def dying(self: SyncBus, *args: Any, **more: Any) -> Any:
                nonlocal published
                made = many(self, *args, **more)
                published += 1
                if left and published == left:  # noqa: B023
                    raise Died
                return made

            monkeypatch.setattr(SyncBus, "publish_many", dying)
            sink = StreamSink(options, SHAPE, False)
            try:
                sink.commit(staged(sink, version * 30, version * 30 + 40), version)
            except Died:
                continue
    monkeypatch.setattr(SyncBus, "publish_many", many)
    sink.commit(staged(sink, 0, 40), 0)  # an older batch is not written again

    assert sent_version({"url": url}, "query") == 3
    with SyncBus(url) as bus:
        found = [record.event.payload for record in bus.read("out", limit=500)]
    assert sorted(found) == sorted(n for v in range(4) for n in range(v * 30, v * 30 + 40))
    with pytest.raises(InvalidOption, match="its partition by itself"):
        StreamSink(options, StructType([*SHAPE, StructField("partition", IntegerType())]), False)


@pytest.mark.timeout(600)
def test_spark_reads_writes_and_makes_tables(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """Batch and stream, in parallel; a stream into the log; pipelines over the log."""
    fill(url, 400)
    fill(f"file:{tmp_path / 'here'}", 400)
    asked = {"url": url, "subscribe": TOPIC, "minPartitions": "4", "includeHeaders": "true"}
    df = spark.read.format("trunkline").options(**asked).load()
    assert df.rdd.getNumPartitions() >= 4
    here = spark.read.format("trunkline").options(**asked | {"url": f"file:{tmp_path / 'here'}"})
    shown = [name for name in COLUMNS if name not in ("appended_at", "headers")]
    assert sorted(map(str, df.select(*shown).collect())) == sorted(
        map(str, here.load().select(*shown).collect())
    )
    query = (
        spark.readStream.format("trunkline")
        .options(**asked, startingOffsets="earliest", maxOffsetsPerTrigger="250")
        .load()
        .selectExpr("key", "value", "'copies' AS topic")
        .writeStream.format("trunkline")
        .options(url=url, checkpointLocation=str(tmp_path / "check"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    with SyncBus(url) as bus:
        assert len(bus.read("copies", limit=1000)) == 400

    lake = Lake(str(tmp_path / "lake"))
    results = Runner(spark, url, lake).run(find(["lake", "clean", "traffic", "lag", "verify"]))
    assert {one.name: one.error for one in results if one.error} == {}
    assert lake.read(spark, "events").where("topic IN ('orders', 'copies')").count() == 800
    counted = lake.read(spark, "traffic").groupBy("topic").sum("events").collect()
    assert {tuple(row) for row in counted} == {("orders", 400), ("copies", 400)}
    assert lake.rows("verify") == 0


@pytest.mark.parametrize(
    "wrong", ["nats://127.0.0.1:1", "mongodb://127.0.0.1:1/x?serverSelectionTimeoutMS=300"]
)
def test_a_server_that_is_not_there_is_told_in_one_line(wrong: str) -> None:
    with pytest.raises(TrunklineError) as caught, closing(open_catalog(wrong)) as catalog:
        catalog.topics()
    assert "\n" not in str(caught.value)
