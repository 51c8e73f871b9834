"""Programs written for ``events`` run unchanged, and leave the files they always left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = (ROOT / "tests" / "compat" / "appendix_b.txt").read_text("utf-8")


def run(program: str, folder: Path, *, silent: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'compat'}{os.pathsep}{ROOT / 'src'}"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or not silent
    return done.stdout


def with_other_key(program: str) -> str:
    """The program with another event: a repeated ``idem_key`` names the one that is there."""
    return program.replace("act:a1|ok", "act:a2|ok")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_the_programs_own_example_runs_and_leaves_its_files(tmp_path: Path) -> None:
    run(PROGRAM, tmp_path)

    bus = tmp_path / "workspace" / ".bus"
    record, *rest = lines(bus / "wal" / "actions.00000001.jsonl")
    assert record["offset"] == 1
    assert record["payload"] == {"action_id": "a1", "status": "ok"}
    meta = record["meta"]
    assert (meta["topic"], meta["type"], meta["space_id"], meta["idem_key"]) == (
        "actions",
        "ACTION_EXECUTED",
        "shared:household",
        "act:a1|ok",
    )
    assert meta["event_id"].startswith("ev-")
    assert len(meta["event_id"]) == 35
    assert int(meta["event_id"][3:], 16) > 0
    assert [set(line) for line in rest] in ([], [{"seal", "crc"}])

    saved = json.loads((bus / "offsets" / "actions__learner.json").read_text("utf-8"))
    assert (saved["committed"], saved["segment"]) == (1, 1)
    assert saved["ts"]
    assert not (bus / "dlq" / "actions.dlq.jsonl").exists()


def test_a_second_run_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    counting = PROGRAM.replace("# dedupe with idem_key", "print(ev.meta.event_id, ev.meta.topic)")
    first = run(counting, tmp_path).split()
    second = run(with_other_key(counting), tmp_path).split()

    assert (len(first), len(second)) == (2, 2)
    assert first[0] != second[0]
    saved = tmp_path / "workspace" / ".bus" / "offsets" / "actions__learner.json"
    assert json.loads(saved.read_text("utf-8"))["committed"] == 2


RETRIES = """
import asyncio, sys
from events.bus import EventBus
from events.types import Event, EventMeta, EventType, Ack, Nack
from events.middleware import MetricsMiddleware

async def main():
    metrics = MetricsMiddleware()
    seen = []
    async def handler(ev):
        seen.append(ev.payload["n"])
        if ev.payload["n"] == "returned" and seen.count("returned") == 1:
            return Nack()
        if ev.payload["n"] == "raised" and seen.count("raised") == 1:
            raise Nack("not yet")
        if ev.payload["n"] == "broken":
            raise RuntimeError("broken")
        return Ack()
    def blocking(ev):
        return Nack() if ev.payload["n"] == "returned" and not blocked else blocked.append(1)
    blocked = [0]
    bus = EventBus(middlewares=[metrics])
    await bus.subscribe("actions", "learner", handler, backoff_base=0.01, max_retries=2)
    await bus.subscribe("actions", "arbiter", blocking)
    for n in ("plain", "returned", "raised", "broken"):
        meta = EventMeta(topic="actions", type=EventType.ACTION_DECISION, space_id="s", ttl_sec=60)
        await bus.publish(Event(meta=meta, payload={"n": n}))
    while seen.count("broken") < 3 or len(blocked) < 5:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    await bus.close()
    print(sorted(seen))
    print(metrics.counts["events_publish_count", "actions"],
          metrics.counts["events_handle_ok_total", "actions", "learner"],
          metrics.counts["events_handle_err_total", "actions", "learner"])

asyncio.run(main())
"""


def test_a_nack_is_tried_again_and_a_failure_ends_in_the_dlq(tmp_path: Path) -> None:
    seen, counts = run(RETRIES, tmp_path, silent=False).splitlines()

    assert seen == str(["broken"] * 3 + ["plain"] + ["raised"] * 2 + ["returned"] * 2)
    assert counts == "4 3 5"
    bus = tmp_path / "workspace" / ".bus"
    letter, *_ = lines(bus / "dlq" / "actions.dlq.jsonl")
    assert letter["payload"] == {"n": "broken"}
    assert letter["meta"]["headers"]["dlq-error"] == "RuntimeError: broken"
    saved = json.loads((bus / "offsets" / "actions__learner.json").read_text("utf-8"))
    assert saved["committed"] == 4, "a dead letter is committed past"
    assert lines(bus / "wal" / "actions.00000001.jsonl")[0]["meta"]["ttl_sec"] == 60


SECOND = """
import asyncio
from events.bus import EventBus
from events.types import Event, EventMeta, EventType
from events.subscription import SubscriptionRegistry
from events.filters import SimpleFilter, CompoundFilter

