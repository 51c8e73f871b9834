"""Short words for tests of the log."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from trunkline.codec import encode_event
from trunkline.event import Event
from trunkline.folder import Folder
from trunkline.log.writer import Placed
from trunkline.options import Limits
from trunkline.testing.clock import EPOCH

TOPIC = "t"
_LIMITS = Limits()


def at(seconds: float) -> datetime:
    return EPOCH + timedelta(seconds=seconds)


def event(payload: Any = None, *, topic: str = TOPIC, ts: float = 0.0, **fields: Any) -> Event:
    return Event(topic=topic, ts=at(ts), payload=payload, **fields)


def put(folder: Folder, *events: Event) -> Placed:
    """Append events as one batch."""
    bodies = [encode_event(one, _LIMITS) for one in events]
    return folder.append(events[0].topic, 0, bodies, events)


def publish(folder: Folder, payloads: Iterable[Any], **fields: Any) -> list[int]:
    """Append each payload as a batch of its own; the offsets."""
    return [o for payload in payloads for o in put(folder, event(payload, **fields)).offsets()]


def payloads(folder: Folder, start: int = 1, topic: str = TOPIC) -> dict[int, Any]:
    """``{offset: payload}`` of everything from ``start`` on."""
    found: dict[int, Any] = {}
    start = max(start, folder.bounds(topic, 0).first)
    while records := folder.read(topic, 0, start, 3):
        found |= {record.offset: record.event.payload for record in records}
        start = records[-1].offset + 1
    return found
