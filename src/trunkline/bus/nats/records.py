"""Events as NATS messages: the event as JSON, with its id as ``Nats-Msg-Id``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from datetime import datetime
from time import monotonic

import msgspec
from nats.aio.msg import Msg

from trunkline.bus.nats.connection import NatsLink
from trunkline.codec import encode_event
from trunkline.errors import ConnectionLost, Corrupt, InvalidEvent, NotFound
from trunkline.event import Event, Record
from trunkline.explain import reason
from trunkline.options import Limits
from trunkline.units import write_time

_decode = msgspec.json.Decoder(Event).decode
_SPLIT, _WHOLE = b'},"payload":', b',"payload":'
_READ_S = 5.0
_AGAIN_S = 0.05
_AT_ONCE = 500


class GivenBack(msgspec.Struct):
    """A record that one group gets again."""

    partition: int
    offset: int
    redrives: int


class _Stored(msgspec.Struct):
    seq: int
    data: bytes = b""


class _Got(msgspec.Struct):
    message: _Stored


_got = msgspec.json.Decoder(_Got).decode


def write_event(event: Event, limits: Limits) -> bytes:
    """The event as JSON; ``InvalidEvent`` if it is none, too large or too deep."""
    if event.priority != "normal":
        raise InvalidEvent(
            "priority is not for a bus on NATS: records come in the order of the log",
            field="priority",
        )
    return encode_event(event, limits).replace(_SPLIT, _WHOLE, 1) + b"}"


def read_record(data: bytes, topic: str, partition: int, offset: int) -> Record:
    try:
        return Record(_decode(data), partition, offset)
    except (msgspec.MsgspecError, UnicodeError) as error:
        said = f"message {offset} of {topic}/{partition} is not an event: {reason(error, data)}"
        raise Corrupt(said, topic=topic, partition=partition, offset=offset) from None


async def fetch(link: NatsLink, topic: str, partition: int, offset: int) -> Record:
    """One record, as the stream's leader has it; ``NotFound`` if it is gone."""
    name = link.place.stream(topic, partition)
    found = _got(await link.api(f"STREAM.MSG.GET.{name}", {"seq": offset})).message
    return read_record(found.data, topic, partition, offset)


async def read(link: NatsLink, topic: str, partition: int, start: int, limit: int) -> list[Record]:
    """Up to ``limit`` records from ``start`` on, in one request; any replica may answer."""
    return [
        read_record(message.data, topic, partition, sequence(message))
        for message in await get_range(link, topic, partition, start, min(limit, _AT_ONCE))
    ]


async def seek(link: NatsLink, topic: str, partition: int, when: datetime) -> int | None:
    """The first offset that the server stored at or after ``when``, as the leader has it."""
    return await _next(link, topic, partition, {"start_time": write_time(when)})


async def get_range(
    link: NatsLink, topic: str, partition: int, start: int, count: int, end: int | None = None
) -> list[Msg]:
    """Up to ``count`` messages from ``start`` on. None means that the leader has none either (below
    ``end``): a replica that lags behind, or that lost a damaged message, is asked again.
    """
    stream = link.place.stream(topic, partition)
    give_up = monotonic() + link.options.patience_s
    while True:
        found = await get_direct(link, stream, {"seq": start, "batch": count})
        if sure := await _without_hole(link, topic, partition, start, found):
            return sure
        if not found:
            there = await _next(link, topic, partition, {"seq": start})
            if there is None or (end is not None and there >= end):
                return []
        if monotonic() > give_up:
            raise ConnectionLost(f"NATS: a replica of {topic}/{partition} lags behind its leader")
        await asyncio.sleep(_AGAIN_S)


async def _without_hole(
    link: NatsLink, topic: str, partition: int, start: int, found: list[Msg]
) -> list[Msg]:
    """The messages before the first one that this replica lacks and the leader has."""
    expected = start
    for number, message in enumerate(found):
        at = sequence(message)
        if at != expected:
            there = await _next(link, topic, partition, {"seq": expected})
            if there is not None and there < at:
                return found[:number]
        expected = at + 1
    return found


async def _next(
    link: NatsLink, topic: str, partition: int, since: Mapping[str, object]
) -> int | None:
    """The first offset at or after a place, as the stream's leader has it."""
    name = link.place.stream(topic, partition)
    try:
        answer = await link.api(f"STREAM.MSG.GET.{name}", {**since, "next_by_subj": ">"})
    except NotFound:
        return None
    return _got(answer).message.seq


def sequence(message: Msg) -> int:
    return int(message.headers["Nats-Sequence"])


async def get_direct(link: NatsLink, stream: str, body: Mapping[str, object]) -> list[Msg]:
    """Messages by a direct get; the server ends them with a status. A server that does not answer
    is asked again for ``patience_s``.
    """
    give_up = monotonic() + link.options.patience_s
    while True:
        found, status = await _get_once(link, stream, body)
        if status in ("204", "404"):
            return found
        await link.api(f"STREAM.INFO.{stream}")  # waits for a server, or says what is wrong
        if monotonic() > give_up:
            raise ConnectionLost(f"NATS: a direct get of {stream} ended with {status}")
        await asyncio.sleep(_AGAIN_S)


async def _get_once(
    link: NatsLink, stream: str, body: Mapping[str, object]
) -> tuple[list[Msg], str]:
    nc = link.nc
    inbox = nc.new_inbox()
    found: list[Msg] = []
    done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def came(message: Msg) -> None:
        status = (message.headers or {}).get("Status")
        if status is None:
            found.append(message)
        elif not done.done():
            done.set_result(status)

    subscription = await nc.subscribe(inbox, cb=came, pending_msgs_limit=-1)
    try:
        subject = f"$JS.API.DIRECT.GET.{stream}"
        await nc.publish(subject, msgspec.json.encode(body), reply=inbox)
        async with asyncio.timeout(_READ_S):
            status = await done
    except TimeoutError:
        status = "no answer"
    finally:
        with contextlib.suppress(Exception):
            await subscription.unsubscribe()
    return found, status
