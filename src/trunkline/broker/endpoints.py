"""What can be asked for over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from datetime import datetime
from heapq import heappop, heappush
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response, StreamingResponse

from trunkline.broker import cloudevents, exposition
from trunkline.broker.configs import Config
from trunkline.broker.http import Ask, decoded, reply
from trunkline.broker.letters import page_of
from trunkline.broker.places import read_mark, read_places
from trunkline.broker.tail import follow
from trunkline.dead import Desk, keeps_books
from trunkline.errors import (
    Invalid,
    InvalidEvent,
    InvalidOption,
    NotFound,
    OutOfRange,
    TrunklineError,
)
from trunkline.event import Event, Record, check_value, decode_payload
from trunkline.filters import read_time
from trunkline.frames import DIGEST, check_digest, envelope_of, fields_of
from trunkline.group import Group
from trunkline.options import TopicOptions, changed, make
from trunkline.store import GroupKey
from trunkline.topics import check_group, check_topic, dead_topic
from trunkline.where import compile_where

READ_MAX = 1000
_STREAM = "text/event-stream"
_BATCH_MAX = 10_000


# -- topics ----------------------------------------------------------------------------------------


class NewTopic(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    topic: str
    partitions: Annotated[int, Meta(ge=1, le=1024)] | None = None
    retention_ms: Annotated[int, Meta(ge=0, le=10**15)] | None = None
    max_attempts: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    ack_timeout_ms: Annotated[int, Meta(ge=1, le=10**12)] | None = None
    publish_acl: list[str] | None = msgspec.field(default=None, name="publishACL")
    subscribe_acl: list[str] | None = msgspec.field(default=None, name="subscribeACL")
    options: dict[str, Any] = {}


async def create_topic(ask: Ask) -> Response:
    asked: NewTopic = await ask.json(NewTopic)
    name = check_topic(asked.topic)
    ask.require("admin", name)
    ask.hub.refuse_reserved(ask.who, "admin", name)
    bus = ask.hub.bus
    have = (await bus.topics()).get(name)
    values = changed(have) if have is not None else {}
    values |= asked.options
    if asked.partitions is not None:
        values["partitions"] = asked.partitions
    if asked.retention_ms is not None:
        values["retention_age_s"] = asked.retention_ms / 1000
    make(TopicOptions, values)
    configs = ask.hub.configs
    before = configs.get(name)
    # First: who waits for the topic must not find it without its rules.
    await configs.set(
        Config(
            name,
            asked.max_attempts or before.max_attempts,
            asked.ack_timeout_ms or before.ack_timeout_ms,
            before.publish_acl if asked.publish_acl is None else asked.publish_acl,
            before.subscribe_acl if asked.subscribe_acl is None else asked.subscribe_acl,
        )
    )
    try:
        await bus.define(name, **values)
    except TrunklineError:
        await configs.set(before)
        raise
    return reply(await _topic(ask, name), 201 if have is None else 200)


async def list_topics(ask: Ask) -> Response:
    found = []
    for name, options in sorted((await ask.hub.bus.topics()).items()):
        if ask.hub.allows(ask.who, "read", name):
            found.append(await _topic(ask, name, options))
            await asyncio.sleep(0)  # others have their turn, too
    return reply({"topics": found})


async def get_topic(ask: Ask) -> Response:
    return reply(await _topic(ask, await _known(ask, "read")))


async def delete_topic(ask: Ask) -> Response:
    name = await _known(ask, "admin")
    ask.hub.refuse_reserved(ask.who, "admin", name)
    await ask.hub.bus.store.define(name, None)
    await ask.hub.configs.set(Config(name))
    return Response(status_code=204)


async def _known(ask: Ask, action: Any) -> str:
    name = check_topic(ask.path("topic"))
    ask.require(action, name)
    if name not in await ask.hub.bus.topics():
        raise NotFound(f"there is no topic {name}", topic=name)
    return name


async def _topic(ask: Ask, name: str, options: TopicOptions | None = None) -> dict[str, Any]:
    store = ask.hub.bus.store
    options = options or (await ask.hub.bus.topics()).get(name, TopicOptions())
    bounds = [await store.bounds(name, number) for number in range(options.partitions)]
    config = msgspec.to_builtins(ask.hub.configs.get(name))
    return {
        **config,
        "partitions": options.partitions,
        "records": sum(end - first for first, end in bounds),
        "options": changed(options),
    }


async def offsets(ask: Ask) -> Response:
    name = await _known(ask, "read")
    bus = ask.hub.bus
    options = (await bus.topics()).get(name, TopicOptions())
    groups = [key for key in await bus.store.groups() if key.topic == name]
    found = []
    for number in range(options.partitions):
        first, end = await bus.store.bounds(name, number)
        mine = [await _group(ask, key) for key in groups if key.partition == number]
        found.append({"partition": number, "first": first, "next": end, "groups": mine})
    return reply({"topic": name, "partitions": found})


# -- events ----------------------------------------------------------------------------------------


class NewEvent(msgspec.Struct, forbid_unknown_fields=True):
    payload: msgspec.Raw
    key: str | None = None
    headers: dict[str, str] | None = None
    payload_sha256: str | None = None
    type: str | None = None
    id: str | None = None


async def publish(ask: Ask) -> Response:
    name = check_topic(ask.path("topic"))
    ask.require("publish", name)
    content = ask.request.headers.get("content-type", "application/json")
    kind = content.partition(";")[0].strip().lower()
    data = await ask.bytes()
    ask.require("publish", name)  # as well as before it was read: rights may have changed
    if kind == cloudevents.BATCH:
        found = decoded(data, list[dict[str, Any]])
        if len(found) > _BATCH_MAX:
            raise InvalidEvent(f"a batch holds at most {_BATCH_MAX} events")
        events = cloudevents.from_batch(found, name)
    elif kind == cloudevents.STRUCTURED:
        events = [cloudevents.from_cloudevent(decode_payload(data), name)]
    elif "ce-specversion" in ask.request.headers:
        events = [cloudevents.from_binary(ask.request.headers.items(), data, name)]
    elif kind == "application/json":
        what = 'an event is {"payload": …}, and may have key, headers, type, id'
        events = [_new_event(ask, name, decoded(data, NewEvent, what))]
    else:
        said = f"events come as {cloudevents.KNOWN}, not {kind[:80]!r}"
        raise Invalid(said, code="media_type", status=415)
    for event in events:
        check_value(event.payload, ask.hub.bus.store.options.limits.depth)  # type: ignore[attr-defined]
    receipts = await ask.hub.publish(ask.who, name, events) if events else []
    if kind == cloudevents.BATCH:
        return reply({"receipts": receipts}, 201)
    return reply(receipts[0], 201)


def _new_event(ask: Ask, topic: str, asked: NewEvent) -> Event:
    raw = bytes(asked.payload)
    headers = asked.headers or {}
    if asked.payload_sha256 is not None:
        check_digest(raw, asked.payload_sha256)
        headers = {**headers, DIGEST: asked.payload_sha256.lower()}
    fields, rest = fields_of(headers)
    if asked.type is not None:
        fields["type"] = asked.type
    if asked.id is not None:
        fields["id"] = asked.id
    payload = decode_payload(raw)
    now = ask.hub.clock.now()
    return Event(topic=topic, key=asked.key, payload=payload, headers=rest, ts=now, **fields)


async def read_events(ask: Ask) -> Response:
    name = await _known(ask, "read")
    limit = ask.number("limit", 100, 1, READ_MAX)
    where = ask.query("where")
    wanted = None if where is None else compile_where(where)
    start = ask.query("from", "earliest") or "earliest"
    begun = read_places(start)
    partitions = await _partitions(ask, name, begun)
    places = {
        number: await _offset(ask, name, number, begun.get(number, "earliest" if begun else start))
        for number in partitions
    }
    batch = cloudevents.BATCH in ask.request.headers.get("accept", "")
    form: Any = cloudevents.to_cloudevent if batch else envelope_of
    rows: list[msgspec.Raw] = []
    looked = size = 0
    async for record in _by_time(ask, name, places):
        looked += 1
        if wanted is None or wanted(record.event):
            data = msgspec.json.encode(form(record))
            rows.append(msgspec.Raw(data))
            size += len(data)
        if len(rows) == limit or looked == 100 * READ_MAX or size >= ask.hub.options.pending_bytes:
            break
    if batch:
        return reply(rows, media=cloudevents.BATCH)
    if len(places) == 1:
        ((partition, at),) = places.items()
        return reply({"topic": name, "partition": partition, "events": rows, "next": at})
    following = ",".join(f"{number}:{at}" for number, at in places.items())
    return reply({"topic": name, "events": rows, "next": following})


async def _by_time(ask: Ask, topic: str, places: dict[int, int]) -> AsyncIterator[Record]:
    """What is there from these places on, by time. A place moves on before its record is given."""
    store = ask.hub.bus.store
    size = max(10, READ_MAX // len(places))
    ahead: dict[int, Iterator[Record]] = {number: iter(()) for number in places}
    first: list[tuple[datetime, int, Record]] = []

    async def push(number: int) -> None:
        record = next(ahead[number], None)
        if record is None:
            ahead[number] = iter(await store.read(topic, number, places[number], size))
            await asyncio.sleep(0)
            record = next(ahead[number], None)
        if record is not None:
            heappush(first, (record.event.ts, number, record))

    for number in places:
        await push(number)
    while first:
        _, number, record = heappop(first)
        places[number] = record.offset + 1
        yield record
        await push(number)


async def _partitions(ask: Ask, topic: str, named: Iterable[int] = ()) -> range:
    """The one that is asked for, or all. Those that are ``named`` besides must be there, too."""
    count = (await ask.hub.bus.topics())[topic].partitions
    number = ask.number("partition", 0, 0, 1023)
    for one in (number, *named):
        if one >= count:
            raise OutOfRange(f"there is no partition {one} in {topic}")
    return range(count) if ask.query("partition") is None else range(number, number + 1)


async def read_event(ask: Ask) -> Response:
    """One record; ``form`` says how, else ``Accept``."""
    name = await _known(ask, "read")
    partition, offset = int(ask.path("partition")), int(ask.path("offset"))
    if partition > 1023 or offset > 2**63 - 1:
        raise NotFound(f"there is no record {partition}/{offset} in {name}")
    found = await ask.hub.bus.store.read(name, partition, offset, 1)
    if not found or found[0].offset != offset:
        raise OutOfRange(f"there is no record {partition}/{offset} in {name}")
    is_asked = cloudevents.STRUCTURED in ask.request.headers.get("accept", "")
    form = ask.query("form", "cloudevent" if is_asked else "envelope")
    if form == "binary":
        headers, data = cloudevents.to_binary(found[0])
        return Response(data, 200, headers)
    if form == "cloudevent":
        return reply(cloudevents.to_cloudevent(found[0]), media=cloudevents.STRUCTURED)
    if form != "envelope":
        raise InvalidOption("form is envelope, cloudevent or binary", name="form")
    return reply(envelope_of(found[0]))


async def _offset(ask: Ask, topic: str, partition: int, text: str, name: str = "from") -> int:
    """An offset, ``earliest``, ``latest``, or a time: what was written since."""
    store = ask.hub.bus.store
    first, end = await store.bounds(topic, partition)
    if text in ("earliest", "latest"):
        return first if text == "earliest" else end
    if text.isascii() and text.isdigit() and len(text) < 19:
        return min(max(int(text), first), end)
    when = read_time(text)
    if when is None:
        raise InvalidOption(f"{name} is an offset, earliest, latest or a time", name=name)
    return await store.seek(topic, partition, when)


async def tail(ask: Ask) -> Response:
    """Server-sent events, from the end on or from ``from``; ``Last-Event-ID`` goes on there."""
    name = await _known(ask, "read")
    came = ask.request.headers.get("last-event-id", "")
    partitions = await _partitions(ask, name, read_places(came))
    where = ask.query("where")
    wanted = None if where is None else compile_where(where)
    limit = ask.number("limit", 0, 0, 1_000_000)
    start = ask.query("from", "latest") or "latest"
    after = read_mark(came, partitions)
    places = {}
    for number in partitions:  # one that the mark does not name is younger than it
        text = str(after[number] + 1) if number in after else "earliest" if after else start
        places[number] = await _offset(ask, name, number, text)
    if ask.request.method == "HEAD":  # nothing of it is sent, and it would have no end
        return Response(media_type=_STREAM)
    return StreamingResponse(follow(ask, name, places, wanted, limit), media_type=_STREAM)


# -- groups ----------------------------------------------------------------------------------------


class Seek(msgspec.Struct, forbid_unknown_fields=True):
    to: str | Annotated[int, Meta(ge=0, le=2**62)]


async def _group(ask: Ask, key: GroupKey) -> dict[str, Any]:
    store = ask.hub.bus.store
    first, end = await store.bounds(key.topic, key.partition)

    def look(group: Group) -> dict[str, Any]:
        return {
            "topic": key.topic,
            "partition": key.partition,
            "group": key.group,
            "lastCommitted": group.floor,
            "lag": group.lag(end, first),
            "inflight": len(group.leases),
            "waiting": len(group.waiting),
            "paused": group.paused,
            "policy": changed(group.options),
        }

    return await store.update(key, look)


async def list_groups(ask: Ask) -> Response:
    every = ask.flag("all")
    keys = [
        key
        for key in await ask.hub.bus.store.groups()
        if ask.hub.allows(ask.who, "read", key.topic) and (every or not keeps_books(key))
    ]
    return reply({"groups": [await _group(ask, key) for key in keys]})


async def get_group(ask: Ask) -> Response:
    keys = await _keys(ask, "read")
    return reply({"partitions": [await _group(ask, key) for key in keys]})


async def _keys(ask: Ask, action: Any) -> Sequence[GroupKey]:
    topic, group = check_topic(ask.path("topic")), check_group(ask.path("group"))
    ask.require(action, topic, group)
    store = ask.hub.bus.store
    keys = [k for k in await store.groups() if (k.topic, k.group) == (topic, group)]
    if not keys:
        raise NotFound(f"there is no group {group} on {topic}", group=group)
    return keys


async def seek_group(ask: Ask) -> Response:
    asked: Seek = await ask.json(Seek)
    keys = await _keys(ask, "admin")
    to = str(asked.to)
    floors = [await _offset(ask, key.topic, key.partition, to, "to") - 1 for key in keys]
    for key, floor in zip(keys, floors, strict=True):
        await ask.hub.bus.store.update(key, lambda group, floor=floor: group.seek(floor))  # type: ignore[misc]
        ask.hub.bus.store.bell.ring(key.topic)
    return reply({"partitions": [await _group(ask, key) for key in keys]})


async def pause_group(ask: Ask) -> Response:
    return await _pause(ask, True)


async def resume_group(ask: Ask) -> Response:
    return await _pause(ask, False)


async def _pause(ask: Ask, on: bool) -> Response:
    keys = await _keys(ask, "admin")
    for key in keys:
        await ask.hub.bus.store.update(key, lambda group: group.pause(on))
        ask.hub.bus.store.bell.ring(key.topic)
    return reply({"partitions": [await _group(ask, key) for key in keys]})


async def delete_group(ask: Ask) -> Response:
    for key in await _keys(ask, "admin"):
        await ask.hub.bus.store.update(key, None)
    return Response(status_code=204)


# -- dead letters ----------------------------------------------------------------------------------


class Choice(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    group: str | None = None
    offsets: list[int] | None = None
    where: str | None = None
    dry_run: bool = False
    max_redrives: Annotated[int, Meta(ge=0, le=1000)] = 3


async def list_dead(ask: Ask) -> Response:
    name = check_topic(ask.path("topic"))
    ask.require("read", dead_topic(name))
    found, following = await page_of(
        await _desk(ask, name),
        group=ask.query("group"),
        closed=ask.flag("closed"),
        start=ask.number("from", 0, 0, 2**62),
        limit=ask.number("limit", 100, 1, READ_MAX),
    )
    return reply({"letters": found, "next": following})


async def redrive(ask: Ask) -> Response:
    desk, asked = await _choice(ask)
    done = [
        {"offset": one.letter.offset, "origin": one.letter.origin, "refused": one.refused or None}
        async for one in desk.redrive(
            group=asked.group,
            offsets=None if asked.offsets is None else set(asked.offsets),
            where=asked.where,
            dry_run=asked.dry_run,
            max_redrives=asked.max_redrives,
        )
    ]
    return reply({"redriven": done})


async def drop_dead(ask: Ask) -> Response:
    desk, asked = await _choice(ask)
    done = [
        letter.offset
        async for letter in desk.drop(
            group=asked.group,
            offsets=None if asked.offsets is None else set(asked.offsets),
            where=asked.where,
            dry_run=asked.dry_run,
        )
    ]
    return reply({"dropped": done})


async def _desk(ask: Ask, name: str) -> Desk:
    if not {name, dead_topic(name)} & (await ask.hub.bus.topics()).keys():
        raise NotFound(f"there is no topic {name}", topic=name)
    return ask.hub.bus.dead_letters(name)


async def _choice(ask: Ask) -> tuple[Desk, Choice]:
    asked: Choice = await ask.json(Choice)
    name = check_topic(ask.path("topic"))
    ask.require("admin", name)
    return await _desk(ask, name), asked


# -- schemas ---------------------------------------------------------------------------------------


class NewSchema(msgspec.Struct, forbid_unknown_fields=True):
    schema: dict[str, Any] | bool
    compatibility: str | None = None


async def list_schemas(ask: Ask) -> Response:
    registry = ask.hub.registry
    names = [name for name in registry.topics() if ask.hub.allows(ask.who, "read", name)]
    return reply({"schemas": [registry.current(name) for name in names]})


async def get_schema(ask: Ask) -> Response:
    name = check_topic(ask.path("topic"))
    ask.require("read", name)
    return reply(ask.hub.registry.current(name))


async def schema_versions(ask: Ask) -> Response:
    name = check_topic(ask.path("topic"))
    ask.require("read", name)
    return reply({"versions": ask.hub.registry.versions(name)})


async def put_schema(ask: Ask) -> Response:
    asked: NewSchema = await ask.json(NewSchema)
    name = check_topic(ask.path("topic"))
    ask.require("admin", name)
    rule: Any = asked.compatibility  # which is looked at there
    return reply(await ask.hub.registry.add(name, asked.schema, rule))


async def delete_schema(ask: Ask) -> Response:
    name = check_topic(ask.path("topic"))
    ask.require("admin", name)
    await ask.hub.registry.remove(name)
    return Response(status_code=204)


# -- the broker itself -----------------------------------------------------------------------------


async def stats(ask: Ask) -> Response:
    ask.require("read", "system.metrics")
    hub = ask.hub
    return reply(
        {
            "since": hub.since,
            "counters": hub.counts.totals(),
            "gauges": hub.gauges(),
            "byTopic": {topic: dict(found) for topic, found in hub.counts.by_topic.items()},
            "health": await hub.bus.health(),
        }
    )


async def metrics(ask: Ask) -> Response:
    ask.require("read", "system.metrics")
    text, kind = await exposition.render(ask.hub)
    return Response(text, media_type=kind)


async def healthz(ask: Ask) -> Response:
    """Whether the process is alive at all."""
    del ask
    return reply({"ok": True})


async def readyz(ask: Ask) -> Response:
    """Whether it can do its work: it is not closing, and the bus is well."""
    health = await ask.hub.bus.health()
    ready = ask.hub.is_open and bool(health["ok"])
    return reply({"ok": ready, **({} if ready else {"health": health})}, 200 if ready else 503)
