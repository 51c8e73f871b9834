"""The bus in this process: a store, and pumps that move its records to subscribers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

from trunkline.bus import Start
from trunkline.buses.stream import LocalSubscription, Pumps
from trunkline.clock import Clock, SystemClock
from trunkline.dead import Desk
from trunkline.errors import Closed, InvalidEvent, InvalidOption
from trunkline.event import PRIORITIES, Event, Receipt, Record, check_event, new_ids
from trunkline.middleware import PublishNext, compose
from trunkline.options import BusOptions, Flow, GroupOptions, TopicOptions, make
from trunkline.pump import Hooks
from trunkline.store import Store
from trunkline.topics import check_group, check_pattern, check_topic
from trunkline.where import compile_where
from trunkline.worker import Handler, run

H = TypeVar("H", bound=Handler)
OnPublish = Callable[[str, BaseException | None, float], None]
_FIND_S = 0.25  # new topics are rare, rings are not
_LOOK_S = 0.005
_FIELDS = frozenset(Event.__struct_fields__) - {"topic", "payload"}


class LocalBus:
    def __init__(
        self,
        store: Store,
        *,
        clock: Clock | None = None,
        middleware: Sequence[object] = (),
        on_publish: OnPublish | None = None,
        on_message: OnPublish | None = None,
        hooks: Hooks = Hooks(),
        draw: Callable[[], float] = random.random,
        **options: Any,
    ) -> None:
        self.store = store
        self.options = make(BusOptions, options)
        self.clock: Clock = clock or SystemClock()
        self._limits = store.options.limits  # type: ignore[attr-defined]
        self._middleware = list(middleware)
        self._on_publish = on_publish
        self._on_message = on_message
        self._pumps = Pumps(store, self.clock, draw, hooks)
        self._handlers: list[tuple[dict[str, Any], Handler, int]] = []
        self._workers: list[asyncio.Task[None]] = []
        self._starting: set[asyncio.Event] = set()
        self._checked: set[str] = set()
        self._fired: set[asyncio.Task[Receipt]] = set()
        self._misfires: list[asyncio.Task[Receipt]] = []
        self._endings: list[Callable[[], Awaitable[None]]] = []
        self._started = False
        self._closed = False
        self._plain = False  # whether nothing stands between publish and the store
        self.use()

    # -- publishing ----------------------------------------------------------------------------

    async def publish(self, topic: str | Event, payload: Any = None, **fields: Any) -> Receipt:
        """Publish one event; returns once it is durable.

        ``fields`` are those of ``Event``, and ``delay_s`` in the place of ``not_before``.
        """
        if isinstance(topic, Event):
            event = topic
            check_event(event, self._limits)
        elif fields:
            event = self._event(topic, payload, fields)
            check_event(event, self._limits)
        else:
            if topic not in self._checked:
                self._checked.add(check_topic(topic))
            event = Event(topic=topic, payload=payload, ts=self.clock.now())
        if self._plain and not self._closed:
            return (await self.store.append(event.topic, (event,)))[0]
        return (await self._send([event]))[0]

    async def publish_many(
        self, topic: str, payloads: Sequence[Any], **fields: Any
    ) -> list[Receipt]:
        """Publish payloads, or whole events, as one batch: all of them are kept or none. Where the
        topic has several partitions that holds for each partition's share.
        """
        check_topic(topic)
        if not payloads:
            return []
        if any(isinstance(payload, Event) for payload in payloads):
            events = self._whole_events(topic, payloads)
        else:
            extra = self._fields(fields)
            now = extra.pop("ts", None) or self.clock.now()
            events = [
                Event(id=id_, topic=topic, payload=payload, ts=now, **extra)
                for id_, payload in zip(new_ids(len(payloads)), payloads, strict=True)
            ]
            if extra:
                check_event(events[0], self._limits)
        if self._plain and not self._closed:
            return await self.store.append(topic, events)
        return await self._send(events)

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

    def _whole_events(self, topic: str, events: Sequence[Any]) -> list[Event]:
        for event in events:
            check_event(event, self._limits)
            if event.topic != topic:
                raise InvalidEvent(f"an event for {event.topic} in a batch for {topic}")
        return list(events)

    def _event(self, topic: str, payload: Any, fields: dict[str, Any]) -> Event:
        if "ts" not in fields:
            fields["ts"] = self.clock.now()
        return Event(topic=topic, payload=payload, **self._fields(fields))

    def _fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        if not fields.keys() <= _FIELDS or "priority" in fields:
            fields = dict(fields)
            delay_s = fields.pop("delay_s", None)
            if delay_s is not None:
                try:
                    fields["not_before"] = self.clock.now() + timedelta(seconds=delay_s)
                except (TypeError, ValueError, OverflowError) as error:
                    raise InvalidEvent(f"delay_s={delay_s!r}: {error}", field="delay_s") from None
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
            return await self._chain(events)
        except BaseException as failure:
            error = failure
            raise
        finally:
            if self._on_publish is not None:
                self._on_publish(events[0].topic, error, time.perf_counter() - started)

    async def _append(self, events: list[Event]) -> list[Receipt]:
        topic = events[0].topic
        if len(events) > 1 and any(event.topic != topic for event in events):
            raise InvalidEvent("the events of one batch have one topic")
        return await self.store.append(topic, events)

    def use(self, *middleware: object) -> None:
        """Add middleware inside of those there are; see ``trunkline.middleware``."""
        self._middleware += middleware
        self._chain: PublishNext = compose(self._middleware, "publish", self._append)
        self._plain = self._on_publish is None and self._chain == self._append

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
    ) -> LocalSubscription:
        check_pattern(topic)
        check_group(group)
        flow = Flow() if max_inflight is None else Flow(max_inflight=max_inflight)
        match = compile_where(where) if isinstance(where, str) else where
        _check_start(start)
        return LocalSubscription(self._pumps, topic, group, start, policy, flow, match)

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
        """Let the handlers begin. Entering the bus does it."""
        if self._closed:
            raise Closed("the bus is closed")
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
        for subscription in list(self._pumps.subscriptions):
            subscription.drain()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=timeout_s)
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
        self._raise_failed()
        while await self._pumps.lag():
            if deadline is not None and self.clock.monotonic() >= deadline:
                return False
            await asyncio.sleep(_LOOK_S)  # not the clock's time: handlers work in real time
            self._raise_failed()
        return True

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
        """Up to ``limit`` records from ``start`` on, past any group."""
        records: list[Record] = []
        while len(records) < limit:
            more = await self.store.read(topic, partition, start, limit - len(records))
            if not more:
                break
            records += more
            start = more[-1].offset + 1
        return records

    async def topics(self) -> dict[str, TopicOptions]:
        return await self.store.topics()

    async def define(self, topic: str, **options: Any) -> None:
        """Set a topic's options; see ``TopicOptions``."""
        await self.store.define(check_topic(topic), make(TopicOptions, options))

    def dead_letters(self, topic: str) -> Desk:
        return Desk(self.store, check_topic(topic), self.clock)

    async def health(self) -> dict[str, Any]:
        """What an operator wants to know at a glance."""
        folder = getattr(self.store, "folder", None)
        full = bool(folder and folder.is_full)
        ended = [t for t in self._workers if t.done() and not t.cancelled()]
        failed = [str(_only(t.exception())) for t in ended if t.exception() is not None]
        return {
            "ok": not (self._closed or full or failed),
            "durability": self.store.features.durability,
            "events_storage_full": full,
            "groups": len(self._pumps),
            "failed": failed,
        }

    # -- life ----------------------------------------------------------------------------------

    def at_close(self, end: Callable[[], Awaitable[None]]) -> None:
        """Call ``end`` when the bus closes, while it still takes events."""
        self._endings.append(end)

    async def close(self) -> None:
        if self._closed:
            return
        try:
            await self.stop()
            for end in self._endings:
                await end()
            await self.flush()
        finally:
            self._closed = True
            await self._pumps.close()
            await self.store.close()

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


def _check_start(start: Start) -> None:
    if isinstance(start, bool) or not isinstance(start, str | int | datetime):
        raise InvalidOption(f"not a start: {start!r}", name="start")
    if isinstance(start, str) and start not in ("earliest", "latest"):
        raise InvalidOption(
            f"not a start: {start!r}", name="start", hint="earliest, latest, an offset or a time"
        )
    if isinstance(start, datetime) and start.tzinfo is None:
        raise InvalidOption("a start time has a time zone", name="start")


def _only(error: BaseException | None) -> BaseException:
    """The one error inside a group of one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    assert error is not None
    return error
