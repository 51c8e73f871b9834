"""One event in three forms: of the bus, of an NDJSON file, of a spool.

What a form has no member for goes into its headers, and the way back takes it out again, so an
event that comes home is the one that left. Two headers travel with every carried event: where it
began, and the places it came through.
"""

from __future__ import annotations

import base64
import json
import math
import re
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec

from trunkline.errors import InvalidEvent, InvalidName
from trunkline.event import Event, new_id
from trunkline.explain import reason
from trunkline.files import event_file, ndjson
from trunkline.names import check_topic

ORIGIN: Final = "trunkline-origin"
VIA: Final = "trunkline-via"
FIELDS: Final = "trunkline-event"
ENCODING: Final = "trunkline-encoding"
WRAPPED: Final = "trunkline-wrapped"
TOPIC: Final = "trunkline-topic"
Json = dict[str, Any]

_OWN_LINES = (("origin", ORIGIN), ("via", VIA))


class Parcel(NamedTuple):
    """One event on its way: where it began, and the place it is read from now."""

    event: Event
    origin: str
    place: str

    @property
    def via(self) -> list[str]:
        return [place for place in self.event.headers.get(VIA, "").split(",") if place]


def to_event(item: Parcel) -> Event:
    """The event with its origin and its way in the headers."""
    return msgspec.structs.replace(item.event, headers=_headers(item))


def to_line(item: Parcel) -> Json:
    """The event as a line of an NDJSON file. What the eight members cannot hold goes into
    ``headers``, from where ``from_line`` takes it back.
    """
    event = item.event
    rest = _rest(event, "event_id", "topic", "actor", "idem_key") | _absent(event)
    headers = _headers(item)
    payload = event.payload
    if not isinstance(payload, dict):
        payload = {"text": payload} if isinstance(payload, str) else {"value": payload}
        headers[WRAPPED] = next(iter(payload))
    if rest:
        headers[FIELDS] = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {
        "event_id": event.id,
        "ts": ndjson.format_ts(event.ts),
        "topic": headers.pop(TOPIC, event.topic),
        "scope": event.subject or event.key or event.topic,
        "actor": event.actor or "unknown",
        "payload": payload,
        "ttl_s": math.ceil(event.ttl_s or 0),
        "idempotency_key": event.idem_key or event.id,
        "headers": headers,
    }


def from_line(line: Json) -> Event:
    """The event of an NDJSON line of any writer: a field that is missing or odd gets a default."""
    headers = _text_map(line.get("headers"))
    payload, wrapped = line.get("payload"), headers.pop(WRAPPED, "")
    if wrapped and isinstance(payload, dict):
        payload = payload.get(wrapped)
    name = _clean(str(line.get("topic") or "event"))
    scope, ttl_s = _text(line.get("scope")), line.get("ttl_s")
    fields: Json = {
        "ts": _moment(line.get("ts")),
        "type": name,
        "actor": _text(line.get("actor")),
        "subject": scope,
        "key": scope,
        "idem_key": _text(line.get("idempotency_key")) if line_has_own_key(line) else None,
        "ttl_sec": float(ttl_s) if isinstance(ttl_s, int) and 0 < ttl_s < 1e15 else None,
    }
    return _event(_text(line.get("event_id")) or new_id(), name, fields, headers, payload)


def line_has_own_key(line: Json) -> bool:
    """Whether the publisher chose the idempotency key. The key that ``ndjson.make_event`` fills in
    is the same for all events of one actor in one second: such a key identifies no event.
    """
    made = "|".join(str(line.get(name)) for name in ("topic", "scope", "actor", "ts"))
    return line.get("idempotency_key") != made


def to_spool(item: Parcel) -> bytes:
    event = item.event
    headers = _headers(item)
    payload = event.payload
    raw = b""
    if headers.pop(ENCODING, "") == "base64" and isinstance(payload, dict):
        raw = base64.b64decode(str(payload.get("base64", "")))
    elif isinstance(payload, str):
        raw = payload.encode("utf-8", "replace")
    elif payload is None:
        headers[WRAPPED] = "none"
    else:
        raw = json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()
        headers[WRAPPED] = "json"
    if raw.endswith(b"\n"):
        headers[WRAPPED] = "newline"  # the block of a file does not keep it
    rest = _rest(event, "priority") | _absent(event)
    rest["event_id"] = event.id
    headers[FIELDS] = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    source, kind = word(event.actor or "bus"), word(event.type or event.topic)
    fields = {
        "dedup-key": event.idem_key or f"{source}:{kind}",
        "origin": headers.pop(ORIGIN),
        "via": headers.pop(VIA),
        "headers": json.dumps(headers, sort_keys=True, separators=(",", ":")),
    }
    return event_file.encode(source, kind, event.priority, int(event.ts.timestamp()), fields, raw)


