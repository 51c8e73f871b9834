"""A bus behind a broker: the same calls over a WebSocket.

A publish returns once the broker has it durable. When the connection breaks in between, the event
is sent again on the next one, and the broker looks for it in the log before it keeps it: there is
one record, whatever broke when. Subscriptions come back by themselves; what was in hand then is
delivered again, as after any crash.

Both are bound: publishes that wait for an answer, and deliveries in hand.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import ssl
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from trunkline.access import bare_token
from trunkline.bus import Delivery, Start
from trunkline.buses.base import BusBase, OnPublish, check_start
from trunkline.buses.link import AGAIN, ClientOptions, Link
from trunkline.buses.remote_stream import RemoteDesk, RemoteSubscription
from trunkline.clock import Clock, SystemClock
from trunkline.errors import (
    InvalidEvent,
    InvalidFilter,
    InvalidOption,
    TrunklineError,
    spelt,
)
from trunkline.event import Event, Receipt, Record, check_value
from trunkline.filters import check_filter
from trunkline.frames import (
    Failure,
    From,
    Message,
    Published,
    Revoked,
    Subscribe,
    epoch_ms,
    error_of,
)
from trunkline.options import (
    BusOptions,
    Flow,
    GroupOptions,
    Limits,
    TopicOptions,
    changed,
    check_policy,
    make,
)
from trunkline.store import Bounds
from trunkline.topics import check_group, check_pattern, check_topic

_encode = msgspec.json.Encoder().encode


class RemoteBus(BusBase):
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

    @property
    def is_closed(self) -> bool:
        return self._closed

    # -- publishing ----------------------------------------------------------------------------

    async def publish(self, topic: str | Event, payload: Any = None, **fields: Any) -> Receipt:
        """Publish one event; returns once the broker has it durable. Fields as of ``Event``, and
        ``delay_s``.
        """
        if isinstance(topic, Event):
            event = self._whole(topic, payload, fields)
        elif fields:
            event = self._event(topic, payload, fields)
        else:
            event = Event(topic=check_topic(topic), payload=payload, ts=self.clock.now())
        if self._plain and not self._closed:
            if not self.link.room.is_set():
                await self.link.room.wait()
            return _receipt(event, await self._ask(event))
        return (await self._send([event]))[0]

    async def publish_many(
        self, topic: str, payloads: Sequence[Any], **fields: Any
    ) -> list[Receipt]:
        """Publish payloads, or whole events, as one batch: all of them are kept or none."""
        events = self._events(topic, payloads, fields)
        return await self._send(events) if events else []

    async def publish_again(self, topic: str, events: Sequence[Event]) -> list[Receipt]:
        """Publish events that may have been published before, by their ids: each is kept once."""
        check_topic(topic)
        return await self._batch(list(events), again=True)

    async def _append(self, events: list[Event]) -> list[Receipt]:
        if len(events) == 1:
            await self.link.room.wait()
            return [_receipt(events[0], await self._ask(events[0]))]
        return await self._batch(events) if events else []

    def _ask(self, event: Event) -> asyncio.Future[Any]:
        return self.link.publish(event.topic, encoded(event, self._limits))

    async def _batch(self, events: list[Event], *, again: bool = False) -> list[Receipt]:
        bodies = encoded_batch(events, self._limits)
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
        max_inflight: int | None = None,
        where: str | Callable[[Event], bool] | None = None,
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
            sub=f"s{next(self._names)}",
            policy=None if policy is None else msgspec.to_builtins(policy),
        )
        return RemoteSubscription(self, frame, match)

    async def start(self) -> None:
        """Connect, and let the handlers begin. Entering the bus does it."""
        if not self._closed:
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

    async def define(self, topic: str, **options: Any) -> None:
        """Set a topic's options; see ``TopicOptions``."""
        wanted = changed(make(TopicOptions, options))
        await self.link.call("define", topic=check_topic(topic), options=wanted)

    def dead_letters(self, topic: str) -> RemoteDesk:
        return RemoteDesk(self, check_topic(topic))

    async def health(self) -> dict[str, Any]:
        """What an operator wants to know at a glance: of the broker, and of the handlers here."""
        if not self.link.is_up:
            return {"ok": False, "connected": False}
        found: dict[str, Any] = await self.link.call("health")
        failed = [str(error) for error in self._failed()]
        return {
            **found,
            "ok": found["ok"] and not failed,
            "failed": found["failed"] + failed,
            "connected": True,
        }

    # -- as the link sees it -------------------------------------------------------------------

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
        if self._closed:
            return
        try:
            await self.stop()
            await self.flush()
        finally:
            self._closed = True
            for subscription in list(self.streams.values()):
                await subscription.close()
            await self.link.close()


def _receipt(event: Event, told: Published | tuple[int, int, str]) -> Receipt:
    if isinstance(told, tuple):  # it was answered together with others
        partition, offset, durability = told
        return Receipt(event.topic, partition, offset, event.id, False, durability)
    name = told.id if told.duplicate and told.id else event.id
    return Receipt(event.topic, told.partition, told.offset, name, told.duplicate, told.durability)


def encoded(event: Event, limits: Limits) -> bytes:
    """The event as it travels; ``InvalidEvent`` if it is no JSON value, too large or too deep."""
    whole = _json(event)
    if len(whole) > limits.record_bytes:
        raise InvalidEvent(
            f"the record is {len(whole)} bytes long, {limits.record_bytes} are allowed",
            size=len(whole),
            hint="store the bulk elsewhere and publish a reference",
        )
    # Both are rare, and a walk in Python costs more than the encoding: look only on a sign of them.
    opened = len(whole) - len(whole.replace(b"[", b"").replace(b"{", b""))
    if opened > limits.depth or whole.rfind(b"null") >= 0:
        check_value(event.payload, limits.depth)
    return whole


def encoded_batch(events: list[Event], limits: Limits) -> bytes:
    """An array of events as it travels. One that is too deep is left for the broker to refuse."""
    whole = _json(events)
    if len(whole) > limits.record_bytes or b"null" in whole:
        for event in events:
            encoded(event, limits)
    return whole


def _json(value: Event | list[Event]) -> bytes:
    try:
        return _encode(value)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise InvalidEvent(f"the payload is no JSON value: {error}", field="payload") from error


def _from(start: Start) -> From:
    check_start(start)
    if isinstance(start, datetime):
        return From("timestamp", epoch_ms(start))
    if isinstance(start, int):
        return From("offset", max(0, start))
    return From("earliest" if start == "earliest" else "latest")


def _check_where(text: str) -> None:
    """Refuse a bad filter here, where the library that reads it is installed."""
    from trunkline.where import compile_where

    try:
        compile_where(text)
    except InvalidFilter as error:
        if "needs" not in error.fields:
            raise
