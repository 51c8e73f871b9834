"""What can be asked for over HTTP."""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response, StreamingResponse

from trunkline.broker import prometheus
from trunkline.broker.cursors import read_mark, read_places
from trunkline.broker.dlq_pages import page_of
from trunkline.broker.exposition import MEDIA_TYPE
from trunkline.broker.http import Ask, decoded, reply
from trunkline.broker.listing import place_of, show_group, show_topic
from trunkline.broker.spelling import event_row, letter_row, with_aliases
from trunkline.broker.tail import follow
from trunkline.broker.topic_rules import Attempts, Config, Milliseconds
from trunkline.bus.groups import edit_group, find_group
from trunkline.codec import check_value, decode_payload
from trunkline.delivery.deadletters import Desk, is_hidden
from trunkline.errors import (
    Conflict,
    Denied,
    Invalid,
    InvalidEvent,
    InvalidOption,
    NotFound,
    OutOfRange,
    TrunklineError,
)
from trunkline.event import Event, Record
from trunkline.filters import read_time
from trunkline.filters.where import compile_where
from trunkline.filters.work import Share
from trunkline.names import GroupKey, check_group, check_topic, dead_topic
from trunkline.options import TopicOptions, changed, make
from trunkline.wire import cloudevents
from trunkline.wire.envelope import DIGEST, check_digest, fields_of

READ_MAX = 1000
PAGE_MAX = 1000
_STREAM = "text/event-stream"
_BATCH_MAX = 10_000
_KEY_CHARS = 200
_STATE_CHARS = 512  # longer ones need not be passed on
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


# -- topics ----------------------------------------------------------------------------------------


