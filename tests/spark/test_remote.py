"""The log of a broker in a process of its own, read by HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("starlette")

from trunkline.errors import Denied, OutOfRange, StorageError
from trunkline.folder import Folder
from trunkline.options import TopicOptions
from trunkline.spark.source.columns import COLUMNS
from trunkline.spark.source.offsets import catalog_of, resolve
from trunkline.spark.source.options import read_options
from trunkline.spark.source.scan import OffsetRange, ScanOptions, scan

from .logs import TOPIC, append, as_row, decoded, make_event, read_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def root(tmp_path: Path) -> str:
    """2,500 events in two partitions: more than a page."""
    folder = Folder(str(tmp_path / "bus"))
    folder.define(TOPIC, TopicOptions(partitions=2))
    for start in range(0, 2500, 100):
        events = [
            make_event(
                n,
                type=f"t{n % 3}",
                key=f"k{n % 7}" if n % 2 else None,
                space=f"s{n % 2}",
                priority="high" if n % 5 == 0 else "normal",
                ttl_s=60.0 if n % 4 == 0 else None,
                caps=("read", "write") if n % 6 == 0 else (),
                not_before=datetime(2026, 2, 1, tzinfo=UTC) if n % 8 == 0 else None,
                headers={"h": "é"} if n % 3 == 0 else {},
                payload={"n": n, "text": "☃", "half": n / 2} if n % 9 else None,
            )
            for n in range(start, start + 100)
        ]
        append(folder, events, start // 100 % 2)
    folder.close()
    return str(tmp_path / "bus")


@pytest.fixture
def token(root: str) -> str:
    """One that may read the topic. The broker then lets in nobody who shows none."""
    words = ["token", "create", "spark", "--read", TOPIC, "-q", "--url", f"file:{root}"]
    made = subprocess.run(
        [sys.executable, "-m", "trunkline.cli", *words], capture_output=True, text=True, check=True
    )
    return made.stdout.strip()


@pytest.fixture
def broker(root: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "trunkline.broker", "--json", "--url", f"file:{root}", "--port=0"],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        url = json.loads(process.stdout.readline())["url"]
        yield url.replace("ws", "http", 1)
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def options_for(url: str, names: tuple[str, ...] = tuple(COLUMNS), **more: Any) -> ScanOptions:
    return ScanOptions(root=url, names=names, **more)


def test_the_rows_are_those_of_the_folder(root: str, broker: str) -> None:
    for partition in (0, 1):
        expected = [as_row(record) for record in read_log(root, TOPIC, partition)]
        span = OffsetRange(TOPIC, partition, 1, len(expected) + 1)

        found = [row for batch in scan(span, options_for(broker)) for row in batch.to_pylist()]

        assert list(map(decoded, found)) == expected
    picked = options_for(broker, ("offset",), types=frozenset({"t1"}), spaces=frozenset({"s0"}))
    rows = sum(batch.num_rows for batch in scan(OffsetRange(TOPIC, 0, 5, 90), picked))
    here = options_for(root, ("offset",), types=frozenset({"t1"}), spaces=frozenset({"s0"}))
    assert rows == sum(batch.num_rows for batch in scan(OffsetRange(TOPIC, 0, 5, 90), here)) > 0


def test_times_and_bounds_mean_the_same(root: str, broker: str) -> None:
    when = (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=777)).isoformat()
    for asked in ({"startingTimestamp": when}, {"startingOffsets": "earliest"}):
        places = []
        for url in (broker, f"file:{root}"):
            choice = read_options({"url": url, "subscribe": "*", **asked}, stream=False)
            catalog = catalog_of(choice)
            places.append([resolve(catalog, choice, edge) for edge in ("starting", "ending")])
            catalog.close()
        assert places[0] == places[1]
    with pytest.raises(OutOfRange, match="has offsets 1 to"):
        list(scan(OffsetRange(TOPIC, 0, 1, 9999), options_for(broker)))


def test_a_broker_that_asks_for_a_token_is_shown_it(token: str, broker: str) -> None:
    span = OffsetRange(TOPIC, 0, 1, 11)
    with pytest.raises(Denied, match="option token"):
        list(scan(span, options_for(broker)))
    shown = options_for(broker, ("offset",), token=token)
    assert [b.column("offset").to_pylist() for b in scan(span, shown)] == [[*range(1, 11)]]


def test_no_broker_is_said_in_one_line() -> None:
    with pytest.raises(StorageError, match=r"no broker answers at http://127\.0\.0\.1:1: .*serve"):
        catalog_of(
            read_options({"url": "http://127.0.0.1:1", "subscribe": "a"}, stream=False)
        ).topics()


def test_spark_reads_a_broker_as_batch_and_as_stream(
    spark: SparkSession, broker: str, tmp_path: Path
) -> None:
    asked = {"url": broker, "subscribe": TOPIC, "minPartitions": "4"}
    df = spark.read.format("trunkline").options(**asked).load()
    assert df.rdd.getNumPartitions() >= 4
    assert df.select("partition", "offset").distinct().count() == 2500

    query = (
        spark.readStream.format("trunkline")
        .options(**asked, startingOffsets="earliest", maxOffsetsPerTrigger="1000")
        .load()
        .writeStream.format("memory")
        .queryName("from_broker")
        .option("checkpointLocation", str(tmp_path / "check"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert spark.sql("SELECT DISTINCT partition, offset FROM from_broker").count() == 2500
    assert spark.table("from_broker").count() == 2500
