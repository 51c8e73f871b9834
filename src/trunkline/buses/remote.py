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
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from trunkline.bus import Start
from trunkline.buses.link import ClientOptions, Link
from trunkline.buses.remote_stream import RemoteDesk, RemoteSubscription
from trunkline.clock import Clock, SystemClock
from trunkline.errors import (
    Closed,
    InvalidEvent,
    InvalidFilter,
    InvalidOption,
)
from trunkline.event import PRIORITIES, Event, Receipt, Record, check_event, check_value, new_ids
from trunkline.frames import (
    Failure,
    From,
    Message,
    Published,
    Subscribe,
    epoch_ms,
    error_of,
)
from trunkline.middleware import compose
from trunkline.options import BusOptions, Flow, GroupOptions, Limits, TopicOptions, changed, make
from trunkline.topics import check_group, check_pattern, check_topic
from trunkline.worker import Handler, run

H = TypeVar("H", bound=Handler)
_FIELDS = frozenset(Event.__struct_fields__) - {"topic", "payload"}
_encode = msgspec.json.Encoder().encode
_LOOK_S = 0.01


class RemoteBus:
    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Clock | None = None,
        middleware: Sequence[object] = (),
        limits: Limits = Limits(),
        on_publish: Callable[[str, BaseException | None, float], None] | None = None,
        on_message: Callable[[str, BaseException | None, float], None] | None = None,
        **options: Any,
    ) -> None:
        mine = {name: options.pop(name) for name in BusOptions.__struct_fields__ if name in options}
        self.options = make(BusOptions, mine)
        self.clock: Clock = clock or SystemClock()
        self.link = Link(
            url,
            self,
            token=token or os.environ.get("TRUNKLINE_TOKEN") or None,
            tls=tls,
            options=make(ClientOptions, options),
        )
        self._limits = limits
        self._middleware = list(middleware)
        self._chain: Callable[[list[Event]], Any] = compose(middleware, "publish", self._append)
        self._on_publish = on_publish
        self._on_message = on_message
        self._plain = on_publish is None and not middleware
        self._names = itertools.count(1)
        self.streams: dict[str, RemoteSubscription] = {}
        self._handlers: list[tuple[dict[str, Any], Handler, int]] = []
        self._workers: list[asyncio.Task[None]] = []
        self._starting: set[asyncio.Event] = set()
        self._fired: set[asyncio.Task[Receipt]] = set()
        self._misfires: list[asyncio.Task[Receipt]] = []
        self._started = False
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    # -- publishing ----------------------------------------------------------------------------

    async def publish(self, topic: str | Event, payload: Any = None, **fields: Any) -> Receipt:
        """Publish one event; returns once the broker has it durable. Fields as of ``Event``, and
        ``delay_s``.
        """
        if isinstance(topic, Event):
            event = topic
            check_event(event, self._limits)
        else:
            if "ts" not in fields:
                fields["ts"] = self.clock.now()
            event = Event(topic=topic, payload=payload, **self._fields(fields))
            if len(fields) > 1:
                check_event(event, self._limits)
            else:
                check_topic(topic)
        if self._plain and not self._closed:
            return await self._one(event)
        return (await self._send([event]))[0]

    async def publish_many(
        self, topic: str, payloads: Sequence[Any], **fields: Any
    ) -> list[Receipt]:
        """Publish payloads, or whole events, as one batch: all of them are kept or none."""
        check_topic(topic)
        if not payloads:
            return []
        extra = self._fields(fields)
        now = extra.pop("ts", None) or self.clock.now()
        events = [
            payload
            if isinstance(payload, Event)
            else Event(id=id_, topic=topic, payload=payload, ts=now, **extra)
            for id_, payload in zip(new_ids(len(payloads)), payloads, strict=True)
        ]
        for index, event in enumerate(events):
            if event is payloads[index] or (extra and index == 0):
                check_event(event, self._limits)
                if event.topic != topic:
                    raise InvalidEvent(f"an event for {event.topic} in a batch for {topic}")
        return await self._send(events)

    async def publish_again(self, topic: str, events: Sequence[Event]) -> list[Receipt]:
        """Publish events that may have been published before, by their ids: each is kept once."""
        check_topic(topic)
        return await self._batch(list(events), again=True)

    def fire(self, topic: str | Event, payload: Any = None, **fields: Any) -> asyncio.Task[Receipt]:
        """Publish without waiting: await what this gives, or ``flush``, before you rely on it."""
        task = asyncio.get_running_loop().create_task(self.publish(topic, payload, **fields))
        self._fired.add(task)
        task.add_done_callback(self._landed)
        return task

    def _landed(self, task: asyncio.Task[Receipt]) -> None:
        self._fired.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._misfires.append(task)

    async def flush(self) -> None:
        """Wait for everything fired so far; raises the first error among it since the last time."""
        if self._fired:
            await asyncio.wait(set(self._fired))
        misfires, self._misfires = self._misfires, []
        for task in misfires:
            task.result()

    def _fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        if fields.keys() <= _FIELDS and "priority" not in fields:
            return fields
        fields = dict(fields)
        delay_s = fields.pop("delay_s", None)
        if delay_s is not None:
            if isinstance(delay_s, bool) or not isinstance(delay_s, int | float):
                raise InvalidEvent(f"delay_s is a number, not {delay_s!r}", field="delay_s")
            fields["not_before"] = self.clock.now() + timedelta(seconds=delay_s)
        rank = fields.get("priority")
        if isinstance(rank, int) and 0 <= rank < len(PRIORITIES):
            fields["priority"] = PRIORITIES[rank]
        unknown = fields.keys() - _FIELDS
        if unknown:
            raise InvalidEvent(
                f"an event has no field {', '.join(sorted(unknown))}",
                hint=f"fields: {', '.join(sorted(_FIELDS))}, delay_s",
            )
        return fields

    async def _send(self, events: list[Event]) -> list[Receipt]:
        if self._closed:
            raise Closed("the bus is closed")
        started = time.perf_counter()
        error: BaseException | None = None
        try:
            receipts: list[Receipt] = await self._chain(events)
            return receipts
        except BaseException as failure:
            error = failure
            raise
        finally:
            if self._on_publish is not None:
                self._on_publish(events[0].topic, error, time.perf_counter() - started)

    async def _append(self, events: list[Event]) -> list[Receipt]:
        if len(events) == 1:
            return [await self._one(events[0])]
        return await self._batch(events)

    async def _one(self, event: Event) -> Receipt:
        body = encoded(event, self._limits)
        link = self.link
        if not link.room.is_set():
            await link.room.wait()
        corr = link.next_corr()
        told: Published | tuple[int, int, str] = await link.ask(
            corr,
            b'{"type":"PUBLISH","corr":%d,"event":%b}' % (corr, body),
            lambda: b'{"type":"PUBLISH","again":true,"corr":%d,"event":%b}' % (corr, body),
        )
        if isinstance(told, tuple):  # it was answered together with others
            partition, offset, durability = told
            return Receipt(event.topic, partition, offset, event.id, False, durability)
        return Receipt(
            event.topic, told.partition, told.offset, event.id, told.duplicate, told.durability
        )

    async def _batch(self, events: list[Event], *, again: bool = False) -> list[Receipt]:
        bodies = encoded_batch(events, self._limits)
        link = self.link
        if not link.room.is_set():
            await link.room.wait()
        corr = link.next_corr()

        def repeated() -> bytes:
            return b'{"type":"PUBLISH","again":true,"corr":%d,"events":%b}' % (corr, bodies)

        told: Published = await link.ask(
            corr,
            repeated() if again else b'{"type":"PUBLISH","corr":%d,"events":%b}' % (corr, bodies),
            repeated,
        )
        if told.receipts is None:
            topic, partition, durability = told.topic, told.partition, told.durability
            return [
                Receipt(topic, partition, offset, event.id, False, durability)
                for offset, event in enumerate(events, told.offset)
            ]
        return [
            Receipt(event.topic, partition, offset, event.id, duplicate, told.durability)
            for event, (partition, offset, duplicate) in zip(events, told.receipts, strict=True)
        ]

    def use(self, *middleware: object) -> None:
        """Add middleware inside of those there are; see ``trunkline.middleware``."""
        self._middleware += middleware
        self._chain = compose(self._middleware, "publish", self._append)
        self._plain = False

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

    def on(self, topic: str, *, group: str, workers: int = 1, **options: Any) -> Callable[[H], H]:
        """Make a function the handler of a group. It begins with ``start``; a function added later
        begins at once.
        """
        if workers < 1:
            raise InvalidOption("workers is at least 1", name="workers", value=workers)
        check_pattern(topic)
        check_group(group)

        def register(handler: H) -> H:
            entry = ({"topic": topic, "group": group, **options}, handler, workers)
            self._handlers.append(entry)
            if self._started:
                self._begin(*entry)
            return handler

        return register

    async def start(self) -> None:
        """Connect, and let the handlers begin. Entering the bus does it."""
        if self._closed:
            raise Closed("the bus is closed")
        self.link.start()
        if not self._started:
            self._started = True
            for entry in self._handlers:
                self._begin(*entry)

    def _begin(self, options: dict[str, Any], handler: Handler, workers: int) -> None:
        options = dict(options)
        options.setdefault("max_inflight", max(Flow().max_inflight, workers))
        subscription = self.subscribe(options.pop("topic"), **options)
        ready = asyncio.Event()
        self._starting.add(ready)

        async def work() -> None:
            try:
                await subscription.__aenter__()
            finally:
                ready.set()
                self._starting.discard(ready)
            async with contextlib.aclosing(subscription):
                await run(subscription, handler, workers, self._middleware, self._on_message)

        self._workers.append(asyncio.get_running_loop().create_task(work()))

    async def stop(self, timeout_s: float | None = None) -> None:
        """Let handlers finish what they have, for at most ``timeout_s``, and end them."""
        self._started = False
        timeout_s = self.options.drain_timeout_s if timeout_s is None else timeout_s
        if self._workers:
            for ready in list(self._starting):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ready.wait(), timeout_s or 0.001)
            for subscription in list(self.streams.values()):
                subscription.drain()
            _, late = await asyncio.wait(self._workers, timeout=timeout_s or 0.001)
            for task in late:
                task.cancel()
            results = await asyncio.gather(*self._workers, return_exceptions=True)
            self._workers.clear()
            for result in results:
                if isinstance(result, BaseException) and not isinstance(
                    result, asyncio.CancelledError
                ):
                    raise _only(result)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until every group that has handlers here has settled all there is; False if that
        took longer than ``timeout_s``.
        """
        deadline = None if timeout_s is None else self.clock.monotonic() + timeout_s
        for ready in list(self._starting):
            await ready.wait()
        while True:
            self._raise_failed()
            groups = [(s.frame.topic, s.frame.group) for s in self.streams.values()]
            if not groups or not await self.link.call("lag", groups=groups):
                return True
            if deadline is not None and self.clock.monotonic() >= deadline:
                return False
            await asyncio.sleep(_LOOK_S)

    async def run(self) -> None:
        """Handle events until cancelled."""
        await self.start()
        try:
            await asyncio.gather(*self._workers)
        finally:
            await self.stop()

    def _raise_failed(self) -> None:
        for task in self._workers:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise _only(task.exception())

    # -- looking -------------------------------------------------------------------------------

    async def read(
        self, topic: str, start: int = 1, limit: int = 1000, *, partition: int = 0
    ) -> list[Record]:
        """Records by offset, past any group."""
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
        """What an operator wants to know at a glance."""
        if not self.link.is_up:
            return {"ok": False, "connected": False}
        found: dict[str, Any] = await self.link.call("health")
        return {**found, "connected": True}

    # -- as the link sees it -------------------------------------------------------------------

    def came(self, message: Message) -> None:
        subscription = self.streams.get(message.sub or "")
        if subscription is not None and message.event is not None:
            subscription.put(message, message.event)

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

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


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
    opened = len(whole) - len(whole.translate(None, b"[{"))
    if b"null" in whole or opened > limits.depth:
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
    if isinstance(start, bool) or not isinstance(start, str | int | datetime):
        raise InvalidOption(f"not a start: {start!r}", name="start")
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise InvalidOption("a start time has a time zone", name="start")
        return From("timestamp", epoch_ms(start))
    if isinstance(start, int):
        return From("offset", max(0, start))
    if start == "earliest" or start == "latest":
        return From("earliest" if start == "earliest" else "latest")
    raise InvalidOption(
        f"not a start: {start!r}", name="start", hint="earliest, latest, an offset or a time"
    )


def _check_where(text: str) -> None:
    """Refuse a bad filter here, where the library that reads it is installed."""
    from trunkline.where import compile_where

    try:
        compile_where(text)
    except InvalidFilter as error:
        if "needs" not in error.fields:
            raise


def _only(error: BaseException | None) -> BaseException:
    """The one error inside a group of one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    assert error is not None
    return error
