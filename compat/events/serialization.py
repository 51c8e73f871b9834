"""Events as JSON and back."""

from __future__ import annotations

from typing import Any

import msgspec

import trunkline
from events.types import Event, from_bus, to_bus


def event_to_dict(event: Event) -> dict[str, Any]:
    """``{"meta": {...}, "payload": {...}}``, as a line of the log has it."""
    meta = msgspec.to_builtins(to_bus(event))
    payload = meta.pop("payload", None)
    return {"meta": meta, "payload": payload}


def event_from_dict(value: dict[str, Any]) -> Event:
    return from_bus(
        msgspec.convert({**value["meta"], "payload": value.get("payload")}, trunkline.Event)
    )


def serialize_event(event: Event) -> str:
    return msgspec.json.encode(event_to_dict(event)).decode()


def deserialize_event(text: str | bytes) -> Event:
    return event_from_dict(msgspec.json.decode(text))