async def main():
    registry = SubscriptionRegistry()
    important = CompoundFilter("AND", [
        SimpleFilter("meta.priority", "high", "exact"),
        SimpleFilter("meta.actor.user_id", "alice", "exact"),
    ])
    got = []
    async def handle(event):
        got.append(event)
    sub_id, subscription = registry.register_subscription(
        topic="WORKSPACE_BROADCAST", handler=handle, advanced_filters=[important])
    bus = EventBus(registry=registry)
    await bus.start()
    for user, priority in (("alice", "normal"), ("bob", "high"), ("alice", "high")):
        meta = EventMeta(topic=EventType.WORKSPACE_BROADCAST, space_id="family-001",
                         actor={"user_id": user}, device={"device_id": "phone-1"},
                         priority=priority)
        event = Event(meta=meta, payload={"message": "Hello world"})
        await bus.publish(event, meta.topic.value)
    while not got:
        await asyncio.sleep(0.01)
    await bus.close()
    (event,) = got
    print(event.meta.actor, event.meta.device, event.meta.type.name, subscription.group)

asyncio.run(main())
"""


def test_the_other_interface_runs_too(tmp_path: Path) -> None:
    shown = run(SECOND, tmp_path).strip()
    assert shown == (
        "{'user_id': 'alice'} {'device_id': 'phone-1'} WORKSPACE_BROADCAST main-locals-handle"
    )
    wal = tmp_path / "workspace" / ".bus" / "wal" / "WORKSPACE_BROADCAST.00000001.jsonl"
    assert [line["offset"] for line in lines(wal) if "offset" in line] == [1, 2, 3]


FILTERS = """
from events.filters import *
from events.filters import FilterValidationError
from events.types import Event, EventMeta

event = Event(EventMeta("actions", "ACTION", "home", headers={"a": "b"}),
              {"n": 5, "text": "hello", "tags": ["x", "y"], "items": [{"n": 1}, {"n": 2}]})

def simple(*args): return SimpleFilter(*args).matches(event)
def path(*args, **kw): return JSONPathFilter(*args, **kw).matches(event)

assert simple("payload.n", 5) and not simple("payload.n", 6)
assert simple("payload.n", 4, "gt") and simple("payload.n", 5, "gte")
assert simple("payload.n", 6, "lt") and simple("payload.n", 5, "lte")
assert simple("payload.text", "^hel", "regex") and simple("payload.tags", "y", "contains")
assert simple("payload.items.1.n", 2) and simple("meta.space_id", "home")
assert simple("payload.none", None) and not simple("payload.none", 0)
assert not simple("payload.none", 1, "gt")
assert not simple("payload.text", 3, "gt"), "what cannot be compared does not match"
assert path("$.payload.items[*].n", 2) and not path("$.payload.items[*].n", 3)
assert path("$.payload.items[?@.n > 1]", mode="any") and not path("$.nothing", mode="any")
assert not path("$.payload.items[*].n", 1, "all") and path("$.payload.n", 5, "all")
assert path("$.payload.tags", "x", "contains") and path("$.payload.text", "llo$", "regex")
assert CustomFunctionFilter(lambda e: e.payload["n"] == 5).matches(event)
assert not CustomFunctionFilter(lambda e: e.payload["missing"]).matches(event)
yes, no = SimpleFilter("payload.n", 5), SimpleFilter("payload.n", 6)
assert CompoundFilter("OR", [no, yes]).matches(event)
assert not CompoundFilter("AND", [no, yes]).matches(event)
assert CompoundFilter("NOT", [no]).matches(event)
for bad in (lambda: SimpleFilter("a", 1, "near"), lambda: SimpleFilter("a", "(", "regex"),
            lambda: JSONPathFilter("$.["), lambda: CompoundFilter("XOR", [yes]),
            lambda: CompoundFilter("AND", []), lambda: CompoundFilter("NOT", [yes, no]),
            lambda: CustomFunctionFilter(3), lambda: SimpleFilter("", 1)):
    try:
        bad()
    except FilterValidationError:
        continue
    raise AssertionError("not refused")
