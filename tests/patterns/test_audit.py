from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import trunkline
from trunkline.broker.server import Broker
from trunkline.bus.connect import open_local
from trunkline.bus.remote import RemoteBus
from trunkline.event import Record
from trunkline.names import AUDIT, GroupKey
from trunkline.options import BrokerOptions
from trunkline.patterns.audit import DEAD, METRICS, Counts, System
from trunkline.testing.clock import ManualClock


async def rows(bus: Any, topic: str, count: int) -> list[Any]:
    async with asyncio.timeout(10):
        while len(found := await bus.read(topic)) < count:
            await asyncio.sleep(0.01)
    return [record.event.payload for record in found]


async def test_decisions_metrics_and_dead_letters_are_told(tmp_path: Path) -> None:
    options = BrokerOptions(url=f"file:{tmp_path}", port=0, metrics_s=0.1, audit=1.0)
    async with Broker(options) as broker, RemoteBus(broker.url) as bus:
        policy = trunkline.GroupOptions(backoff_base_s=0.0)
        await bus.publish_many("orders", ["good", "bad"])
        async with bus.subscribe("orders", group="g", policy=policy) as stream:
            good, bad = await anext(stream), await anext(stream)
            await good.ack()
            await bad.nack(reason="once more")
            await (await anext(stream)).term("no good")
            log = broker.hub.bus
            (dead,) = await rows(log, DEAD, 1)
            audit = await rows(log, AUDIT, 7)
        assert (dead["topic"], dead["group"], dead["offset"]) == ("orders", "g", 2)
        assert (dead["reason"], dead["error"], dead["payload"]) == ("rejected", "no good", "bad")
        (acked,) = [row for row in audit if row["what"] == "ack"]
        assert (acked["topic"], acked["partition"], acked["offset"]) == ("orders", 0, 1)
        assert (acked["group"], acked["attempt"]) == ("g", 1)
        assert 0 <= acked["waited_s"] < 10
        assert 0 <= acked["held_s"] < 10
        told = sorted(row["what"] for row in audit)
        assert told == ["ack", "dlq", "nack", "publish", "publish", "redelivery", "term"]
        async with asyncio.timeout(10):
            while True:
                told_metrics = await rows(log, METRICS, 1)
                metrics = told_metrics[-1]
                if metrics["counters"]["dead"]:
                    break
                await asyncio.sleep(0.05)
        assert (await log.topics())[METRICS].retention_age_s == 7 * 86_400
    assert metrics["counters"]["publishes"] == 2
    of_orders = [row["byTopic"]["orders"] for row in told_metrics if "orders" in row["byTopic"]]
    assert of_orders[-1] == {"published": 2, "delivered": 3}, "a row tells of what changed"
    assert metrics["gauges"]["connections"] == 1


async def test_a_bus_without_a_broker_tells_of_its_decisions_when_asked() -> None:
    clock = ManualClock()
    bus = open_local("memory:", clock=clock, audit=1.0)
    silent = open_local("memory:")
    assert silent._plain  # nothing stands between publish and the store

    @bus.on("orders", group="g", policy=trunkline.GroupOptions(max_retries=0))
    async def handle(event: trunkline.Event) -> None:
        clock.advance(2.0)
        if event.payload == "bad":
            raise trunkline.Reject("no good")

    async with silent, bus:
        event = trunkline.Event(topic="orders", payload="good", ts=clock.now())
        clock.advance(5.0)
        await bus.publish(event)
        await bus.publish("orders", "bad")
        assert await bus.drain(10)
        told = {(row["what"], row["offset"]): row for row in await rows(bus, AUDIT, 4)}
    assert set(told) == {("publish", 1), ("publish", 2), ("ack", 1), ("term", 2)}
    acked = told["ack", 1]
    assert (acked["topic"], acked["group"], acked["attempt"]) == ("orders", "g", 1)
    assert (acked["waited_s"], acked["held_s"]) == (5.0, 2.0)


