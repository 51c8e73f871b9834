from __future__ import annotations

import asyncio
from typing import Any

import pytest

import trunkline
from trunkline.access import EVERYTHING
from trunkline.broker.server import Broker
from trunkline.bus.remote import RemoteBus
from trunkline.options import BrokerOptions
from trunkline.patterns.heartbeat import TOPIC, Beat, Heartbeat, Monitor
from trunkline.testing.clock import ManualClock


async def seen(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_process_that_stops_is_noticed_and_found_again() -> None:
    clock = ManualClock()
    lost: list[str] = []
    found: list[str] = []

    def note(into: list[str]) -> Any:
        def call(beat: Beat) -> None:
            into.append(beat.name)

        return call

    async with (
        trunkline.connect("memory:", clock=clock) as bus,
        Monitor(bus, late_s=10, lost=note(lost), found=note(found)) as monitor,
    ):
        beat = Heartbeat(bus, "stt", every_s=3)
        async with beat:
            await seen(lambda: found == ["stt"])
            for _ in range(8):
                await clock.run(3)
                await asyncio.sleep(0.005)
            assert (lost, [b.name for b in monitor.alive()]) == ([], ["stt"])
        for _ in range(8):
            await clock.run(3)
        assert (lost, [b.name for b in monitor.late()]) == (["stt"], ["stt"])
        await beat.beat()
        await seen(lambda: found == ["stt", "stt"])
        assert monitor.late() == []
        records = await bus.read(TOPIC)
        assert records[0].event.payload.keys() == {"pid", "name", "host", "ts"}
        assert (records[0].event.key or "").startswith("proc:stt:")


async def test_a_beat_of_another_make_is_understood() -> None:
    async with trunkline.connect("memory:") as bus, Monitor(bus) as monitor:
        await bus.publish(TOPIC, {"pid": 7})
        await bus.publish(TOPIC, "odd", key="proc:8")
        await seen(lambda: len(monitor.alive()) == 2)
        assert sorted(beat.key for beat in monitor.alive()) == ["proc:7", "proc:8"]


async def test_a_function_that_fails_does_not_end_the_watch() -> None:
    clock = ManualClock()
    told: list[str] = []

    def fail(beat: Beat) -> None:
        told.append(beat.name)
        raise RuntimeError("a fault of the caller's")

    async with (
        trunkline.connect("memory:", clock=clock) as bus,
        Monitor(bus, late_s=10, lost=fail, found=fail) as monitor,
    ):
        for name in ("one", "two"):
            await Heartbeat(bus, name).beat()
        await seen(lambda: told == ["one", "two"])
        for _ in range(8):
            await clock.run(3)
        assert told == ["one", "two", "one", "two"]
        assert len(monitor.late()) == 2


async def test_a_monitor_that_hears_no_more_says_so(caplog: pytest.LogCaptureFixture) -> None:
    options = BrokerOptions(url="memory:", port=0, metrics_s=0, auth=True, rights_s=0.05)
    async with Broker(options) as broker:
        rights = broker.hub.rights
        text, token = await rights.create("watcher", [EVERYTHING])
        async with RemoteBus(broker.url, token=text) as bus, Monitor(bus):
            await rights.revoke(token.id)
            await seen(lambda: caplog.records)
    assert "not heard any more" in caplog.text
