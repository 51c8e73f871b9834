"""What broker and client say to each other: one JSON object a frame, told apart by its ``type``.

A wire message is one frame or an array of frames. Parsing never raises: what is no frame becomes a
``Bad`` that says why and, if it could be read, whom to answer. Unknown members are ignored, so that
either side may be older than the other.

An event travels in one of two forms. An *envelope* carries what its format knows (id, ts in epoch
milliseconds, key, headers, payload), and every other field of the event as a header. The form
*event* is the event itself, complete.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from trunkline import errors
from trunkline.errors import InvalidEvent, InvalidOption, ProtocolError, TrunklineError, reason
from trunkline.event import Event, Receipt, Record, decode_payload, new_id

Corr = str | int
Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Partition = Annotated[int, Meta(ge=0, le=1023)]
Window = Annotated[int, Meta(ge=1, le=100_000)]
Credits = Annotated[int, Meta(ge=0, le=1_000_000_000)]
FRAMES_MAX: Final = 10_000  # in one message, and each of several publishes in one is one
Corrs = Annotated[list[Corr], Meta(min_length=1, max_length=FRAMES_MAX)]

SUBPROTOCOL: Final = "trunkline.v1"  # who asks for it reads arrays
CLOUDEVENTS: Final = "cloudevents.json"  # who asks for it sends and gets structured CloudEvents
CLIENT: Final = "Trunkline-Client"  # the header that names a client, on each of its connections
SUBPROTOCOLS: Final = (SUBPROTOCOL, CLOUDEVENTS)


class Frame(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True, gc=False
):
    """``corr`` is the sender's own mark; the answer to a frame carries the same."""

    corr: Corr | None = None


class Auth(Frame, frozen=True, kw_only=True, tag="AUTH"):
    """For clients that cannot send a header with the handshake."""

    token: str


class Publish(Frame, frozen=True, kw_only=True, tag="PUBLISH"):
    """Either the envelope's members, or ``event``, or ``events``: a batch, kept all or none. With
    ``corrs`` they are no batch but as many frames in one: each is kept, and answered, for itself.
    ``again`` says that the same event was sent before, on a connection that was lost.
    """

    topic: str = ""
    key: str | None = None
    headers: dict[str, str] | None = None
    payload: Raw | UnsetType = UNSET
    payload_sha256: str | None = None
    event: Event | None = None
    events: list[Event] | None = None
    corrs: Corrs | None = None
    again: bool = False


