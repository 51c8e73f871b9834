"""A bus behind a broker: the same calls over a WebSocket.

A publish returns once the broker has it durable. When the connection breaks in between, the event
is sent again on the next one, and the broker looks for it in the log before it keeps it: there is
one record, whatever broke when. Subscriptions come back by themselves; what was in hand then is
delivered again, as after any crash.

Both are bound: publishes that wait for an answer, and deliveries in hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import ssl
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Unpack

import msgspec

from trunkline.access import bare_token
from trunkline.bus import Delivery, GroupInfo, Health, Start, Where
from trunkline.bus.app import AWAY_S, CLOSED, BusBase, OnPublish
from trunkline.bus.groups import check_policy_fields, check_start
from trunkline.bus.link import AGAIN, Link
from trunkline.bus.remote_subscription import RemoteDesk, RemoteSubscription
from trunkline.check import check_count
from trunkline.clock import Clock, SystemClock
from trunkline.codec import encode_batch, encode_whole
from trunkline.errors import InvalidFilter, InvalidOption, TrunklineError
from trunkline.event import Bounds, Event, EventFields, Receipt, Record
from trunkline.explain import spelt
from trunkline.features import Features
from trunkline.filters import check_filter
from trunkline.group.members import MemberInfo
from trunkline.names import check_group, check_pattern, check_topic
from trunkline.options import (
    BusOptions,
    ClientOptions,
    Flow,
    GroupFields,
    GroupOptions,
    Limits,
    OnConflict,
    TopicFields,
    TopicOptions,
    changed,
    check_on_conflict,
    check_policy,
    make,
)
from trunkline.wire.codes import error_of
from trunkline.wire.envelope import epoch_ms
from trunkline.wire.frames import Failure, From, Message, Published, Revoked, Subscribe

_encode = msgspec.json.Encoder().encode


FEATURES = Features(ledgers=False, handles=False)


class RemoteBus(BusBase):
    features = FEATURES

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Clock | None = None,
        middleware: Sequence[object] = (),
        limits: Limits = Limits(),
        on_publish: OnPublish | None = None,
        on_message: OnPublish | None = None,
        **options: Any,
    ) -> None:
        mine = {name: options.pop(name) for name in BusOptions.__struct_fields__ if name in options}
        clock = clock or SystemClock()
        chosen = make(BusOptions, mine)
        if chosen.audit:
            hint = "trunkline serve --audit"
            raise InvalidOption("audit is told by the broker, not here", name="audit", hint=hint)
        if tls is not None and not isinstance(tls, ssl.SSLContext):
            raise InvalidOption(f"tls is an ssl.SSLContext, not {spelt(tls)}", name="tls")
        super().__init__(chosen, clock, limits, middleware, on_publish, on_message)
        self.link = Link(
            url,
            self,
            token=bare_token(token or os.environ.get("TRUNKLINE_TOKEN")) or None,
            tls=tls,
            options=make(ClientOptions, options),
        )
        self._names = itertools.count(1)
        self.streams: dict[str, RemoteSubscription] = {}
        self.heard_at = 0.0  # when the message came whose frames are taken in now

    @property
    def is_closed(self) -> bool:
        return self._life is CLOSED

    # -- publishing ----------------------------------------------------------------------------

    async def publish(
        self, topic: str | Event, payload: Any = None, **fields: Unpack[EventFields]
    ) -> Receipt:
        if isinstance(topic, Event):
            event = self._whole(topic, payload, {**fields})
        elif fields:
            event = self._event(topic, payload, {**fields})
        else:
            event = Event(topic=check_topic(topic), payload=payload, ts=self.clock.now())
        if self._plain and self._life is not CLOSED:
            if not self.link.room.is_set():
                await self.link.room.wait()
            return _receipt(event, await self._ask(event))
        return (await self._send([event]))[0]

    async def publish_many(
        self, topic: str, payloads: Sequence[Any], **fields: Unpack[EventFields]
    ) -> list[Receipt]:
        events = self._events(topic, payloads, {**fields})
        return await self._send(events) if events else []

    async def publish_again(self, topic: str, events: Sequence[Event]) -> list[Receipt]:
        check_topic(topic)
        return await self._batch(list(events), again=True)

    async def _append(self, events: list[Event]) -> list[Receipt]:
        if len(events) == 1:
            await self.link.room.wait()
            return [_receipt(events[0], await self._ask(events[0]))]
        return await self._batch(events) if events else []

    def _ask(self, event: Event) -> asyncio.Future[Any]:
        return self.link.publish(event.topic, encode_whole(event, self._limits))

    async def _batch(self, events: list[Event], *, again: bool = False) -> list[Receipt]:
        bodies = encode_batch(events, self._limits)
        link = self.link
        await link.room.wait()
        corr = link.next_corr()
        first = AGAIN if again else b'{"type":"PUBLISH",'
        told: Published = await link.ask(
            corr, b'%b"corr":%d,"events":%b}' % (first, corr, bodies), repeat=True
        )
        topic, durability = told.topic, told.durability
        if told.receipts is None:
            return [
                Receipt(topic, told.partition, offset, event.id, False, durability)
                for offset, event in enumerate(events, told.offset)
            ]
        ids = told.ids or [event.id for event in events]
        return [
            Receipt(topic, partition, offset, name, duplicate, durability)
            for name, (partition, offset, duplicate) in zip(ids, told.receipts, strict=True)
        ]

    # -- subscribing ---------------------------------------------------------------------------

    def subscribe(
        self,
        topic: str,
        *,
        group: str,
        start: Start = "earliest",
        policy: GroupOptions | None = None,
        on_conflict: OnConflict = "raise",
        max_inflight: int | None = None,
        where: Where = None,
    ) -> RemoteSubscription:
        """As of any bus. A ``where`` in text is applied by the broker; a function is applied here,
        and what it does not want is settled for the whole group.
        """
        check_pattern(topic)
        check_group(group)
        flow = Flow() if max_inflight is None else Flow(max_inflight=max_inflight)
        check_filter(where)
        if policy is not None:
            check_policy(policy)
        check_on_conflict(on_conflict)
        match = where if callable(where) else None
        if isinstance(where, str):
            _check_where(where)
        frame = Subscribe(
            topic=topic,
            group=group,
            start=_from(start),
            max_inflight=flow.max_inflight,
            where=where if isinstance(where, str) else None,
            ack="each",
            form="event",
            batch=True,
            runs=True,
            sub=f"s{next(self._names)}",
            policy=None if policy is None else msgspec.to_builtins(policy),
            on_conflict=on_conflict,
        )
        return RemoteSubscription(self, frame, match)

    async def start(self) -> None:
        """Connect, and let the handlers begin. Entering the bus does it."""
        if self._life is not CLOSED:
            self.link.start()
        await super().start()

    def _streams(self) -> Iterable[RemoteSubscription]:
        return self.streams.values()

    async def _unsettled(self) -> int:
        groups = [(s.frame.topic, s.frame.group) for s in self.streams.values()]
        return int(await self.link.call("lag", groups=groups)) if groups else 0

    async def policy_of(self, delivery: Delivery) -> GroupOptions:
        place = {"topic": delivery.topic, "partition": delivery.partition, "group": delivery.group}
        found = await self.link.call("policy", **place)
        known = GroupOptions.__struct_fields__  # that of a newer broker may have more to it
        return make(GroupOptions, {name: found[name] for name in known if name in found})

    # -- looking -------------------------------------------------------------------------------

    async def bounds(self, topic: str, partition: int = 0) -> Bounds:
        return Bounds(*await self.link.call("bounds", topic=topic, partition=partition))

    async def _read(self, topic: str, partition: int, start: int, limit: int) -> list[Record]:
        found = await self.link.call(
            "read", topic=topic, start=start, limit=limit, partition=partition
        )
        return msgspec.convert(found, list[Record])

    async def topics(self) -> dict[str, TopicOptions]:
        return msgspec.convert(await self.link.call("topics"), dict[str, TopicOptions])

    async def define(self, topic: str, **options: Unpack[TopicFields]) -> None:
        wanted = changed(make(TopicOptions, {**options}))
        await self.link.call("define", topic=check_topic(topic), options=wanted)

    async def remove(self, topic: str) -> None:
        await self.link.call("remove", topic=check_topic(topic))

    async def trim(self, topic: str, before: int, *, partition: int = 0) -> Bounds:
        check_count("before", before)
        place = {"topic": check_topic(topic), "partition": partition}
        return Bounds(*await self.link.call("trim", **place, before=before))

    async def groups(self, topic: str | None = None, group: str | None = None) -> list[GroupInfo]:
        return _groups(await self.link.call("groups", topic=topic, group=group))

    async def members(self, topic: str | None = None, group: str | None = None) -> list[MemberInfo]:
        found = await self.link.call("members", topic=topic, group=group)
        return msgspec.convert(found, list[MemberInfo])

    async def lag(self, topic: str, group: str) -> int:
        check_pattern(topic)
        check_group(group)
        return int(await self.link.call("lag", groups=[(topic, group)]))

    async def seek(self, topic: str, group: str, to: Start) -> list[GroupInfo]:
        check_start(to, "to")
        return await self._change("seek", topic, group, to=msgspec.to_builtins(_from(to)))

    async def pause(self, topic: str, group: str) -> list[GroupInfo]:
        return await self._change("pause", topic, group)

    async def resume(self, topic: str, group: str) -> list[GroupInfo]:
        return await self._change("resume", topic, group)

    async def edit(self, topic: str, group: str, **policy: Unpack[GroupFields]) -> list[GroupInfo]:
        check_policy_fields({**policy})
        return await self._change("edit", topic, group, policy=policy)

    async def _change(self, op: str, topic: str, group: str, **more: Any) -> list[GroupInfo]:
        check_topic(topic)
        check_group(group)
        return _groups(await self.link.call(op, topic=topic, group=group, **more))

    async def forget(self, topic: str, group: str) -> None:
        await self.link.call("forget", topic=check_topic(topic), group=check_group(group))

    def dead_letters(self, topic: str) -> RemoteDesk:
        return RemoteDesk(self, check_topic(topic))

    async def health(self) -> Health:
        """That of the broker, and of the handlers here."""
        if not self.link.is_up:
            return {"ok": False, "connected": False}
        found: Health = await self.link.call("health")
        failed = [str(error) for error in self._failed()]
        return {
            **found,
            "ok": found["ok"] and not failed,
            "failed": [*found.get("failed", ()), *failed],
            "connected": True,
        }

    # -- as the link sees it -------------------------------------------------------------------

    def heard(self) -> None:
        self.heard_at = self.clock.monotonic()

    def came(self, message: Message) -> None:
        subscription = self.streams.get(message.sub or "")
        if subscription is not None and message.event is not None:
            subscription.put(message, message.event)

    def revoked(self, frame: Revoked) -> None:
        for subscription in self.streams.values():
            subscription.revoke(frame)

    def failed(self, failure: Failure) -> None:
        subscription = self.streams.get(failure.sub or "")
        if subscription is not None:
            subscription.fail(error_of(failure))

    def up(self) -> None:
        for subscription in list(self.streams.values()):
            subscription.resume()

    def down(self) -> None:
        for subscription in self.streams.values():
            subscription.interrupt()

    def refused(self, error: TrunklineError) -> None:
        for subscription in self.streams.values():
            subscription.fail(error)

    # -- life ----------------------------------------------------------------------------------

    async def close(self) -> None:
        if self._life is CLOSED:
            return
        try:
            await self.stop()
            limit = AWAY_S if self._is_away() else None
            with contextlib.suppress(TimeoutError):  # what was fired is told by flush, below
                async with asyncio.timeout(limit):
                    await self._end()
        finally:
            self._life = CLOSED
            for subscription in list(self.streams.values()):
                await subscription.close()
            await self.link.close()
        await self.flush()

    def _is_away(self) -> bool:
        return self.link.is_lost


def _groups(found: Any) -> list[GroupInfo]:
    """A newer broker may say more of a group and of its policy: that is passed over."""
    known = GroupOptions.__struct_fields__
    for one in found:
        policy = one["policy"]
        one["policy"] = {name: policy[name] for name in known if name in policy}
    return msgspec.convert(found, list[GroupInfo])


def _receipt(event: Event, told: Published | tuple[int, int, str]) -> Receipt:
    if isinstance(told, tuple):  # it was answered together with others
        partition, offset, durability = told
        return Receipt(event.topic, partition, offset, event.id, False, durability)
    name = told.id if told.duplicate and told.id else event.id
    return Receipt(event.topic, told.partition, told.offset, name, told.duplicate, told.durability)


def _from(start: Start) -> From:
    check_start(start)
    if isinstance(start, datetime):
        return From("timestamp", epoch_ms(start))
    if isinstance(start, int):
        return From("offset", max(0, start))
    return From("earliest" if start == "earliest" else "latest")


def _check_where(text: str) -> None:
    """Refuse a bad filter here, where the library that reads it is installed."""
    from trunkline.filters.where import compile_where

    try:
        compile_where(text)
    except InvalidFilter as error:
        if "needs" not in error.fields:
            raise
