"""The bus in this process: a store, and pumps that move its records to subscribers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from trunkline.bus import Delivery, Outcome, Start
from trunkline.clock import Clock, SystemClock
from trunkline.dead import Desk
from trunkline.errors import Closed, InvalidEvent, InvalidFilter, InvalidOption, TrunklineError
from trunkline.event import PRIORITIES, Event, Receipt, Record, check_event, new_ids
from trunkline.group import Group, Lease
from trunkline.middleware import PublishNext, compose
from trunkline.options import BusOptions, Flow, GroupOptions, TopicOptions, make
from trunkline.pump import Hooks, Pump
from trunkline.store import GroupKey, Store
from trunkline.topics import check_group, check_pattern, check_topic, is_dead, is_pattern, matches
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
        self._hooks = hooks
        self._draw = draw
        self._pumps: dict[GroupKey, Pump] = {}
        self._subscriptions: set[LocalSubscription] = set()
        self._handlers: list[tuple[dict[str, Any], Handler, int]] = []
        self._workers: list[asyncio.Task[None]] = []
        self._starting: set[asyncio.Event] = set()
        self._checked: set[str] = set()
        self._fired: set[asyncio.Task[Receipt]] = set()
        self._misfires: list[asyncio.Task[Receipt]] = []
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
        return LocalSubscription(self, topic, group, start, policy, flow, match)

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
        for subscription in list(self._subscriptions):
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
        while await self._lag():
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

    async def _lag(self) -> int:
        for subscription in list(self._subscriptions):
            await subscription.find()
        total = 0
        for key in list(self._pumps):
            first, end = await self.store.bounds(key.topic, key.partition)
            total += await self.store.update(key, partial(_lag_of, first=first, end=end))
        return total

    async def pump(self, key: GroupKey, start: Start, policy: GroupOptions | None) -> Pump:
        """The pump of one group and partition, made when it is first asked for."""
        if key not in self._pumps:
            await self._define_group(key, start, policy)
        elif policy is not None:
            await self.store.update(key, lambda group: group.define(policy, 0))
        options = (await self.store.topics()).get(key.topic, TopicOptions())
        found = self._pumps.get(key)  # only now: it may have been closed meanwhile
        if found is None:
            found = Pump(self.store, key, options.ttl_policy, self.clock, self._draw, self._hooks)
            self._pumps[key] = found
        watch = getattr(self.store, "watch", None)
        if watch is not None:
            watch()
        return found

    async def _define_group(self, key: GroupKey, start: Start, policy: GroupOptions | None) -> None:
        floor = await self._floor(key, start)
        _, end = await self.store.bounds(key.topic, key.partition)

        def define(group: Group) -> None:
            if not group.created:
                group.define(policy or GroupOptions(), floor)
            elif policy is not None:
                group.define(policy, floor)
            if group.last_settled >= end:
                raise InvalidOption(
                    f"group {key.group} has settled offset {group.last_settled} of {key.topic}/"
                    f"{key.partition}, which ends before {end}",
                    hint="records were lost or the topic was made anew: 'trunkline group seek'",
                )

        await self.store.update(key, define)

    async def _floor(self, key: GroupKey, start: Start) -> int:
        first, end = await self.store.bounds(key.topic, key.partition)
        if isinstance(start, datetime):
            return await self.store.seek(key.topic, key.partition, start) - 1
        if isinstance(start, int):
            return min(max(start, first), end) - 1
        return (first if start == "earliest" else end) - 1

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

    async def close(self) -> None:
        if self._closed:
            return
        try:
            await self.stop()
            await self.flush()
        finally:
            self._closed = True
            for subscription in list(self._subscriptions):
                await subscription.close()
            for pump in list(self._pumps.values()):
                with contextlib.suppress(TrunklineError):
                    await pump.close()
            self._pumps.clear()
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


class LocalSubscription:
    """Deliveries of one group from every partition of the topics that match."""

    def __init__(
        self,
        bus: LocalBus,
        topic: str,
        group: str,
        start: Start,
        policy: GroupOptions | None,
        flow: Flow,
        match: Callable[[Event], bool] | None,
    ) -> None:
        self._bus = bus
        self._topic = topic
        self._group = group
        self._start = start
        self._policy = policy
        self._room = flow.max_inflight
        self._match = match
        self._queue: deque[Delivery] = deque()
        self._open: dict[Delivery, Pump] = {}
        self._arrived = asyncio.Event()
        self._pumps: dict[GroupKey, Pump] = {}
        self._error: BaseException | None = None
        self._draining = False
        self._closed = False
        self._entered = False
        self._finder: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._known: set[str] = set()

    async def __aenter__(self) -> Self:
        if self._entered or self._closed:
            raise Closed("a subscription is entered once")
        if self._bus._closed:
            raise Closed("the bus is closed")
        self._entered = True
        self._bus._subscriptions.add(self)
        try:
            await self.find()
        except BaseException:
            await self.close()  # part of it may have begun
            raise
        self._bus.store.bell.listen(self._rung)
        self._finder = asyncio.get_running_loop().create_task(self._keep_finding())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        while self._draining or not self._queue:
            if self._error is not None:
                raise self._error
            if self._closed or self._draining:
                raise StopAsyncIteration
            if not self._entered:
                raise Closed("enter the subscription first", hint="async with bus.subscribe(...)")
            self._arrived.clear()
            await self._arrived.wait()
        return self._queue.popleft()

    def drain(self) -> None:
        """Hand out nothing more: what is buffered goes back, the iteration ends."""
        self._draining = True
        self._arrived.set()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._arrived.set()
        bus = self._bus
        bus.store.bell.ignore(self._rung)
        if self._finder is not None:
            self._finder.cancel()
            await asyncio.gather(self._finder, return_exceptions=True)
        unread = set(self._queue)
        self._queue.clear()
        held, self._open = self._open, {}
        for delivery in held.keys() - unread:
            delivery.outcome = Outcome.NACK  # too late for any other verb
        for key, pump in self._pumps.items():
            mine = [d for d, owner in held.items() if owner is pump]
            with contextlib.suppress(TrunklineError):
                await pump.detach(
                    self, [d for d in mine if d in unread], [d for d in mine if d not in unread]
                )
            if pump.idle() and bus._pumps.get(key) is pump:
                del bus._pumps[key]  # before any wait: nobody shall join it any more
                with contextlib.suppress(TrunklineError):
                    await pump.close()
        bus._subscriptions.discard(self)

    # -- as a pump sees it ---------------------------------------------------------------------

    def room(self) -> int:
        return 0 if self._draining else self._room - len(self._open)

    async def aclose(self) -> None:
        await self.close()

    def accepts(self, event: Event) -> bool:
        if self._match is None:
            return True
        try:
            return bool(self._match(event))
        except Exception as error:
            raise InvalidFilter(f"the filter failed on event {event.id}: {error!r}") from error

    def put(self, delivery: Delivery) -> None:
        pump = self._pumps[GroupKey(delivery.topic, delivery.partition, self._group)]
        settle = delivery._settle

        def finish(d: Delivery, *rest: Any) -> None:
            self._open.pop(d, None)
            settle(d, *rest)

        delivery._settle = finish
        self._open[delivery] = pump
        self._queue.append(delivery)
        self._arrived.set()

    def keep(self, pump: Pump, leases: dict[int, Lease]) -> float:
        """Let go of deliveries of ``pump`` that are leased no longer; when to look again."""
        until = float("inf")
        for delivery, owner in list(self._open.items()):
            if owner is not pump:
                continue
            lease = leases.get(delivery.offset)
            if lease is not None and lease.attempt == delivery.attempt:
                until = min(until, lease.until)
                continue
            del self._open[delivery]
            with contextlib.suppress(ValueError):
                self._queue.remove(delivery)
        return until

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._arrived.set()

    # -- finding topics ------------------------------------------------------------------------

    def _rung(self, topic: str | None) -> None:
        if topic is None or (topic not in self._known and matches(self._topic, topic)):
            self._changed.set()

    async def _keep_finding(self) -> None:
        """Notice topics that match and partitions that are new."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self.find()
            except TrunklineError as error:
                self.fail(error)
                return
            await asyncio.sleep(_FIND_S)

    async def find(self) -> None:
        """Begin with the topics and partitions that are there and were not before."""
        topics = await self._bus.store.topics()
        # What came into being since we began is new from its first record on.
        since = self._finder is not None and self._start == "latest"
        start: Start = "earliest" if since else self._start
        if is_pattern(self._topic):
            # Dead letters are asked for by name: a pattern would deliver a failure as an event.
            wanted = {
                name: options
                for name, options in topics.items()
                if matches(self._topic, name) and (not is_dead(name) or is_dead(self._topic))
            }
        else:
            wanted = {self._topic: topics.get(self._topic, TopicOptions())}
        self._known |= wanted.keys()
        for name, options in wanted.items():
            for partition in range(options.partitions):
                key = GroupKey(name, partition, self._group)
                if key not in self._pumps:
                    pump = await self._bus.pump(key, start, self._policy)
                    if key not in self._pumps and not self._closed:
                        self._pumps[key] = pump
                        pump.attach(self)


def _lag_of(group: Group, first: int, end: int) -> int:
    return group.lag(end, first)


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