try:
    EventMeta("actions", "ACTION", "")
except ValueError as error:
    print(error)
"""


def test_filters_mean_what_they_meant(tmp_path: Path) -> None:
    assert "space_id must be set" in run(FILTERS, tmp_path)


MIDDLEWARE = """
import asyncio
from events.bus import EventBus
from events.types import Event, EventMeta, Ack
from events.middleware import MetricsMiddleware, TracingMiddleware

class Hooks:
    def __init__(self): self.seen = []
    def before_publish(self, event): self.seen.append("before publish " + event.meta.topic)
    async def before_handle(self, event): self.seen.append("before handle")
    def after_handle(self, event): self.seen.append("after handle")

async def main():
    hooks, told = Hooks(), []
    bus = EventBus([TracingMiddleware(), hooks, MetricsMiddleware(lambda *a: told.append(a[0]))])
    done = asyncio.Event()
    async def handler(ev):
        done.set()
        return Ack()
    await bus.subscribe("actions", "learner", handler)
    await bus.publish(Event(EventMeta("actions", "ACTION", "home"), {}))
    await done.wait()
    await bus.close()
    print(hooks.seen, told)

asyncio.run(main())
"""


def test_middleware_with_hooks_is_called_around_handlers(tmp_path: Path) -> None:
    shown = run(MIDDLEWARE, tmp_path)
    assert "['before publish actions', 'before handle', 'after handle']" in shown
    for name in ("publish_count", "handle_ok_total", "handle_latency_seconds"):
        assert f"'events_{name}'" in shown


NAMES = """
import asyncio
from events.bus import EventBus
from events.types import Event, EventMeta
from trunkline import InvalidName
async def main():
    bus = EventBus()
    for name in ("a/b", "../x", ""):
        try:
            await bus.publish(Event(EventMeta(name, "T", "s"), {}))
        except InvalidName:
            print("refused")
    await bus.close()
asyncio.run(main())
"""


def test_a_topic_that_is_no_name_is_refused(tmp_path: Path) -> None:
    assert run(NAMES, tmp_path) == "refused\n" * 3


WITHOUT_TELEMETRY = "import sys\nsys.modules['opentelemetry'] = None\n"


def test_the_programs_own_example_runs_without_opentelemetry(tmp_path: Path) -> None:
    run(WITHOUT_TELEMETRY + PROGRAM.replace("from __future__ import annotations", ""), tmp_path)
    wal = tmp_path / "workspace" / ".bus" / "wal" / "actions.00000001.jsonl"
    assert lines(wal)[0]["payload"] == {"action_id": "a1", "status": "ok"}


def test_every_module_of_the_program_imports(tmp_path: Path) -> None:
    names = (
        "bus types persistence dispatcher handlers middleware filters subscription publisher "
        "serialization validation utils attention_gate cognitive_events write_handler"
    )
    program = (
        f"import importlib\nfor n in {names.split()!r}: importlib.import_module('events.' + n)"
    )
    assert run(program, tmp_path) == ""


LETTERS = """
import asyncio
from events.bus import EventBus
from events.types import Event, EventMeta
from events.middleware import MetricsMiddleware
from trunkline import StorageFull

class Full:
    on = False
    async def publish(self, events, call_next):
        if self.on:
            raise StorageFull()
        return await call_next(events)

async def main():
    told = []
    metrics, full = MetricsMiddleware(lambda *a: told.append(a)), Full()
    bus = EventBus([metrics, full])
    async def handler(ev):
        raise RuntimeError("broken")
    await bus.subscribe("actions", "learner", handler, backoff_base=0.001, max_retries=2)
    for n in range(3):
        await bus.publish(Event(EventMeta("actions", "A", "s"), {"n": n}))
    while metrics.counts["events_dlq_total", "actions"] < 3:
        await asyncio.sleep(0.01)
    full.on = True
    for _ in range(2):
        try:
            await bus.publish(Event(EventMeta("other", "A", "s"), {}))
        except StorageFull:
            print("full", metrics.counts[("events_storage_full",)])
    full.on = False
    await bus.publish(Event(EventMeta("other", "A", "s"), {}))
    print([(name, value) for name, value, _ in told if name == "events_storage_full"])
    health = await bus.health()
    print(bus.state.value, health["ok"], health["events_storage_full"])
    await bus.close()
    print(bus.state.value, metrics.counts["events_dlq_total", "actions"])

