"""What passes into silver, what does not and why, and what becomes of foreign envelopes."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from trunkline.event import Event
from trunkline.folder import Folder
from trunkline.options import TopicOptions
from trunkline.spark.lake import Lake
from trunkline.spark.pipelines import find
from trunkline.spark.pipelines.builtin import clean
from trunkline.spark.pipelines.envelopes import normalise
from trunkline.spark.pipelines.run import Runner
from trunkline.spark.source.schemas import Contracts, typed

from .logs import START, TOPIC, append, make_event
from .test_pipelines import at, frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = {
    "type": "object",
    "required": ["n"],
    "properties": {
        "n": {"type": "integer"},
        "price": {"type": ["number", "null"]},
        "when": {"type": "string", "format": "date-time"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "to": {"type": "object", "properties": {"city": {"type": "string"}}},
        "rest": {},
    },
}


def judge(df: DataFrame, **promised: Any) -> list[tuple[int, str | None]]:
    from pyspark.sql import functions as f

    rows = clean.judge(
        df.withColumn("appended_at", f.lit(at(100))),
        None,
        Contracts(**promised),
        clean.WINDOW_S,
        dict.fromkeys(("whole", "schema", "type", "ttl", "repetition"), "quarantine"),
    )
    return [(row.offset, row.reason) for row in rows.orderBy("offset").collect()]


def test_each_event_is_kept_once_and_the_others_are_told_why(spark: SparkSession) -> None:
    df = frame(
        spark,
        {"idem_key": "a", "value": "{}"},
        {"idem_key": "a", "value": "{}"},
        {"type": None, "value": "2"},
        {"type": None, "value": "1"},
        {"ttl_s": 5.0, "value": "1"},
        {"ttl_s": 5.0, "value": "1", "topic": "kept"},
        {"idem_key": "a", "value": "{}", "topic": "kept"},
        {"value": None},
        {"idem_key": "b", "type": None, "value": "1", "topic": "kept"},
        {"idem_key": "b", "value": "[1]", "topic": "kept"},
    )

    assert judge(df, keep_expired=frozenset({"kept"})) == [
        (1, None),
        (2, "it was published before"),
        (3, "it has no type"),
        (4, "it has no type"),
        (5, "it had expired"),
        (6, None),
        (7, None),
        (8, None),
        (9, "it has no type"),
        (10, None),
    ]


def test_a_payload_fits_the_schema_of_its_topic(spark: SparkSession) -> None:
    df = frame(spark, {"value": '{"n":1}'}, {"value": '{"n":"x"}'}, {"value": None})

    (_, first), (_, second), (_, third) = judge(df, schemas={TOPIC: SCHEMA})

    assert first is None
    assert second is not None
    assert second.startswith('it does not fit the schema: "x" is not of type "integer" at /n')
    assert third is None  # a tombstone


def test_a_schema_gives_columns_their_types() -> None:
    kind = typed(SCHEMA)
    assert kind is not None
    assert kind.ddl == (
        "struct<`n`: bigint, `price`: double, `when`: timestamp, `tags`: array<string>, "
        "`to`: struct<`city`: string>, `rest`: string>"
    )
    assert typed({"type": "string"}) is None
    assert typed(True) is None


ENVELOPES: dict[str, dict[str, Any]] = {
    "line": {
        "event_id": "evt_1", "ts": "2026-02-16T11:12:00Z", "topic": "coord.claim",
        "scope": "a.md", "actor": "ann", "payload": {"n": 1}, "ttl_s": 600,
        "idempotency_key": "claim|a.md",
    },
    "file": {
        "source": "parser", "type": "task-complete", "priority": "high",
        "timestamp": "2026-02-16T11:12:00Z", "dedup-key": "job-7", "payload": {"n": 1},
    },
    "message": {
        "subject": "orders.placed", "data": {"n": 1}, "headers": {"Nats-Msg-Id": "m1"},
        "metadata": {"stream": "ORDERS", "timestamp": "2026-02-16T11:12:00Z", "numDelivered": 1},
    },
    "envelope": {
        "id": "01J9", "ts": 1771240320000, "topic": "heartbeat.received", "key": "proc:stt",
        "partition": 0, "headers": {"type": "beat", "agent_id": "duck"}, "payload": {"n": 1},
    },
    "meta": {
        "meta": {
            "topic": "actions", "type": "ACTION_EXECUTED", "space_id": "shared:household",
            "event_id": "ev-1", "ts": "2026-02-16T11:12:00Z", "idem_key": "act:a1", "ttl_sec": 30,
        },
        "payload": {"n": 1},
    },
    "own": {"payload": {"n": 1}, "id": "4711"},
}  # fmt: skip


def test_envelopes_are_taken_off(spark: SparkSession) -> None:
    df = frame(spark, *({"value": json.dumps(e)} for e in ENVELOPES.values()))

    rows = {row.dialect: row for row in normalise(df).collect()}

    assert set(rows) == set(ENVELOPES)
    assert [json.loads(row.value) for n, row in rows.items() if n != "own"] == [{"n": 1}] * 5
    assert json.loads(rows["own"].value) == ENVELOPES["own"]
    said = {n: (row.type, row.actor, row.key, row.idem_key) for n, row in rows.items()}
    assert said == {
        "line": ("coord.claim", "ann", "a.md", "claim|a.md"),
        "file": ("task-complete", "parser", None, "job-7"),
        "message": ("orders.placed", None, None, "m1"),
        "envelope": ("beat", "duck", "proc:stt", None),
        "meta": ("ACTION_EXECUTED", None, None, "act:a1"),
        "own": ("t", None, None, None),
    }
    times = {str(row.timestamp) for n, row in rows.items() if n != "own"}
    assert times == {"2026-02-16 11:12:00"}
    assert (rows["meta"].space, rows["meta"].ttl_s) == ("shared:household", 30.0)
    assert (rows["line"].id, rows["meta"].id, rows["file"].id) == ("evt_1", "ev-1", "e1")


def test_silver_is_typed_and_each_event_is_in_it_once(spark: SparkSession, tmp_path: Path) -> None:
    root = str(tmp_path / "bus")
    folder = Folder(root)
    folder.define(TOPIC, TopicOptions(dedup_window_s=0))  # repeats stay in the log
    schema = {"topic": TOPIC, "version": 1, "schema": SCHEMA}
    append(folder, [Event(topic="system.schemas", type="schema", payload=schema)])
    fits = {"n": 1, "price": 2.5, "when": "2026-01-01T10:00:00Z", "tags": ["a"], "rest": {"x": 1}}
    append(folder, [make_event(n, type="t", idem_key=f"o{n}", payload=fits) for n in range(5)])
    append(folder, [make_event(9, type="t", payload={"n": "no"})])
    append(folder, [make_event(20, topic="free", type="t", payload={"deep": [1, {"x": 2}]})])
    job = Runner(spark, root, Lake(str(tmp_path / "lake")))
    job.run(find(["clean"]))
    soon = [make_event(n + 100, type="t", idem_key=f"o{n}", payload=fits) for n in range(3)]
    late = make_event(4, type="t", idem_key="o4", payload=fits)
    late = Event(**{n: getattr(late, n) for n in late.__struct_fields__} | {"id": "late"})
    far = START + timedelta(days=3)
    append(folder, [*soon, late, Event(topic=TOPIC, type="t", ts=far, idem_key="o1", payload=fits)])
    folder.close()

    (ran,) = job.run(find(["clean"]))

    assert ran.error == ""
    rows = job.lake.read(spark, "clean").where(f"topic = '{TOPIC}'").collect()
    assert sorted(row.idem_key for row in rows) == ["o0", "o1", "o1", "o2", "o3", "o4"]
    free = job.lake.read(spark, "clean").where("topic = 'free'")
    (value,) = free.selectExpr("get_json_object(value, '$.deep[1].x') AS x").collect()
    assert value.x == "2"
    refused = job.lake.read(spark, "quarantine").orderBy("offset").collect()
    assert [row.reason[:12] for row in refused] == ["it does not ", *["it was publi"] * 4]
    orders = job.lake.read(spark, f"clean.{TOPIC}").select("payload.*")
    assert dict(orders.dtypes) | {"n": "bigint", "tags": "array<string>"} == dict(orders.dtypes)
    assert (orders.count(), orders.agg({"price": "sum"}).collect()[0][0]) == (6, 15.0)
    (one,) = orders.select("rest", "when").limit(1).collect()
    assert (one.rest, str(one.when)) == ('{"x":1}', "2026-01-01 10:00:00")
