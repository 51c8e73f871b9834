"""Feature flags of middleware."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import trunkline
from trunkline.bus.local import LocalBus
from trunkline.cli import main
from trunkline.errors import InvalidName, NotFound
from trunkline.event import Event
from trunkline.middleware.flags import Flags
from trunkline.store.memory import MemoryStore
from trunkline.testing import ManualClock


class Shout:
    def __init__(self) -> None:
        self.calls: list[str] = []

    async def publish(self, events: list[Event], call_next: Any) -> Any:
        self.calls.append("publish")
        return await call_next(events)

    async def handle(self, delivery: Any, call_next: Any) -> Any:
        self.calls.append("handle")
        return await call_next(delivery)


async def test_a_middleware_is_switched_while_the_bus_runs_and_the_change_is_told() -> None:
    clock = ManualClock()
    bus = LocalBus(MemoryStore(clock=clock), clock=clock)
    flags, shout, registry = Flags(bus), Shout(), CollectorRegistry()
    bus.use(flags.switch("shout", shout))
    flags.register(registry)
    async with bus:

        @bus.on("t", group="g")
        async def handle(event: Event) -> None: ...

        await bus.publish("t", 1)
        assert await bus.drain(10)
        assert shout.calls == ["publish", "handle"]
        await flags.set("shout", False, by="ops", reason="too loud")
        await bus.publish("t", 2)
        assert await bus.drain(10)
        assert shout.calls == ["publish", "handle"]
        (told,) = await bus.read("system.bus.audit")
        assert told.event.payload == {
            "what": "flag",
            "flag": "shout",
            "on": False,
            "by": "ops",
            "reason": "too loud",
        }
        text = generate_latest(registry).decode()
        with pytest.raises(NotFound, match="flags here: shout"):
            await flags.set("loud", True)
        with pytest.raises(InvalidName):
            flags.switch("shout", shout)
    assert 'trunkline_feature_enabled{feature="shout"} 0.0' in text
    assert 'trunkline_feature_calls_total{enabled="true",feature="shout"} 2.0' in text
    assert 'trunkline_feature_calls_total{enabled="false",feature="shout"} 2.0' in text


async def test_every_process_follows_a_flag_that_the_command_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{tmp_path / 'bus'}"
    async with trunkline.connect(url) as bus:
        flags, shout = Flags(bus, poll_s=0.02), Shout()
        bus.use(flags.switch("shout", shout))
        await bus.publish("t", 1)
        off = ["flag", "off", "shout", "--reason", "night", "--url", url]
        assert await asyncio.to_thread(main, off) == 0
        for _ in range(500):
            if not flags.is_on("shout"):
                break
            await asyncio.sleep(0.01)
        assert not flags.is_on("shout")
    async with trunkline.connect(url) as bus:  # a later process begins with it
        flags, shout = Flags(bus), Shout()
        bus.use(flags.switch("shout", shout))
        await bus.publish("t", 2)
        assert shout.calls == []
    assert await asyncio.to_thread(main, ["flag", "ls", "--url", url]) == 0
    assert "night" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["metrics", "--url", url]) == 0
    assert 'trunkline_feature_enabled{feature="shout"} 0' in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["flag", "on", "shout", "--url", url]) == 0