asyncio.run(main())
"""


def test_every_dead_letter_is_counted_and_a_full_disk_is_told(tmp_path: Path) -> None:
    assert run(LETTERS, tmp_path, silent=False).splitlines() == [
        "full 1",
        "full 1",
        "[('events_storage_full', 1.0), ('events_storage_full', 0.0)]",
        "RUNNING True False",
        "STOPPED 3",
    ]
    letters = lines(tmp_path / "workspace" / ".bus" / "dlq" / "actions.dlq.jsonl")
    assert len([one for one in letters if "offset" in one]) == 3


OWN_CLASSES = """
import asyncio
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Any, Dict, Optional
from uuid import uuid4
from events.bus import EventBus

class EventType(str, Enum):
    ACTION_EXECUTED="ACTION_EXECUTED"

@dataclass
class EventMeta:
    topic: str
    type: EventType
    space_id: str
    event_id: str = field(default_factory=lambda:"ev-"+uuid4().hex)
    ts: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    actor: Optional[str] = None
    trace_id: Optional[str] = None
    idem_key: Optional[str] = None
    ttl_sec: Optional[int] = None

@dataclass
class Event:
    meta: EventMeta
    payload: Dict[str, Any]

class Ack:  ...
class Nack: ...

async def main():
    bus, seen = EventBus(), []
    async def handler(ev):
        seen.append(ev.payload["n"])
        return Nack() if seen.count(ev.payload["n"]) < 3 and ev.payload["n"] == 2 else Ack()
    await bus.subscribe("actions", "learner", handler, backoff_base=0.001)
    for n in (1, 2):
        await bus.publish(Event(EventMeta("actions", EventType.ACTION_EXECUTED, "s"), {"n": n}))
    while len(seen) < 4:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    await bus.close()
    print(sorted(seen))

asyncio.run(main())
"""


def test_the_programs_own_ack_nack_and_meta_work(tmp_path: Path) -> None:
    assert run(OWN_CLASSES, tmp_path) == "[1, 2, 2, 2]\n"


VALUES = """
import asyncio
from events.bus import EventBus, EventBusState
from events.types import *
from events.types import Actor, Device, QoS, SecurityBand, Capability, EventMeta, Event
from events.serialization import serialize_event, deserialize_event
from events.validation import validate_event, validate_topic_format
from events.utils import generate_event_id

meta = EventMeta("actions", EventType.TRIGGER_FIRED, "home", actor=Actor("alice"),
                 device=Device("phone-1"), qos=QoS(priority="high", ttl_sec=60),
                 band=SecurityBand.RED, caps=[Capability.WRITE], event_id=generate_event_id())
event = Event(meta, {"a": 1})
validate_event(event); validate_topic_format("actions")
again = deserialize_event(serialize_event(event))
print(again.meta.actor, again.meta.device, again.meta.priority, again.meta.ttl_sec,
      again.meta.band, again.meta.caps, again.meta.type.name)

async def main():
    bus, got = EventBus(), []
    print(bus.state is EventBusState.STOPPED)
    async def first(ev):
        await bus.publish(Event(EventMeta("later", "T", "home"), {}))
    async def second(ev):
        got.append(ev.meta.trace_id)
    await bus.subscribe("actions", "one", first)
    await bus.subscribe("later", "two", second)
    meta.trace_id = "trace-123"
    await bus.publish(event)
    while not got:
        await asyncio.sleep(0.01)
    print(got, [offset async for offset, _ in bus.replay("actions", 1)])
    await bus.close()
asyncio.run(main())
"""


def test_actors_devices_bands_and_capabilities_are_values(tmp_path: Path) -> None:
    values, stopped, traced = run(VALUES, tmp_path).splitlines()
    assert values == (
        "{'user_id': 'alice', 'caps': []} {'device_id': 'phone-1', 'platform': None} high 60 "
        "RED ['WRITE'] TRIGGER_FIRED"
    )
    assert stopped == "True"
    assert traced == "['trace-123'] [1]", "a trace goes on in what a handler publishes"


FULL_WINDOW = """
import asyncio
from events.bus import EventBus
from events.types import Event, EventMeta

