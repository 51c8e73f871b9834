"""What each pipeline makes of rows one can read, at once and batch by batch."""

from __future__ import annotations

import inspect
from datetime import datetime
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from trunkline.errors import InvalidOption, NotFound
from trunkline.spark.pipelines import Output, find, pipeline, together
from trunkline.spark.pipelines.application import consolidation, learning, sequences, temporal
from trunkline.spark.pipelines.application import decisions as decided
from trunkline.spark.pipelines.builtin import claims, compaction, dead_letters, latency, traffic
from trunkline.spark.pipelines.run import topic_shape, upsert

from .logs import TOPIC

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

ROW = (
    "topic string, partition int, offset bigint, timestamp timestamp, "
    "key string, value string, type string, actor string, space string, id string, "
    "idem_key string, trace string, ttl_s double, priority string, subject string, cause string, "
    "band string, headers map<string,string>"
)


def frame(spark: SparkSession, *rows: dict[str, Any], first: int = 0) -> DataFrame:
    names = [word.split()[0] for word in ROW.split(", ")]
    base = {"topic": TOPIC, "partition": 0, "type": "t", "band": "GREEN"}
    full = []
    for number, row in enumerate(rows, first):
        made = base | {"offset": number + 1, "id": f"e{number}", "timestamp": at(number)} | row
        full.append(tuple(made.get(name) for name in names))
    return spark.createDataFrame(full, ROW)