class From(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: Literal["latest", "earliest", "offset", "timestamp"]
    value: Annotated[float, Meta(ge=0, le=9e15)] | None = None


class Wanted(msgspec.Struct, frozen=True, omit_defaults=True):
    """A filter by key and by one header."""

    key: str | None = None
    header: tuple[str, str] | None = None


class Subscribe(Frame, frozen=True, kw_only=True, tag="SUBSCRIBE"):
    """``sub`` names the subscription, for a client that has several of one topic and group.
    ``credits`` are its own to begin with.
    """

    topic: str
    group: str
    start: From | None = msgspec.field(default=None, name="from")
    max_inflight: Window | None = None
    credits: Credits | None = None
    filter: Wanted | None = None
    where: str | None = None
    ack: Literal["upto", "each"] = "upto"
    form: Literal["envelope", "event"] = "envelope"
    batch: bool = False
    sticky: bool = False
    sub: str | None = None
    policy: dict[str, Any] | None = None


class Unsubscribe(Frame, frozen=True, kw_only=True, tag="UNSUBSCRIBE"):
    """``unread`` are places (topic, partition, offset) that came and were never looked at: they do
    not count as a try.
    """

    topic: str
    group: str
    sub: str | None = None
    unread: list[tuple[str, Partition, Offset]] | None = None


class _Place(Frame, frozen=True, kw_only=True):
    topic: str
    partition: Partition
    group: str
    offset: Offset


class Ack(_Place, frozen=True, kw_only=True, tag="ACK"):
    """``upto`` settles every delivered and not nacked offset up to this one, ``each`` this one.
    ``offsets`` are more of the same partition, each for itself.
    """

    offsets: list[Offset] | None = None


class Revoked(Ack, frozen=True, kw_only=True, tag="REVOKED"):
    """A broker's word: their group was sought or removed, and they are the client's no more."""


class Nack(_Place, frozen=True, kw_only=True, tag="NACK"):
    """``dead`` makes it a dead letter at once."""

    reason: str | None = None
    delay_s: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    dead: bool = False


class Extend(_Place, frozen=True, kw_only=True, tag="EXTEND"):
    """Begin the ack timeout anew."""


class Credit(Frame, frozen=True, kw_only=True, tag="FLOW"):
    """From the first on, the connection gets at most as many records as it has given credits. With
    ``sub`` they are those of one subscription, and 0 takes back what it has.
    """

    credits: Credits
    sub: str | None = None


class Call(Frame, frozen=True, kw_only=True, tag="CALL"):
    """Ask for something that is neither publishing nor delivery; the answer is in ``OK``."""

    op: str
    args: dict[str, Any] = {}


class Ping(Frame, frozen=True, kw_only=True, tag="PING"):
    pass


class Published(Frame, frozen=True, kw_only=True, tag="PUBLISHED"):
    """A batch that lies in one piece is told by ``count``, any other by ``receipts``: partition,
    offset and whether it was there before, for each event, with the ``ids`` of the records if some
    were. ``corrs`` answers as many PUBLISH frames at once, whose events lie one after the other;
    only those who read arrays get it.
    """

    topic: str
    partition: Partition
    offset: Offset
    id: str | None = None
    duplicate: bool = False
    durability: str = ""
    count: int = 1
    corrs: list[Corr] | None = None
    receipts: list[tuple[int, int, bool]] | None = None
    ids: list[str] | None = None


class Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    ts: int
    topic: str
    key: str | None = None
    partition: int | UnsetType = UNSET
    headers: dict[str, str] | None = None
    payload_sha256: str | None = None
    offset: int | UnsetType = UNSET
    attempts: int | UnsetType = UNSET
    payload: Any


class Message(Frame, frozen=True, kw_only=True, tag="MESSAGE"):
    topic: str
    partition: int
    group: str
    offset: int
    attempt: int | UnsetType = UNSET
    sub: str | None = None
    envelope: Envelope | None = None
    event: Event | None = None


class Ok(Frame, frozen=True, kw_only=True, tag="OK"):
    """``linger_s`` answers a SUBSCRIBE: nothing waits for the acks of records without a key, and
    so they may be kept that long, to be sent together.
    """

    topic: str | None = None
    group: str | None = None
    sub: str | None = None
    count: int | None = None
    linger_s: float | None = None
    result: Any = None


class Pong(Frame, frozen=True, kw_only=True, tag="PONG"):
    pass


class Failure(Frame, frozen=True, kw_only=True, tag="ERROR"):
    """``code`` is one of ``CODES``. ``fatal`` says that the connection ends."""

    code: str
    message: str
    topic: str | None = None
    group: str | None = None
    sub: str | None = None
    hint: str | None = None
    path: str | None = None
    retry_s: float | None = None
    fatal: bool = False


Asked = Auth | Publish | Subscribe | Unsubscribe | Ack | Nack | Extend | Credit | Call | Ping | Pong
Told = Published | Message | Revoked | Ok | Pong | Failure | Ping


class Bad(msgspec.Struct, frozen=True):
    """What came was no frame."""

    error: ProtocolError
    corr: Corr | None = None


class _Stub(msgspec.Struct, frozen=True):
    """As much of a broken frame as an answer needs."""

    type: Any = None
    corr: Any = None
    corrs: Any = None


class _Apart(msgspec.Struct, frozen=True):
    """A PUBLISH of several events, one of which is none."""

    type: Literal["PUBLISH"]
    corrs: Corrs
    events: list[Raw]
    topic: str = ""
    again: bool = False


_encode = msgspec.json.Encoder().encode
_apart = msgspec.json.Decoder(_Apart)
_event = msgspec.json.Decoder(Event)
_asked = msgspec.json.Decoder(Asked)
_asked_many = msgspec.json.Decoder(list[Asked])
_told = msgspec.json.Decoder(Told)
_told_many = msgspec.json.Decoder(list[Told])
_pieces = msgspec.json.Decoder(list[Raw])
_stub = msgspec.json.Decoder(_Stub)
_BROKEN = (msgspec.DecodeError, RecursionError, UnicodeError, ValueError, OverflowError)


def read_asked(data: bytes | memoryview) -> list[Asked | Bad]:
    """What a client said."""
    if data[:1] == b"[":
        return _read_many(data, _asked_many, _asked)
    try:
        return [_asked.decode(data)]
    except _BROKEN as error:
        bare = bytes(data).lstrip(b" \t\r\n")  # an array may be preceded by space, and is not often
        return read_asked(bare) if bare[:1] == b"[" else _broken(data, error)


def read_told(data: bytes | memoryview) -> list[Told | Bad]:
    """What a broker said."""
    if data[:1] == b"[":
        return _read_many(data, _told_many, _told)
    try:
        return [_told.decode(data)]
    except _BROKEN as error:
        return _bad(data, error)


def _read_many(data: bytes | memoryview, many: Any, one: Any) -> list[Any]:
    try:
        frames: list[Any] = many.decode(data)
    except _BROKEN:
        try:
            pieces = _pieces.decode(data)
        except _BROKEN as error:
            return _bad(data, error)
        frames = []
        for piece in pieces:
            try:
                frames.append(one.decode(piece))
            except _BROKEN as error:
                frames += _broken(bytes(piece), error)
            if len(frames) > FRAMES_MAX:
                break
    if len(data) > 2 * FRAMES_MAX:  # a mark and its comma, each of which may be answered
        count = sum(len(f.corrs) if type(f) is Publish and f.corrs else 1 for f in frames)
        if count > FRAMES_MAX:
            text = f"more frames in one message than {FRAMES_MAX}, which are allowed"
            return [Bad(ProtocolError(text, code="too_large"))]
    return frames


def _broken(data: bytes | memoryview, error: Exception) -> list[Any]:
    """What cannot be read: where it is several publishes in one, those among them that can."""
    try:
        several = _apart.decode(data)
        pairs = list(zip(several.corrs, several.events, strict=True))
    except _BROKEN:
        return _bad(data, error)
    frames: list[Any] = []
    for corr, piece in pairs:
        try:
            event = _event.decode(piece)
        except _BROKEN as why:
            said = f"not an event: {reason(why, bytes(piece))}"
            frames.append(Bad(ProtocolError(said, code="bad_frame"), corr))
        else:
            mine = Publish(topic=several.topic, corrs=[corr], events=[event], again=several.again)
            frames.append(mine)
    return frames


def _bad(data: bytes | memoryview, error: Exception) -> list[Any]:
    said = f"not a frame: {reason(error, data)}"
    try:
        stub = _stub.decode(data)
    except _BROKEN:
        return [Bad(ProtocolError(said, code="bad_frame"))]
    known = isinstance(stub.type, str) and stub.type in TYPES
    code = "bad_frame" if known or stub.type is None else "unknown_type"
    many = stub.corrs if isinstance(stub.corrs, list) and len(stub.corrs) <= FRAMES_MAX else []
    corrs: list[Corr | None] = [corr for corr in many if isinstance(corr, str | int)]
    corr = stub.corr if isinstance(stub.corr, str | int) else None
    return [Bad(ProtocolError(said, code=code), mark) for mark in corrs or [corr]]


TYPES: Final = frozenset(str(kind.__struct_config__.tag) for kind in get_args(Asked | Told))


def dump(frame: Frame) -> bytes:
    """``ProtocolError`` for what JSON cannot hold."""
    try:
        return _encode(frame)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"cannot be sent: {error}", code="bad_frame") from error


