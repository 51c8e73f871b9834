"""A small mind in a folder: what it hears becomes memories, attention, decisions and actions.

::

    python examples/mind/household.py [FOLDER]

The topics are those of the wiring map: workspace, hippo, affect, cortex, actions, prospective,
temporal. Personal data is redacted, a policy decides who may do what, payloads are sealed on disk,
an attention gate stands before the arbiter, and every step has a metric and a span. The program
ends by itself and says what happened.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from prometheus_client import CollectorRegistry, generate_latest

import trunkline
from trunkline import Denied, Event
from trunkline.bus import Bus
from trunkline.cognition.consolidation import Consolidator
from trunkline.cognition.events import TOPIC, CognitiveType
from trunkline.cognition.gate import AttentionGate
from trunkline.cognition.options import GateOptions, MemoryOptions
from trunkline.cognition.writing import WriteHandler
from trunkline.crypto.keyring import KeyRing, new_wrapping_key
from trunkline.guard.policy_guard import PolicyGuard
from trunkline.guard.redaction import Redactor
from trunkline.guard.vault import Vault
from trunkline.middleware.flags import Flags
from trunkline.middleware.metrics import Metrics
from trunkline.middleware.tracing import Tracing

HOME = "home"
CANARY = "bob@canary.example"
SEALED = ("workspace", "hippo", "affect", "cortex", "actions", "prospective", "temporal")
HEARD: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("kitchen", {"kettle": "boils"}, 0.7),
    ("kitchen", {"kettle": "boils"}, 0.7),
    ("alice", {"likes": "tea"}, 0.9),
    ("door", {"state": "open"}, 0.8),
    ("smoke", {"alarm": "fire in the kitchen", "arousal": 0.95, "valence": -0.9}, 0.9),
    ("alice", {"friend": f"write to {CANARY}"}, 0.8),
    ("alice", {"paid": "with 4111 1111 1111 1111"}, 0.8),
    ("garden", {"rain": "perhaps"}, 0.3),
    ("door", {"state": "shut"}, 0.9),
)
CALM = ("the clock ticks", "the fridge hums", "the clock ticks", "the tap drips", "the clock ticks")


class Spans(SpanProcessor):
    """Counts spans by name, and remembers their traces."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.traces: Counter[int] = Counter()

    def on_end(self, span: ReadableSpan) -> None:
        assert span.context is not None
        self.names[span.name] += 1
        self.traces[span.context.trace_id] += 1


class Mind:
    """The producers and consumers of the wiring map."""

    def __init__(self, bus: Bus, gate: AttentionGate, memory: Consolidator) -> None:
        self.bus = bus
        self.memory = memory
        self.learned: Counter[str] = Counter()
        self.actions: list[str] = []
        self.recalled: list[str] = []
        self.indexed = 0
        bus.on("hippo", group="hippocampus")(self.encode)
        bus.on("affect", group="arbiter-risk")(self.weigh_risk)
        bus.on("cortex", group="arbiter-candidates")(self.consider)
        gate.on("workspace", group="arbiter", workers=2)(self.arbitrate)
        bus.on("workspace", group="recall")(self.recall)
        bus.on("actions", group="actuators")(self.actuate)
        bus.on("temporal", group="temporal-indexer")(self.index)
        bus.on("prospective", group="planner")(self.remind)
        for topic in ("workspace", "affect", "actions"):
            bus.on(topic, group="learning")(self.learn)

    async def say(self, type_: CognitiveType, payload: Any, cause: Event, **more: Any) -> None:
        """Publish a cognitive event on its topic, caused by another one."""
        more = {"space": HOME, "cause": cause.id, "actor": "mind"} | more
        await self.bus.publish(TOPIC[type_], payload, type=type_.value, **more)

    async def encode(self, event: Event) -> None:
        """Hippocampus: annotate an episode with its affect, and predict what it asks for."""
        content = event.payload["content"]
        arousal = float(content.get("arousal", 0.1))
        affect = {"valence": float(content.get("valence", 0.0)), "arousal": arousal}
        subject = {"subject": event.payload["subject"]}
        await self.say(CognitiveType.AFFECT_ANNOTATED, affect | subject, event)
        await self.say(CognitiveType.CORTEX_PREDICTION, {"candidates": ["look"]} | subject, event)

    async def weigh_risk(self, event: Event) -> None:
        """Affect that is strong enough is broadcast to the workspace."""
        if event.payload["arousal"] > 0.5:
            await self.say(
                CognitiveType.WORKSPACE_BROADCAST,
                {"fact": f"danger: {event.payload['subject']}", "affect": event.payload},
                event,
                priority="critical",
                key=event.payload["subject"],
            )

    async def consider(self, event: Event) -> None:
        self.learned["candidates"] += len(event.payload["candidates"])

    async def arbitrate(self, event: Event) -> None:
        """The arbiter sees what the gate admits."""
        await self.say(CognitiveType.ACTION_DECISION, {"do": event.payload["fact"]}, event)

    async def recall(self, event: Event) -> None:
        await self.memory.view.refresh()
        for memory in self.memory.view.recall("alice", HOME):
            self.recalled.append(f"{event.payload['fact']}: {memory.content}")

    async def actuate(self, event: Event) -> None:
        if event.type == CognitiveType.ACTION_DECISION:
            self.actions.append(event.payload["do"])
            await self.say(CognitiveType.ACTION_EXECUTED, {"did": event.payload["do"]}, event)

    async def index(self, event: Event) -> None:
        """The temporal indexer tells the planner once that a day was full."""
        self.indexed += 1
        if self.indexed == len(HEARD):
            await self.say(CognitiveType.PROSPECTIVE_TRIGGER, {"remind": "air the kitchen"}, event)

    async def remind(self, event: Event) -> None:
        if event.type == CognitiveType.PROSPECTIVE_TRIGGER:
            fact = {"fact": event.payload["remind"]}
            await self.say(CognitiveType.WORKSPACE_BROADCAST, fact, event, priority="high")

    async def learn(self, event: Event) -> None:
        self.learned[event.type or ""] += 1