def at(second: float) -> datetime:
    return datetime(2026, 1, 1, 12, int(second) // 60, int(second) % 60)  # noqa: DTZ001


def fold(spark: SparkSession, module: ModuleType, *batches: DataFrame) -> list[Row]:
    return folded(spark, module, *batches).collect()


def folded(spark: SparkSession, module: ModuleType, *batches: DataFrame) -> DataFrame:
    """What the table holds after some batches."""
    table: DataFrame | None = None
    seen: DataFrame | None = None
    for batch in batches:
        seen = together(seen, batch)
        asks = inspect.signature(module.transform).parameters
        more = {"history": lambda rows=seen: rows} if "history" in asks else {}
        made = module.transform(batch, table, **more)
        rows = (made.table if isinstance(made, Output) else made).persist()
        table = spark.createDataFrame(rows.collect(), rows.schema)
        rows.unpersist()
    assert table is not None
    return table


def told(made: Output) -> list[tuple[str, str, str]]:
    assert made.events is not None
    return sorted((row.topic, row.type, row.key) for row in made.events.collect())


def test_traffic_counts_by_topic_type_and_hour(spark: SparkSession) -> None:
    df = frame(spark, {"value": "12", "key": "k"}, {"value": "1", "key": "k"}, {"type": "u"})

    rows = traffic.transform(df).orderBy("type").collect()

    found = [(row.type, row.events, row.bytes, row["keys"], row.is_estimate) for row in rows]
    assert found == [("t", 2, 3, 1, False), ("u", 1, 0, 0, False)]


def test_latency_is_read_from_the_audit(spark: SparkSession) -> None:
    values = [
        f'{{"what":"ack","topic":"orders","group":"g","offset":{n},"attempt":1,'
        f'"waited_s":{0.01 * n},"held_s":0.002}}'
        for n in range(1, 101)
    ]
    values += ['{"what":"publish","topic":"orders","offset":1}', '{"what":"denied","topic":"x"}']

    (row,) = latency.transform(frame(spark, *({"value": value} for value in values))).collect()

    assert (row.topic, row.group, row.records, row.acked) == ("orders", "g", 100, 100)
    assert row.deliver_p50_ms == pytest.approx(500, rel=0.03)
    assert row.deliver_p99_ms == pytest.approx(990, rel=0.03)
    assert row.settle_p95_ms == pytest.approx(2, rel=0.05)


def test_dead_letters_are_grouped_by_what_their_error_comes_down_to(spark: SparkSession) -> None:
    def letter(error: str, offset: int) -> dict[str, Any]:
        names = {"dlq-topic": TOPIC, "dlq-group": "billing", "dlq-reason": "retries"}
        return {"headers": names | {"dlq-error": error, "dlq-offset": str(offset)}}

    df = frame(
        spark,
        letter("KeyError: 'c42'", 3),
        letter("KeyError: 'c7'", 9),
        letter("timeout after 30.5 s", 4),
    )

    rows = dead_letters.transform(df).orderBy("signature").collect()

    assert [(row.signature, row.letters, row.offsets) for row in rows] == [
        ("KeyError: …", 2, [3, 9]),
        ("timeout after # s", 1, [4]),
    ]
    assert sorted(rows[0].examples) == ["KeyError: 'c42'", "KeyError: 'c7'"]


@pytest.mark.parametrize("cut", [0, 2, 4])
def test_compaction_keeps_the_latest_and_heeds_tombstones(spark: SparkSession, cut: int) -> None:
    rows: list[dict[str, Any]] = [
        {"key": "a", "value": "1"},
        {"key": "b", "value": "2"},
        {"key": "a", "value": "3"},
        {"key": "b", "value": None},
        {"value": "4"},
    ]
    batches = [frame(spark, *rows[:cut]), frame(spark, *rows[cut:], first=cut)]

    found = fold(spark, compaction, *batches)

    assert [(row.key, row.value, row.versions) for row in found] == [("a", "3", 2)]


@pytest.mark.parametrize("cut", [0, 41])
def test_sequences_tell_the_usual_from_the_surprising(spark: SparkSession, cut: int) -> None:
    rows = [{"actor": "x", "type": "ab"[n % 2]} for n in range(81)]
    rows.append({"actor": "x", "type": "c"})
    batches = [frame(spark, *rows[:cut]), frame(spark, *rows[cut:], first=cut)]

    found = {row.step: row for row in fold(spark, sequences, *batches)}

    assert (found["a > b"].times, found["a > b"].surprising) == (40, False)
    assert (found["b > a"].times, found["a > c"].times) == (40, 1)
    assert found["a > c"].surprising
    assert found["(start) > a"].times == 1


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_claims_name_their_holders_and_their_conflicts(spark: SparkSession, cut: int) -> None:
    def move(topic: str, what: str, actor: str, second: int) -> dict[str, Any]:
        fields = {"topic": topic, "subject": what, "actor": actor, "ttl_s": 5.0}
        return fields | {"timestamp": at(second)}

    rows = [
        move("coord.claim", "src/a", "ann", 0),
        move("coord.release", "src/a", "ann", 30),
        move("coord.claim", "src/b", "ann", 40),
        move("coord.claim", "src/b", "bob", 50),
        move("coord.claim", "src/c", "cleo", 58),
    ]
    batches = [frame(spark, *rows[:cut]), frame(spark, *rows[cut:], first=cut)]

    found = {(row.actor, row.what): row for row in fold(spark, claims, *batches)}

    assert found["ann", "src/a"].held_s == 30.0
    assert (found["ann", "src/b"].conflicts, found["ann", "src/b"].abandoned) == (1, 0)
    assert (found["bob", "src/b"].conflicts, found["bob", "src/b"].abandoned) == (0, 1)
    assert (found["cleo", "src/c"].claims, found["cleo", "src/c"].abandoned) == (1, 0)
    assert found["cleo", "src/c"].held_since == at(58)


def test_other_events_of_coordination_move_the_clock(spark: SparkSession) -> None:
    claim = {"topic": "coord.claim", "subject": "a", "actor": "ann", "ttl_s": 5.0}
    word = {"topic": "coord.note", "actor": "bob", "timestamp": at(20)}

    (row,) = fold(spark, claims, frame(spark, claim), frame(spark, word, first=1))

    assert (row.actor, row.claims, row.abandoned) == ("ann", 1, 1)


@pytest.mark.parametrize("cut", [0, 3])
def test_temporal_expects_the_next_after_the_usual_pause(spark: SparkSession, cut: int) -> None:
    rows = [{"key": "k", "space": "s", "timestamp": at(10 * n)} for n in range(6)]
    batches = [frame(spark, *rows[:cut]), frame(spark, *rows[cut:], first=cut)]

    (row,) = fold(spark, temporal, *batches)

    assert (row.events, row.usual_gap_s, row.in_bursts) == (6, 10.0, 0)
    assert row.next_expected == at(60)
    assert (row.usual_hour, row.by_hour[12], sum(row.by_hour)) == (12, 6, 6)
    assert (row.usual_weekday, row.by_weekday) == (3, [0, 0, 0, 6, 0, 0, 0])


def test_a_key_that_is_overdue_raises_one_trigger(spark: SparkSession) -> None:
    regular = [{"key": "k", "timestamp": at(10 * n)} for n in range(6)]
    first = temporal.transform(frame(spark, *regular))
    table = first.table.persist()
    late = temporal.transform(frame(spark, {"key": "other", "timestamp": at(65)}, first=6), table)
    far = frame(spark, {"topic": "elsewhere", "key": "x", "timestamp": at(3000)}, first=6)
    assert told(temporal.transform(far, table)) == [("temporal", "TEMPORAL_PROFILE", "elsewhere|x")]
    later = late.table.persist()
    again = temporal.transform(frame(spark, {"key": "other", "timestamp": at(66)}, first=7), later)

    assert told(first) == [("temporal", "TEMPORAL_PROFILE", "orders|k")]
    assert told(late) == [
        ("prospective", "PROSPECTIVE_TRIGGER", "orders|k"),
        ("temporal", "TEMPORAL_PROFILE", "orders|other"),
    ]
    assert told(again) == [("temporal", "TEMPORAL_PROFILE", "orders|other")]
    table.unpersist()
    later.unpersist()


def test_rows_without_a_key_move_the_clock_too(spark: SparkSession) -> None:
    regular = [{"key": "k", "timestamp": at(10 * n)} for n in range(6)]
    table = temporal.transform(frame(spark, *regular)).table.persist()

    late = temporal.transform(frame(spark, {"timestamp": at(65)}, first=6), table)

    assert told(late) == [("prospective", "PROSPECTIVE_TRIGGER", "orders|k")]
    table.unpersist()


@pytest.mark.parametrize("cut", [0, 2, 4])
def test_consolidation_cuts_episodes_where_there_was_a_pause(spark: SparkSession, cut: int) -> None:
    times = [0, 5, 9, 1900, 1910]
    rows: list[dict[str, Any]] = [
        {"actor": "ann", "space": "s", "timestamp": at(t), "type": "ab"[t % 2]} for t in times
    ]
    batches = [frame(spark, *rows[:cut]), frame(spark, *rows[cut:], first=cut)]

    found = sorted(fold(spark, consolidation, *batches), key=lambda row: row.start)

    assert [(row.events, row.first_id, row.last_id, row.open) for row in found] == [
        (3, "e0", "e2", False),
        (2, "e3", "e4", True),
    ]
    assert (found[0].types, found[0].mostly) == ({"a": 1, "b": 2}, "b")
    assert found[0].summary == "ann in s: 3 events in 9 s, mostly b"


def test_an_episode_is_told_when_it_is_over_and_when_it_changes(spark: SparkSession) -> None:
    open_ = consolidation.transform(frame(spark, {"actor": "ann", "timestamp": at(0)}))
    assert told(open_) == []
    table = open_.table.persist()
    other = frame(spark, {"actor": "bob", "timestamp": at(1500)}, first=1)
    assert told(consolidation.transform(other, table)) == []
    next_ = frame(spark, {"actor": "ann", "timestamp": at(2000)}, first=2)
    over = consolidation.transform(next_, table)
    assert told(over) == [("hippo", "HIPPO_ENCODE", "|ann")]
    later = over.table.persist()
    late = consolidation.transform(
        frame(spark, {"actor": "ann", "timestamp": at(9)}, first=3), later
    )
    assert told(late) == [("hippo", "HIPPO_ENCODE", "|ann")]
    quiet = frame(spark, {"actor": "ann", "timestamp": at(2001)}, first=4)
    assert told(consolidation.transform(quiet, late.table)) == []
    table.unpersist()
    later.unpersist()


def decisions(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    made = {"type": "ACTION_DECISION", "value": '{"action":"mail","context":"day","confidence":1}'}
    named = '{"action_id":"a1","action":"call","confidence":0.5}'
    first = frame(spark, made, made, made, {"type": "ACTION_DECISION", "value": named})
    second = frame(
        spark,
        {"type": "ACTION_EXECUTED", "cause": "e0", "value": '{"ok":true,"reward":1}'},
        {"type": "ACTION_EXECUTED", "cause": "e1", "value": '{"ok":false,"reward":0}'},
        {"type": "ACTION_EXECUTED", "value": '{"action_id":"a1","status":"ok"}'},
        first=4,
    )
    return first, second


def test_learning_joins_decisions_to_what_came_of_them(spark: SparkSession) -> None:
    first, second = decisions(spark)
    late = {"type": "ACTION_EXECUTED", "cause": "e2", "value": '{"ok":true}', "timestamp": at(3599)}
    twice = {"type": "ACTION_DECISION", "id": "e0", "value": '{"action":"mail","context":"day"}'}
    third = frame(
        spark,
        late,
        twice,
        {"type": "ACTION_EXECUTED", "cause": "e0", "value": '{"ok":false}'},
        first=7,
    )
    batches = [decided.prepare(one) for one in (second, first, third)]
    rows = folded(spark, partial_module(within_s=60.0), *batches)

    call, mail = learning.transform(rows).table.collect()

    assert (mail.action, mail.decisions, mail.outcomes, mail.too_late) == ("mail", 3, 2, 1)
    assert (mail.success_rate, mail.reward, mail.brier) == (0.5, 0.5, 0.5)
    assert (call.decisions, call.success_rate, call.brier) == (1, 1.0, 0.25)
    assert 0.4 < mail.expected < call.expected < 1.0
    assert mail.model_brier == pytest.approx(0.25, abs=0.02)


def partial_module(**settings: Any) -> Any:
    """The pipeline decisions with settings of its own."""
    from types import SimpleNamespace

    def transform(df: DataFrame, table: DataFrame | None = None) -> DataFrame:
        return decided.transform(df, table, **settings)

    return SimpleNamespace(transform=transform)


def test_what_has_the_same_keys_is_replaced(spark: SparkSession) -> None:
    old = spark.createDataFrame([("a", None, 1), ("b", "x", 2)], "k string, l string, n int")
    new = spark.createDataFrame([("a", None, 5), ("c", "x", 3)], "k string, l string, n int")

    found = upsert(old, new, ("k", "l")).collect()

    assert [tuple(row) for row in found] == [("a", None, 5), ("b", "x", 2), ("c", "x", 3)]


@pytest.mark.parametrize(
    ("pattern", "topic", "fits"),
    [
        ("", "system.schemas", True),
        (">", "orders", True),
        (">", "a.b.c", True),
        (">", "system.schemas", False),
        (">", "orders.DLQ", False),
        ("*.DLQ", "a.b.DLQ", True),
        ("coord.*", "coord.claim", True),
        ("coord.*", "coord.claim.x", False),
        ("coord.>", "coord.claim.x", True),
        ("coord.>", "coord.claim.DLQ", False),
        ("coord.*", "coord.DLQ", False),
        ("coord.*.DLQ", "coord.claim.DLQ", True),
        ("orders", "ordersX", False),
    ],
)
def test_a_pattern_of_topics(pattern: str, topic: str, fits: bool) -> None:
    import re

    assert bool(re.fullmatch(topic_shape(pattern), topic)) is fits


def test_a_pipeline_of_ones_own_stands_beside_the_others() -> None:
    import trunkline.spark.pipelines.declare as registry

    @pipeline("mine", about="mine", columns="topic")
    def transform(df: DataFrame) -> DataFrame:
        return df

    try:
        assert find(["mine"])[0].transform is transform
        with pytest.raises(NotFound, match="there is no pipeline other"):
            find(["other"])
        with pytest.raises(InvalidOption, match="replaces its table without having seen it"):
            pipeline("other", about="", sink="replace")(transform)
    finally:
        del registry._known["mine"]
