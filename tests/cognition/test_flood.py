"""The gate under ten times the load that its group can take."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

import trunkline
from trunkline.cognition.decision import By, read_decision
from trunkline.cognition.gate import AttentionGate
from trunkline.cognition.options import GateOptions
from trunkline.cognition.salience import Scene
from trunkline.event import Event
from trunkline.names import ATTENTION, DEFERRED_PREFIX

WORK_S = 0.1
WORKERS = 4
CAPACITY = WORKERS / WORK_S  # events a second
SECONDS = 5
HIGH_EVERY = 40  # one event in so many has a high salience


def salience(event: Event, scene: Scene) -> float:
    """Given by the producer; the rest is spread from 0.1 to 0.7."""
    return float(event.payload["s"])


def p95(values: list[float]) -> float:
    return sorted(values)[max(0, int(len(values) * 0.95) - 1)]


@pytest.mark.timeout(240)
async def test_high_salience_passes_a_flood_and_every_event_is_accounted_for(
    tmp_path: Path,
) -> None:
    latency: dict[str, float] = {}
    times: Counter[str] = Counter()
    async with trunkline.connect(f"file:{tmp_path / 'bus'}") as bus:
        options = GateOptions(waiting=8, defer_s=1.0)
        gate = AttentionGate(bus, options, scorer=salience)

        @gate.on("flood", group="mind", workers=WORKERS)
        async def handle(event: Event) -> None:
            await asyncio.sleep(WORK_S)
            latency.setdefault(event.id, time.monotonic() - event.payload["at"])
            times[event.id] += 1

        async def send(level: float) -> str:
            receipt = await bus.publish("flood", {"s": level, "at": time.monotonic()})
            return receipt.id

        calm = []
        for _ in range(30):  # unloaded: one at a time
            calm.append(await send(0.95))
            while calm[-1] not in latency:
                await asyncio.sleep(0.005)
        unloaded = p95([latency[one] for one in calm])

        high: list[str] = []
        low: list[str] = []
        total, began = int(10 * CAPACITY * SECONDS), time.monotonic()
        for number in range(total):
            is_high = number % HIGH_EVERY == 0
            level = 0.95 if is_high else 0.1 + (number % 61) / 100
            (high if is_high else low).append(await send(level))
            await asyncio.sleep(max(0.0, began + number / (10 * CAPACITY) - time.monotonic()))
        while not all(one in latency for one in high):
            await asyncio.sleep(0.01)
        flooded = p95([latency[one] for one in high])

        while await bus.lag("flood", "mind"):  # until each one is handled, deferred or dropped
            await asyncio.sleep(0.05)
        await gate.flush()
        _, end = await bus.bounds(DEFERRED_PREFIX + "mind")
        told = [read_decision(one.event) for one in await bus.read(ATTENTION, limit=100_000)]
    first = {one.id: one for one in told if one is not None and one.is_first}
    back = {one.id for one in told if one is not None and one.by is By.RETURN}
    actions = Counter(first[one].action.value for one in (*high, *low))
    print(f"p95 unloaded {unloaded * 1000:.0f} ms, flooded {flooded * 1000:.0f} ms; {actions}")
    assert flooded <= 3 * unloaded
    assert {first[one].action.value for one in high} == {"boost"}
    assert sum(actions.values()) == total, "each event has exactly one first decision"
    assert all(one.reason for one in first.values())
    handled_at_once = {i for i, one in first.items() if one.action.value in ("admit", "boost")}
    deferred = {i for i, one in first.items() if one.action.value == "defer"}
    dropped = {i for i, one in first.items() if one.action.value == "drop"}
    assert handled_at_once | deferred | dropped == {*calm, *high, *low}
    assert not dropped & times.keys()
    assert back <= deferred
    assert end - 1 == len(deferred), "each deferred record is on disk, once"
    assert set(times) <= handled_at_once | back
