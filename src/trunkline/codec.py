"""Events as JSON, for the log and for the wire, within limits."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from trunkline.errors import InvalidEvent
from trunkline.event import Event
from trunkline.explain import reason
from trunkline.options import Limits

_SCALARS = (str, int, bool, bytes, bytearray, type(None), datetime, UUID, Decimal)


def _of_pydantic(value: Any) -> Any:
    """A pydantic model as the values JSON has; asked only for what the encoder does not know."""
    serializer = getattr(type(value), "__pydantic_serializer__", None)
    if serializer is None:
        raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
    return serializer.to_python(value, mode="json", by_alias=True)


_encode = msgspec.json.Encoder(enc_hook=_of_pydantic).encode
encode_value = _encode
"""Any value that a payload may be, as JSON."""
_PAYLOAD = b',"payload":'
_NEWLINE = ord("\n")  # the encoder writes none: it copied it from a msgspec.Raw
_UNCHECKED = (msgspec.Raw, msgspec.UnsetType)  # it writes these as they are, or not at all
_PLAIN = frozenset({dict, list, str, int, float, bool, type(None)})  # others may hold a Raw field
_SPLIT = b'},"payload":'


def encode_event(event: Event, limits: Limits) -> bytes:
    """The event as a log line has it behind ``"meta":``, that is ``{…},"payload":…``.

    Raises ``InvalidEvent`` for what is no JSON value, too large or too deep.
    """
    if event.ts.tzinfo is not UTC or event.not_before is not None:
        event = _in_utc(event)
    try:
        whole = _encode(event)
        if (kind := type(event.payload)) not in _PLAIN or _NEWLINE in whole:
            payload = msgspec.json.decode(_encode(event.payload))
            if kind in _UNCHECKED or _NEWLINE in whole:
                return encode_event(msgspec.structs.replace(event, payload=payload), limits)
        if event.payload is None:
            body = whole[:-1] + b'},"payload":null'
        elif "payload" in event.headers:
            at = len(whole) - len(_encode(event.payload)) - len(_PAYLOAD) - 1
            body = whole[:at] + _SPLIT + whole[at + len(_PAYLOAD) : -1]
        else:
            body = whole[:-1].replace(_PAYLOAD, _SPLIT, 1)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise _no_json(error) from error
    # As in ``_check_limits``, in place: this is the path of every publish.
    size = len(whole)
    if size > limits.record_bytes:
        raise _too_long(size, limits)
    opened = size - len(whole.replace(b"[", b"").replace(b"{", b""))
    if opened > limits.depth or whole.rfind(b"null") >= 0:
        check_value(event.payload, limits.depth)
    return body


def encode_whole(event: Event, limits: Limits) -> bytes:
    """The event as one JSON object, as it travels; the same limits and the same errors."""
    whole = _json(event)
    _check_limits(whole, event, limits)
    return whole


def encode_batch(events: list[Event], limits: Limits) -> bytes:
    """The events as one JSON array. An event that is nested too deep is left for the broker to
    refuse.
    """
    whole = _json(events)
    if len(whole) > limits.record_bytes or b"null" in whole:
        for event in events:
            encode_whole(event, limits)
    return whole


def _json(value: Event | list[Event]) -> bytes:
    try:
        return _encode(value)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise _no_json(error) from error


def to_plain(value: Any) -> Any:
    """A struct, a dataclass or a pydantic model as the values JSON has."""
    return msgspec.to_builtins(value, enc_hook=_plain_part, str_keys=True)


def _plain_part(value: Any) -> Any:
    return decode_payload(bytes(value)) if type(value) is msgspec.Raw else _of_pydantic(value)


def with_plain_payload(event: Event) -> Event:
    """The event as a middleware sees it: with a payload of the values JSON has."""
    if type(event.payload) in _PLAIN or isinstance(event.payload, _UNCHECKED):
        return event
    try:
        return msgspec.structs.replace(event, payload=to_plain(event.payload))
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise _no_json(error) from error


def _no_json(error: Exception) -> InvalidEvent:
    hint = ""
    if isinstance(error, TypeError):
        hint = "publish a JSON value, a msgspec struct, a dataclass or a pydantic model"
    return InvalidEvent(f"the payload is no JSON value: {error}", field="payload", hint=hint)


def _check_limits(whole: bytes, event: Event, limits: Limits) -> None:
    """Deep nesting and NaN are rare, and a walk in Python costs more than the encoding. So the
    payload is walked only if its text shows a sign of them: many brackets, or ``null``.
    """
    if len(whole) > limits.record_bytes:
        raise _too_long(len(whole), limits)
    opened = len(whole) - len(whole.replace(b"[", b"").replace(b"{", b""))
    if opened > limits.depth or whole.rfind(b"null") >= 0:
        check_value(event.payload, limits.depth)


def _too_long(size: int, limits: Limits) -> InvalidEvent:
    return InvalidEvent(
        f"the record is {size} bytes long, {limits.record_bytes} are allowed",
        size=size,
        hint="store the bulk elsewhere and publish a reference",
    )


def _in_utc(event: Event) -> Event:
    """The event with its times as the log has them; a zone may have seconds, which JSON has not."""
    due = event.not_before
    try:
        ts, not_before = event.ts.astimezone(UTC), due and due.astimezone(UTC)
    except OverflowError as error:
        raise InvalidEvent(f"a time cannot be told in UTC: {error}", field="ts") from None
    return msgspec.structs.replace(event, ts=ts, not_before=not_before)


def check_value(value: Any, depth_max: int) -> None:
    """Refuse NaN and infinities, which JSON cannot hold, and nesting below ``depth_max``."""
    stack: list[tuple[Any, int]] = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, float):
            if item != item or item in (float("inf"), float("-inf")):
                raise InvalidEvent(f"the payload holds {item}, which JSON cannot", field="payload")
        elif isinstance(item, dict | list | tuple | set | frozenset):
            if depth > depth_max:
                raise InvalidEvent(
                    f"the payload is nested deeper than {depth_max}", field="payload"
                )
            children = item.values() if isinstance(item, dict) else item
            stack.extend((child, depth + 1) for child in children)
        elif not isinstance(item, _SCALARS):
            # A struct, an enum or the like: look at its plain form, and into a msgspec.Raw.
            stack.append((msgspec.to_builtins(item, enc_hook=_plain_part), depth))


def decode_payload(text: bytes | str) -> Any:
    """Parse JSON from outside; ``InvalidEvent`` for anything that is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError, OverflowError) as error:
        raw = text.encode(errors="replace") if isinstance(text, str) else text
        why = reason(error, raw).removeprefix("it is not JSON: ")
        raise InvalidEvent(f"the payload is not JSON: {why}", field="payload") from error
