"""What is stored: an event, and the record it becomes once it has a place in a log.

One value serves every door. Its JSON names are those of the folder's ``meta`` object, so the bytes
on disk are this struct and nothing in between.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from operator import attrgetter
from typing import Any, Final, Literal
from uuid import UUID

import msgspec

from trunkline.errors import InvalidEvent, reason
from trunkline.options import Limits
from trunkline.topics import check_space, check_topic, is_dead

PRIORITIES: Final = ("critical", "high", "normal", "low")
RANK: Final = {name: rank for rank, name in enumerate(PRIORITIES)}
BANDS: Final = ("GREEN", "AMBER", "RED", "BLACK")
Priority = Literal["critical", "high", "normal", "low"]
Band = Literal["GREEN", "AMBER", "RED", "BLACK"]

_random = random.Random(os.urandom(16))
_COUNTS: Final = tuple(f"{number:03x}" for number in range(4096))
_stamp: tuple[int, str, str, Iterator[str]] = (0, "", "", iter(()))


def _forget() -> None:
    global _stamp
    _random.seed(os.urandom(16))
    _stamp = (0, "", "", iter(()))


os.register_at_fork(after_in_child=_forget)


def new_id() -> str:
    """A UUID of version 7 that sorts by the time it was made: 48 bits of milliseconds, 12 bits of
    counter within one millisecond, 62 random bits.
    """
    global _stamp
    ms = time.time_ns() // 1_000_000
    made, head, tail, counts = _stamp
    count = next(counts, None) if ms == made else None
    if count is None:
        bits = f"{0x8000_0000_0000_0000 | _random.getrandbits(62):016x}"
        head, tail = f"{ms >> 16:08x}-{ms & 0xFFFF:04x}-7", f"-{bits[:4]}-{bits[4:]}"
        counts = iter(_COUNTS)
        count = next(counts)
        _stamp = (ms, head, tail, counts)
    return head + count + tail


def new_ids(count: int) -> list[str]:
    """Many ids at once, in order, for less."""
    ids = [new_id()]
    while len(ids) < count:
        _, head, tail, counts = _stamp
        ids += [head + number + tail for number in itertools.islice(counts, count - len(ids))]
        if len(ids) < count:
            ids.append(new_id())
    return ids


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Event(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    gc=False,  # a payload that holds itself cannot be JSON
    rename={
        "id": "event_id",
        "space": "space_id",
        "trace": "trace_id",
        "ttl_s": "ttl_sec",
    },
):
    """What a producer hands over. ``payload`` is any JSON value."""

    id: str = msgspec.field(default_factory=new_id)
    ts: datetime = msgspec.field(default_factory=_utc_now)
    topic: str
    type: str | None = None
    space: str | None = None
    actor: str | None = None
    subject: str | None = None
    key: str | None = None
    idem_key: str | None = None
    trace: str | None = None
    ttl_s: float | None = None
    priority: Priority = "normal"
    not_before: datetime | None = None
    band: Band = "GREEN"
    caps: tuple[str, ...] = ()
    cause: str | None = None
    headers: dict[str, str] = {}
    payload: Any = None  # last: the line codec splits the encoded struct in front of it


class Record(msgspec.Struct, frozen=True, gc=False):
    """An event with its place: ``offset`` counts from 1 within one topic and partition."""

    event: Event
    partition: int
    offset: int

    @property
    def topic(self) -> str:
        return self.event.topic


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """What a producer gets back. ``durability`` says what the acknowledgement is worth:
    ``fsync`` survives a power cut, ``os`` a crash of the process, ``none`` neither. A ``duplicate``
    names the record it repeats: the ``offset`` and, as long as the log holds it, the ``id``.
    """

    topic: str
    partition: int
    offset: int
    id: str
    duplicate: bool = False
    durability: str = "fsync"


LETTER_MARK = "dlq-reason"  # the header by which a dead letter is told from any other event
_TEXT_FIELDS = ("type", "actor", "subject", "key", "idem_key", "trace", "cause")
_texts = attrgetter(*_TEXT_FIELDS)
_NO_TEXTS = (None,) * len(_TEXT_FIELDS)


def check_event(event: Event, limits: Limits) -> None:
    """Raise ``InvalidEvent`` or ``InvalidName`` unless every field holds what it may hold."""
    if type(event) is not Event:
        raise InvalidEvent(f"an Event was expected, not {type(event).__name__}")
    check_topic(event.topic)
    _check_fields(event, limits)
    if is_dead(event.topic):
        _check_letter(event)


def check_events(topic: str, events: Iterable[Event], limits: Limits) -> None:
    """The same for each of a batch, all of one topic, whose name was checked."""
    dead = is_dead(topic)
    for event in events:
        if type(event) is not Event or event.topic != topic:
            check_event(event, limits)
            raise InvalidEvent(f"an event for {event.topic} in a batch for {topic}")
        _check_fields(event, limits)
        if dead:
            _check_letter(event)


def _check_fields(event: Event, limits: Limits) -> None:
    texts = _texts(event)
    if texts != _NO_TEXTS:
        for name, value in zip(_TEXT_FIELDS, texts, strict=True):
            if value is not None:
                check_text(name, value, limits.text_bytes)
    check_text("id", event.id, limits.text_bytes)
    if not event.id:
        raise InvalidEvent("an id is not empty", field="id")
    if event.space is not None:
        check_space(event.space)
    if event.priority not in PRIORITIES:
        known = ", ".join(PRIORITIES)
        raise InvalidEvent(f"unknown priority: {event.priority!r}", hint=f"priorities: {known}")
    if event.band not in BANDS:
        raise InvalidEvent(f"unknown band: {event.band!r}", hint=f"bands: {', '.join(BANDS)}")
    if event.ttl_s is not None and not _is_span(event.ttl_s):
        raise InvalidEvent(f"ttl_s is a number of seconds, not {event.ttl_s!r}", field="ttl_s")
    _check_time("ts", event.ts)
    if event.not_before is not None:
        _check_time("not_before", event.not_before)
    if event.headers != {} or type(event.headers) is not dict:
        _check_headers(event.headers, limits)
    if event.caps != ():
        if not isinstance(event.caps, tuple | list):
            raise InvalidEvent("caps is a list of names", field="caps")
        for cap in event.caps:
            check_text("caps", cap, limits.text_bytes)


def _check_letter(event: Event) -> None:
    if LETTER_MARK not in event.headers:
        raise InvalidEvent(
            f"not a dead letter: {event.topic} takes what a group gave up, with the reason",
            field="topic",
            hint="a handler that raises Reject, or delivery.term(reason), makes one",
        )


def check_text(name: str, value: Any, bytes_max: int = 1024) -> None:
    if not isinstance(value, str):
        raise InvalidEvent(f"{name} is text, not {type(value).__name__}", field=name)
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidEvent(f"{name} is not valid Unicode: {error}", field=name) from None
    if size > bytes_max:
        raise InvalidEvent(f"{name} is {size} bytes long, {bytes_max} are allowed", field=name)


def _check_time(name: str, when: Any) -> None:
    if not (isinstance(when, datetime) and when.tzinfo is not None):
        raise InvalidEvent(f"{name} is a datetime with a time zone, not {when!r}", field=name)


def _is_span(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


def _check_headers(headers: Any, limits: Limits) -> None:
    if not isinstance(headers, dict):
        raise InvalidEvent("headers is a mapping of text to text", field="headers")
    if len(headers) > limits.headers:
        raise InvalidEvent(f"{len(headers)} headers, {limits.headers} are allowed", field="headers")
    for name, value in headers.items():
        check_text("a header's name", name, limits.header_bytes)
        check_text(f"header {name!r}", value, limits.header_bytes)


_SCALARS = (str, int, bool, bytes, bytearray, type(None), datetime, UUID, Decimal)
_encode = msgspec.json.Encoder().encode
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
        raise InvalidEvent(f"the payload is no JSON value: {error}", field="payload") from error
    size = len(whole)
    if size > limits.record_bytes:
        raise InvalidEvent(
            f"the record is {size} bytes long, {limits.record_bytes} are allowed",
            size=size,
            hint="store the bulk elsewhere and publish a reference",
        )
    # Both are rare, and a walk in Python costs more than the encoding: look only on a sign of them.
    opened = size - len(whole.replace(b"[", b"").replace(b"{", b""))
    if opened > limits.depth or whole.rfind(b"null") >= 0:
        check_value(event.payload, limits.depth)
    return body


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
            stack.append((msgspec.to_builtins(item, enc_hook=decode_payload), depth))


def decode_payload(text: bytes | str) -> Any:
    """Parse JSON from outside; ``InvalidEvent`` for anything that is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError, OverflowError) as error:
        raw = text.encode(errors="replace") if isinstance(text, str) else text
        why = reason(error, raw).removeprefix("it is not JSON: ")
        raise InvalidEvent(f"the payload is not JSON: {why}", field="payload") from error
