"""A log as real ones are: awkward names, nulls, late and repeated events, 24 topics, 14 years."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from trunkline.event import Event
from trunkline.folder import Folder
from trunkline.names import partition_for
from trunkline.options import TopicOptions

from .logs import append

BEGIN = datetime(2005, 1, 3, tzinfo=UTC)
YEARS = 14
MACHINES = ("apache", "hdfs", "hpc", "linux", "mac", "spark", "ssh", "thunder", "zoo")
LOGS = tuple(f"logs.{name}" for name in MACHINES)
FLIGHTS = ("flight.departed", "flight.landed", "flight.cancelled")
TOPICS = (
    *FLIGHTS, *LOGS, "actions", "coord.claim", "coord.release", "coord.note", "quakes", "movies",
    "football", "odd", "notes", "orders", "stock", "users",
)  # fmt: skip
PARTS = {"flight.departed": 3, "logs.hdfs": 2}
SCHEMA = {
    "type": "object",
    "required": ["id"],
    "properties": {
        "id": {"type": "integer"},
        "key": {"type": ["string", "null"]},
        "TOPIC": {"type": "string"},
        "offset": {"type": "integer"},
        "dep.delay": {"type": ["number", "null"]},
        "air time": {"type": "number"},
        "Origin": {"type": "string"},
        "origin": {"type": "string"},
        "Zürich": {"type": "boolean"},
        "_h": {"type": "integer"},
        "when": {"type": "string", "format": "date-time"},
        "any": {},
        "legs": {"type": "array", "items": {"type": "object", "properties": {
            "a": {"type": "integer"}, "A": {"type": "string"}}}},
    },
}  # fmt: skip


def make_world(path: Path, count: int, seed: int = 1) -> str:
    """A bus with ``count`` events in 24 topics, and the schema of flights."""
    folder = Folder(str(path))
    for topic in TOPICS:
        folder.define(topic, TopicOptions(partitions=PARTS.get(topic, 1)))
    promise = {"topic": FLIGHTS[0], "version": 1, "schema": SCHEMA}
    append(folder, [Event(topic="system.schemas", type="schema", payload=promise)])
    waiting: dict[tuple[str, int], list[Event]] = {}
    for number, event in enumerate(events(count, seed)):
        parts = PARTS.get(event.topic, 1)
        where = (event.topic, partition_for(event.key or event.id, parts))
        waiting.setdefault(where, []).append(event)
        if number % 2000 == 1999:
            _append(folder, waiting)
    _append(folder, waiting)
    folder.close()
    return str(path)


def _append(folder: Folder, waiting: dict[tuple[str, int], list[Event]]) -> None:
    for (_, partition), found in waiting.items():
        append(folder, found, partition)
    waiting.clear()


def events(count: int, seed: int) -> Iterator[Event]:
    """In the order of publishing: most in the order of time, 2 % late, 1 % twice."""
    rng = random.Random(seed)
    step = timedelta(days=365 * YEARS) / max(1, count)
    late: list[tuple[int, Event]] = []
    made = 0
    number = 0
    while made < count:
        while late and late[0][0] <= number and made < count:
            yield late.pop(0)[1]
            made += 1
        # Fifty in half an hour, then a pause; many at whole minutes, so at one moment.
        ts = BEGIN + step * (number // 50 * 50) + timedelta(seconds=number % 50 * 40)
        ts = ts.replace(second=0, microsecond=0) if number % 3 else ts
        event = _event(rng, number, ts)
        number += 1
        chance = rng.random()
        if chance < 0.02:
            late.append((number + rng.randint(1, max(2, count // 20)), event))
            late.sort(key=lambda pair: pair[0])
            continue
        yield event
        made += 1
        if chance > 0.99 and made < count:
            yield event
            made += 1


def _event(rng: random.Random, number: int, ts: datetime) -> Event:
    kind = rng.random()
    common: dict[str, Any] = {"id": f"e{number}", "ts": ts}
    actor = f"agent-{rng.randint(0, 11)}" if rng.random() < 0.9 else None
    common |= {"actor": actor, "space": rng.choice([None, "s:one", "two"])}
    if kind < 0.45:
        topic = rng.choice(FLIGHTS)
        return Event(
            topic=topic, type=topic, key=f"N{rng.randint(1, 400)}",
            payload=_flight(rng, number, ts), **common,
        )  # fmt: skip
    if kind < 0.60:
        return _action(rng, number, common)
    if kind < 0.66:
        return _claim(rng, common)
    topic = rng.choice([t for t in TOPICS if t not in (*FLIGHTS, "actions")])
    topic = "odd" if topic.startswith("coord.") else topic
    return Event(
        topic=topic,
        type=rng.choice(["a", "b", "c", None]),
        key=rng.choice([None, "k1", "k2", f"k{rng.randint(1, 90)}", "ключ"]),
        payload=_odd(rng, number),
        ttl_s=rng.choice([None, None, None, 60.0]),
        **common,
    )


def _flight(rng: random.Random, number: int, ts: datetime) -> Any:
    chance = rng.random()
    if chance < 0.01:
        return None
    if chance < 0.02:
        return {"id": "no number", "air time": 1}
    large = 1 << 64 if chance < 0.03 else number
    return {
        "id": large, "key": rng.choice(["k", None]), "TOPIC": "t", "offset": -1,
        "dep.delay": rng.choice([None, 3, -2.5]), "air time": rng.random() * 500,
        "Origin": "EWR", "origin": "ewr", "Zürich": bool(number % 2), "_h": 7,
        "when": ts.isoformat(), "any": rng.choice([1, "x", [1], {"y": None}]),
        "legs": [{"a": 1, "A": "one"}],
    }  # fmt: skip


def _odd(rng: random.Random, number: int) -> Any:
    return rng.choice([
        None, "text", "\u001f\u2028\"\\", 1e5, 12345678901234567, -0.0, [], {}, [1, None, 2.5],
        {"a.b": {"": 1}, "c d": number}, {"payload": {"n": number}, "id": "x"},
        {"commit": {"count": 1, "durable": 0, "at": 5}}, True,
    ])  # fmt: skip


def _action(rng: random.Random, number: int, common: dict[str, Any]) -> Event:
    if rng.random() < 0.5:
        payload: dict[str, Any] = {
            "action": rng.choice(["mail", "call", "wait"]),
            "context": rng.choice(["day", "night"]),
            "confidence": rng.randint(1, 9) / 10,
        }
        return Event(topic="actions", type="ACTION_DECISION", payload=payload, **common)
    payload = {"decision": f"e{number - rng.randint(1, 12)}", "ok": rng.random() < 0.6}
    payload |= {"reward": rng.randint(0, 4) / 4}
    return Event(topic="actions", type="ACTION_EXECUTED", payload=payload, **common)


def _claim(rng: random.Random, common: dict[str, Any]) -> Event:
    topic = rng.choice(["coord.claim", "coord.claim", "coord.release", "coord.note"])
    subject = f"src/{rng.randint(0, 9)}"
    return Event(topic=topic, type=topic, subject=subject, payload={}, ttl_s=3600.0, **common)