async def main(folder: Path) -> None:
    spans, registry = Spans(), CollectorRegistry()
    provider = TracerProvider()
    provider.add_span_processor(spans)
    metrics = Metrics(registry)
    vault = Vault(keys(folder), topics=(*SEALED, "memory.>", "attention.deferred.>"))
    tracing = Tracing(provider, publish_name="events.publish", handle_name="events.handle")
    redactor = Redactor()
    bus = trunkline.connect(f"file:{folder / 'bus'}", middleware=[tracing, metrics])
    flags = Flags(bus)
    bus.use(
        flags.switch("redaction", redactor),
        PolicyGuard(bus, Path(__file__).parent / "policy.toml", "mind"),
        vault,
    )
    async with bus:
        options = MemoryOptions(after_writes=len(HEARD), after_s=None, idle_s=None)
        memory = Consolidator(bus, options, opened=vault.open, secret=vault.secret)
        memory.review()
        writer = WriteHandler(bus, options, redact=redactor.redact, consolidator=memory)
        gate = AttentionGate(bus, GateOptions(defer_s=0.3, waiting=4))
        mind = Mind(bus, gate, memory)

        for subject, content, confidence in HEARD:
            await writer.write(subject, content, space=HOME, confidence=confidence, actor="ears")
        for fact in CALM:
            await bus.publish(
                "workspace",
                {"fact": fact},
                type=CognitiveType.WORKSPACE_BROADCAST.value,
                space=HOME,
                key=fact,
                priority="low",
            )
        try:
            await bus.publish("payroll", {"salary": 1}, space=HOME)
        except Denied as error:
            print(f"denied: {error.missing}")
        await writer.settle()
        if not await bus.drain(60):
            raise SystemExit("the mind did not come to rest")
        await gate.flush()
        await memory.view.refresh()
        await report(bus, gate, mind, memory)
    shown = generate_latest(registry).decode().splitlines()
    for name in ("events_publish_count", "events_handle_ok_total", "events_dlq_total"):
        total = sum(float(line.split()[-1]) for line in shown if line.startswith(name + "{"))
        print(f"metric {name}: {total:.0f}")
    print(f"spans: {dict(sorted(spans.names.items()))}, longest trace {max(spans.traces.values())}")
    print(f"files that hold {CANARY}: {len(holding(folder, CANARY))}")


async def report(bus: Bus, gate: AttentionGate, mind: Mind, memory: Consolidator) -> None:
    for topic in SEALED:
        _, end = await bus.bounds(topic)
        print(f"topic {topic}: {end - 1} events")
    decided = {action: count for (_, action), count in sorted(gate.counts.items())}
    print(f"gate: {decided}")
    print(f"actions: {mind.actions}")
    print(f"learned: {dict(sorted(mind.learned.items()))}")
    for one in sorted(memory.view, key=lambda one: (one.subject, one.valid_at)):
        print(f"memory {one.subject}: {one.content} {one.state} {one.confidence:.2f}")
    letters = [one async for one in bus.dead_letters("memory.review").letters()]
    print(f"to review: {len(letters)}")
    audited = await bus.read("system.bus.audit")
    print(f"denials on record: {sum(one.event.type == 'denied' for one in audited)}")


def holding(folder: Path, text: str) -> list[Path]:
    """The files below a folder in which a text stands."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text.encode() in path.read_bytes()]


def keys(folder: Path) -> KeyRing:
    """The key ring of the household, made when it is first opened."""
    wrapping = folder / "wrapping.key"
    if not wrapping.exists():
        wrapping.write_text(new_wrapping_key())
    return KeyRing(folder / "keys", f"file:{wrapping}", create=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    if len(sys.argv) > 1:
        place = Path(sys.argv[1])
        os.makedirs(place, exist_ok=True)
        asyncio.run(main(place))
    else:
        with tempfile.TemporaryDirectory() as made:
            asyncio.run(main(Path(made)))
