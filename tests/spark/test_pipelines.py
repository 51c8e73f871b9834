"""Pipelines on rows one can read, and a run of all of them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from trunkline.errors import NotFound
from trunkline.log import upkeep
from trunkline.log.folder import Folder, GroupKey
from trunkline.options import GroupOptions, TopicOptions
from trunkline.spark.jobs import Runner, pick, read_outcomes, replay
from trunkline.spark.lake import EVENTS, Lake
from trunkline.spark.pipelines import (
    all_pipelines,
    claims,
    clean,
    compaction,
    consolidation,
    dead_letters,
    find,
    latency,
    learning,
    pipeline,
    sequences,
    temporal,
    traffic,
)
from trunkline.spark.report import write_report

from .logs import TOPIC, append, make_event, make_log, read_log
from .test_source import load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROW = (
    "topic string, partition int, offset bigint, timestamp timestamp, timestampType int, "
    "key string, value string, type string, actor string, space string, id string, "
    "idem_key string, ttl_s double, subject string, cause string, band string, "
    "headers map<string,string>"
)


def frame(spark: SparkSession, *rows: dict[str, Any]) -> DataFrame:
    names = [word.split()[0] for word in ROW.split(", ")]
    base = {"topic": TOPIC, "partition": 0, "timestampType": 0, "type": "t", "band": "GREEN"}
    full = []
    for number, row in enumerate(rows):
        made = base | {"offset": number + 1, "id": f"e{number}", "timestamp": at(number)} | row
        full.append(tuple(made.get(name) for name in names))
    return spark.createDataFrame(full, ROW)


def at(second: float) -> datetime:
    return datetime(2026, 1, 1, 12, int(second) // 60, int(second) % 60)  # noqa: DTZ001


def test_clean_keeps_each_event_once_and_says_why_not_the_others(spark: SparkSession) -> None:
    df = frame(
        spark,
        {"idem_key": "a", "value": "{}"},
        {"idem_key": "a", "value": "{}"},
        {"value": "not json"},
        {"type": None, "value": "1"},
        {"ttl_s": 5.0, "value": "1"},
        {"topic": "orders.DLQ", "value": "1"},
    )

    rows = clean.transform(df).orderBy("offset").collect()

    assert [(row.offset, row.reason) for row in rows] == [
        (1, None),
        (2, "it was published before"),
        (3, "the payload is no JSON"),
        (4, "it has no type"),
        (5, "it has expired"),
    ]


def test_traffic_counts_by_topic_type_and_hour(spark: SparkSession) -> None:
    df = frame(spark, {"value": "12", "key": "k"}, {"value": "1", "key": "k"}, {"type": "u"})

    rows = traffic.transform(df).collect()

    found = [(row.type, row.events, row.bytes, row["keys"]) for row in rows]
    assert found == [("t", 2, 3, 1), ("u", 1, None, 0)]


def test_latency_is_read_from_the_audit(spark: SparkSession) -> None:
    values = [
        f'{{"topic":"orders","group":"g","published":{n},"delivered":{n + 0.01 * n},'
        f'"settled":{n + 0.01 * n + 0.002},"attempt":1}}'
        for n in range(1, 101)
    ]

    (row,) = latency.transform(frame(spark, *({"value": value} for value in values))).collect()

    assert (row.topic, row.group, row.records) == ("orders", "g", 100)
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

    rows = dead_letters.transform(df).collect()

    assert [(row.signature, row.letters, row.offsets) for row in rows] == [
        ("KeyError: …", 2, [3, 9]),
        ("timeout after # s", 1, [4]),
    ]
    assert sorted(rows[0].examples) == ["KeyError: 'c42'", "KeyError: 'c7'"]


def test_compaction_keeps_the_latest_and_heeds_tombstones(spark: SparkSession) -> None:
    df = frame(
        spark,
        {"key": "a", "value": "1"},
        {"key": "b", "value": "2"},
        {"key": "a", "value": "3"},
        {"key": "b", "value": None},
        {"value": "4"},
    )

    rows = compaction.transform(df).collect()

    assert [(row.key, row.value, row.versions) for row in rows] == [("a", "3", 2)]


def test_sequences_tell_the_usual_from_the_surprising(spark: SparkSession) -> None:
    df = frame(
        spark,
        *({"actor": "x", "type": "ab"[n % 2]} for n in range(81)),
        {"actor": "x", "type": "c"},
    )

    rows = {row.step: row for row in sequences.transform(df).collect()}

    assert (rows["a > b"].times, rows["a > b"].surprising) == (40, False)
    assert (rows["a > c"].times, rows["a > c"].surprising) == (1, True)


def test_claims_say_who_held_what_and_what_clashed(spark: SparkSession) -> None:
    df = frame(
        spark,
        {"topic": "coord.claim", "subject": "src/a", "actor": "ann", "timestamp": at(0)},
        {"topic": "coord.release", "subject": "src/a", "actor": "ann", "timestamp": at(30)},
        {"topic": "coord.claim", "subject": "src/b", "actor": "ann", "timestamp": at(40)},
        {"topic": "coord.claim", "subject": "src/b", "actor": "bob", "timestamp": at(50)},
    )

    rows = {(row.actor, row.what): row for row in claims.transform(df).collect()}

    assert rows["ann", "src/a"].held_s == 30.0
    assert (rows["ann", "src/b"].conflicts, rows["ann", "src/b"].abandoned) == (1, 0)
    assert (rows["bob", "src/b"].conflicts, rows["bob", "src/b"].abandoned) == (0, 1)


def test_temporal_expects_the_next_after_the_usual_pause(spark: SparkSession) -> None:
    df = frame(spark, *({"key": "k", "timestamp": at(10 * n)} for n in range(6)))

    (row,) = temporal.transform(df).collect()

    assert (row.events, row.usual_gap_s, row.in_bursts) == (6, 10.0, 0)
    assert row.next_expected == at(60)


def test_consolidation_cuts_episodes_where_there_was_a_pause(spark: SparkSession) -> None:
    times = [0, 5, 9, 1900, 1910]
    df = frame(spark, *({"actor": "ann", "space": "s", "timestamp": at(t)} for t in times))

    rows = consolidation.transform(df).collect()

    assert [(row.events, row.first_id, row.last_id) for row in rows] == [
        (3, "e0", "e2"),
        (2, "e3", "e4"),
    ]


def test_learning_joins_decisions_to_what_came_of_them(spark: SparkSession) -> None:
    made = {"type": "ACTION_DECISION", "value": '{"action":"mail","context":"day","confidence":1}'}
    df = frame(
        spark,
        made,
        made,
        made,
        {"type": "ACTION_EXECUTED", "cause": "e0", "value": '{"ok":true,"reward":1}'},
        {"type": "ACTION_EXECUTED", "cause": "e1", "value": '{"ok":false,"reward":0}'},
    )

    (row,) = learning.transform(df).collect()

    assert (row.action, row.decisions, row.outcomes) == ("mail", 3, 2)
    assert (row.success_rate, row.reward, row.brier) == (0.5, 0.5, 0.5)
    assert row.expected == pytest.approx(0.5, abs=0.01)


def demo_log(root: Path) -> str:
    folder = Folder(str(root))
    folder.define(TOPIC, TopicOptions(partitions=2))
    for start in range(0, 200, 10):
        events = [
            make_event(n, type=f"t{n % 3}", key=f"k{n % 7}", actor=f"a{n % 4}")
            for n in range(start, start + 10)
        ]
        append(folder, events, start // 10 % 2)
    folder.step(GroupKey(TOPIC, 0, "billing"), lambda group: group.define(GroupOptions(), 60))
    folder.close()
    return str(root)


def test_all_pipelines_run_again_without_doing_anything_twice(
    spark: SparkSession, tmp_path: Path
) -> None:
    root = demo_log(tmp_path / "bus")
    lake = Lake(str(tmp_path / "lake"))
    runner = Runner(spark, f"file:{root}", lake)

    first = {one.name: one for one in runner.run(find([]))}
    again = {one.name: one for one in runner.run(find(["lake", "traffic", "temporal"]))}

    assert {one.name: one.error for one in first.values() if one.error} == {}
    assert {one.name for one in read_outcomes(lake)} == set(all_pipelines())
    sent_back = len(read_log(root, "temporal")) + len(read_log(root, "hippo"))
    assert (first["lake"].rows, again["lake"].rows) == (200, sent_back)
    assert lake.read(spark, EVENTS).count() == 200 + sent_back
    assert again["temporal"].published == 0
    assert lake.read(spark, "clean").count() == 200
    assert lake.read(spark, "verify").count() == 0
    lags = {row.group: row.lag for row in lake.read(spark, "lag").collect()}
    assert lags["billing"] == 40
    assert len(read_log(root, "temporal")) == 7
    assert {r.event.type for r in read_log(root, "hippo")} == {"EPISODE"}
    page = write_report(spark, lake, find([]))
    assert page.count("<svg") >= 6
    assert "<script" not in page
    assert "http" not in page


def test_old_records_come_from_the_lake_and_new_ones_from_the_log(
    spark: SparkSession, tmp_path: Path
) -> None:
    root = make_log(tmp_path / "bus", 100, partitions=2)
    lake = Lake(str(tmp_path / "lake"))
    Runner(spark, root, lake).run(find(["lake"]))
    folder = Folder(root)
    upkeep.trim(folder, TOPIC, 0, 31)
    append(folder, [make_event(n) for n in range(100, 110)], 0)
    folder.close()

    df = load(spark, root, tier="auto", lake=lake.path)

    expected = [(0, n) for n in range(1, 61)] + [(1, n) for n in range(1, 51)]
    rows = df.select("partition", "offset", "id", "topic").collect()
    assert sorted((row.partition, row.offset) for row in rows) == expected
    assert len({row.id for row in rows}) == 110
    assert {row.topic for row in rows} == {TOPIC}
    part = load(
        spark, root, tier="auto", lake=lake.path, startingOffsets='{"orders":{"0":25,"1":40}}'
    )
    assert part.count() == 36 + 11
    assert load(spark, root).count() == 80


def test_retention_waits_for_the_lake(spark: SparkSession, tmp_path: Path) -> None:
    root = make_log(tmp_path / "bus", 50)
    Runner(spark, root, Lake(str(tmp_path / "lake"))).run(find(["lake"]))
    folder = Folder(root)
    folder.define(TOPIC, TopicOptions(retention_records=5))
    append(folder, [make_event(n) for n in range(50, 80)])

    upkeep.retain(folder, TOPIC, 0)

    assert folder.bounds(TOPIC, 0) == (51, 81)
    folder.close()


def test_records_are_published_once_more_by_condition(spark: SparkSession, tmp_path: Path) -> None:
    root = make_log(tmp_path, 30)

    count = replay(
        spark,
        {"url": root, "subscribe": TOPIC},
        {"url": root, "topic": "again"},
        where="type = 't1' AND payload.n >= 10",
    )

    copies = read_log(root, "again")
    assert [r.event.payload["n"] for r in copies] == [10, 13, 16, 19, 22, 25, 28]
    assert count == 7
    assert copies[0].event.cause == "e10"


def test_a_condition_means_the_same_to_spark(spark: SparkSession, tmp_path: Path) -> None:
    df = load(spark, make_log(tmp_path, 30))

    kept = pick(df, "key = 'k3' AND ts < '2026-01-01T00:00:20Z'")

    assert sorted(row.offset for row in kept.collect()) == [4, 11, 18]
    assert kept.columns == df.columns


def test_a_pipeline_of_ones_own_stands_beside_the_others() -> None:
    @pipeline("mine", about="mine", columns="topic")
    def transform(df: DataFrame) -> DataFrame:
        return df

    try:
        assert find(["mine"])[0].transform is transform
        with pytest.raises(NotFound, match="there is no pipeline other"):
            find(["other"])
    finally:
        import trunkline.spark.pipelines as registry

        del registry._known["mine"]