async def main():
    bus, published, most = EventBus(), 0, []
    handled = 0
    async def handler(ev):
        nonlocal handled
        await asyncio.sleep(0.02)
        handled += 1
        if ev.payload["n"] == 3:
            await bus.publish(Event(EventMeta("actions", "T", "s"), {"n": 99}))
    await bus.subscribe("actions", "learner", handler, max_inflight=2)
    for n in range(10):
        await bus.publish(Event(EventMeta("actions", "T", "s"), {"n": n}))
        published += 1
        most.append(published - handled)
    while handled < 11:
        await asyncio.sleep(0.01)
    await bus.close()
    print(max(most), handled)

asyncio.run(main())
"""


def test_a_publisher_waits_while_max_inflight_events_are_not_done(tmp_path: Path) -> None:
    most, handled = map(int, run(FULL_WINDOW, tmp_path).split())
    assert handled == 11
    assert most <= 3, "two in flight, and the one that was just published"


DEADLINE = """
import asyncio
from events.bus import EventBus
from events.types import Event, EventMeta

async def main():
    bus, began = EventBus(ack_deadlines={"actions": 50}), []
    async def handler(ev):
        began.append(1)
        await asyncio.sleep(30 if len(began) == 1 else 0)
    await bus.subscribe("actions", "learner", handler, backoff_base=0.001)
    await bus.publish(Event(EventMeta("actions", "T", "s"), {}))
    while len(began) < 2:
        await asyncio.sleep(0.01)
    await bus.close()
    print(len(began))

asyncio.run(main())
"""


def test_an_event_returns_to_the_queue_after_the_deadline_of_its_topic(tmp_path: Path) -> None:
    assert run(DEADLINE, tmp_path, silent=False) == "2\n"


def test_a_changed_policy_is_taken(tmp_path: Path) -> None:
    run(PROGRAM, tmp_path)
    run(PROGRAM.replace("max_retries=5", "max_retries=1"), tmp_path, silent=False)
    saved = tmp_path / "workspace" / ".bus" / "offsets" / "actions__learner.json"
    assert json.loads(saved.read_text("utf-8"))["options"]["max_retries"] == 1


@pytest.mark.parametrize("damage", [b"", b"garbage", b"{", "cut", "flip"])
def test_a_damaged_offsets_file_recovers_from_its_journal(
    tmp_path: Path, damage: bytes | str
) -> None:
    counting = PROGRAM.replace("# dedupe with idem_key", "print(ev.meta.event_id)")
    run(counting, tmp_path)
    path = tmp_path / "workspace" / ".bus" / "offsets" / "actions__learner.json"
    whole = path.read_bytes()
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "flip":
        path.write_bytes(whole.replace(b'"committed":1', b'"committed":7'))
    else:
        assert isinstance(damage, bytes)
        path.write_bytes(damage)
    shown = run(with_other_key(counting), tmp_path, silent=False).split()
    assert len(shown) == 1, "the new event alone is handled"
    assert json.loads(path.read_text("utf-8"))["committed"] == 2


GATE = """
import asyncio
from events.attention_gate import AttentionGate
from events.bus import EventBus
from events.cognitive_events import FOCUS_SHIFT_REQUEST, CognitiveEventType
from events.write_handler import WriteHandler
from events.types import Event, EventMeta

gate = AttentionGate()
def verbs(event): return [v for v in ("admit", "defer", "boost", "drop") if getattr(gate, v)(event)]
urgent = Event(EventMeta("workspace", FOCUS_SHIFT_REQUEST, "home", priority="critical"), {"n": 1})
plain = Event(EventMeta("workspace", "T", "home", key="k"), {"n": 2})
print(verbs(urgent), verbs(plain))
print(AttentionGate(scorer=lambda *a: 1 / 0).decide(plain), len(CognitiveEventType))

async def main():
    async with EventBus() as bus:
        writer = WriteHandler(bus)
        meta = EventMeta("ingest", "T", "home", actor="phone", band="RED", caps=["pci"])
        done = await writer.handle(Event(meta, {"subject": "alice", "content": {"likes": "tea"}}))
        mind = writer.inner.consolidator
        run = await mind.run()
        (memory,) = mind.view.recall("alice", "home")
        print(done.encoded.topic, run.ok, memory.band, *memory.caps)
asyncio.run(main())
"""


def test_gate_types_and_write_handler_are_there(tmp_path: Path) -> None:
    assert run(GATE, tmp_path).splitlines() == [
        "['boost'] ['admit']",
        "admit 15",
        "hippo True RED pci",
    ]
