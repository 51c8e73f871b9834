"""Topics as streams of the Durable Streams protocol, version 1.0: ``/v1/stream/{topic}``.

A stream is a topic of one partition. In a JSON stream a message is the payload of an event. A
stream of text or bytes is the payloads of its events, one after the other. What the protocol allows
a server to leave out and this one does leave out is refused with 501, never ignored.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import random
import re
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Final, NamedTuple

import msgspec
from starlette.responses import Response, StreamingResponse

from trunkline.broker.endpoints import delete_topic
from trunkline.broker.http import Ask
from trunkline.broker.tail import listening
from trunkline.codec import check_value, decode_payload
from trunkline.errors import Conflict, Invalid, InvalidOption, NotFound, OutOfRange
from trunkline.event import Event, Record
from trunkline.names import check_topic
from trunkline.wire.cloudevents import BASE64

JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"
LIVE_S: Final = 60.0  # then a client of server-sent events comes back
_CHUNK_BYTES = 1024 * 1024  # of one answer
_RECORD_BYTES = 256 * 1024  # of a stream of text or bytes: a longer append is several records
_READ = 500
_OFFSET = re.compile(r"[0-9]{16}")
_MEDIA = re.compile(r"[\w!#$&^.+-]+/[\w!#$&^.+-]+")
_LINES = re.compile(r"\r\n|\r|\n")
_CURSOR_EPOCH = datetime(2024, 10, 9, tzinfo=UTC)
_CURSOR_S = 20
_NOT_OFFERED = (
    *("stream-ttl", "stream-expires-at", "stream-seq", "stream-closed"),
    *("producer-id", "producer-epoch", "producer-seq"),
    *("stream-forked-from", "stream-fork-offset", "stream-fork-sub-offset"),
)


class Page(NamedTuple):
    """A part of a stream: its records, and where the next part begins."""

    start: int
    next: int
    end: int  # of the stream, when it was read
    records: list[Record]

    @property
    def is_last(self) -> bool:
        return self.next >= self.end


def token(offset: int) -> str:
    """An offset as the protocol wants it: tokens sort as offsets do."""
    return f"{offset:016d}"


def _media(text: str) -> str:
    return text.partition(";")[0].strip().lower()


def _refuse_not_offered(ask: Ask) -> None:
    for name in _NOT_OFFERED:
        if name in ask.request.headers:
            raise Invalid(f"{name} is not offered here", code="not_offered", status=501)


async def _stream(ask: Ask, action: Any) -> tuple[str, str]:
    """The topic of the address, and the content type of its stream."""
    name = check_topic(ask.path("topic"))
    ask.require(action, name)
    options = (await ask.hub.bus.topics()).get(name)
    if options is None:
        raise NotFound(f"there is no stream {name}", topic=name)
    if options.partitions > 1:
        raise Conflict(
            f"{name} has {options.partitions} partitions, and a stream has one",
            topic=name,
            hint=f"read it by GET /topics/{name}/tail",
        )
    return name, ask.hub.configs.get(name).content_type or JSON


# -- create, append, delete ------------------------------------------------------------------------


async def create_stream(ask: Ask) -> Response:
    _refuse_not_offered(ask)
    name = check_topic(ask.path("topic"))
    given = ask.request.headers.get("content-type", BYTES)
    if not _MEDIA.fullmatch(_media(given)):
        raise InvalidOption("Content-Type is a media type", name="Content-Type")
    body = await ask.bytes()
    async with ask.hub.creating:  # of two at once, the second finds the stream of the first
        if name in await ask.hub.bus.topics():
            name, kind = await _stream(ask, "read")
            if _media(kind) != _media(given):
                raise Conflict(f"{name} is a stream of {kind}", topic=name)
            return _done(await _tail(ask, name), kind, 200)
        ask.require("admin", name)
        ask.hub.refuse_reserved(ask.who, "admin", name)
        events = _events(ask, name, given, body) if body else []
        config = ask.hub.configs.get(name)
        await ask.hub.configs.set(msgspec.structs.replace(config, content_type=given))
        await ask.hub.bus.define(name)
        if events:
            await ask.hub.publish(ask.who, name, events)
    done = _done(await _tail(ask, name), given, 201)
    done.headers["location"] = str(ask.request.url.replace(query=""))
    return done


async def append_stream(ask: Ask) -> Response:
    name, kind = await _stream(ask, "publish")
    _refuse_not_offered(ask)
    given = ask.request.headers.get("content-type")
    if given is None:
        raise InvalidOption("an append has a Content-Type", name="Content-Type")
    if _media(given) != _media(kind):
        raise Conflict(f"{name} is a stream of {kind}, not of {given[:80]}", topic=name)
    body = await ask.bytes()
    if not body:
        raise InvalidOption("an append has a body")
    events = _events(ask, name, kind, body)
    if not events:
        raise InvalidOption("an append has at least one message")
    ask.require("publish", name)  # as well as before it was read: rights may have changed
    receipts = await ask.hub.publish(ask.who, name, events)
    return _done(max(receipt.offset for receipt in receipts) + 1, kind, 204)


async def delete_stream(ask: Ask) -> Response:
    return await delete_topic(ask)


def _events(ask: Ask, topic: str, kind: str, body: bytes) -> list[Event]:
    """An array of JSON is its elements; text and bytes are cut into records."""
    now = ask.hub.clock.now()
    if _media(kind) == JSON:
        value = decode_payload(body)
        values = value if isinstance(value, list) else [value]
        for one in values:
            check_value(one, ask.hub.bus.store.limits.depth)
        return [Event(topic=topic, payload=one, ts=now) for one in values]
    if kind.startswith("text/"):
        try:
            text = body.decode()
        except UnicodeDecodeError:
            pass  # bytes are kept as they are
        else:
            parts = [text[at : at + _RECORD_BYTES // 4] for at in _cuts(text, _RECORD_BYTES // 4)]
            return [Event(topic=topic, payload=part, ts=now) for part in parts]
    return [
        Event(
            topic=topic,
            payload=base64.b64encode(body[at : at + _RECORD_BYTES]).decode(),
            headers={BASE64: "1"},
            ts=now,
        )
        for at in _cuts(body, _RECORD_BYTES)
    ]


def _cuts(body: Sequence[Any], size: int) -> range:
    return range(0, len(body), size)


async def _tail(ask: Ask, topic: str) -> int:
    return (await ask.hub.bus.store.bounds(topic, 0)).next


def _done(offset: int, kind: str, status: int) -> Response:
    return Response(None, status, {"stream-next-offset": token(offset), "content-type": kind})


# -- read ------------------------------------------------------------------------------------------


async def read_stream(ask: Ask) -> Response:
    name, kind = await _stream(ask, "read")
    if ask.request.method == "HEAD":
        return _done(await _tail(ask, name), kind, 200)
    live = ask.query("live")
    text = ask.query("offset", "-1" if live is None else None)
    if text is None:
        raise InvalidOption("a live read has an offset", name="offset", hint="-1, or now")
    start = await _start(ask, name, text)
    if live is None and text == "now":
        headers = _headers(Page(start, start, start, []), kind, ask)
        del headers["etag"]
        return Response(b"[]" if _media(kind) == JSON else b"", 200, headers)
    if live is None:
        return _answer(ask, await _page(ask, name, start), kind)
    if live == "long-poll":
        return await _poll(ask, name, kind, start)
    if live == "sse":
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache, no-store"}
        if not _is_text(kind):
            headers["stream-sse-data-encoding"] = "base64"
        return StreamingResponse(_follow(ask, name, kind, start), 200, headers)
    raise InvalidOption("live is long-poll or sse", name="live")


async def _start(ask: Ask, topic: str, text: str) -> int:
    first, end = await ask.hub.bus.store.bounds(topic, 0)
    if text in ("-1", "now"):
        return first if text == "-1" else end
    if not _OFFSET.fullmatch(text):
        raise InvalidOption("offset is a Stream-Next-Offset of this stream", name="offset")
    if not first <= int(text) <= end:
        raise OutOfRange(
            f"{topic} has no offset {text}: it holds {token(first)} to {token(end)}",
            status=410,
            hint="records were removed, or the stream was made anew: begin with -1",
        )
    return int(text)


async def _page(ask: Ask, topic: str, start: int) -> Page:
    """Records from ``start`` on, about as many as one answer holds."""
    store, size, at = ask.hub.bus.store, 0, start
    records: list[Record] = []
    while size < _CHUNK_BYTES:
        found = await store.read(topic, 0, at, _READ)
        if not found:
            break
        for record in found:
            at = record.offset + 1
            if ask.hub.may_read(ask.who, record):
                records.append(record)
                size += len(msgspec.json.encode(record.event.payload))
                if size >= _CHUNK_BYTES:
                    break
    end = (await store.bounds(topic, 0)).next
    return Page(start, at, max(end, at), records)


def _body(kind: str, records: Sequence[Record]) -> bytes:
    if _media(kind) == JSON:
        encode = msgspec.json.encode
        return b"[" + b",".join(encode(record.event.payload) for record in records) + b"]"
    return b"".join(map(_bytes, records))


def _bytes(record: Record) -> bytes:
    """The payload of a record in a stream of text or bytes, of any publisher."""
    event = record.event
    if not isinstance(event.payload, str):
        return msgspec.json.encode(event.payload)
    if BASE64 in event.headers:
        try:
            return base64.b64decode(event.payload, validate=True)
        except binascii.Error:
            pass  # it was published at another door
    return event.payload.encode()


def _headers(page: Page, kind: str, ask: Ask) -> dict[str, str]:
    last = page.records[-1].event.id if page.records else ""
    mark = hashlib.sha256(f"{kind}:{page.start}:{page.next}:{page.end}:{last}".encode())
    headers = {
        "content-type": kind,
        "stream-next-offset": token(page.next),
        "stream-cursor": _cursor(ask),
        "etag": f'"{mark.hexdigest()[:32]}"',
    }
    if page.is_last:
        headers["stream-up-to-date"] = "true"
    return headers


def _answer(ask: Ask, page: Page, kind: str) -> Response:
    headers = _headers(page, kind, ask)
    if ask.request.headers.get("if-none-match") == headers["etag"]:
        return Response(None, 304, headers)
    return Response(_body(kind, page.records), 200, headers)


def _cursor(ask: Ask) -> str:
    """A number that grows, so that a cache between us and a client cannot hold it in a circle."""
    now = int((ask.hub.clock.now() - _CURSOR_EPOCH).total_seconds()) // _CURSOR_S
    came = ask.query("cursor") or ""
    if came.isascii() and came.isdigit() and len(came) < 16 and int(came) >= now:
        return str(int(came) + max(1, random.randint(1, 3600) // _CURSOR_S))
    return str(now)


async def _poll(ask: Ask, topic: str, kind: str, start: int) -> Response:
    until = monotonic() + ask.hub.options.poll_s
    with listening(ask.hub.bus.store, topic) as rung:
        while True:
            rung.clear()
            await _stream(ask, "read")  # rights may have changed, and the stream be gone
            page = await _page(ask, topic, start)
            if page.records:
                return _answer(ask, page, kind)
            left_s = until - monotonic()
            if left_s <= 0 or not ask.hub.is_open:
                headers = _headers(page, kind, ask)
                del headers["content-type"]
                return Response(None, 204, headers)
            try:
                async with asyncio.timeout(left_s):
                    await rung.wait()
            except TimeoutError:
                continue


def _is_text(kind: str) -> bool:
    return _media(kind) == JSON or kind.startswith("text/")


def _told(ask: Ask, page: Page, kind: str) -> bytes:
    """Server-sent events: the data, and where the next data begins."""
    told = b""
    if page.records:
        body = _body(kind, page.records)
        text = body.decode() if _is_text(kind) else base64.b64encode(body).decode()
        # A reader takes away one space behind the colon.
        lines = [f"data:{' ' * line.startswith(' ')}{line}\n" for line in _LINES.split(text)]
        told = f"event: data\n{''.join(lines)}\n".encode()
    control: dict[str, Any] = {"streamNextOffset": token(page.next), "streamCursor": _cursor(ask)}
    if page.is_last:
        control["upToDate"] = True
    return told + b"event: control\ndata:%b\n\n" % msgspec.json.encode(control)


async def _follow(ask: Ask, topic: str, kind: str, start: int) -> AsyncIterator[bytes]:
    hub, until, is_told = ask.hub, monotonic() + LIVE_S, False
    with listening(hub.bus.store, topic) as rung:
        while hub.is_open and (left_s := until - monotonic()) > 0:
            rung.clear()
            if hub.rights.current(ask.who) is None or not hub.allows(ask.who, "read", topic):
                return
            if topic not in await hub.bus.topics():
                return
            page = await _page(ask, topic, start)
            start = page.next
            if page.records or not is_told:
                is_told = True
                yield _told(ask, page, kind)
            if not page.is_last:
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(min(left_s, 15.0)):
                    await rung.wait()
            except TimeoutError:
                yield b": still here\n\n"
