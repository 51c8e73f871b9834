"""Events as those programs see them, and how they become events of the bus and come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any
from uuid import uuid4

import msgspec

import trunkline


class EventType(str, Enum):  # noqa: UP042 -- str() of a member shows its class there, as it did
    WORKSPACE_BROADCAST = "WORKSPACE_BROADCAST"
    HIPPO_ENCODE = "HIPPO_ENCODE"
    AFFECT_ANNOTATED = "AFFECT_ANNOTATED"
    CORTEX_PREDICTION = "CORTEX_PREDICTION"
    ACTION_DECISION = "ACTION_DECISION"
    ACTION_EXECUTED = "ACTION_EXECUTED"
    METACOG_REPORT = "METACOG_REPORT"
    PROSPECTIVE_TRIGGER = "PROSPECTIVE_TRIGGER"


@dataclass
class EventMeta:
    """``topic`` may be an ``EventType``, which is then the type as well; ``space_id`` is needed."""

    topic: str
    type: EventType | str | None = None
    space_id: str = ""
    event_id: str = field(default_factory=lambda: "ev-" + uuid4().hex)
    ts: datetime = field(default_factory=lambda: datetime.now(UTC))
    actor: str | dict[str, Any] | None = None
    trace_id: str | None = None
    idem_key: str | None = None
    ttl_sec: int | None = None
    device: str | dict[str, Any] | None = None
    priority: str = "normal"
    band: str = "GREEN"
    key: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.space_id:
            raise ValueError("space_id must be set: every event belongs to a space")
        if self.type is None and isinstance(self.topic, EventType):
            self.type = self.topic


@dataclass
class Event:
    meta: EventMeta
    payload: dict[str, Any]


class Ack:
    """Returned by a handler: it is done."""


class Nack(Exception):
    """Returned or raised by a handler: try again, after ``delay_s`` or the group's backoff."""

    def __init__(self, reason: str = "", delay_s: float | None = None) -> None:
        super().__init__(reason)
        self.delay_s = delay_s


def to_bus(event: Event, topic: str | None = None) -> trunkline.Event:
    meta = event.meta
    headers = dict(meta.headers)
    if meta.device is not None:
        headers["device"] = _text(meta.device)
    return trunkline.Event(
        id=meta.event_id,
        ts=meta.ts if meta.ts.tzinfo else meta.ts.replace(tzinfo=UTC),
        topic=_name(topic if topic is not None else meta.topic),
        type=None if meta.type is None else _name(meta.type),
        space=meta.space_id,
        actor=None if meta.actor is None else _text(meta.actor),
        key=meta.key,
        idem_key=meta.idem_key,
        trace=meta.trace_id,
        ttl_s=meta.ttl_sec,
        priority=meta.priority,
        band=meta.band,
        headers=headers,
        payload=event.payload,
    )


def from_bus(event: trunkline.Event) -> Event:
    headers = dict(event.headers)
    device = headers.pop("device", None)
    known = EventType.__members__.get(event.type or "")
    meta = EventMeta(
        topic=event.topic,
        type=known or event.type,
        space_id=event.space or "default",
        event_id=event.id,
        ts=event.ts,
        actor=_value(event.actor),
        trace_id=event.trace,
        idem_key=event.idem_key,
        ttl_sec=None if event.ttl_s is None else int(event.ttl_s),
        device=_value(device),
        priority=event.priority,
        band=event.band,
        key=event.key,
        headers=headers,
    )
    return Event(meta=meta, payload=event.payload)


def _name(value: str) -> str:
    return value.value if isinstance(value, Enum) else value


def _text(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _value(text: str | None) -> str | dict[str, Any] | None:
    if text is None or not text.startswith("{"):
        return text
    try:
        value: dict[str, Any] = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return value