async def test_a_large_dead_letter_is_told_without_its_payload_and_takes_no_other_along() -> None:
    async with open_local("memory:") as bus:
        counts = Counts()
        system = System(bus, counts)
        for offset, payload in ((1, "small"), (2, "x" * 1_048_300), (3, "small")):
            record = Record(trunkline.Event(topic="orders", payload=payload), 0, offset)
            system.on_dead_letter(GroupKey("orders", 0, "g"), record, "rejected", "no good")
        await system.close()
        told = [record.event.payload for record in await bus.read(DEAD)]
        assert [(row["offset"], row.get("payload")) for row in told] == [
            *((1, "small"), (2, None), (3, "small")),
        ]
        assert counts.lost == 0


async def test_what_the_bus_does_not_take_is_counted() -> None:
    bus = open_local("memory:")
    counts = Counts()
    system = System(bus, counts, audit=1.0)
    record = Record(trunkline.Event(topic="orders", payload=1), 0, 1)
    system.on_dead_letter(GroupKey("orders", 0, "g"), record, "rejected", "no good")
    await bus.close()
    await system.close()
    assert counts.lost == 2  # on each of two topics


async def test_an_error_of_the_system_does_not_end_what_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_local("memory:") as bus:
        counts = Counts()
        system = System(bus, counts, metrics_s=0.0, audit=1.0)
        await system.start(dict)

        async def fail(*_: Any) -> None:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(bus, "publish_many", fail)
            system.audit("publish", offset=1)
            async with asyncio.timeout(10):
                while not counts.lost:
                    await asyncio.sleep(0.01)
        system.audit("publish", offset=2)
        assert [row["offset"] for row in await rows(bus, AUDIT, 1)] == [2]
        await system.close()


async def test_the_topic_of_a_policys_denials_has_retention_too() -> None:
    async with open_local("memory:") as bus:
        system = System(bus, Counts(), metrics_s=0.0, audit=0.0)
        system.audit_denial(agent="bob", action="read", topic="orders")
        await system.close()
        assert len(await bus.read(AUDIT)) == 1
        assert (await bus.topics())[AUDIT].retention_age_s


async def test_a_share_of_decisions_is_told() -> None:
    async with open_local("memory:") as bus:
        none, all_ = System(bus, Counts(), audit=0.0), System(bus, Counts(), audit=1.0)
        for system in (none, all_):
            for n in range(50):
                system.audit("publish", offset=n)
            await system.close()
        assert len(await bus.read(AUDIT)) == 50


async def test_what_nobody_writes_away_is_bound_and_counted() -> None:
    async with open_local("memory:") as bus:
        counts = Counts()
        system = System(bus, counts, audit=1.0)
        for n in range(10_050):
            system.audit("publish", offset=n)
        assert counts.lost == 50
        await system.close()


def test_names_from_outside_do_not_grow_the_counts_for_ever() -> None:
    counts = Counts()
    for n in range(1500):
        counts.published(f"t{n}", 1)
    assert len(counts.by_topic) <= 1001
    assert counts.by_topic["other"]["published"] == 500


async def test_what_is_being_told_at_the_end_is_not_lost() -> None:
    begun = asyncio.Event()

    class Slow:
        async def publish(self, events: list[trunkline.Event], call_next: Any) -> Any:
            begun.set()
            await asyncio.sleep(0.05)
            return await call_next(events)

    async with open_local("memory:", middleware=[Slow()]) as bus:
        system = System(bus, Counts(), metrics_s=0.0, audit=1.0)
        await system.start(dict)
        for n in range(3):
            system.audit("denied", n=n)
        await begun.wait()
        system.audit("denied", n=3)
        await system.close()
        assert [row["n"] for row in await rows(bus, AUDIT, 0)] == [0, 1, 2, 3]


async def test_the_audit_does_not_feed_on_its_own_denials() -> None:
    async with open_local("memory:") as bus:
        system = System(bus, Counts(), metrics_s=0.0)
        for topic in ("orders", "system.metrics", AUDIT):
            system.audit_denial(agent="a", action="read", topic=topic, id="1")
        system.audit_denial(agent="a", action="publish", topic=AUDIT, id="2")
        await system.close()
        said = [record.event.payload for record in await bus.read(AUDIT)]

    told = [(one["topic"], one["action"]) for one in said]
    assert told == [("orders", "read"), ("system.metrics", "read"), (AUDIT, "publish")]
