"""The log and the lake in SQL: tables, typed payloads, views, declarative pipelines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

import pyspark

from trunkline.event import Event
from trunkline.folder import Folder
from trunkline.spark import cause_of
from trunkline.spark.lake import Lake, register
from trunkline.spark.pipelines import find
from trunkline.spark.pipelines.run import Runner
from trunkline.spark.session.start import prepare_environment

from .logs import TOPIC, append, make_event, make_log, read_log
from .world import SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def refused(call: Callable[[], object]) -> str:
    """What a call is refused with; Spark wraps it."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 -- Spark's errors have no common base
        return str(cause_of(error))
    pytest.fail("it was not refused")


DOCS = Path(__file__).parents[2] / "docs"


def test_a_table_in_the_catalog_is_read(spark: SparkSession, tmp_path: Path) -> None:
    root = make_log(tmp_path / "bus", 40)
    name = f"orders_{os.getpid()}"
    try:
        spark.sql(
            f"CREATE TABLE {name} USING trunkline "
            f"OPTIONS (url 'file:{root}', subscribe 'orders', payloadSchema 'n bigint')"
        )
        rows = spark.sql(f"SELECT count(*), sum(payload.n), max(key) FROM {name}").collect()
        assert [tuple(row) for row in rows] == [(40, 780, "k6")]
        late = spark.sql(f"SELECT value FROM {name} WHERE payload.n >= 38 ORDER BY offset")
        assert [row.value for row in late.collect()] == ['{"n":38}', '{"n":39}']
    finally:
        spark.sql(f"DROP TABLE IF EXISTS {name}")
    wrong = {
        "there is no option subscrib": "url 'file:/x', subscrib 'orders'",
        "keeps no token": "url 'http://127.0.0.1:1', subscribe 'a', token 't'",
    }
    for said, options in wrong.items():
        assert said in refused(
            partial(spark.sql, f"CREATE TABLE {name} USING trunkline OPTIONS ({options})")
        )


def test_a_typed_payload_fits_or_is_told(spark: SparkSession, tmp_path: Path) -> None:
    root = str(tmp_path / "bus")
    folder = Folder(root)
    promise = {"topic": TOPIC, "version": 1, "schema": SCHEMA}
    append(folder, [Event(topic="system.schemas", type="schema", payload=promise)])
    payloads = [{"id": 1, "Origin": "EWR", "origin": "ewr", "dep.delay": 2.5}, None, {"id": "no"}]
    append(folder, [make_event(n, payload=payload) for n, payload in enumerate(payloads)])
    folder.close()

    def read(**options: str) -> list[tuple[object, ...]]:
        reader = spark.read.format("trunkline").options(url=root, subscribe=TOPIC, **options)
        shown = ["offset", "payload.id", "payload.`dep.delay`"]
        shown += ["_corrupt_record"] if options.get("badRecords") == "column" else []
        return [tuple(row) for row in reader.load().selectExpr(*shown).collect()]

    assert read(payloadSchema="registry", badRecords="skip") == [(1, 1, 2.5), (2, None, None)]
    ddl = "id bigint, `dep.delay` double"
    told = read(payloadSchema=ddl, badRecords="column")
    assert told[:2] == [(1, 1, 2.5, None), (2, None, None, None)]
    assert told[2][:3] == (3, None, None)
    assert told[2][3] == 'the payload does not fit its type: "no" is no bigint at /id'
    for options, said in (
        ({"payloadSchema": ddl}, f"{TOPIC}/0/3: the payload does not fit"),
        (
            {"payloadSchema": "id decimal(3,1), `dep.delay` double"},
            "decimal(3,1) is no type of a payload",
        ),
    ):
        assert said in refused(partial(read, **options))


def test_tables_of_the_lake_are_views(spark: SparkSession, tmp_path: Path) -> None:
    root = make_log(tmp_path / "bus", 40)
    lake = Lake(str(tmp_path / "lake"))
    Runner(spark, root, lake).run(find(["traffic"]))

    assert register(spark, lake.path) == ["lake_traffic"]
    assert spark.sql("SELECT sum(events) AS n FROM lake_traffic").collect()[0].n == 40


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_on_declarative_pipelines_runs(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    root = make_log(tmp_path / "bus", 40)
    page = (DOCS / "declarative.md").read_text("utf-8")
    blocks = dict(re.findall(r"```(yaml|python|sh)\n(.*?)```", page, re.DOTALL))
    command = blocks["sh"].split()
    home = tmp_path / "project"
    (home / "transformations").mkdir(parents=True)
    spec = blocks["yaml"].replace("/tmp/orders-state", str(tmp_path / "state"))
    (home / "spark-pipeline.yml").write_text(spec)
    program = blocks["python"].replace("/srv/bus", root)
    assert root in program
    (home / "transformations" / "orders.py").write_text(program)
    prepare_environment()
    place = Path(pyspark.__file__).parent
    for total in (40, 60):
        ran = subprocess.run(
            [str(place / "bin" / command[0]), *command[1:], "--conf", "spark.ui.enabled=false"],
            cwd=home, capture_output=True, text=True, timeout=400,
            env={**os.environ, "SPARK_HOME": str(place), "PYSPARK_PYTHON": sys.executable},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
        assert len(read_log(root, "copies")) == total
        if total == 40:
            folder = Folder(root)
            append(folder, [make_event(n) for n in range(40, 60)])
            folder.close()
