"""The lake on an object store: the same tables as in a folder, by one writer at a time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("moto")

import msgspec
import pyarrow as pa
from deltalake import write_deltalake

from trunkline.cli import main
from trunkline.errors import Conflict
from trunkline.spark.lake import Lake
from trunkline.spark.lake import lock as locking
from trunkline.spark.lake.lock import hold
from trunkline.spark.pipelines import find
from trunkline.spark.pipelines.run import Runner, RunResult, read_outcomes
from trunkline.spark.session.cluster import Cluster

from .object_store import BUCKET, SETTINGS, object_store
from .test_cluster import free_port
from .test_servers import broker
from .world import make_world

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMES = ["lake", "clean", "traffic", "compaction"]


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with object_store():
        yield


@pytest.fixture
def place(server: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place for a lake that no other test uses."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/t{time.time_ns()}/lake"


def rows_of(spark: SparkSession, lake: Lake, table: str) -> list[str]:
    df = lake.read(spark, table)
    shown = sorted(name for name in df.columns if name != "payload")
    return sorted(map(str, df.select(*shown).collect()))


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.timeout(600)
def test_the_tables_are_those_of_a_folder(
    spark: SparkSession, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_world(tmp_path / "bus", 400)
    here, lake = Lake(str(tmp_path / "here")), Lake(place)
    with monkeypatch.context() as patch:  # a first run is killed before its first commit

        def die(*_: Any, **__: Any) -> None:
            raise Killed

        patch.setattr(Lake, "commit", die)
        with pytest.raises(Killed):
            Runner(spark, root, lake).run(find(["clean"]))
    for one in (here, lake):
        results = Runner(spark, root, one).run(find(NAMES))
        assert {ran.name: ran.error for ran in results if ran.error} == {}

    assert lake.tables() == here.tables()
    for table in ("events", "clean", "traffic", "compaction", "quarantine"):
        assert rows_of(spark, lake, table) == rows_of(spark, here, table), table
    (again,) = Runner(spark, root, lake).run(find(["traffic"]), rebuild=True)
    assert again.error == ""
    assert rows_of(spark, lake, "traffic") == rows_of(spark, here, "traffic")
    assert {one.name for one in read_outcomes(lake)} == set(NAMES)
    staged = {path.rpartition("/")[2] for path in lake.storage.files("") if ".parquet" in path}
    logs = [path for path in lake.storage.files("") if path.endswith(".json")]
    named = b"".join(lake.storage.read(path) or b"" for path in logs)
    assert {name for name in staged if name.encode() not in named} == set()


def test_the_status_and_the_report_are_read_from_there(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    show = ["pipeline", "report", "--lake", place, "--out", str(out), "--json"]
    assert main(show) == 3
    assert f"there is no lake at {place}" in capsys.readouterr().err
    lake = Lake(place)
    when = datetime(2026, 1, 1, tzinfo=UTC)
    row = {"hour": when, "topic": "a b", "type": "t", "events": 7, "bytes": 9}
    where = lake.storage.delta("traffic")
    write_deltalake(
        where["table_uri"], pa.Table.from_pylist([row]), partition_by=["topic"],
        storage_options=where["storage_options"],
    )  # fmt: skip
    lake.storage.replace("_runs.json", msgspec.json.encode([RunResult("traffic", 1, 0.5, "", 0)]))

    assert main(["pipeline", "status", "--lake", place, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "traffic"
    assert main(show) == 0
    told = {one["name"]: one["line"] for one in json.loads(capsys.readouterr().out)["tables"]}
    assert told["traffic"].startswith("7 events of 1 topic")
    assert "a b" in out.read_text("utf-8")


def test_one_holds_a_pipeline_and_the_lock_of_a_killed_one_ends(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Lake(place).storage
    with hold(storage, "clean"):
        with pytest.raises(Conflict, match="clean runs already"), hold(storage, "clean"):
            pass
        with hold(storage, "traffic"):
            pass
    with hold(storage, "clean"):
        pass
    monkeypatch.setattr(locking, "LEASE_S", 0.3)
    killed = locking._StoreLock(storage, "_checks/clean.lock")
    assert killed.take()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with hold(storage, "clean"):
                return
        except Conflict:
            time.sleep(0.1)
    pytest.fail("the lock never ended")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_workers_make_the_same_tables_through_a_broker_and_an_object_store(
    place: str, tmp_path: Path
) -> None:
    """The workers have folders of their own, and no path of the bus or the lake."""
    root = make_world(tmp_path / "bus", 2000)
    program = Path(__file__).with_name("on_cluster.py")

    def results(master: str, url: str, lake: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(program), master, url, lake],
            capture_output=True, text=True, timeout=900, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return said

    alone = results("local[2]", f"file:{root}", str(tmp_path / "here"))
    with (
        broker(root) as url,
        Cluster(str(tmp_path / "cluster"), workers=2, port=free_port()) as cluster,
    ):
        far = results(cluster.url, url, place)

    assert (far["executors"], far["errors"], alone["errors"]) == (2, {}, {})
    tables = [name for name in alone if name.startswith("table ")]
    assert len(tables) >= 10
    for table in tables:
        assert far[table] == alone[table], table
