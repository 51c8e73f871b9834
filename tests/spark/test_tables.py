"""Tables that are made of tables: rules, new columns and other types, rebuilding, bounds of time,
and damage in the log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from trunkline.cli import main
from trunkline.event import Event
from trunkline.folder import Folder
from trunkline.options import TopicOptions
from trunkline.spark.lake import Lake
from trunkline.spark.lake.optimize import optimize
from trunkline.spark.lake.table import Replacing
from trunkline.spark.pipelines import all_pipelines, expect, find, table
from trunkline.spark.pipelines import declare as registry
from trunkline.spark.pipelines.run import Runner, RunResult
from trunkline.spark.report import read_report

from .logs import START, TOPIC, append, make_event
from .test_orphans import orphans

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    before = dict(all_pipelines())
    yield
    registry._known.clear()
    registry._known.update(before)


def fill(place: Path, *events: Event) -> str:
    folder = Folder(str(place))
    for event in events:
        if event.topic not in folder.topics():
            folder.define(event.topic, TopicOptions(dedup_window_s=0))
        append(folder, [event])
    folder.close()
    return str(place)


def promise(version: int, schema: Any, topic: str = TOPIC) -> Event:
    payload = {"topic": topic, "version": version, "schema": schema}
    return Event(topic="system.schemas", type="schema", payload=payload)


def members(**types: str) -> dict[str, Any]:
    return {"type": "object", "properties": {n: {"type": kind} for n, kind in types.items()}}


def paid(number: int, **payload: Any) -> Event:
    return make_event(number, type="paid", key=f"k{number % 3}", payload={"n": number, **payload})


def results(ran: list[RunResult]) -> dict[str, RunResult]:
    assert {one.name: one.error for one in ran if one.error} == {}
    return {one.name: one for one in ran}


def test_a_table_is_made_of_another_and_its_rules_are_counted(
    spark: SparkSession, tmp_path: Path
) -> None:
    @table(
        "totals",
        source=f"clean.{TOPIC}",
        keys=("key",),
        expect=[
            expect("few", "times < 4"),
            expect("known", "key <> 'k0'", on_fail="quarantine"),
            expect("odd", "key <> 'k1'", on_fail="drop"),
        ],
    )
    def totals(df: DataFrame) -> DataFrame:
        return df.groupBy("key").agg({"payload.n": "sum"}).toDF("key", "sum").selectExpr(
            "*", "sum AS times"
        )  # fmt: skip

    root = fill(tmp_path / "bus", promise(1, members(n="integer")), *map(paid, range(6)))
    job = Runner(spark, root, Lake(str(tmp_path / "lake")))

    first = results(job.run(find(["totals"])))

    assert list(first) == ["clean", "totals"], "the maker of its source runs before it"
    fill(tmp_path / "bus", *map(paid, range(6, 9)))
    results(job.run(find(["totals"])))
    assert [tuple(row) for row in job.lake.read(spark, "totals").collect()] == [("k2", 15, 15)]
    refused = job.lake.read(spark, "quarantine").where("pipeline = 'totals'").collect()
    assert [(one.rule, json.loads(one.value)["sum"]) for one in refused] == [("known", 9)], (
        "a table that is made of all rows tells once which of them it refuses"
    )
    counted = job.lake.read(spark, "rules").where("pipeline = 'totals'").orderBy("at", "rule")
    said = [(one.rule, one.on_fail, one.checked, one.failed) for one in counted.collect()]
    assert said == [
        ("few", "keep", 3, 2), ("known", "quarantine", 3, 1), ("odd", "drop", 3, 1),
        ("few", "keep", 3, 3), ("known", "quarantine", 3, 1), ("odd", "drop", 3, 1),
    ]  # fmt: skip


def test_a_rule_can_fail_the_batch_and_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    @table("sure", topics=TOPIC, expect=[expect("small", "offset < 3", on_fail="fail")])
    def sure(df: DataFrame) -> DataFrame:
        return df.select("topic", "offset")

    root = fill(tmp_path / "bus", *map(paid, range(2)))
    job = Runner(spark, root, Lake(str(tmp_path / "lake")))
    results(job.run(find(["sure"])))
    fill(tmp_path / "bus", *map(paid, range(2, 5)))

    (ran,) = job.run(find(["sure"]))

    assert ran.error.startswith("rule small failed: offset < 3; for example Row(topic='orders'")
    assert job.lake.read(spark, "sure").count() == 2
    assert orphans(job.lake) == set()


def test_rows_of_ones_own_table_are_counted_and_found_in_the_quarantine(
    spark: SparkSession, tmp_path: Path
) -> None:
    later = [expect("later", "number > 2", on_fail="quarantine")]

    @table("bare", topics=TOPIC, expect=later)
    def bare(df: DataFrame) -> DataFrame:
        return df.selectExpr("offset AS number", "'the first' AS offset")

    @table("placed", topics=TOPIC, expect=later)
    def placed(df: DataFrame) -> DataFrame:
        place = ("topic", "partition", "offset", "timestamp", "id")
        return df.selectExpr(*place, "offset AS number")

    root = fill(tmp_path / "bus", *map(paid, range(4)))
    job = Runner(spark, root, Lake(str(tmp_path / "lake")))

    ran = results(job.run(find(["bare", "placed"])))

    assert [(one.rows, one.set_aside) for one in ran.values()] == [(2, 2), (2, 2)]
    assert {one.refused for one in ran.values()} == {"quarantine"}
    found = job.lake.read(spark, "quarantine").orderBy("pipeline", "id").collect()
    assert [(one.pipeline, one.topic, one.offset, one.id) for one in found] == [
        ("bare", None, None, None), ("bare", None, None, None),
        ("placed", TOPIC, 1, "e0"), ("placed", TOPIC, 2, "e1"),
    ]  # fmt: skip
    cards = {card.name: card for card in read_report(job.lake.path, find([])).cards}
    top = [(row["topic"], row["reason"], row["example"]) for row in cards["quarantine"].top]
    reason = "it fails the rule later"
    assert [one[:2] for one in top] == [(TOPIC, reason), ("table bare", reason)]
    assert json.loads(top[0][2])["id"] == "e1", "the newest"
    assert json.loads(top[1][2])["offset"] == "the first"


def test_a_wrong_rule_is_named_with_its_table(spark: SparkSession, tmp_path: Path) -> None:
    @table("totals", topics=TOPIC, expect=[expect("any", "1 = 1"), expect("high", "total > 0")])
    def totals(df: DataFrame) -> DataFrame:
        return df.groupBy("topic").agg({"offset": "sum"})

    root = fill(tmp_path / "bus", paid(0))

    (ran,) = Runner(spark, root, Lake(str(tmp_path / "lake"))).run(find(["totals"]))

    assert ran.error.startswith("rule high of table totals: total > 0: [UNRESOLVED_COLUMN")
    assert ran.error.endswith("(a rule sees what the function returns: topic, sum(offset))")
    assert "\n" not in ran.error


def test_a_new_column_is_told_and_another_type_is_refused_until_a_rebuild(
    spark: SparkSession, tmp_path: Path
) -> None:
    def declare(*columns: str) -> None:
        @table("mine", topics=TOPIC)
        def mine(df: DataFrame) -> DataFrame:
            return df.selectExpr("offset", *columns)

    root = fill(tmp_path / "bus", paid(0))
    job = Runner(spark, root, Lake(str(tmp_path / "lake")))
    declare()
    results(job.run(find(["mine"])))
    declare("CAST(1 AS BIGINT) AS more")
    fill(tmp_path / "bus", paid(1))

    assert results(job.run(find(["mine"])))["mine"].new_columns == ("mine.more",)
    declare("'text' AS more")
    fill(tmp_path / "bus", paid(2))
    (ran,) = job.run(find(["mine"]))

    assert ran.error == (
        "table mine: column more was bigint and is string (trunkline pipeline run mine --rebuild)"
    )
    rows = job.lake.read(spark, "mine").orderBy("offset").collect()
    assert [tuple(row) for row in rows] == [(1, None), (2, 1)]
    assert orphans(job.lake) == set()
    results(job.run(find(["mine"]), rebuild=True))
    rows = job.lake.read(spark, "mine").orderBy("offset").collect()
    assert [tuple(row) for row in rows] == [(1, "text"), (2, "text"), (3, "text")]
    assert job.run(find(["mine"]))[0].error == ""
    assert job.lake.rows("mine") == 3


def test_a_schema_grows_and_one_that_changes_a_type_leaves_its_table_out(
    spark: SparkSession, tmp_path: Path
) -> None:
    root = fill(tmp_path / "bus", promise(1, members(n="integer")), paid(0))
    job = Runner(spark, root, Lake(str(tmp_path / "lake")))
    results(job.run(find(["clean"])))
    fill(tmp_path / "bus", promise(2, members(n="integer", m="string")), paid(1, m="x"))

    grown = results(job.run(find(["clean"])))["clean"]

    typed = f"clean.{TOPIC}"
    assert grown.new_columns == (f"{typed}.payload",)
    rows = job.lake.read(spark, typed).orderBy("offset").selectExpr("payload.*").collect()
    assert [tuple(row) for row in rows] == [(0, None), (1, "x")]
    far = make_event(2, type="t", payload={"n": "two"}), make_event(3, topic="free", type="t")
    fill(tmp_path / "bus", promise(3, members(n="string")), *far)
    changed = results(job.run(find(["clean"])))["clean"]
    (note,) = changed.notes
    assert note.startswith(f"table {typed}: column payload.n was bigint and is string (trunkline ")
    assert "trunkline pipeline run clean --rebuild" in note
    assert job.lake.rows(typed) == 2
    assert job.lake.read(spark, "clean").where("NOT startswith(topic, 'system.')").count() == 4
    results(job.run(find(["clean"]), rebuild=True))
    assert [row.n for row in job.lake.read(spark, typed).selectExpr("payload.n").collect()] == [
        "two"
    ]
    refused = job.lake.read(spark, "quarantine").where("pipeline = 'clean'").collect()
    assert [one.offset for one in refused] == [1, 2], "numbers do not fit the new schema"


def test_nothing_in_a_payload_or_a_schema_stops_silver(spark: SparkSession, tmp_path: Path) -> None:
    schema = members(n="number", i="integer")
    schema["properties"] |= {"when": {"type": "string", "format": "date-time"}, "": {}}
    odd = [
        {"n": 10**400}, {"i": 10**400}, {"when": "9999-12-31T23:59:59-14:00"},
        {"when": "0001-01-01T00:00:00+14:00"},
    ]  # fmt: skip
    events = [make_event(n, type="t", payload=payload) for n, payload in enumerate([{}, *odd])]
    root = fill(
        tmp_path / "bus",
        promise(1, schema),
        promise(1, {"type": "no such type"}, "bad"),
        promise(1, {"$ref": "http://127.0.0.1:1/schema"}, "far"),
        *events,
        make_event(20, topic="bad", type="t"),
        make_event(21, topic="far", type="t"),
    )
    job = Runner(spark, root, Lake(str(tmp_path / "lake")))

    ran = results(job.run(find(["clean"])))["clean"]

    assert [note.partition(" is ")[0] for note in ran.notes] == ["topic bad", "topic far"]
    refused = job.lake.read(spark, "quarantine").orderBy("offset").collect()
    said = {one.offset: one.reason for one in refused}
    assert said.keys() == {2, 3, 4, 5}
    assert all(reason.startswith("it does not fit its type: ") for reason in said.values())
    assert max(map(len, said.values())) < 200
    passed = job.lake.read(spark, "clean").where("NOT startswith(topic, 'system.')").count()
    assert passed + len(said) == len(events) + 2


def test_what_clean_refused_is_no_step_and_no_decision(spark: SparkSession, tmp_path: Path) -> None:
    def step(number: int, kind: str, **fields: Any) -> Event:
        return make_event(number, type=kind, actor="ann", key="k", **fields)

    root = fill(
        tmp_path / "bus",
        promise(1, members(n="integer")),
        step(0, "placed"),
        step(0, "placed"),
        step(1, "paid"),
        step(2, "broken", payload={"n": "x"}),
    )
    job = Runner(spark, root, Lake(str(tmp_path / "lake")))

    first = results(job.run(find(["sequences", "temporal"])))
    fill(tmp_path / "bus", step(1, "paid"), step(3, "sent"))
    results(job.run(find(["sequences", "temporal"])))

    assert next(iter(first)) == "clean", "the maker of their source runs before them"
    steps = {(row.step, row.times) for row in job.lake.read(spark, "sequences").collect()}
    assert steps == {("(start) > placed", 1), ("placed > paid", 1), ("paid > sent", 1)}
    (profile,) = job.lake.read(spark, "temporal").collect()
    assert (profile.events, profile.in_bursts) == (3, 0)
    results(job.run(find(["sequences"]), rebuild=True))
    assert {(r.step, r.times) for r in job.lake.read(spark, "sequences").collect()} == steps


def test_a_table_of_silver_waits_for_clean(spark: SparkSession, tmp_path: Path) -> None:
    root = fill(tmp_path / "bus", make_event(0, type="t", actor="ann"))
    (alone,) = (one for one in find(["sequences"]) if one.name == "sequences")

    (ran,) = Runner(spark, root, Lake(str(tmp_path / "lake"))).run([alone])

    assert (
        ran.error == "there is no table clean to make sequences of (trunkline pipeline run clean)"
    )


def test_a_damaged_line_is_put_aside_and_stops_no_pipeline(
    spark: SparkSession, tmp_path: Path
) -> None:
    root = fill(tmp_path / "bus", *map(paid, range(9)))
    (segment,) = Path(root, "wal").glob(f"{TOPIC}.*.jsonl")
    text = segment.read_bytes()
    assert text.count(b'"payload":{"n":4}') == 1
    segment.write_bytes(text.replace(b'"payload":{"n":4}', b'"payload":{"n":5}'))
    lake = Lake(str(tmp_path / "lake"))

    results(Runner(spark, root, lake).run(find(["lake", "clean", "traffic", "verify"])))

    offsets = {1, 2, 3, 4, 6, 7, 8, 9}
    for name in ("events", "clean"):
        assert {row.offset for row in lake.read(spark, name).collect()} == offsets
    refused = lake.read(spark, "quarantine").collect()
    assert [(one.pipeline, one.offset, one.rule) for one in refused] == [("lake", 5, "whole")]
    assert '"n":5' in refused[0].value
    alone = Lake(str(tmp_path / "alone"))
    results(Runner(spark, root, alone).run(find(["clean"])))
    refused = alone.read(spark, "quarantine").collect()
    assert [(one.pipeline, one.offset, one.rule) for one in refused] == [("clean", 5, "whole")]
    assert lake.read(spark, "traffic").selectExpr("sum(events) AS n").collect()[0].n == 8
    found = lake.read(spark, "verify").where(f"topic = '{TOPIC}'").collect()
    assert any(str(segment.name) in one.path and one.severe for one in found)


def test_a_run_can_be_bounded_by_time(spark: SparkSession, tmp_path: Path) -> None:
    def at(seconds: float) -> str:
        when: datetime = START + timedelta(seconds=seconds)
        return when.isoformat()

    root = fill(tmp_path / "bus", *map(paid, range(10)))
    lake = Lake(str(tmp_path / "lake"))

    def counted(**options: Any) -> int:
        rebuild = options.pop("rebuild", False)
        (ran,) = Runner(spark, root, lake, **options).run(find(["traffic"]), rebuild=rebuild)
        assert ran.error == ""
        found = lake.read(spark, "traffic").selectExpr("sum(events) AS n").collect()[0].n
        return int(found)

    assert counted(since=at(2), until=at(5)) == 3
    assert counted() == 8, "it goes on where it ended"
    (ran,) = Runner(spark, root, lake, since=at(0)).run(find(["traffic"]))
    assert "has begun elsewhere" in ran.error
    assert "--rebuild" in ran.error
    assert counted(since=at(7), rebuild=True) == 3
    assert counted(rebuild=True) == 10


def test_what_spark_keeps_the_state_of_is_not_bounded(spark: SparkSession, tmp_path: Path) -> None:
    @table("kept", topics=TOPIC, keys=("key",))
    def kept(df: DataFrame) -> DataFrame:
        return df.groupBy("key").count()

    root = fill(tmp_path / "bus", *map(paid, range(3)))

    (ran,) = Runner(spark, root, Lake(str(tmp_path / "lake")), until="2030-01-01").run(
        find(["kept"])
    )

    assert ran.error == (
        "pipeline kept keeps its state in Spark and reads the whole log (run it without --from "
        "and --to)"
    )


@pytest.mark.parametrize("how", ["--every 1", "--follow"])
@pytest.mark.parametrize("once", ["--rebuild", "--from 2026-01-01", "--to 2026-01-01"])
def test_what_is_for_one_run_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, once: str
) -> None:
    words = f"pipeline run traffic --url file:{tmp_path} {how} {once}".split()

    assert main(words) == 4

    assert "--rebuild, --from and --to are for one run" in capsys.readouterr().err


VALUES = (
    "plain",
    "a b",
    "ü",
    "%41",
    "a=b",
    "a/b",
    "../../../out",
    "c:d",
    "#?[x]{y}",
    "'\"\\",
    None,
)


def test_any_text_can_be_a_partition(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"))
    rows = [(value, number) for number, value in enumerate(VALUES)]
    df = spark.createDataFrame(rows, "k string, n int").coalesce(1)
    lake.write("t", df, app="a", version=0, partition_by=("k",))

    def found() -> set[tuple[Any, ...]]:
        return {(row.k, row.n) for row in lake.read(spark, "t").collect()}

    assert found() == set(rows)
    assert [path.name for path in tmp_path.iterdir()] == ["lake"]
    assert [path.name for path in (tmp_path / "lake").iterdir()] == ["t"]
    newest = lake.newest("t")
    lake.write("t", df, app="a", version=1, partition_by=("k",))
    assert len(lake.added_since("t", newest, newest + 1) or ()) == len(VALUES)
    assert optimize(lake, "t", many=2) == 2 * len(VALUES)
    assert lake.read(spark, "t").count() == 2 * len(VALUES)
    given = frozenset(value for value in VALUES if value is not None)
    lake.write("t", df, app="a", version=2, partition_by=("k",), replacing=Replacing("k", given))
    assert lake.read(spark, "t").count() == len(VALUES) + 2
