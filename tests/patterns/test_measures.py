"""Figures and stories from the files, with nothing running."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import trunkline
from trunkline.cli import main
from trunkline.cognition.gate import AttentionGate
from trunkline.cognition.options import GateOptions
from trunkline.errors import Denied, Reject
from trunkline.event import Event
from trunkline.guard.policy_guard import PolicyGuard
from trunkline.middleware.dedup import Dedup
from trunkline.middleware.flags import Flags
from trunkline.middleware.metrics import Metrics
from trunkline.options import GroupOptions
from trunkline.patterns.measures import NAMES, BusCollector, measure, to_text

AT_ONCE = GroupOptions(backoff_base_s=0.0, max_retries=1)


def figures(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(found: dict[Any, float], name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


async def make(url: str) -> dict[str, str]:
    """A bus with a bit of everything; the ids of some events."""
    ids: dict[str, str] = {}
    async with trunkline.connect(url, audit=1.0) as bus:

        @bus.on("orders", group="billing", policy=AT_ONCE)
        async def bill(event: Event) -> None:
            if event.payload == "never":
                raise Reject("no")
            if event.payload == "fails":
                raise RuntimeError("broken")
            if event.payload == "fine":
                await bus.publish("bills", {"for": event.payload}, cause=event.id)

        for payload in ("fine", "fails", "never"):
            ids[payload] = (await bus.publish("orders", payload, actor="shop")).id
        assert await bus.drain(20)
    async with trunkline.connect(url) as bus:
        async with bus.subscribe("orders", group="late"):
            pass  # a group that has read nothing
        await bus.publish("orders", "later", delay_s=3600)
    return ids


async def test_the_figures_of_a_folder_need_no_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{tmp_path / 'bus'}"
    await make(url)
    assert await asyncio.to_thread(main, ["metrics", "--url", url]) == 0
    found = figures(capsys.readouterr().out)
    assert of(found, "trunkline_published_total", topic="orders") == 4
    assert of(found, "events_publish_count", topic="orders") == 4
    assert of(found, "events_dlq_total", topic="orders") == 2
    assert of(found, "trunkline_dlq_total", topic="orders") == 2
    billing = {"topic": "orders", "group": "billing"}
    late = {"topic": "orders", "group": "late", "partition": "0"}
    assert of(found, "events_handle_ok_total", **billing) == 1
    assert of(found, "events_handle_err_total", **billing) == 3
    assert of(found, "trunkline_settled_total", **billing, outcome="term") == 1
    assert of(found, "events_handle_latency_seconds_count", **billing) == 4
    assert of(found, "events_handle_latency_seconds_bucket", **billing, le="+Inf") == 4
    assert of(found, "trunkline_group_ready_records", **late) == 3
    assert of(found, "trunkline_group_scheduled_records", **late) == 1
    assert of(found, "trunkline_group_in_flight_records", **late) == 0
    assert 0 < of(found, "trunkline_group_oldest_age_seconds", **late) < 60
    assert of(found, "trunkline_open_letters", topic="orders") == 2
    assert of(found, "events_storage_full") == 0
    assert of(found, "trunkline_free_bytes") > 0
    assert await asyncio.to_thread(main, ["metrics", "--json", "--url", url]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"name": "trunkline_open_letters", "topic": "orders", "value": 2} in rows


async def test_a_collector_gives_prometheus_the_same_figures(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'bus'}"
    await make(url)
    registry = CollectorRegistry()
    async with trunkline.connect(url) as bus:
        async with BusCollector(bus, registry, outboxes={"shop": lambda: 7}):
            shown = figures(generate_latest(registry).decode())
            told = figures(to_text(await measure(bus, {"shop": lambda: 7})))
        assert generate_latest(registry) == b""
    assert of(shown, "trunkline_outbox_waiting", outbox="shop") == 7
    names = {name for name, _ in told}
    assert {name for name, _ in shown} == names
    assert of(shown, "events_publish_count", topic="orders") == 4


async def test_a_collector_and_middleware_share_a_registry() -> None:
    """Also the default one, which refuses what is there twice."""
    registry = CollectorRegistry(auto_describe=True)
    async with trunkline.connect("memory:", middleware=[Metrics(registry)]) as bus:
        flags = Flags(bus)
        bus.use(flags.switch("empty", Dedup()))
        flags.register(registry)
        await flags.set("empty", False)
        await bus.publish("orders", 1)
        async with BusCollector(bus, registry) as collector:
            await collector.refresh()
            text = generate_latest(registry).decode()
    lines = [line for line in text.splitlines() if not line.startswith("# HELP")]
    series = [line.rpartition(" ")[0] for line in lines]
    assert len(series) == len(set(series))
    assert 'trunkline_published_total{result="ok",topic="orders"} 1.0' in lines
    assert 'trunkline_feature_enabled{feature="empty"} 0.0' in lines
    assert "# TYPE trunkline_build_info gauge" in lines


async def test_middleware_and_folder_use_the_same_names(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    url = f"file:{tmp_path / 'bus'}"
    async with trunkline.connect(url, middleware=[metrics]) as bus:

        @bus.on("orders", group="billing", policy=AT_ONCE)
        async def bill(event: Event) -> None:
            if event.payload == 2:
                raise Reject("no")

        for n in (1, 2):
            await bus.publish("orders", n)
        assert await bus.drain(20)
    found = figures(generate_latest(registry).decode())
    place = {"topic": "orders", "group": "billing"}
    assert of(found, "events_publish_count", topic="orders") == 2
    assert of(found, "events_handle_ok_total", **place) == 1
    assert of(found, "events_handle_err_total", **place) == 1
    assert of(found, "events_handle_latency_seconds_count", **place) == 2
    assert of(found, "events_storage_full") == 0
    names = {name for name, _ in found}
    wanted = {name.partition("{")[0] for pair in NAMES.items() for name in pair}
    assert {name for name in wanted if not any(n.startswith(name) for n in names)} == set()


async def test_why_tells_the_whole_story_of_an_event(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{tmp_path / 'bus'}"
    ids = await make(url)

    async def why(id_: str) -> list[dict[str, Any]]:
        assert await asyncio.to_thread(main, ["why", id_, "--json", "--url", url]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    fine = await why(ids["fine"])
    assert fine[0]["what"] == "published"
    assert {"delivered", "settled", "caused", "ack"} <= {step["what"] for step in fine}
    (caused,) = [step for step in fine if step["what"] == "caused"]
    assert caused["facts"]["topic"] == "bills"
    mine = [step for step in fine if step.get("group") == "billing"]
    (delivered,) = [step for step in mine if step["what"] == "delivered"]
    assert delivered["facts"]["attempt"] == 1
    assert delivered["facts"]["member"]

    fails = await why(ids["fails"])
    tries = [s["facts"]["attempt"] for s in fails if s["what"] == "delivered"]
    assert tries == [1, 2]
    assert "failed" in {step["what"] for step in fails}
    (letter,) = [step for step in fails if step["what"] == "dead letter"]
    assert "RuntimeError: broken" in letter["text"]

    redrive = ["dlq", "redrive", "orders", str(letter["facts"]["letter"]), "--url", url]
    assert await asyncio.to_thread(main, redrive) == 0
    capsys.readouterr()
    assert "redriven" in {step["what"] for step in await why(ids["fails"])}

    assert await asyncio.to_thread(main, ["why", ids["never"], "--url", url]) == 0
    shown = capsys.readouterr().out
    assert "published to orders/0@3 by shop" in shown
    assert "rejected: no" in shown
    assert await asyncio.to_thread(main, ["why", "nobody", "--url", url]) == 3
    assert "there is no event nobody" in capsys.readouterr().err


async def test_why_does_not_wait_for_a_pipe_in_the_place_of_a_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{tmp_path / 'bus'}"
    ids = await make(url)
    os.mkfifo(tmp_path / "bus" / "offsets" / "orders.0__other.journal")
    done = asyncio.to_thread(main, ["why", ids["fine"], "--json", "--url", url])
    assert await asyncio.wait_for(done, 30) == 0
    steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "settled" in {step["what"] for step in steps}


async def test_why_tells_what_a_gate_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{tmp_path / 'bus'}"
    async with trunkline.connect(url) as bus:
        gate = AttentionGate(bus, scorer=lambda event, scene: event.payload)

        @gate.on("t", group="g")
        async def handle(event: Event) -> None: ...

        dropped = (await bus.publish("t", 0.1)).id
        deferred = (await bus.publish("t", 0.4)).id
        while sum(gate.counts.values()) < 2:
            await asyncio.sleep(0.01)
    assert await asyncio.to_thread(main, ["why", dropped, "--url", url]) == 0
    assert "drop before group g: salience 0.100 is below 0.2" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["why", deferred, "--url", url]) == 0
    assert "deferred for group g as attention.deferred.g@1" in capsys.readouterr().out


async def test_why_follows_a_record_that_was_deferred_to_its_dead_letter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{tmp_path / 'bus'}"
    async with trunkline.connect(url, audit=1.0) as bus:
        options = GateOptions(defer_s=0.01)
        gate = AttentionGate(bus, options, scorer=lambda event, scene: event.payload)

        @gate.on("t", group="g", policy=trunkline.GroupOptions(max_retries=1, backoff_base_s=0.0))
        async def handle(event: Event) -> None:
            raise RuntimeError("broken")

        id_ = (await bus.publish("t", 0.4)).id
        while not [one async for one in bus.dead_letters("attention.deferred.g").letters()]:
            await asyncio.sleep(0.01)
    assert await asyncio.to_thread(main, ["why", id_, "--url", url]) == 0
    shown = capsys.readouterr().out
    assert "deferred for group g as attention.deferred.g@1" in shown
    assert "attempt 2" in shown
    assert "audit: nack (group g, attempt 1" in shown
    assert "of group g, attempts 2, retries: RuntimeError: broken (now open)" in shown


async def test_why_says_which_tables_of_a_lake_hold_an_event(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deltalake, pa = pytest.importorskip("deltalake"), pytest.importorskip("pyarrow")
    url, lake = f"file:{tmp_path / 'bus'}", tmp_path / "lake"
    async with trunkline.connect(url) as bus:
        ids = [(await bus.publish("t", number)).id for number in range(2)]
    rows = {"topic": ["t", "u", "t"], "partition": [0, 0, 0], "offset": [2, 1, 3]}
    deltalake.write_deltalake(str(lake / "log"), pa.table(rows))
    deltalake.write_deltalake(str(lake / "counts"), pa.table({"topic": ["t"], "count": [2]}))
    words = ["--url", url, "--lake", str(lake)]
    assert await asyncio.to_thread(main, ["why", ids[1], *words]) == 0
    assert "in the lake: 1 row of log\n" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["why", ids[0], *words]) == 0
    assert "in the lake" not in capsys.readouterr().out


async def test_why_tells_of_an_event_that_was_never_appended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{tmp_path / 'bus'}"
    policy = tmp_path / "policy.toml"
    policy.write_text("[actors]\nanna = []\n")
    denied, dropped = Event(topic="t", payload=0.1), Event(topic="t", payload=0.1)
    async with trunkline.connect(url) as bus:
        bus.use(PolicyGuard(bus, policy, "anna"))
        with pytest.raises(Denied):
            await bus.publish(denied)
    async with trunkline.connect(url) as bus:
        AttentionGate(bus, GateOptions(stands="ingest"), scorer=lambda event, scene: event.payload)
        await bus.publish(dropped)
    assert await asyncio.to_thread(main, ["why", denied.id, "--url", url]) == 0
    shown = capsys.readouterr().out
    assert "it was never appended" in shown
    assert "audit: denied (agent anna, action publish" in shown
    assert await asyncio.to_thread(main, ["why", dropped.id, "--url", url]) == 0
    assert "drop before the append" in capsys.readouterr().out


async def test_letters_that_are_done_with_are_not_open_and_their_stories_say_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{tmp_path / 'bus'}"
    async with trunkline.connect(url) as bus:
        receipts = [await bus.publish("orders", number) for number in range(3)]
        async with bus.subscribe("orders", group="billing") as deliveries:
            async for delivery in deliveries:
                await delivery.term("bad")
                if delivery.offset == 3:
                    break
        desk = bus.dead_letters("orders")
        assert [one.offset async for one in desk.drop(offsets={1})] == [1]
        assert [one.refused async for one in desk.redrive(offsets={2})] == [""]
        found = await measure(bus)
    samples = [one for family in found for one in family.samples]
    (count,) = [one.value for one in samples if one.name == "trunkline_open_letters"]
    assert count == 1
    capsys.readouterr()
    for receipt, state in zip(receipts, ("dropped", "redriven", "open"), strict=True):
        assert await asyncio.to_thread(main, ["why", receipt.id, "--url", url]) == 0
        told = capsys.readouterr().out
        assert f"(now {state})" in told
        if state == "redriven":
            assert told.index("dead letter") < told.index("billing: redriven")
