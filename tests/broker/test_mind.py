"""The attention gate and the memory work over a broker as they do in a process."""

from __future__ import annotations

import asyncio

import trunkline
from trunkline.broker.server import Broker
from trunkline.cognition.decision import read_decision
from trunkline.cognition.gate import AttentionGate
from trunkline.cognition.options import GateOptions, MemoryOptions
from trunkline.cognition.writing import WriteHandler
from trunkline.event import Event
from trunkline.names import ATTENTION


async def test_a_gate_stands_before_a_group_behind_a_broker(broker: Broker) -> None:
    handled: list[float] = []
    async with trunkline.connect(broker.url) as bus:
        gate = AttentionGate(
            bus, GateOptions(defer_s=0.1), scorer=lambda event, scene: event.payload
        )

        @gate.on("t", group="g", workers=2)
        async def handle(event: Event) -> None:
            handled.append(event.payload)

        for salience in (0.1, 0.4, 0.7, 0.9):
            await bus.publish("t", salience)
        async with asyncio.timeout(20):
            while len(handled) < 3:
                await asyncio.sleep(0.01)
        assert await bus.drain(20)
        await gate.flush()
        told = [read_decision(one.event) for one in await bus.read(ATTENTION)]
    assert sorted(handled) == [0.4, 0.7, 0.9]
    actions = sorted(one.action.value for one in told if one is not None and one.is_first)
    assert actions == ["admit", "boost", "defer", "drop"]


async def test_a_memory_is_kept_behind_a_broker(broker: Broker) -> None:
    async with trunkline.connect(broker.url) as bus:
        options = MemoryOptions(after_writes=2, after_s=None, idle_s=None)
        writer = WriteHandler(bus, options)
        await writer.write("alice", {"likes": "tea"}, space="home")
        await writer.write("alice", {"lives": "Oslo"}, space="home")
        await writer.settle()
        assert writer.runs == 1
        (memory,) = writer.consolidator.view.recall("alice", "home")
    assert memory.content == {"likes": "tea", "lives": "Oslo"}