class NewTopic(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    partitions: Annotated[int, Meta(ge=1, le=1024)] | None = None
    retention_ms: Annotated[int, Meta(ge=0, le=10**15)] | None = None
    max_attempts: Attempts | None = None
    ack_timeout_ms: Milliseconds | None = None
    publish_acl: list[str] | None = None
    subscribe_acl: list[str] | None = None
    allow: list[str] | None = None  # agents that may publish: another form of publish_acl
    deny: list[str] | None = None
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
    publishers = _publishers(asked)
    lists = [one for one in (publishers, asked.subscribe_acl) if one is not None]
    if lists and not ask.hub.rights.is_on:
        raise Conflict(
            "this broker has no tokens, so lists of agents would let every client pass",
            code="open_broker",
            hint="make a token with 'trunkline token create', or start it with --auth",
        )
    # First: a client that waits for the topic must not find it without its rules.
    await configs.set(
        Config(
            name,
            asked.max_attempts or before.max_attempts,
            asked.ack_timeout_ms or before.ack_timeout_ms,
            before.publish_acl if publishers is None else publishers,
            before.subscribe_acl if asked.subscribe_acl is None else asked.subscribe_acl,
            before.content_type,
        )
    )
    try:
        await bus.define(name, **values)
    except TrunklineError:
        await configs.set(before)
        raise
    return reply(await show_topic(ask.hub.bus, ask.hub.configs, name), 201 if have is None else 200)


def _publishers(asked: NewTopic) -> list[str] | None:
    """``publish_acl``, or the members ``allow`` and ``deny`` in its form."""
    if asked.allow is None and asked.deny is None:
        return asked.publish_acl
    if asked.publish_acl is not None:
        raise InvalidOption("publish_acl, or allow and deny, not both", name="publish_acl")
    allowed = ["*"] if asked.allow is None else asked.allow
    return [*allowed, *(f"!{agent}" for agent in asked.deny or ())]


async def list_topics(ask: Ask) -> Response:
    rows = await ask.hub.topics_shown.get()
    return _page(ask, "topics", rows, _may_see, "topic")


def _may_see(ask: Ask, row: dict[str, Any]) -> bool:
    return ask.hub.allows(ask.who, "read", row["topic"])


def _page(
    ask: Ask,
    name: str,
    rows: list[dict[str, Any]],
    is_shown: Callable[[Ask, dict[str, Any]], bool],
    *by: str,
) -> Response:
    """A page of those rows that are shown, and where the next one begins. The rows are sorted by
    their members ``by``; only those of the page are looked at.
    """
    limit = ask.number("limit", PAGE_MAX, 1, PAGE_MAX)
    place = partial(place_of, by=by)
    after = ask.query("after")
    start = 0 if after is None else bisect_right(rows, after, key=place)
    shown = (row for row in islice(rows, start, None) if is_shown(ask, row))
    page = list(islice(shown, limit))
    more = next(shown, None) is not None
    return reply({name: page, "next": place(page[-1]) if more else None})


async def get_topic(ask: Ask) -> Response:
    return reply(await show_topic(ask.hub.bus, ask.hub.configs, await known_topic(ask, "read")))


async def delete_topic(ask: Ask) -> Response:
    name = await known_topic(ask, "admin")
    ask.hub.refuse_reserved(ask.who, "admin", name)
    await ask.hub.bus.store.define(name, None)
    await ask.hub.configs.set(Config(name))
    return Response(status_code=204)


async def known_topic(ask: Ask, action: Any) -> str:
    name = check_topic(ask.path("topic"))
    ask.require(action, name)
    if name not in await ask.hub.bus.topics():
        raise NotFound(f"there is no topic {name}", topic=name)
    return name


async def offsets(ask: Ask) -> Response:
    name = await known_topic(ask, "read")
    bus = ask.hub.bus
    options = (await bus.topics()).get(name, TopicOptions())
    groups = [key for key in await bus.store.groups() if key.topic == name]
    found = []
    for number in range(options.partitions):
        first, end = await bus.store.bounds(name, number)
        mine = [await show_group(ask.hub.bus, key) for key in groups if key.partition == number]
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
        check_value(event.payload, ask.hub.bus.store.limits.depth)
    events = _marked(ask, events)
    receipts = await ask.hub.publish(ask.who, name, events) if events else []
    if kind == cloudevents.BATCH:
        return reply({"receipts": receipts}, 201)
    return reply(receipts[0], 201)


def _marked(ask: Ask, events: list[Event]) -> list[Event]:
    """Events with what the request's headers say of them. What an event says itself counts more."""
    headers = ask.request.headers
    once = headers.get("idempotency-key")
    if once is not None:
        # The header is a quoted string in the IETF's draft; most clients send it bare.
        once = once[1:-1] if len(once) > 2 and once[0] == once[-1] == '"' else once
        if not once or len(once) > _KEY_CHARS:
            raise InvalidOption(
                f"Idempotency-Key has 1 to {_KEY_CHARS} characters", name="Idempotency-Key"
            )
    trace = headers.get("traceparent", "")
    if _TRACEPARENT.fullmatch(trace) is None:  # a broken one is to be ignored, says the W3C
        trace = ""
    state = headers.get("tracestate", "") if trace else ""
    if once is None and not trace:
        return events
    found = []
    for index, event in enumerate(events):
        changes: dict[str, Any] = {}
        if once is not None and event.idem_key is None:
            changes["idem_key"] = once if len(events) == 1 else f"{once}/{index}"
        if trace and event.trace is None:
            changes["trace"] = trace
            if state and "tracestate" not in event.headers and len(state) <= _STATE_CHARS:
                changes["headers"] = {**event.headers, "tracestate": state}
        found.append(msgspec.structs.replace(event, **changes) if changes else event)
    return found


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
    name = await known_topic(ask, "read")
    limit = ask.number("limit", 100, 1, READ_MAX)
    where = ask.query("where")
    wanted = None if where is None else compile_where(where)
    start = ask.query("from", "earliest") or "earliest"
    begun = read_places(start)
    partitions = await partitions_of(ask, name, begun)
    places = {
        number: await offset_of(
            ask, name, number, begun.get(number, "earliest" if begun else start)
        )
        for number in partitions
    }
    batch = cloudevents.BATCH in ask.request.headers.get("accept", "")
    form: Any = cloudevents.to_cloudevent if batch else event_row
    rows: list[msgspec.Raw] = []
    looked = size = 0
    share = Share()
    async for record in _by_time(ask, name, places):
        looked += 1
        if share.is_spent():  # others have their turn
            await asyncio.sleep(0)
        if (wanted is None or wanted(record.event)) and ask.hub.may_read(ask.who, record):
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


async def partitions_of(ask: Ask, topic: str, named: Iterable[int] = ()) -> range:
    """The one that is asked for, or all. Those that are ``named`` besides must be there, too."""
    count = (await ask.hub.bus.topics())[topic].partitions
    number = ask.number("partition", 0, 0, 1023)
    for one in (number, *named):
        if one >= count:
            raise OutOfRange(f"there is no partition {one} in {topic}")
    return range(count) if ask.query("partition") is None else range(number, number + 1)


async def read_event(ask: Ask) -> Response:
    """One record; ``form`` says how, else ``Accept``."""
    name = await known_topic(ask, "read")
    partition, offset = int(ask.path("partition")), int(ask.path("offset"))
    if partition > 1023 or offset > 2**63 - 1:
        raise NotFound(f"there is no record {partition}/{offset} in {name}")
    found = await ask.hub.bus.store.read(name, partition, offset, 1)
    if not found or found[0].offset != offset:
        raise OutOfRange(f"there is no record {partition}/{offset} in {name}")
    if not ask.hub.may_read(ask.who, found[0]):
        raise Denied("access denied", actor=ask.who.agent, action="read", topic=name)
    is_asked = cloudevents.STRUCTURED in ask.request.headers.get("accept", "")
    form = ask.query("form", "cloudevent" if is_asked else "envelope")
    if form == "binary":
        headers, data = cloudevents.to_binary(found[0])
        return Response(data, 200, headers)
    if form == "cloudevent":
        return reply(cloudevents.to_cloudevent(found[0]), media=cloudevents.STRUCTURED)
    if form != "envelope":
        raise InvalidOption("form is envelope, cloudevent or binary", name="form")
    return reply(event_row(found[0]))


async def offset_of(ask: Ask, topic: str, partition: int, text: str, name: str = "from") -> int:
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
    name = check_topic(ask.path("topic"))
    ask.require("read", name)
    came = ask.request.headers.get("last-event-id", "")
    if name in await ask.hub.bus.topics():
        partitions = await partitions_of(ask, name, read_places(came))
    else:  # a page that asks too early is told of what comes: EventSource does not ask again
        partitions = range(ask.number("partition", 0, 0, 1023) + 1)[-1:]
    where = ask.query("where")
    wanted = None if where is None else compile_where(where)
    limit = ask.number("limit", 0, 0, 1_000_000)
    start = ask.query("from", "latest") or "latest"
    after = read_mark(came, partitions)
    places = {}
    for number in partitions:  # one that the mark does not name is younger than it
        text = str(after[number] + 1) if number in after else "earliest" if after else start
        places[number] = await offset_of(ask, name, number, text)
    if ask.request.method == "HEAD":  # nothing of it is sent, and it would have no end
        return Response(media_type=_STREAM)
    return StreamingResponse(follow(ask, name, places, wanted, limit), media_type=_STREAM)


# -- groups ----------------------------------------------------------------------------------------


async def list_groups(ask: Ask) -> Response:
    every = ask.flag("all")

    def is_shown(ask: Ask, row: dict[str, Any]) -> bool:
        key = GroupKey(row["topic"], row["partition"], row["group"])
        return (every or not is_hidden(key)) and _may_see(ask, row)

    rows = await ask.hub.groups_shown.get()
    return _page(ask, "groups", rows, is_shown, "topic", "group", "partition")


async def get_group(ask: Ask) -> Response:
    keys = await keys_of(ask, "read")
    return reply({"partitions": [await show_group(ask.hub.bus, key) for key in keys]})


async def keys_of(ask: Ask, action: Any) -> Sequence[GroupKey]:
    topic, group = check_topic(ask.path("topic")), check_group(ask.path("group"))
    ask.require(action, topic, group)
    return await find_group(ask.hub.bus.store, topic, group)


class NewPolicy(msgspec.Struct, forbid_unknown_fields=True):
    policy: dict[str, Any]


async def edit_policy(ask: Ask) -> Response:
    asked: NewPolicy = await ask.json(NewPolicy)
    keys = await keys_of(ask, "admin")
    await edit_group(ask.hub.bus.store, keys[0].topic, keys[0].group, asked.policy)
    return reply({"partitions": [await show_group(ask.hub.bus, key) for key in keys]})


async def pause_group(ask: Ask) -> Response:
    return await _pause(ask, True)


async def resume_group(ask: Ask) -> Response:
    return await _pause(ask, False)


async def _pause(ask: Ask, on: bool) -> Response:
    keys = await keys_of(ask, "admin")
    for key in keys:
        await ask.hub.bus.store.update(key, lambda group: group.pause(on))
        ask.hub.bus.store.bell.ring(key.topic)
    return reply({"partitions": [await show_group(ask.hub.bus, key) for key in keys]})


async def delete_group(ask: Ask) -> Response:
    for key in await keys_of(ask, "admin"):
        await ask.hub.bus.store.update(key, None)
    return Response(status_code=204)


# -- dead letters ----------------------------------------------------------------------------------


async def list_dead(ask: Ask) -> Response:
    name = check_topic(ask.path("topic"))
    ask.require("read", dead_topic(name))
    found, following = await page_of(
        await desk_of(ask, name),
        group=ask.query("group"),
        closed=ask.flag("closed"),
        start=ask.number("from", 0, 0, 2**62),
        limit=ask.number("limit", 100, 1, READ_MAX),
        may_read=partial(ask.hub.may_read, ask.who),
        form=letter_row,
    )
    return reply({"letters": found, "next": following})


async def desk_of(ask: Ask, name: str) -> Desk:
    if not {name, dead_topic(name)} & (await ask.hub.bus.topics()).keys():
        raise NotFound(f"there is no topic {name}", topic=name)
    return ask.hub.bus.dead_letters(name)


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
        with_aliases(
            {
                "since": hub.since,
                "counters": hub.counts.totals(),
                "gauges": hub.gauges(),
                "by_topic": {topic: dict(found) for topic, found in hub.counts.by_topic.items()},
                "health": await hub.bus.health(),
            }
        )
    )


async def metrics(ask: Ask) -> Response:
    ask.require("read", "system.metrics")
    text = await prometheus.render(ask.hub, await ask.hub.figures_shown.get())
    return Response(text, media_type=MEDIA_TYPE)


async def healthz(ask: Ask) -> Response:
    """Whether the process is alive at all."""
    del ask
    return reply({"ok": True})


async def readyz(ask: Ask) -> Response:
    """Whether it can do its work: it is not closing, and the bus is well."""
    health = await ask.hub.bus.health()
    ready = ask.hub.is_open and bool(health["ok"])
    return reply({"ok": ready, **({} if ready else {"health": health})}, 200 if ready else 503)
