"""Programs written for ``events`` run unchanged, and leave the files they always left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = (ROOT / "tests" / "compat" / "appendix_b.txt").read_text("utf-8")


def run(program: str, folder: Path, *, silent: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": str(ROOT / "compat")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or not silent
    return done.stdout


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
    second = run(counting, tmp_path).split()

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
