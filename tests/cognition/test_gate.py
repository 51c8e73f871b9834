"""The attention gate, on real buses."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import trunkline
from trunkline.bus.local import LocalBus
from trunkline.cli import main
from trunkline.cognition.decision import Action, By, Decision, Thresholds, read_decision
from trunkline.cognition.gate import AttentionGate
from trunkline.cognition.options import GateOptions
from trunkline.cognition.replay import parse_thresholds, replayed, summed
from trunkline.cognition.salience import SalienceScorer, Scene, Score, decayed
from trunkline.cognition.workspace import Workspace
from trunkline.errors import InvalidOption, StorageFull
from trunkline.event import Event
from trunkline.names import ATTENTION, DEFERRED_PREFIX
from trunkline.options import GroupOptions, Limits
from trunkline.store.memory import MemoryStore
from trunkline.testing import ManualClock


def by_payload(event: Event, scene: Scene) -> float:
    return float(event.payload["s"])


def make_bus() -> tuple[LocalBus, ManualClock]:
    clock = ManualClock()
    return LocalBus(MemoryStore(clock=clock), clock=clock), clock


async def decisions(bus: Any) -> list[Decision]:
    found = [read_decision(record.event) for record in await bus.read(ATTENTION, limit=100_000)]
    return [one for one in found if one is not None]


async def until(check: Any, clock: ManualClock | None = None) -> None:
    deadline = time.monotonic() + 20
    while not check():
        assert time.monotonic() < deadline, "it did not happen within 20 s"
        await (clock.run(0) if clock else asyncio.sleep(0.005))
        await asyncio.sleep(0)


def test_salience_decides_by_the_documented_thresholds() -> None:
    actions = [Thresholds().action(s).value for s in (0.0, 0.199, 0.2, 0.599, 0.6, 0.799, 0.8, 1.0)]
    assert actions == ["drop", "drop", "defer", "defer", "admit", "admit", "boost", "boost"]
    with pytest.raises(InvalidOption, match="out of order"):
        GateOptions(drop_below=0.7)


def test_the_ready_scorer_weighs_what_it_documents() -> None:
    clock = ManualClock()

    def score(
        scorer: SalienceScorer, load: float = 0.0, age_s: float = 0.0, **fields: Any
    ) -> Score:
        ts = clock.now() - timedelta(seconds=age_s)
        event = Event(topic="t", ts=ts, **({"payload": {"n": 1}} | fields))
        return scorer(event, Scene(clock.now(), load))

    assert score(SalienceScorer()).salience == pytest.approx(0.75)
    assert score(SalienceScorer(), priority="critical").salience == pytest.approx(0.95)
    assert score(SalienceScorer(), load=1.0).salience == pytest.approx(0.75 * 0.75)
    assert score(SalienceScorer(), age_s=60).features["recency"] == pytest.approx(0.5)
    assert score(SalienceScorer(decay="power"), age_s=180).features["recency"] == 0.25
    upset = {"affect": {"valence": -1.0, "arousal": 1.0}}
    assert score(SalienceScorer(), payload=upset).features["affect"] == 1.0
    assert "affect" not in score(SalienceScorer()).features
    bands = [score(SalienceScorer(), band=band).salience for band in ("GREEN", "RED", "BLACK")]
    assert bands == sorted(bands)
    assert bands[0] < bands[2]
    scorer = SalienceScorer()
    first, again = score(scorer, key="k"), score(scorer, key="k")
    other = score(scorer, key="k", payload={"n": 2})
    assert (first.features["novelty"], again.features["novelty"]) == (1.0, 0.0)
    assert other.features["novelty"] == 1.0
    assert score(scorer, key="k2").features["novelty"] == 1.0
    clock.advance(60)
    assert score(scorer, key="k").features["novelty"] == pytest.approx(0.5)
    assert decayed(0, 60, "exp") == decayed(0, 60, "power") == 1.0
    with pytest.raises(InvalidOption, match="no feature"):
        SalienceScorer(weights={"colour": 1.0})


async def test_each_action_happens_and_is_told_with_its_reason() -> None:
    bus, clock = make_bus()
    handled: list[tuple[float, str, int]] = []
    async with bus:
        options = GateOptions(defer_s=10.0, return_below=0.0)
        gate = AttentionGate(bus, options, scorer=by_payload)

        @gate.on("workspace", group="arbiter", workers=2)
        async def arbitrate(event: Event, delivery: Any) -> None:
            handled.append((event.payload["s"], event.topic, delivery.offset))

        for salience in (0.1, 0.4, 0.7, 0.9):
            await bus.publish("workspace", {"s": salience}, key=f"k{salience}", headers={"h": "x"})
        await until(lambda: len(handled) == 2 and sum(gate.counts.values()) == 4, clock)
        assert sorted(handled) == [(0.7, "workspace", 3), (0.9, "workspace", 4)]
        (parked,) = await bus.read(DEFERRED_PREFIX + "arbiter")
        assert parked.event.payload == {"s": 0.4}
        await clock.run(11)
        await until(lambda: len(handled) == 3, clock)
        assert handled[2] == (0.4, "workspace", 2), "it comes back as the record it was"
        assert await bus.drain(10)
        await gate.flush()
        found = {(d.offset, d.by): d for d in await decisions(bus)}
    actions = {offset: d.action.value for (offset, by), d in found.items() if by is By.THRESHOLD}
    assert actions == {1: "drop", 2: "defer", 3: "admit", 4: "boost"}
    assert found[1, By.THRESHOLD].reason.startswith("salience 0.100 is below 0.2")
    assert found[2, By.RETURN].reason == "its time came"
    assert found[4, By.THRESHOLD].group == "arbiter"


async def test_a_deferred_record_comes_back_when_the_load_falls() -> None:
    bus, clock = make_bus()
    handled: list[float] = []
    go = asyncio.Event()
    async with bus:
        gate = AttentionGate(bus, GateOptions(defer_s=3600.0), scorer=by_payload)

        @gate.on("t", group="g", workers=1)
        async def handle(event: Event) -> None:
            handled.append(event.payload["s"])
            if event.payload["s"] > 0.6:
                await go.wait()

        await bus.publish("t", {"s": 0.7})
        await bus.publish("t", {"s": 0.3})
        await until(lambda: gate.counts["g", "defer"] == 1, clock)
        await clock.run(1)
        assert handled == [0.7]
        go.set()
        await until(lambda: handled == [0.7, 0.3], clock)
        assert await bus.drain(10)
        await gate.flush()
        (back,) = [d for d in await decisions(bus) if d.by is By.RETURN]
    assert back.reason == "the load fell"


async def test_over_budget_admission_goes_by_rank_and_the_lowest_is_deferred() -> None:
    bus, clock = make_bus()
    handled: list[float] = []
    go = asyncio.Event()
    async with bus:
        options = GateOptions(items=1, waiting=2, defer_s=3600.0)
        gate = AttentionGate(bus, options, scorer=by_payload)

        @gate.on("t", group="g", workers=4)
        async def handle(event: Event) -> None:
            handled.append(event.payload["s"])
            await go.wait()

        await bus.publish("t", {"s": 0.61})
        await until(lambda: handled == [0.61], clock)
        for salience in (0.62, 0.95, 0.63, 0.9):
            await bus.publish("t", {"s": salience})
        await until(lambda: gate.counts["g", "defer"] == 2, clock)
        go.set()
        await until(lambda: len(handled) == 5, clock)
        await gate.flush()
        told = await decisions(bus)
    assert handled[:3] == [0.61, 0.95, 0.9]
    over = [d for d in told if d.by is By.BUDGET]
    assert sorted(d.salience for d in over) == [0.62, 0.63]
    assert all("over budget" in d.reason for d in over)


async def test_a_budget_of_bytes_bounds_the_payloads_at_work() -> None:
    space = Workspace(10, 100, 10)
    assert await space.enter(0.7, 90)
    late = asyncio.create_task(space.enter(0.9, 20))
    await asyncio.sleep(0)
    assert (space.at_work, space.held, space.in_line) == (1, 90, 1)
    space.leave(90)
    assert await late
    space.leave(20)
    assert await space.enter(0.7, 5000), "one that is larger than the budget works alone"
    cancelled = asyncio.create_task(space.enter(0.9, 20))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert (space.at_work, space.in_line) == (1, 0)


async def test_the_gate_fails_open() -> None:
    bus, clock = make_bus()
    handled: list[Any] = []

    async def broken(event: Event, scene: Scene) -> float:
        if event.payload["s"] == "nan":
            return float("nan")
        raise RuntimeError("no model")

    async with bus:
        gate = AttentionGate(bus, scorer=broken)

        @gate.on("t", group="g")
        async def handle(event: Event) -> None:
            handled.append(event.payload["s"])

        await bus.publish("t", {"s": "error"})
        await bus.publish("t", {"s": "nan"})
        await until(lambda: len(handled) == 2, clock)
        await gate.flush()
        told = await decisions(bus)
    assert [d.by for d in told] == [By.FAIL_OPEN] * 2
    assert told[0].reason == "the scorer failed: RuntimeError"  # its text may quote the payload


class Full:
    """Refuses what a gate writes, as a full disk does."""

    async def publish(self, events: list[Event], call_next: Any) -> Any:
        if events[0].topic != "t":
            raise StorageFull()
        return await call_next(events)


async def test_an_event_is_handled_when_its_deferral_or_its_decision_cannot_be_written() -> None:
    bus, clock = make_bus()
    bus.use(Full())
    handled: list[float] = []
    async with bus:
        gate = AttentionGate(bus, scorer=by_payload)

        @gate.on("t", group="g")
        async def handle(event: Event) -> None:
            handled.append(event.payload["s"])

        for salience in (0.1, 0.4):
            await bus.publish("t", {"s": salience})
        await until(lambda: sorted(handled) == [0.1, 0.4], clock)
        await gate.flush()
    assert gate.log.lost >= 2


class Broken:
    """Middleware with a mistake in it, for decisions alone."""

    async def publish(self, events: list[Event], call_next: Any) -> Any:
        if events[0].topic == ATTENTION:
            raise KeyError("a mistake")
        return await call_next(events)


async def test_an_event_is_handled_when_a_middleware_fails_over_its_decision() -> None:
    bus, clock = make_bus()
    bus.use(Broken())
    handled: list[float] = []
    async with bus:
        gate = AttentionGate(bus, scorer=by_payload)

        @gate.on("t", group="g")
        async def handle(event: Event) -> None:
            handled.append(event.payload["s"])

        await bus.publish("t", {"s": 0.1})
        await until(lambda: handled == [0.1], clock)


async def test_a_decision_that_is_too_large_does_not_take_others_along() -> None:
    clock = ManualClock()
    limits = Limits(record_bytes=2000)
    bus = LocalBus(MemoryStore(clock=clock, limits=limits), clock=clock)
    registry = CollectorRegistry()
    async with bus:
        gate = AttentionGate(bus, GateOptions(stands="ingest"), scorer=by_payload)
        gate.register(registry)
        small, large = {"s": 0.1}, {"s": 0.1, "x": "x" * 1600}  # kept whole it is over the limit
        receipts = await bus.publish_many("t", [small, large, {"s": 0.7}])
        await gate.flush()
        told = await decisions(bus)
    assert [one.topic for one in receipts] == [ATTENTION, "t", "t"], "it fails open"
    assert [d.by for d in told] == [By.THRESHOLD, By.FAIL_OPEN, By.THRESHOLD]
    text = generate_latest(registry).decode()
    assert 'trunkline_attention_decisions_total{action="admit",group=""} 2.0' in text


async def test_a_later_attempt_is_not_judged_again() -> None:
    bus, clock = make_bus()
    attempts: list[int] = []
    seen: list[float] = []

    def once(event: Event, scene: Scene) -> float:
        seen.append(1.0)
        return 0.7 if len(seen) == 1 else 0.0

    async with bus:
        gate = AttentionGate(bus, scorer=once)

        @gate.on("t", group="g", policy=GroupOptions(backoff_base_s=0.0))
        async def handle(event: Event, delivery: Any) -> None:
            attempts.append(delivery.attempt)
            if len(attempts) == 1:
                raise RuntimeError("once")

        await bus.publish("t", {})
        await until(lambda: attempts == [1, 2], clock)
        await gate.flush()
        told = await decisions(bus)
    assert [d.is_first for d in told] == [True, False]


async def test_a_restart_gives_waiting_records_back_at_once_and_counts_no_attempt(
    tmp_path: Path,
) -> None:
    url = f"file:{tmp_path / 'bus'}"
    options = GateOptions(items=1, waiting=4, defer_s=3600.0, return_below=0.0)
    for number in range(8):  # more often than a record has attempts
        began = time.monotonic()
        async with trunkline.connect(url, drain_timeout_s=30.0) as bus:
            gate = AttentionGate(bus, options, scorer=by_payload)
            busy, go = asyncio.Event(), asyncio.Event()

            @gate.on("t", group="g")
            async def work(event: Event, busy: Any = busy, go: Any = go) -> None:
                busy.set()
                await go.wait()

            if number == 0:
                for salience in (0.3, 0.9, 0.7):
                    await bus.publish("t", {"s": salience})
                await busy.wait()
                await until(lambda gate=gate: gate.counts["g", "defer"] == 1)
                asyncio.get_running_loop().call_later(0.1, go.set)
            else:
                await asyncio.sleep(0.1)
        assert time.monotonic() - began < 10, "nobody waits for the drain timeout"
    handled: dict[float, int] = {}
    async with trunkline.connect(url) as bus:
        gate = AttentionGate(bus, GateOptions(defer_s=3600.0), scorer=by_payload)

        @gate.on("t", group="g")
        async def handle(event: Event, delivery: Any) -> None:
            handled[event.payload["s"]] = delivery.attempt

        await bus.publish("t", {"s": 0.8})  # done at once, and then the load has fallen
        await until(lambda: len(handled) == 3)
        assert await bus.drain(20)
        await gate.flush()
        told = await decisions(bus)
        assert [one async for one in bus.dead_letters("t").letters()] == []
    assert handled == {0.3: 1, 0.7: 1, 0.8: 1}
    assert [d.salience for d in told if d.by is By.STOP] == [0.7]


async def test_a_bus_that_is_stopped_and_started_has_its_gate_again() -> None:
    bus, clock = make_bus()
    handled: list[float] = []
    async with bus:
        gate = AttentionGate(bus, scorer=by_payload)

        @gate.on("t", group="g")
        async def handle(event: Event) -> None:
            handled.append(event.payload["s"])

        await bus.stop(1)
        await bus.publish("t", {"s": 0.7})
        await bus.start()
        await until(lambda: handled == [0.7], clock)
        assert gate.counts["g", "defer"] == 0


async def test_before_the_append_each_action_happens_too() -> None:
    bus, clock = make_bus()
    async with bus:
        options = GateOptions(stands="ingest", defer_s=10.0, items=2)
        gate = AttentionGate(bus, options, scorer=by_payload, topics="t")
        dropped = await bus.publish("t", {"s": 0.1}, idem_key="a", band="RED", caps=("ward",))
        assert (dropped.topic, dropped.offset) == (ATTENTION, 1)
        for salience in (0.3, 0.7, 0.7, 0.7, 0.9):
            assert (await bus.publish("t", {"s": salience})).topic == "t"
        await bus.publish("other", {"no": "score"})
        batch = await bus.publish_many("t", [{"s": 0.1}, {"s": 0.9}])
        assert [one.topic for one in batch] == [ATTENTION, "t"]
        await gate.flush()
        records = [record.event for record in await bus.read("t")]
        told = await decisions(bus)
        kept = (await bus.read(ATTENTION))[0].event
        assert (kept.band, kept.caps) == ("RED", ("ward",)), "a policy guards it as the event"
        await clock.run(1.5)
        await bus.publish("t", {"s": 0.7})
        assert (await bus.read("t"))[-1].event.not_before is None, "a new window, a new budget"
    late = clock.now() - timedelta(seconds=1.5) + timedelta(seconds=10)
    assert [(event.payload["s"], event.priority, event.not_before) for event in records] == [
        (0.3, "normal", late),
        (0.7, "normal", None),
        (0.7, "normal", None),
        (0.7, "normal", late),
        (0.9, "high", None),
        (0.9, "high", None),
    ]
    assert told[0].event["payload"] == {"s": 0.1}, "a dropped event is kept whole"
    assert [d.by for d in told if d.offset == 4] == [By.BUDGET]


async def live(path: Path, options: GateOptions) -> Counter[str]:
    async with trunkline.connect(f"file:{path}") as bus:
        gate = AttentionGate(bus, options, scorer=by_payload)

        @gate.on("t", group="g", workers=4)
        async def handle(event: Event) -> None: ...

        await bus.publish_many("t", [{"s": n / 100} for n in range(101)])
        await until(lambda: sum(gate.counts.values()) >= 101)
        await gate.flush()
        return Counter(d.action.value for d in await decisions(bus) if d.is_first)


async def test_a_replay_of_thresholds_agrees_with_a_live_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = GateOptions(waiting=1000, defer_s=0.0)
    other = GateOptions(waiting=1000, defer_s=0.0, drop_below=0.35, admit_from=0.5, boost_from=0.93)
    await live(tmp_path / "a", first)
    wanted = await live(tmp_path / "b", other)
    async with trunkline.connect(f"file:{tmp_path / 'a'}") as bus:
        told = await decisions(bus)
    now = Counter(one.action.value for one in replayed(told, parse_thresholds("0.35,0.5,0.93")))
    assert now == wanted
    assert sum(now.values()) == 101
    same = list(replayed(told, Thresholds()))
    assert not any(one.is_changed for one in same)
    assert sum(summed(same).values()) == 101
    url = f"file:{tmp_path / 'a'}"
    code = await asyncio.to_thread(
        main, ["gate", "replay", "--thresholds", "0.35,0.5,0.93", "--url", url]
    )
    assert code == 0
    shown = capsys.readouterr().out
    counts = ", ".join(f"{wanted[action.value]} {action.value}" for action in Action)
    assert f"101 events: {counts}; " in shown
    args = ["gate", "replay", "--thresholds", "0.35,0.5,0.93", "--changed", "--json", "--url", url]
    assert await asyncio.to_thread(main, args) == 0
    changed = capsys.readouterr().out.splitlines()
    assert len(changed) == sum(
        Thresholds().action(n / 100) is not Thresholds(0.35, 0.5, 0.93).action(n / 100)
        for n in range(101)
    )
    assert await asyncio.to_thread(main, ["gate", "ls", "--action", "drop", "--url", url]) == 0
    assert capsys.readouterr().out.count(" drop ") == 20


def test_thresholds_that_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in ("0.5", "a,b,c", "0.9,0.5,0.2", "0.1,0.2,7"):
        args = ["gate", "replay", "--thresholds", wrong, "--url", f"file:{tmp_path}"]
        assert main(args) == 4
        assert "not thresholds" in capsys.readouterr().err
