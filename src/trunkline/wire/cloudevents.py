"""Events as CloudEvents 1.0, in and out: structured, binary and in batches.

One table maps the fields both know. A header whose name may be an attribute of a CloudEvent is one;
the others travel together as JSON text in the attribute ``busheaders``.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final
from urllib.parse import quote, unquote_to_bytes

import msgspec
from msgspec import Meta

from trunkline.codec import decode_payload
from trunkline.errors import InvalidEvent, ProtocolError, TrunklineError
from trunkline.event import Event, Record
from trunkline.explain import reason
from trunkline.fields import FIELDS, WORDS
from trunkline.wire.codes import code_of
from trunkline.wire.frames import Bad, Publish, read_asked

STRUCTURED: Final = "application/cloudevents+json"
BATCH: Final = "application/cloudevents-batch+json"
JSON: Final = "application/json"
KNOWN: Final = f"{JSON}, {STRUCTURED} or {BATCH}"

# Attribute of a CloudEvent, field of an event.
_TEXT: Final = {
    field.cloudevent: field.name for field in WORDS if field.name not in ("id", "topic")
}
_OWN: Final = frozenset(
    {"specversion", "data_base64", "datacontenttype", "partition", "offset"}
    | {field.cloudevent for field in FIELDS}
)
_NAME: Final = re.compile(r"[a-z0-9]{1,40}")
_CONTENT: Final = "datacontenttype"
_HEADERS: Final = frozenset({_CONTENT, "dataschema"})  # of CloudEvents, kept as headers
BASE64: Final = "data-base64"  # a header: the payload is the base64 text of bytes
_TYPED: Final = "typed-attributes"  # a header: which of the others are no text, but JSON


def to_cloudevent(record: Record) -> dict[str, Any]:
    """The structured form."""
    event = record.event
    found: dict[str, Any] = {
        "specversion": "1.0",
        "id": event.id,
        "source": _uri(event.actor or f"/topics/{event.topic}"),
        "type": event.type or event.topic,
        "time": event.ts.isoformat(),
        "topic": event.topic,
        "partition": record.partition,
        "offset": str(record.offset),  # an Integer of a CloudEvent has 32 bits
    }
    for name, field in _TEXT.items():
        value = getattr(event, field)
        if value and name not in found and (field, value) not in _DEFAULTS:
            found[name] = value
    if event.ttl_s is not None:
        found["expirytime"] = _later(event.ts, event.ttl_s)
    if event.not_before is not None:
        found["notbefore"] = event.not_before.isoformat()
    if event.caps:
        found["caps"] = ",".join(event.caps)
    others = {}
    typed = event.headers.get(_TYPED, "").split(",")
    for name, header in event.headers.items():
        if name in (BASE64, _TYPED):
            continue
        if name in _HEADERS or (_NAME.fullmatch(name) and name not in _OWN):
            found[name] = _value(header) if name in typed and name not in _HEADERS else header
        else:
            others[name] = header
    if others:
        found["busheaders"] = msgspec.json.encode(others).decode()
    if event.headers.get(BASE64) and isinstance(event.payload, str):
        found["data_base64"] = event.payload
    elif event.payload is not None:
        found.setdefault(_CONTENT, JSON)
        found["data"] = event.payload
    return found


def _value(header: str) -> Any:
    """What somebody else has put there stays text."""
    try:
        found = msgspec.json.decode(header)
    except msgspec.DecodeError:
        return header
    return found if _is_typed(found) else header


_Zoned = Annotated[datetime, Meta(tz=True)]
_DEFAULTS: Final = frozenset({("priority", "normal"), ("band", "GREEN")})


_LONE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


def _uri(text: str) -> str:
    """An actor may be any text, a source is a URI reference; what is one stays as it is."""
    return _LONE.sub("%25", quote(text, safe="%:/?#@!$&'()*+,;=~"))


def _later(ts: datetime, ttl_s: float) -> str:
    try:
        return (ts + timedelta(seconds=ttl_s)).isoformat()
    except OverflowError:
        return "9999-12-31T23:59:59+00:00"


def from_cloudevent(found: Any, topic: str) -> Event:
    """An event of the structured form. ``InvalidEvent`` names the attribute that is wrong."""
    if not isinstance(found, dict):
        raise InvalidEvent("a CloudEvent is a JSON object")
    found = {name: value for name, value in found.items() if value is not None}  # as if left out
    payload, extra = _data_of(found)
    return _event(found, topic, payload, extra)


def from_batch(found: Iterable[Any], topic: str) -> list[Event]:
    """As ``from_cloudevent``, for each; the error names the place, counted from 0."""
    events: list[Event] = []
    try:
        for one in found:
            events.append(from_cloudevent(one, topic))  # noqa: PERF401 -- its length is the place
    except InvalidEvent as error:
        said = f"event {len(events)} of the batch: {error.message}"
        raise InvalidEvent(said, hint=error.hint, **error.fields) from error
    return events


def _data_of(found: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    if "data_base64" not in found:
        return found.get("data"), {}
    text = found["data_base64"]
    if not isinstance(text, str) or "data" in found:
        raise InvalidEvent("data_base64 is text, and the only data", field="data_base64")
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidEvent(f"data_base64 is not base64: {error}", field="data_base64") from error
    return text, {BASE64: "1"}


def _event(
    found: Mapping[str, Any], topic: str, payload: Any, extra: Mapping[str, str] = {}
) -> Event:
    if found.get("specversion") != "1.0":
        raise InvalidEvent("specversion must be '1.0'", field="specversion")
    for name in ("id", "source", "type"):
        if not isinstance(found.get(name), str) or not found[name]:
            raise InvalidEvent(f"a CloudEvent has the attribute {name}", field=name)
    fields: dict[str, Any] = {}
    headers = dict(extra)
    typed: list[str] = []
    for name, value in found.items():
        if name in _TEXT:
            fields[_TEXT[name]] = _text(name, value)
        elif name == "busheaders":
            headers |= _headers(value)
        elif name == _CONTENT:
            if value != JSON or extra:  # it is what JSON is, unless the data are bytes
                headers[name] = _text(name, value)
        elif name not in _OWN:
            if not _NAME.fullmatch(name):
                raise InvalidEvent(f"not the name of an attribute: {name[:60]!r}", field=name)
            headers[name] = _text(name, value)
            if _is_typed(value) and name not in _HEADERS:
                typed.append(name)
    if typed:
        headers[_TYPED] = ",".join(typed)
    named = found.get("topic")
    if named is not None and named != topic and topic:
        raise InvalidEvent(f"an event for {named!r} was sent to {topic}", field="topic")
    ts = _time("time", found["time"]) if "time" in found else None
    if "notbefore" in found:
        fields["not_before"] = _time("notbefore", found["notbefore"])
    if "caps" in found:
        fields["caps"] = tuple(cap for cap in _text("caps", found["caps"]).split(",") if cap)
    if "expirytime" in found:
        ts = ts or datetime.now(UTC)
        left = (_time("expirytime", found["expirytime"]) - ts).total_seconds()
        fields["ttl_s"] = max(0.0, left)
    if ts is not None:
        fields["ts"] = ts
    if not topic and named is None:
        raise InvalidEvent("a CloudEvent for a WebSocket has the attribute topic", field="topic")
    name = topic or _text("topic", named)
    return Event(id=found["id"], topic=name, payload=payload, headers=headers, **fields)


def _headers(value: Any) -> dict[str, str]:
    try:
        return msgspec.json.decode(_text("busheaders", value), type=dict[str, str])
    except msgspec.DecodeError as error:
        raise InvalidEvent(f"busheaders is a JSON object of text: {reason(error)}") from error


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str):
        raise InvalidEvent(f"the attribute {name[:60]} is text", field=name)
    return value


def _is_typed(value: Any) -> bool:
    """A whole number of more bits is none for a CloudEvent, and stays text."""
    return isinstance(value, int) and -(2**31) <= value < 2**31


def _time(name: str, value: Any) -> datetime:
    try:
        return msgspec.convert(value, _Zoned)
    except msgspec.ValidationError:
        raise InvalidEvent(f"the attribute {name} is a time of RFC 3339", field=name) from None


# -- over WebSocket --------------------------------------------------------------------------------


def read_cloudevents(data: bytes) -> list[Any]:
    """What a client says whose events are CloudEvents: one to publish, a batch of them, or frames,
    which have no ``specversion``.
    """
    if b'"specversion"' not in data:
        return list(read_asked(data))
    found: Any = None
    try:
        found = decode_payload(data)
        several = found if isinstance(found, list) else [found]
        if not any(isinstance(one, dict) and "specversion" in one for one in several):
            return list(read_asked(data))  # what it publishes has it
        if not isinstance(found, list):
            event = from_cloudevent(found, "")
            return [Publish(corr=event.id, event=event)]
        events = from_batch(found, "")
        return [Publish(corr=events[0].id, events=events)]
    except TrunklineError as error:
        bad = ProtocolError(error.message, hint=error.hint, code=code_of(error))
        return [Bad(bad, _id_of(found))]


def _id_of(found: Any) -> str | None:
    """What the answer would be marked with: the id of the event, or of the first of a batch."""
    first = found[0] if isinstance(found, list) else found
    given = first.get("id") if isinstance(first, dict) else None
    return given if isinstance(given, str) else None


# -- binary mode -----------------------------------------------------------------------------------


def from_binary(headers: Iterable[tuple[str, str]], body: bytes, topic: str) -> Event:
    """An event whose attributes are headers ``ce-…`` and whose data is the body."""
    found: dict[str, Any] = {}
    content = ""
    for name, value in headers:
        low = name.lower()
        if low.startswith("ce-"):
            found[low[3:]] = _unescaped(low, value)
        elif low == "content-type":
            content = value
    if content:
        found[_CONTENT] = content
    kind = content.partition(";")[0].strip().lower()
    if not body:
        return _event(found, topic, None)
    if not kind or _is_json(kind):
        return _event(found, topic, decode_payload(body))
    charset = _CHARSET.search(content)
    if kind.startswith("text/") and (charset is None or charset[1].lower() in _UNICODE):
        with contextlib.suppress(UnicodeDecodeError):
            return _event(found, topic, body.decode())
    return _event(found, topic, base64.b64encode(body).decode(), {BASE64: "1"})


def _unescaped(name: str, value: str) -> str:
    """Out of its double quotes, if it has any, then percent-decoded: the binding's own order."""
    if len(value) > 1 and value[0] == value[-1] == '"':
        value = re.sub(r"\\(.)", r"\1", value[1:-1])
    try:
        return unquote_to_bytes(value.encode("latin-1")).decode()
    except UnicodeDecodeError:
        raise InvalidEvent(f"the header {name[:60]} is not UTF-8", field=name[3:]) from None


def to_binary(record: Record) -> tuple[dict[str, str], bytes]:
    """Headers and body of the binary form."""
    found = to_cloudevent(record)
    data = found.pop("data", None)
    raw = found.pop("data_base64", None)
    content = found.pop(_CONTENT, None if raw is None else _BYTES)
    if raw is not None:
        body = base64.b64decode(raw)
    elif isinstance(data, str) and not _is_json(content.partition(";")[0].strip().lower()):
        body = data.encode()
    else:
        body = b"" if data is None else msgspec.json.encode(data)
    headers = {
        f"ce-{name}": quote(_text(name, value), safe=_PRINTABLE) for name, value in found.items()
    }
    if content is not None:
        headers["content-type"] = quote(content, safe=_PRINTABLE + ' "')
    return headers, body


def _is_json(kind: str) -> bool:
    return kind == JSON or kind.endswith("+json")


_BYTES: Final = "application/octet-stream"
_CHARSET: Final = re.compile(r';\s*charset="?([^\s";]+)', re.IGNORECASE)
_UNICODE: Final = frozenset({"utf-8", "utf8", "us-ascii"})
_PRINTABLE: Final = "!#$&'()*+,/:;=?@[]-._~<>{}|^`\\"
