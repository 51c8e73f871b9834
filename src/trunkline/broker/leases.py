"""Consumption over HTTP: records are fetched with a lease and settled by its handle.

The rules are those of ``trunkline.bus.handles``: a handle is text, it outlives the connection, and
a lease lasts until it is settled or its time runs out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from trunkline.broker.http import Ask, reply
from trunkline.broker.spelling import event_row
from trunkline.bus import Start
from trunkline.bus.handles import (
    HandleState,
    HeldRecord,
    LeaseHandle,
    Taker,
    ack,
    extend,
    nack,
    term,
)
from trunkline.delivery.observers import Observers
from trunkline.errors import InvalidOption, NotFound
from trunkline.filters import read_time
from trunkline.names import SYSTEM_PREFIX, check_group, check_topic

LEASE_MAX_S = 12 * 3600.0
WAIT_MAX_S = 60.0
FETCH_MAX = 1000

Lease = Annotated[float, Meta(gt=0, le=LEASE_MAX_S)]
Handles = Annotated[list[str], Meta(min_length=1, max_length=FETCH_MAX)]
Verb = Callable[[LeaseHandle], Awaitable[dict[str, Any]]]


class FetchLeases(msgspec.Struct, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=FETCH_MAX)] = 1
    lease_s: Lease = 30.0
    wait_s: Annotated[float, Meta(ge=0, le=WAIT_MAX_S)] = 0.0
    start: str | Annotated[int, Meta(ge=0, le=2**62)] = msgspec.field(
        default="earliest", name="from"
    )
    where: str | None = None


async def fetch(ask: Ask) -> Response:
    """Up to ``limit`` records of a group, each leased to a handle. Without any it waits for the
    first one. A topic that does not exist yet has none.
    """
    asked: FetchLeases = await ask.json(FetchLeases)
    topic, group = check_topic(ask.path("topic")), check_group(ask.path("group"))
    ask.require("subscribe", topic, group)
    hub = ask.hub
    taker = Taker(
        hub.bus.store,
        topic,
        group,
        lease_s=asked.lease_s,
        start=_start(asked.start),
        where=asked.where,
        default=hub.policy,
        observers=_observers(ask),
    )
    found = await _take(ask, taker, asked)
    if not hub.allows(ask.who, "subscribe", topic, group):  # the wait may have been long
        await taker.give_back(found)
        ask.require("subscribe", topic, group)
    allowed = []
    for one in found:
        if hub.may_read(ask.who, one.record, group):
            allowed.append(one)
        else:  # trying again would not make it allowed
            await term(hub.bus.store, one.handle, "the policy does not allow it", _observers(ask))
    if allowed:
        hub.counts.sent(topic, len(allowed), sum(one.attempt > 1 for one in allowed))
    until = hub.clock.now() + timedelta(seconds=asked.lease_s)
    return reply({"topic": topic, "group": group, "deliveries": [_row(x, until) for x in allowed]})


def _row(held: HeldRecord, until: Any) -> dict[str, Any]:
    return {
        "handle": str(held.handle),
        "attempt": held.attempt,
        "leased_until": until,
        "event": event_row(held.record, held.attempt),
    }


def _observers(ask: Ask) -> Observers:
    return Observers(ask.hub.system)


def _start(text: str | int) -> Start:
    if isinstance(text, int) or text in ("earliest", "latest"):
        return text
    when = read_time(text)
    if when is None:
        raise InvalidOption("from is an offset, earliest, latest or a time", name="from")
    return when


async def _take(ask: Ask, taker: Taker, asked: FetchLeases) -> list[HeldRecord]:
    """What is taken for a client that has gone meanwhile goes back: nobody has its handles."""
    gone = asyncio.ensure_future(_disconnected(ask.request))
    ended = asyncio.ensure_future(ask.hub.ending.wait())
    for one in (gone, ended):
        one.add_done_callback(lambda _: taker.leave())
    try:
        found = await taker.take(asked.limit, asked.wait_s)
    except NotFound:
        return []
    finally:
        is_gone = gone.done()
        for one in (gone, ended):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await one
    if is_gone:
        await taker.give_back(found)
        return []
    return found


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# -- by handle -------------------------------------------------------------------------------------


class AckLeases(msgspec.Struct, forbid_unknown_fields=True):
    handles: Handles


class NackLeases(msgspec.Struct, forbid_unknown_fields=True):
    handles: Handles
    delay_s: Annotated[float, Meta(ge=0, le=366 * 86_400)] | None = None
    reason: str = ""


class ExtendLeases(msgspec.Struct, forbid_unknown_fields=True):
    handles: Handles
    lease_s: Lease = 30.0


class TermLeases(msgspec.Struct, forbid_unknown_fields=True):
    handles: Handles
    reason: str = ""


async def ack_leases(ask: Ask) -> Response:
    asked: AckLeases = await ask.json(AckLeases)

    async def verb(handle: LeaseHandle) -> dict[str, Any]:
        found = await ack(ask.hub.bus.store, handle)
        if found in (HandleState.TAKEN, HandleState.GONE):
            return _lost(found)
        if found is not HandleState.SETTLED:
            _told(ask, "ack", handle)
        return {"ok": True, "state": "acked"}

    return await _each(ask, asked.handles, verb)


async def nack_leases(ask: Ask) -> Response:
    asked: NackLeases = await ask.json(NackLeases)

    async def verb(handle: LeaseHandle) -> dict[str, Any]:
        store, observers = ask.hub.bus.store, _observers(ask)
        done = await nack(store, handle, asked.delay_s, asked.reason, observers)
        if done.standing is not HandleState.HELD:
            return _lost(done.standing)
        _told(ask, "nack", handle, asked.reason)
        if done.dead:
            return {"ok": True, "state": "dead"}
        return {"ok": True, "state": "nacked", "delay_s": round(done.delay_s, 3)}

    return await _each(ask, asked.handles, verb)


async def extend_leases(ask: Ask) -> Response:
    asked: ExtendLeases = await ask.json(ExtendLeases)

    async def verb(handle: LeaseHandle) -> dict[str, Any]:
        found = await extend(ask.hub.bus.store, handle, asked.lease_s)
        if found is not HandleState.HELD:
            return _lost(found)
        until = ask.hub.clock.now() + timedelta(seconds=asked.lease_s)
        return {"ok": True, "state": "held", "leased_until": until}

    return await _each(ask, asked.handles, verb)


async def term_leases(ask: Ask) -> Response:
    asked: TermLeases = await ask.json(TermLeases)

    async def verb(handle: LeaseHandle) -> dict[str, Any]:
        found = await term(ask.hub.bus.store, handle, asked.reason, _observers(ask))
        if found is not HandleState.HELD:
            return _lost(found)
        _told(ask, "term", handle, asked.reason)
        return {"ok": True, "state": "dead"}

    return await _each(ask, asked.handles, verb)


_LOST = {
    HandleState.FREE: "the lease is over, and the record is to be delivered again",
    HandleState.TAKEN: "the lease is over, and another member has the record",
    HandleState.SETTLED: "the record is settled already",
    HandleState.GONE: "the group was moved or removed since, or never gave this handle the record",
}


def _lost(found: HandleState) -> dict[str, Any]:
    return {"ok": False, "state": found.value, "message": _LOST[found]}


def _told(ask: Ask, what: str, handle: LeaseHandle, reason: str = "") -> None:
    ask.hub.counts.finished(handle.topic, handle.group, what, [None])
    if ask.hub.options.audit and not handle.topic.startswith(SYSTEM_PREFIX):
        ask.hub.system.audit(
            what,
            topic=handle.topic,
            partition=handle.partition,
            offset=handle.offset,
            group=handle.group,
            attempt=handle.attempt,
            agent=ask.who.agent,
            reason=reason,
        )


async def _each(ask: Ask, texts: list[str], verb: Verb) -> Response:
    """Every handle is read, and every right asked for, before the first one is used. 409 if a lease
    was lost; the others of the call are settled all the same.
    """
    handles = [LeaseHandle.parse(text) for text in texts]
    for place in {(handle.topic, handle.group) for handle in handles}:
        ask.require("subscribe", *place)
    results = []
    for text, handle in zip(texts, handles, strict=True):
        try:
            done = await verb(handle)
        except NotFound:
            done = _lost(HandleState.GONE)
        results.append({"handle": text, **done})
    lost = [one for one in results if not one["ok"]]
    if not lost:
        return reply({"results": results})
    said = lost[0]["message"]
    return reply({"code": "lease_lost", "message": said, "results": results}, 409)
