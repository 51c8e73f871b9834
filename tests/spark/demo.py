"""A log that gives every pipeline something to find."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from trunkline.event import Event
from trunkline.folder import Folder
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, TopicOptions

from .logs import TOPIC, append, make_event

GROUPS = ("billing", "shipping")


def make_demo(path: Path, count: int, *, damaged: bool = False) -> str:
    """A bus with the first ``count`` events. ``damaged`` takes a seal away, for ``verify``."""
    folder = begin_demo(path)
    add_demo(folder, 0, count)
    for number, group in enumerate(GROUPS):
        floor = (number + 1) * count // 10
        key = GroupKey(TOPIC, 0, group)
        folder.step(key, lambda state, floor=floor: state.define(GroupOptions(), floor))  # type: ignore[misc]
    if damaged:
        _take_a_seal_away(folder, path)
    folder.close()
    return str(path)


def begin_demo(path: Path) -> Folder:
    folder = Folder(str(path))
    folder.define(TOPIC, TopicOptions(partitions=2, dedup_window_s=0))  # repeats stay in the log
    return folder


def add_demo(folder: Folder, start: int, end: int, batch: int = 1000) -> None:
    """Append the events numbered ``start`` to ``end``, in order of time."""
    for low in range(start, end, batch):
        places: dict[tuple[str, int], list[Event]] = {}
        for n in range(low, min(end, low + batch)):
            event = demo_event(n)
            partition = n // 20 % 2 if event.topic == TOPIC else 0
            places.setdefault((event.topic, partition), []).append(event)
        for (_, partition), events in places.items():
            append(folder, events, partition)


def demo_event(n: int) -> Event:
    """Most are orders; of each twenty, one is a decision, an outcome, a claim, a release, a dead
    letter, a note, or what the bus says of itself.
    """
    kinds = (_decision, _outcome, _claim, _release, _letter, _audit, _note)
    number, kind = divmod(n, 20)
    return kinds[kind](n, number) if kind < len(kinds) else _order(n)


def _order(n: int) -> Event:
    return make_event(
        n,
        type=("placed", "paid", "sent")[n % 3] if n % 211 else "returned",
        key=f"c{n % 97}",
        actor=f"shop{n // 300 % 5}",  # in shifts, so that episodes come to an end
        space=f"s{n % 2}",
        payload={"n": n, "total": n % 50},
        idem_key=f"o{n - (n % 500 == 11)}",
    )


def _decision(n: int, number: int) -> Event:
    payload = {
        "action": ("mail", "call", "wait")[number % 3],
        "context": "day" if number % 4 else "night",
        "confidence": 0.5 + number % 5 / 10,
    }
    agent = f"agent{number % 3}"
    return make_event(n, topic="actions", type="ACTION_DECISION", actor=agent, payload=payload)


def _outcome(n: int, number: int) -> Event:
    ok = number % 5 > 1
    payload = {"decision": f"e{n - 1}", "ok": ok, "reward": float(ok)}
    return make_event(n, topic="actions", type="ACTION_EXECUTED", payload=payload)


def _claim(n: int, number: int) -> Event:
    return _coord(n, "claim", number, number % 4)


def _release(n: int, number: int) -> Event:
    """Some are never given back."""
    return _coord(n, "release" if number % 9 else "claim", number, number % 4 + (number % 9 == 0))


def _coord(n: int, what: str, number: int, agent: int) -> Event:
    subject = f"src/{number % 13}"
    return make_event(
        n, topic=f"coord.{what}", type=what, subject=subject, actor=f"agent{agent}", payload={}
    )


def _letter(n: int, number: int) -> Event:
    error = (f"KeyError: 'c{n}'", f"timeout after {n}.5 s", f"refused 0x{n:012x}")[number % 3]
    headers = {"dlq-topic": TOPIC, "dlq-group": "billing", "dlq-reason": "retries"}
    headers |= {"dlq-error": error, "dlq-offset": str(number + 1)}
    return make_event(n, topic=f"{TOPIC}.DLQ", headers=headers)


def _audit(n: int, number: int) -> Event:
    payload: dict[str, Any] = {"what": "ack", "topic": TOPIC, "partition": 0, "offset": number + 1}
    payload |= {"group": GROUPS[number % 2], "attempt": 1 + number % 2}
    payload |= {"waited_s": 0.001 * (number % 40), "held_s": 0.004}
    event = make_event(n, topic="system.bus.audit", type="ack", payload=payload)
    return msgspec.structs.replace(event, ts=event.ts + timedelta(seconds=2 * n))  # over hours


def _note(n: int, number: int) -> Event:
    """Some have no type, or have long been of no use."""
    kind, ttl_s = None if number % 7 == 0 else "note", 60.0 if number % 5 == 0 else None
    return make_event(n, topic="notes", type=kind, ttl_s=ttl_s, payload=f"note {n}")


def _take_a_seal_away(folder: Folder, path: Path) -> None:
    """As if a sync had failed and the log had gone on in the next file; nothing is lost by it."""
    folder.define("archive", TopicOptions(segment_records=10))
    for start in range(0, 30, 10):
        events = [make_event(n, topic="archive", type="kept") for n in range(start, start + 10)]
        append(folder, events)
    first = min(path.glob("wal/archive.*.jsonl"))
    lines = first.read_bytes().splitlines(keepends=True)
    first.write_bytes(b"".join(lines[:-1]))
