"""What broker and client say to each other: one JSON object a frame, told apart by its ``type``.

A wire message is one frame or an array of frames. Parsing never raises: what is no frame becomes a
``Bad`` that says why and, if it could be read, whom to answer. Unknown members are ignored, so that
either side may be older than the other.

An event travels in one of two forms: as an *envelope* (``trunkline.wire.envelope``), or in the form
*event*, which is the event itself, complete. ``trunkline.wire.codes`` has the errors.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from trunkline.errors import ProtocolError
from trunkline.event import Event, Receipt
from trunkline.explain import reason

Corr = str | int
Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Partition = Annotated[int, Meta(ge=0, le=1023)]
Window = Annotated[int, Meta(ge=1, le=100_000)]
Credits = Annotated[int, Meta(ge=0, le=1_000_000_000)]
FRAMES_MAX: Final = 10_000  # in one message, and each of several publishes in one is one
Corrs = Annotated[list[Corr], Meta(min_length=1, max_length=FRAMES_MAX)]

SUBPROTOCOL: Final = "trunkline.v1"  # a client that asks for it reads arrays
CLOUDEVENTS: Final = "cloudevents.json"  # its clients send and get structured CloudEvents
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
    ``credits`` are its own to begin with. With ``runs`` the client takes several records of a key
    at once and handles them one after the other; see docs/protocol.md.
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
    runs: bool = False
    sub: str | None = None
    policy: dict[str, Any] | None = None
    on_conflict: Literal["raise", "update", "keep"] = "raise"


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
    ``sub`` they are those of one subscription, and 0 takes back what it has. ``hands`` is the most
    records of it that the client's handlers may have at once.
    """

    credits: Credits
    sub: str | None = None
    hands: Window | None = None


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
    only clients that read arrays get it.
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
    lease_s: float | None = None  # for so long after it was sent the record is the client's
    lane: Literal["key", "partition"] | None = None  # handle it after those of its lane before it
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