def from_spool(name: str, body: bytes) -> Event:
    content = event_file.parse(body)
    fields = {key: _clean(value) for key, value in content.fields.items()}
    headers = _text_map(_json(fields.get("headers", "{}")))
    headers |= {header: fields[key] for key, header in _OWN_LINES if key in fields}
    payload = _spool_payload(content.payload, headers.pop(WRAPPED, ""))
    if isinstance(payload, bytes):
        payload = {"base64": base64.b64encode(payload).decode()}
        headers[ENCODING] = "base64"
    source, kind = fields.get("source", ""), fields.get("type") or "event"
    us = int(name.partition("-")[0])
    key = fields.get("dedup-key")
    plain: Json = {
        "ts": datetime.fromtimestamp(us / 1_000_000, UTC) if us < 2**53 else None,
        "type": kind,
        "actor": source or None,
        "priority": fields.get("priority")
        if fields.get("priority") in event_file.PRIORITIES
        else None,
        # Every plain nbs-bus event has this one, different ones too: it identifies nothing.
        "idem_key": key if key != f"{source}:{kind}" else None,
    }
    return _event(readable(name), kind, plain, headers, payload)


def _spool_payload(raw: bytes, wrapped: str) -> Any:
    if wrapped == "none":
        return None
    if wrapped == "json":
        with suppress(ValueError, RecursionError):
            return json.loads(raw)
    if wrapped == "newline":
        raw += b"\n"
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _event(name: str, topic: str, plain: Json, headers: dict[str, str], payload: Any) -> Event:
    """An event from what a file says of it, corrected by what a bridge noted in the headers."""
    values: Json = {"event_id": name, "topic": topic, **plain}
    noted = _json(headers.pop(FIELDS, "null"))
    if isinstance(noted, dict):
        keep = {"event_id", "topic", "actor", "idem_key", "priority"}
        with suppress(InvalidEvent):
            exact = {key: value for key, value in values.items() if key in keep} | noted
            return _convert(exact, headers, payload)
    return _convert(values, headers, payload)


def _convert(values: Json, headers: dict[str, str], payload: Any) -> Event:
    wanted = str(values["topic"])
    values = {key: value for key, value in values.items() if value is not None}
    values |= {"topic": topic_for(wanted), "headers": dict(headers), "payload": payload}
    if values["topic"] != wanted:
        values["headers"][TOPIC] = wanted
    try:
        return msgspec.convert(values, Event)
    except msgspec.ValidationError as error:
        raise InvalidEvent(f"not an event: {reason(error, values)}") from error


def topic_for(text: str) -> str:
    """A topic name for any text: itself if it is one, else the nearest name that is."""
    try:
        return check_topic(text)
    except InvalidName:
        name = re.sub(r"_{2,}", "_", re.sub(r"[^A-Za-z0-9_.-]", "-", text))
        return re.sub(r"\.{2,}", ".", name)[:200].strip(".") or "event"


def _headers(item: Parcel) -> dict[str, str]:
    via = [*item.via, item.place]
    own = item.event.headers
    return {**own, ORIGIN: item.origin, VIA: ",".join(dict.fromkeys(via))}


def _rest(event: Event, *native: str) -> Json:
    """What the other form has no member for, as the log spells it."""
    values: Json = msgspec.to_builtins(event)
    for name in ("headers", "payload", *native):
        values.pop(name, None)
    return values


def _absent(event: Event) -> Json:
    """The members that the other form must fill in although the event has none."""
    return {name: None for name in ("actor", "idem_key") if getattr(event, name) is None}


def _text(value: Any) -> str | None:
    return _clean(value) if isinstance(value, str) and value else None


def _json(text: str) -> Any:
    """The value of a JSON text that anyone may have written; None when it is none."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def _text_map(value: Any) -> dict[str, str]:
    pairs = value.items() if isinstance(value, dict) else ()
    return {_clean(key): _clean(text) for key, text in pairs if isinstance(text, str)}


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode() if not text.isascii() else text


def readable(name: str) -> str:
    """A file name as text that can be stored: bytes that are no text are spelled out, so that two
    names stay two.
    """
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def word(text: str) -> str:
    """The text as a source or type of a spool, which holds no blanks and no slash."""
    return re.sub(r"[\s/\0]", "-", text)


def _moment(text: Any) -> str | None:
    when = ndjson.find_ts(text)
    return None if when is None else when.isoformat()
