"""Events as those programs see them, and how they become events of the bus and come back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, is_dataclass
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
    WRITE_ACCEPTED = "WRITE_ACCEPTED"
    TRIGGER_FIRED = "TRIGGER_FIRED"


class SecurityBand(str, Enum):  # noqa: UP042 -- as above
    GREEN = "GREEN"
    AMBER = "AMBER"
    RED = "RED"
    BLACK = "BLACK"


class Capability(str, Enum):  # noqa: UP042 -- as above
    READ = "READ"
    WRITE = "WRITE"
    RECALL = "RECALL"
    PROJECT = "PROJECT"
    SCHEDULE = "SCHEDULE"


class EventBusState(str, Enum):  # noqa: UP042 -- as above
    STOPPED = "STOPPED"
    RUNNING = "RUNNING"


@dataclass
class Actor:
    user_id: str
    caps: list[Capability | str] = field(default_factory=list)


@dataclass
class Device:
    device_id: str
    platform: str | None = None


@dataclass
class QoS:
    """``priority`` is that of the event; ``ttl_sec`` counts where the meta has none."""

    priority: str = "normal"
    ttl_sec: int | None = None


@dataclass
class EventMeta:
    """``topic`` may be an ``EventType``, which is then the type as well; ``space_id`` is needed."""

    topic: str
    type: EventType | str | None = None
    space_id: str = ""
    event_id: str = field(default_factory=lambda: "ev-" + uuid4().hex)
    ts: datetime = field(default_factory=lambda: datetime.now(UTC))
    actor: Actor | str | dict[str, Any] | None = None
    trace_id: str | None = None
    idem_key: str | None = None
    ttl_sec: int | None = None
    device: Device | str | dict[str, Any] | None = None
    priority: str = "normal"
    band: SecurityBand | str = "GREEN"
    key: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    qos: QoS | None = None
    caps: list[Capability | str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.space_id:
            raise ValueError("space_id must be set: every event belongs to a space")
        if self.type is None and isinstance(self.topic, EventType):
            self.type = self.topic
        if self.qos is not None and self.priority == "normal":
            self.priority = self.qos.priority
        if self.qos is not None and self.ttl_sec is None:
            self.ttl_sec = self.qos.ttl_sec


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


def is_nack(result: Any) -> bool:
    """Whether a result is a ``Nack``: ours, or a class of that name in the program itself."""
    kind = result if isinstance(result, type) else type(result)
    return any(one.__name__ == "Nack" for one in kind.__mro__)


def to_bus(event: Any, topic: str | None = None) -> trunkline.Event:
    """``event`` is an ``Event``, or of a class with the same fields; a field may be missing."""
    meta = event.meta
    if not getattr(meta, "space_id", None):
        raise ValueError("space_id must be set: every event belongs to a space")
    headers = dict(getattr(meta, "headers", None) or {})
    device = getattr(meta, "device", None)
    if device is not None:
        headers["device"] = _text(device)
    actor, type_ = getattr(meta, "actor", None), getattr(meta, "type", None)
    return trunkline.Event(
        id=meta.event_id,
        ts=meta.ts if meta.ts.tzinfo else meta.ts.replace(tzinfo=UTC),
        topic=_name(topic if topic is not None else meta.topic),
        type=None if type_ is None else _name(type_),
        space=meta.space_id,
        actor=None if actor is None else _text(actor),
        key=getattr(meta, "key", None),
        idem_key=getattr(meta, "idem_key", None),
        trace=getattr(meta, "trace_id", None),
        ttl_s=getattr(meta, "ttl_sec", None),
        priority=_name(getattr(meta, "priority", "normal")),  # type: ignore[arg-type]
        band=_name(getattr(meta, "band", "GREEN")),  # type: ignore[arg-type]
        caps=tuple(_names(getattr(meta, "caps", ()))),
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
        caps=list(event.caps),
    )
    return Event(meta=meta, payload=event.payload)


def _name(value: str) -> str:
    return value.value if isinstance(value, Enum) else value


def _names(values: Iterable[str]) -> list[str]:
    return [_name(value) for value in values]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return msgspec.json.encode(plain).decode()


def _value(text: str | None) -> str | dict[str, Any] | None:
    if text is None or not text.startswith("{"):
        return text
    try:
        value: dict[str, Any] = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return value
