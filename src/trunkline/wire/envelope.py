"""The envelope: an event as the clients of the older broker know it.

An envelope has members for id, ts (epoch milliseconds), key, headers and payload. It carries every
other field of the event as a header.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from trunkline.codec import decode_payload
from trunkline.errors import InvalidEvent, InvalidOption
from trunkline.event import Event, Record, new_id
from trunkline.fields import BY_NAME, WORDS
from trunkline.wire.frames import Envelope, Publish

_encode = msgspec.json.Encoder().encode

# The fields of an event that an envelope carries as headers.
_AS_TEXT: Final = {field.envelope: field.name for field in WORDS if field.envelope}
_TTL, _NOT_BEFORE, _CAPS = (BY_NAME[name].envelope for name in ("ttl_s", "not_before", "caps"))
DIGEST: Final = "payload_sha256"
_HEX: Final = re.compile(r"[0-9a-fA-F]{64}")


def event_of(frame: Publish, now: datetime) -> Event:
    """The event that a PUBLISH in the envelope's form stands for. ``InvalidEvent`` if it has no
    payload, or a digest that does not fit the payload's text.
    """
    if frame.payload is UNSET:
        raise InvalidEvent("payload is missing", field="payload", hint="null is a value too")
    raw = bytes(frame.payload)
    headers = frame.headers
    if frame.payload_sha256 is not None:
        check_digest(raw, frame.payload_sha256)
        headers = {**(headers or {}), DIGEST: frame.payload_sha256.lower()}
    payload = None if raw == b"null" else decode_payload(raw)
    if not headers:
        return Event(topic=frame.topic, key=frame.key, payload=payload, ts=now)
    fields, rest = fields_of(headers)
    return Event(
        id=new_id(),
        topic=frame.topic,
        key=frame.key,
        payload=payload,
        ts=now,
        headers=rest,
        **fields,
    )


def check_digest(text: bytes, digest: str) -> None:
    if not _HEX.fullmatch(digest) or hashlib.sha256(text).hexdigest() != digest.lower():
        raise InvalidEvent("payload_sha256 is not the digest of the payload's text", field=DIGEST)


def fields_of(headers: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Split an envelope's headers into fields of an event and the headers that remain."""
    fields: dict[str, Any] = {}
    rest: dict[str, str] = {}
    for name, value in headers.items():
        if name in _AS_TEXT:
            fields[_AS_TEXT[name]] = value
        elif name == _TTL:
            fields["ttl_s"] = _number(name, value)
        elif name == _NOT_BEFORE:
            fields["not_before"] = time_of(_number(name, value))
        elif name == _CAPS:
            fields["caps"] = tuple(cap for cap in value.split(",") if cap)
        else:
            rest[name] = value
    return fields, rest


def headers_of(event: Event) -> dict[str, str]:
    """The headers of an event's envelope; ``fields_of`` takes them apart again."""
    headers = dict(event.headers)
    if (texts := _texts_of(event)) != _PLAIN:
        pairs = zip(_AS_TEXT, texts, _PLAIN, strict=True)
        headers |= {name: text for name, text, plain in pairs if text != plain}
    if event.ttl_s is not None:
        headers[_TTL] = f"{event.ttl_s:g}"
    if event.not_before is not None:
        headers[_NOT_BEFORE] = str(epoch_ms(event.not_before))
    if event.caps:
        headers[_CAPS] = ",".join(event.caps)
    return headers


_texts_of = attrgetter(*_AS_TEXT.values())
_PLAIN: Final = _texts_of(Event(topic=""))


def envelope_of(record: Record, attempts: int | UnsetType = UNSET) -> Envelope:
    event = record.event
    headers = headers_of(event)
    if (digest := headers.pop(DIGEST, None)) is not None:  # of this text: it may be spelt anew
        digest = hashlib.sha256(_encode(event.payload)).hexdigest()
    return Envelope(
        id=event.id,
        ts=epoch_ms(event.ts),
        topic=event.topic,
        key=event.key,
        partition=record.partition,
        headers=headers or None,
        payload_sha256=digest,
        offset=record.offset,
        attempts=attempts,
        payload=event.payload,
    )


def epoch_ms(when: datetime) -> int:
    return round(when.timestamp() * 1000)


def time_of(ms: float) -> datetime:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidOption(f"not a time in epoch milliseconds: {ms}") from error


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not 0 <= number < 1e15:
        raise InvalidEvent(f"the header {name} is a number, not {value[:40]!r}", field=name)
    return number