def join(frames: list[bytes]) -> bytes:
    """Several frames as one wire message."""
    return frames[0] if len(frames) == 1 else b"[" + b",".join(frames) + b"]"


# -- envelopes -------------------------------------------------------------------------------------

# The fields of an event that an envelope carries as headers.
_AS_TEXT: Final = {
    "type": "type",
    "agent_id": "actor",
    "space": "space",
    "subject": "subject",
    "idem_key": "idem_key",
    "traceparent": "trace",
    "priority": "priority",
    "band": "band",
    "cause": "cause",
}
_TTL, _NOT_BEFORE, _CAPS = "ttl_s", "not_before", "caps"
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


def published(
    receipts: list[Receipt], corr: Corr | None, corrs: list[Any] | None = None
) -> Published:
    """The answer to a batch, or to as many publishes as there are ``corrs``."""
    first = receipts[0]
    partition, offset = first.partition, first.offset
    places: list[tuple[int, int, bool]] | None = None
    for receipt in receipts:
        if receipt.offset != offset or receipt.partition != partition or receipt.duplicate:
            places = [(one.partition, one.offset, one.duplicate) for one in receipts]
            break
        offset += 1
    has_old = places is not None and any(was_there for *_, was_there in places)
    return Published(
        corr=corr,
        topic=first.topic,
        partition=partition,
        offset=first.offset,
        durability=first.durability,
        count=len(receipts),
        corrs=corrs,
        receipts=places,
        ids=[one.id for one in receipts] if has_old else None,
    )


