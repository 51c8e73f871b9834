"""Pipelines over a log: each event once, only what is new, and whatever died in between."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from trunkline.event import Event
from trunkline.folder import Folder, upkeep
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, TopicOptions
from trunkline.spark.lake import EVENTS, Lake
from trunkline.spark.pipelines import (
    Output,
    Pipeline,
    all_pipelines,
    as_events,
    find,
    pipeline,
    together,
)
from trunkline.spark.pipelines import declare as registry
from trunkline.spark.pipelines.context import Context
from trunkline.spark.pipelines.run import Runner, RunResult, pick, read_outcomes, replay

from .logs import START, TOPIC, append, make_event, make_log, read_log
from .test_source import load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Died(Exception):
    """The process ends here."""


def fill(root: str, start: int, end: int) -> None:
    folder = Folder(root)
    folder.define(TOPIC, TopicOptions(partitions=2))
    for begin in range(start, end, 10):
        events = [
            make_event(n, type=f"t{n % 3}", key=f"k{n % 7}", actor=f"a{n % 4}")
            for n in range(begin, begin + 10)
        ]
        append(folder, events, begin // 10 % 2)
    folder.step(GroupKey(TOPIC, 0, "billing"), lambda group: group.define(GroupOptions(), 60))
    folder.close()


def runner(spark: SparkSession, place: Path) -> Runner:
    return Runner(spark, f"file:{place / 'bus'}", Lake(str(place / "lake")), publish=True)


def by_name(ran: list[RunResult]) -> dict[str, RunResult]:
    assert {one.name: one.error for one in ran if one.error} == {}
    return {one.name: one for one in ran}


@pytest.fixture
def own() -> Iterator[None]:
    before = dict(all_pipelines())
    yield
    registry._known.clear()
    registry._known.update(before)


def test_a_second_run_reads_what_is_new_and_does_nothing_twice(
    spark: SparkSession, tmp_path: Path
) -> None:
    root = str(tmp_path / "bus")
    fill(root, 0, 200)
    job = runner(spark, tmp_path)
    lake = job.lake

    names = ["lake", "clean", "traffic", "temporal"]
    first = by_name(job.run(find([*names, "lag", "verify"])))
    fill(root, 200, 240)
    again = by_name(job.run(find(names)))

    assert {one.name for one in read_outcomes(lake)} == set(first)
    # What pipelines published comes to bronze and silver, and counts in no other.
    assert [first[name].events for name in names] == [200, 200, 200, 200]
    assert [again[name].events for name in names] == [47, 47, 47, 47]
    assert (first["temporal"].published, again["temporal"].published) == (7, 7)
    assert len(read_log(root, "temporal")) == 14
    events = Counter((r.topic, r.partition, r.offset) for r in lake.read(spark, EVENTS).collect())
    assert len(events) == 240 + 7
    assert set(events.values()) == {1}
    clean = lake.read(spark, "clean")
    assert clean.where(f"topic = '{TOPIC}'").count() == 240
    assert clean.count() == again["clean"].rows == 247
    traffic = lake.read(spark, "traffic").collect()
    assert sum(row.events for row in traffic) == 240
    assert {row.topic for row in traffic} == {TOPIC}
    assert sum(row.events for row in lake.read(spark, "temporal").collect()) == 240
    assert lake.read(spark, "verify").count() == 0
    lags = {row.group: row.lag for row in lake.read(spark, "lag").collect()}
    assert (lags["billing"], lags["pipeline.lake"]) == (40, 0)


MOMENTS = ("before it publishes", "before the commit", "after the commit")


def test_a_batch_that_died_is_done_again_and_counts_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: None
) -> None:
    @pipeline("tally", about="per type", columns="type", topics=TOPIC, sink="replace")
    def tally(df: DataFrame, table: DataFrame | None = None) -> Output:
        whole = together(table, df.groupBy("type").count()).groupBy("type").agg({"count": "sum"})
        whole = whole.toDF("type", "count")
        return Output(
            whole, {"told": df.select("type")}, as_events(whole, "tally", "tally", "type")
        )

    root = str(tmp_path / "bus")
    publish, commit = Context.send, Lake.commit
    for number, moment in enumerate(MOMENTS):
        fill(root, number * 30, number * 30 + 30)

        def die_publishing(self: Context, *args: Any, moment: str = moment) -> int:
            if moment == MOMENTS[0]:
                raise Died
            return publish(self, *args)

        def die_writing(self: Lake, staged: Any, moment: str = moment, **options: Any) -> list[str]:
            if staged.table == "tally" and moment == MOMENTS[1]:
                raise Died
            new = commit(self, staged, **options)
            if staged.table == "tally" and moment == MOMENTS[2]:
                raise Died
            return new

        monkeypatch.setattr(Context, "send", die_publishing)
        monkeypatch.setattr(Lake, "commit", die_writing)
        (ran,) = runner(spark, tmp_path).run(find(["tally"]))
        assert ran.error, moment
        monkeypatch.undo()
        by_name(runner(spark, tmp_path).run(find(["tally"])))

    lake = runner(spark, tmp_path).lake
    counts = {row.type: row["count"] for row in lake.read(spark, "tally").collect()}
    assert counts == {"t0": 30, "t1": 30, "t2": 30}
    assert lake.read(spark, "told").count() == 90
    sent = [(r.event.key, r.event.payload["count"]) for r in read_log(root, "tally")]
    assert sorted(sent) == sorted((f"t{n % 3}", 10 * (n // 3 + 1)) for n in range(9))


def test_decisions_meet_outcomes_of_another_batch(spark: SparkSession, tmp_path: Path) -> None:
    root = str(tmp_path / "bus")

    def publish(*events: tuple[str, str, float, dict[str, Any]]) -> None:
        folder = Folder(root)
        made = [
            Event(
                id=id_,
                topic="actions",
                type="ACTION_EXECUTED" if id_[0] == "x" else "ACTION_DECISION",
                ts=START + timedelta(seconds=second),
                cause=cause or None,
                payload=payload,
            )
            for id_, cause, second, payload in events
        ]
        append(folder, made)
        folder.close()

    publish(
        ("d1", "", 0, {"action": "mail", "context": "day", "confidence": 0.75}),
        ("d2", "", 1, {"action": "mail", "context": "day", "confidence": 0.75}),
        ("d3", "", 2, {"action": "call", "context": "day", "confidence": 0.5}),
    )
    job = runner(spark, tmp_path)
    by_name(job.run(find(["learning"])))
    publish(("x1", "d1", 60, {"ok": True, "reward": 2.0}), ("x2", "d2", 61, {"ok": False}))
    by_name(job.run(find(["learning"])))
    publish(("d4", "", 9000, {"action": "call"}))  # now no outcome of d3 can come
    by_name(job.run(find(["learning"])))

    rows = {row.action: row for row in job.lake.read(spark, "learning").collect()}
    assert (rows["mail"].decisions, rows["mail"].outcomes) == (2, 2)
    assert (rows["mail"].success_rate, rows["mail"].reward) == (0.5, 2.0)
    assert (rows["call"].decisions, rows["call"].outcomes) == (1, 0)
    reports = [r.event for r in read_log(root, "metacog")]
    assert {event.type for event in reports} == {"METACOG_REPORT"}
    assert {event.key for event in reports} == {"mail|day", "call|day", "call|"}
    last = [event for event in reports if event.key == "mail|day"][-1]
    assert last.payload["expected"] == pytest.approx(0.5, abs=0.01)
    assert last.actor == "pipeline.learning"


def test_pipelines_follow_the_log(spark: SparkSession, tmp_path: Path) -> None:
    root = str(tmp_path / "bus")
    fill(root, 0, 20)
    job = runner(spark, tmp_path)
    seen: list[RunResult] = []
    more = iter([lambda: fill(root, 20, 40)])

    def noticed(ran: RunResult) -> None:
        seen.append(ran)
        if {one.name for one in seen} == {"traffic", "lag"}:
            next(more, lambda: None)()

    def is_enough() -> bool:
        counts = [one.rows for one in seen if one.name == "traffic"]
        return len(counts) >= 2 and job.lake.rows("lag") > 0

    failed = job.keep(find(["traffic", "lag"]), noticed, every_s=0.2, until=is_enough)

    assert failed == []
    assert sum(row.events for row in job.lake.read(spark, "traffic").collect()) == 40
    assert spark.streams.active == []


def test_one_that_fails_does_not_keep_those_that_follow(
    spark: SparkSession, tmp_path: Path, own: None
) -> None:
    @pipeline("poor", about="it breaks at its first batch", topics=TOPIC)
    def poor(df: DataFrame) -> DataFrame:
        return df.selectExpr("raise_error('no luck') AS x")

    @pipeline("wrong", about="it cannot even begin", topics=TOPIC)
    def wrong(df: DataFrame) -> DataFrame:
        return df.select("nowhere")

    root = str(tmp_path / "bus")
    fill(root, 0, 20)
    job = runner(spark, tmp_path)
    seen: list[RunResult] = []
    more = iter([lambda: fill(root, 20, 40)])

    def noticed(ran: RunResult) -> None:
        seen.append(ran)
        if {one.name for one in seen} == {"traffic", "poor", "wrong"}:
            next(more, lambda: None)()

    def is_enough() -> bool:
        return sum(one.events for one in seen if one.name == "traffic") >= 40

    wanted = find(["poor", "wrong", "traffic"])
    failed = job.keep(wanted, noticed, every_s=0.2, until=is_enough)

    assert {one.name for one in failed} == {"poor", "wrong"}
    assert {one.name: one.error for one in failed}["poor"].endswith("no luck")
    assert sum(row.events for row in job.lake.read(spark, "traffic").collect()) == 40
    assert job.keep(find(["wrong"]), every_s=0.2)[0].name == "wrong"  # and it ends by itself


def test_a_pipeline_is_told_when_it_is_done_and_not_when_all_are(
    spark: SparkSession, tmp_path: Path, own: None
) -> None:
    @pipeline("early", columns="type", topics=TOPIC)
    def early(df: DataFrame) -> DataFrame:
        return df.select("offset", "type")

    @pipeline("later", columns="type", topics=TOPIC)
    def later(df: DataFrame) -> DataFrame:
        return df.select("offset", "type")

    fill(str(tmp_path / "bus"), 0, 10)
    job = runner(spark, tmp_path)
    told: list[tuple[str, bool]] = []

    ran = job.run(
        find(["later", "early"]), lambda one: told.append((one.name, job.lake.has("early")))
    )

    assert [one.name for one in ran] == ["later", "early"]
    assert told == [("later", False), ("early", True)], "it was told at the end of their scan"


def test_an_error_in_ones_own_code_is_told_in_one_line(
    spark: SparkSession, tmp_path: Path, own: None
) -> None:
    @pipeline("poor", about="it breaks in a worker", topics=TOPIC)
    def poor(df: DataFrame) -> DataFrame:
        def broken(batches: Iterator[Any]) -> Iterator[Any]:
            for _ in batches:
                raise ValueError("no luck")
            yield

        return df.select("value").mapInArrow(broken, "value string")

    fill(str(tmp_path / "bus"), 0, 10)

    (ran,) = runner(spark, tmp_path).run(find(["poor"]))

    assert ran.error == "ValueError: no luck"


def test_a_pipeline_runs_once_at_a_time(spark: SparkSession, tmp_path: Path) -> None:
    fill(str(tmp_path / "bus"), 0, 10)
    job = runner(spark, tmp_path)

    with job.context.alone(find(["lag"])[0]):
        (ran,) = job.run(find(["lag"]))

    assert "pipeline lag runs already" in ran.error


def test_ones_own_pipelines_add_and_count(spark: SparkSession, tmp_path: Path, own: None) -> None:
    @pipeline("big", about="the late ones", topics=TOPIC, to_topic="late", to_type="late")
    def big(df: DataFrame) -> DataFrame:
        return df.where("get_json_object(value, '$.n') >= 25").select("key", "value")

    @pipeline("totals", about="per key", columns="key", keys=("key",), chart=("key", "count"))
    def totals(df: DataFrame) -> DataFrame:
        return df.groupBy("key").count()

    root = str(tmp_path / "bus")
    fill(root, 0, 30)
    job = runner(spark, tmp_path)
    mine: list[Pipeline] = find(["big", "totals"])
    by_name(job.run(mine))
    fill(root, 30, 40)
    by_name(job.run(mine))

    assert job.lake.read(spark, "big").count() == 15
    late = [r.event for r in read_log(root, "late")]
    assert sorted(json.loads(e.payload["value"])["n"] for e in late) == list(range(25, 40))
    assert {(e.type, e.actor) for e in late} == {("late", "pipeline.big")}
    counts = {row.key: row["count"] for row in job.lake.read(spark, "totals").collect()}
    assert counts == {f"k{n}": 6 if n < 5 else 5 for n in range(7)}


def test_spark_keeps_its_state_when_a_batch_died_after_its_commit(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: None
) -> None:
    @pipeline("totals", about="per key", columns="key", keys=("key",))
    def totals(df: DataFrame) -> DataFrame:
        return df.groupBy("key").count()

    root = str(tmp_path / "bus")
    fill(root, 0, 70)
    job, write = runner(spark, tmp_path), Lake.write

    def die_after(self: Lake, *args: Any, **options: Any) -> None:
        write(self, *args, **options)
        raise Died

    monkeypatch.setattr(Lake, "write", die_after)
    assert job.run(find(["totals"]))[0].error
    monkeypatch.undo()
    fill(root, 70, 140)
    by_name(job.run(find(["totals"])))

    counts = {row.key: row["count"] for row in job.lake.read(spark, "totals").collect()}
    assert counts == {f"k{n}": 20 for n in range(7)}


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
    folder = Folder(root)
    options = TopicOptions(retention_records=5, retain_unsettled=False, retain_for_lake=True)
    folder.define(TOPIC, options)
    upkeep.retain(folder, TOPIC, 0)
    assert folder.bounds(TOPIC, 0) == (1, 51)

    Runner(spark, root, Lake(str(tmp_path / "lake"))).run(find(["lake"]))
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


def test_a_replay_keeps_the_pauses_at_its_speed(spark: SparkSession, tmp_path: Path) -> None:
    root = make_log(tmp_path / "bus", 30)
    lake = Lake(str(tmp_path / "lake"))
    Runner(spark, root, lake).run(find(["lake"]))
    now = datetime(2026, 5, 1, tzinfo=UTC)
    span = {
        "startingTimestamp": (START + timedelta(seconds=10)).isoformat(),
        "endingTimestamp": (START + timedelta(seconds=14)).isoformat(),
    }
    source = {"url": root, "subscribe": TOPIC} | span

    for to, store in (("log", None), ("lake", lake)):
        target = {"url": root, "topic": f"from-{to}", "txnAppId": to, "txnVersion": "1"}
        for _ in range(2):
            count = replay(spark, source, target, lake=store, speed=4, now=now)
            assert count == 4
        copies = [r.event for r in read_log(root, f"from-{to}")]
        assert [event.payload["n"] for event in copies] == [10, 11, 12, 13]
        assert [event.not_before for event in copies] == [
            now + timedelta(seconds=n / 4) for n in range(4)
        ]


def test_a_condition_means_the_same_to_spark(spark: SparkSession, tmp_path: Path) -> None:
    df = load(spark, make_log(tmp_path, 30))

    kept = pick(df, "key = 'k3' AND ts < '2026-01-01T00:00:20Z'")

    assert sorted(row.offset for row in kept.collect()) == [4, 11, 18]
    assert kept.columns == df.columns


def test_a_run_keeps_nothing_in_the_memory_of_the_session(
    spark: SparkSession, tmp_path: Path
) -> None:
    def kept() -> int:
        return int(spark.sparkContext._jsc.getPersistentRDDs().size())

    before = kept()
    for start in (0, 40):
        fill(str(tmp_path / "bus"), start, start + 40)
        by_name(runner(spark, tmp_path).run(find(["clean", "sequences"])))

    assert kept() == before