# -- errors ----------------------------------------------------------------------------------------

# One table for both doors: the error, its code on the wire, its status in HTTP. The first that fits
# is taken; the client raises the first whose code it reads.
CODES: Final[tuple[tuple[type[TrunklineError], str, int], ...]] = (
    (errors.InvalidName, "invalid_name", 400),
    (errors.InvalidOption, "invalid_option", 400),
    (errors.InvalidFilter, "invalid_filter", 400),
    (errors.InvalidEvent, "invalid_event", 400),
    (errors.Invalid, "invalid", 400),
    (errors.OutOfRange, "out_of_range", 404),
    (errors.NotFound, "not_found", 404),
    (errors.NoBus, "no_bus", 404),
    (errors.Duplicate, "duplicate", 409),
    (errors.Conflict, "conflict", 409),
    (errors.Denied, "denied", 403),
    (errors.StorageFull, "storage_full", 507),
    (errors.LockTimeout, "busy", 503),
    (errors.StorageError, "storage", 503),
    (errors.Closed, "closing", 503),
    (errors.ConnectionLost, "closing", 503),
    (errors.ProtocolError, "bad_frame", 400),
    (errors.TrunklineError, "failed", 500),
)


def code_of(error: TrunklineError) -> str:
    own = error.fields.get("code")
    if isinstance(own, str):
        return own
    return next(code for kind, code, _ in CODES if isinstance(error, kind))


def status_of(error: TrunklineError) -> int:
    own = error.fields.get("status")
    if isinstance(own, int):
        return own
    return next(status for kind, _, status in CODES if isinstance(error, kind))


def failure_of(error: TrunklineError, corr: Corr | None = None, **fields: Any) -> Failure:
    path = error.fields.get("path") if code_of(error) == "schema" else None
    return Failure(
        corr=corr,
        code=code_of(error),
        message=error.message,
        hint=error.hint or None,
        path=path,
        retry_s=error.fields.get("retry_s"),
        **fields,
    )


def error_of(failure: Failure) -> TrunklineError:
    """The error that the other side had."""
    kind = next((kind for kind, code, _ in CODES if code == failure.code), None)
    kind = kind or _OTHERS.get(failure.code, ProtocolError)
    fields = {"path": failure.path} if failure.path is not None else {}
    if failure.retry_s is not None:
        fields["retry_s"] = failure.retry_s  # type: ignore[assignment]
    return kind(failure.message, hint=failure.hint or "", code=failure.code, **fields)


_OTHERS: Final[dict[str, type[TrunklineError]]] = {
    "schema": InvalidEvent,
    "unauthenticated": errors.Denied,
    "rate": errors.Conflict,
    "slow": errors.ConnectionLost,
    "internal": TrunklineError,
}
