"""What every bus does alike: making events of values, firing, and running handlers.

A bus adds how it publishes a list of events (``_append``), how it subscribes, and how it tells what
its handlers' groups have not settled (``_unsettled``).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Sequence,
)
from datetime import datetime, timedelta
from enum import Enum
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, Unpack

from trunkline.bus import Bus, F, H, HandlerInfo, Start, Subscription, Where
from trunkline.bus.type_routes import TypeRoutes, check_types
from trunkline.check import check_count, check_delay, check_event, check_events
from trunkline.clock import Clock
from trunkline.codec import with_plain_payload
from trunkline.delivery.observers import Observers
from trunkline.delivery.worker import Call, Keeper, adapt, run
from trunkline.errors import Closed, Conflict, InvalidEvent, TrunklineError
from trunkline.event import PRIORITIES, Event, EventFields, Receipt, Record, new_ids
from trunkline.explain import spelt
from trunkline.middleware import PublishNext, check, check_places, compose
from trunkline.names import check_topic
from trunkline.options import WORKERS_MAX, BusOptions, Flow, GroupOptions, Limits, OnConflict

OnPublish = Callable[[str, BaseException | None, float], None]
_LOOK_S = 0.005
AWAY_S = 0.5  # a bus that cannot be reached is not waited for longer when it is closed
_FIELDS = frozenset(Event.__struct_fields__) - {"topic", "payload"}


class BusLife(Enum):
    OPEN = "open"  # it publishes; its handlers rest
    RUNNING = "running"  # its handlers run
    CLOSED = "closed"


RUNNING, CLOSED = BusLife.RUNNING, BusLife.CLOSED


class _Registered(NamedTuple):
    """A handler and how to open the subscription that it handles."""

    info: HandlerInfo
    open: Callable[[], Subscription]
    call: Call
    options: dict[str, Any]  # of its subscription
    routes: TypeRoutes | None = None  # it shares the subscription of its group


class Drainable(Protocol):
    def drain(self) -> None: ...


class BusBase(Bus):
    def __init__(
        self,
        options: BusOptions,
        clock: Clock,
        limits: Limits,
        middleware: Sequence[object],
        on_publish: OnPublish | None,
        on_message: OnPublish | None,
    ) -> None:
        self.options = options
        self.clock = clock
        self._limits = limits
        self._middleware: list[object] = []
        self._observers = Observers()
        self._on_publish = on_publish
        self._on_message = on_message
        self._handlers: list[_Registered] = []
        self._routes: dict[tuple[str, str], TypeRoutes] = {}
        self._workers: list[asyncio.Task[None]] = []
        self._schedules: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._timers: list[asyncio.Task[None]] = []  # of the schedules that run
        self._starting: set[asyncio.Event] = set()
        self._fired: set[asyncio.Task[Receipt]] = set()
        self._misfires: list[asyncio.Task[Receipt]] = []
        self._endings: list[Callable[[], Awaitable[None]]] = []
        self._told_to_stop: list[Callable[[], None]] = []
        self._life = BusLife.OPEN
        self._plain = False  # whether nothing stands between publish and the store
        check(middleware)
        self.use(*middleware)

    # -- what a bus adds -----------------------------------------------------------------------

    @abstractmethod
    async def _append(self, events: list[Event]) -> list[Receipt]: ...

    @abstractmethod
    async def _unsettled(self) -> int: ...

    def _is_away(self) -> bool:
        """Whether the bus is elsewhere and cannot be reached now."""
        return False

    @abstractmethod
    def _streams(self) -> Iterable[Drainable]: ...

    @abstractmethod
    async def _read(self, topic: str, partition: int, start: int, limit: int) -> list[Record]: ...

    async def read(
        self, topic: str, start: int | None = None, limit: int = 1000, *, partition: int = 0
    ) -> list[Record]:
        """Up to ``limit`` records of one partition, past any group, from ``start`` on or from the
        first there is.
        """
        if start is None:
            start = (await self.bounds(topic, partition)).first
        check_count("start", start)
        check_count("limit", limit)
        records: list[Record] = []
        while len(records) < limit:
            more = await self._read(topic, partition, start, limit - len(records))
            if not more:
                break
            records += more
            start = more[-1].offset + 1
        return records

    # -- publishing ----------------------------------------------------------------------------

    def use(self, *middleware: object) -> None:
        """Add middleware inside of those there are; see ``trunkline.middleware``."""
        check(middleware)
        check_places([*self._middleware, *middleware])
        self._middleware += middleware
        self._observers.add(*middleware)
        self._chain: PublishNext = compose(self._middleware, "publish", self._append)
        self._plain = self._on_publish is None and self._chain == self._append

    def fire(
        self, topic: str | Event, payload: Any = None, **fields: Unpack[EventFields]
    ) -> asyncio.Task[Receipt]:
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

    def _event(self, topic: str, payload: Any, fields: dict[str, Any]) -> Event:
        if "ts" not in fields:
            fields["ts"] = self.clock.now()
        event = Event(topic=topic, payload=payload, **self._fields(fields))
        check_event(event, self._limits)
        return event

    def _whole(self, event: Event, payload: Any, fields: dict[str, Any]) -> Event:
        _refuse_fields(fields if payload is None else {"payload", *fields})
        check_event(event, self._limits)
        return event

    def _events(self, topic: str, payloads: Sequence[Any], fields: dict[str, Any]) -> list[Event]:
        """A batch of values, or of whole events."""
        check_topic(topic)
        if not isinstance(payloads, Sequence) or isinstance(payloads, str | bytes | bytearray):
            kind = type(payloads).__name__
            raise InvalidEvent(f"a batch is a list, not {kind}", hint="publish sends one event")
        if not payloads:
            return []
        if any(issubclass(kind, Event) for kind in set(map(type, payloads))):
            _refuse_fields(fields)
            check_events(topic, payloads, self._limits)
            return list(payloads)
        extra = self._fields(fields)
        if "id" in extra:
            hint = "publish whole events to choose their ids"
            raise InvalidEvent("each event of a batch has its own id", field="id", hint=hint)
        now = extra.pop("ts") if "ts" in extra else self.clock.now()
        new = partial(Event, **extra) if extra else Event  # no names to unpack for each of them
        events = [
            new(id=id_, topic=topic, payload=payload, ts=now)
            for id_, payload in zip(new_ids(len(payloads)), payloads, strict=True)
        ]
        check_event(events[0], self._limits)
        return events

    def _fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        return fields_of(fields, self.clock.now)

    async def _send(self, events: list[Event]) -> list[Receipt]:
        if self._life is CLOSED:
            raise Closed("the bus is closed")
        started = time.perf_counter()
        error: BaseException | None = None
        try:
            if self._chain != self._append:
                events = [with_plain_payload(event) for event in events]
            receipts = await self._chain(events)
            if receipts is None or len(receipts) < len(events):
                raise TrunklineError(
                    f"a middleware gave {len(receipts or ())} receipts for {len(events)} events",
                    hint="it gives back what call_next gave, or raises to refuse an event",
                )
            return receipts
        except BaseException as failure:
            error = failure
            raise
        finally:
            if self._on_publish is not None:
                self._on_publish(events[0].topic, error, time.perf_counter() - started)

    # -- handlers ------------------------------------------------------------------------------

    def on(
        self,
        topic: str,
        *,
        group: str,
        workers: int = 1,
        start: Start = "earliest",
        policy: GroupOptions | None = None,
        on_conflict: OnConflict = "raise",
        max_inflight: int | None = None,
        where: Where = None,
        type: str | Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> Callable[[H], H]:
        if self._life is CLOSED:
            raise Closed("the bus is closed")
        check_count("workers", workers, 1, WORKERS_MAX)
        check_delay(timeout_s, "timeout_s")
        types = () if type is None else check_types(type)
        options: dict[str, Any] = {
            "start": start,
            "policy": policy,
            "on_conflict": on_conflict,
            "max_inflight": max_inflight,
            "where": where,
        }

        def open_stream() -> Subscription:
            chosen, most = options, workers
            if (routes := self._routes.get((topic, group))) is not None:
                chosen, most = {**options, "where": routes.where}, routes.workers
                routes.has_begun = self._life is RUNNING
            if max_inflight is None:
                chosen = {**chosen, "max_inflight": max(Flow().max_inflight, most)}
            return self.subscribe(topic, group=group, **chosen)

        open_stream()  # a wrong argument is refused here, where the handler is registered

        def register(handler: H) -> H:
            call = adapt(handler, timeout_s)
            routes = self._route(topic, group, types, options)
            if routes is not None:
                routes.add(types, call, workers)
            info = HandlerInfo(
                topic=topic,
                group=group,
                name=getattr(handler, "__qualname__", None) or handler.__class__.__qualname__,
                workers=workers,
                policy=policy,
                timeout_s=timeout_s,
                types=types,
            )
            entry = _Registered(info, open_stream, call, options, routes)
            self._handlers.append(entry)
            if self._life is RUNNING:
                self._begin(entry)
            return handler

        return register

    def every(
        self,
        period: str | float | timedelta,
        *,
        name: str | None = None,
        missed: Literal["skip", "all"] = "skip",
        tz: str = "UTC",
        policy: GroupOptions | None = None,
        on_conflict: OnConflict = "raise",
        timeout_s: float | None = None,
    ) -> Callable[[F], F]:
        from trunkline.patterns import schedule  # it needs the bus, and few need it

        plan = schedule.plan_of(period, tz)

        def register(function: F) -> F:
            called = str(name or getattr(function, "__name__", type(function).__name__))
            timer = schedule.Timetable(self, called, plan, missed)
            self.on(
                timer.topic,
                group=schedule.GROUP,
                policy=policy,
                on_conflict=on_conflict,
                timeout_s=timeout_s,
            )(schedule.handler_of(function))
            self._schedules.append(timer.run)
            if self._life is RUNNING:
                self._timers.append(asyncio.get_running_loop().create_task(timer.run()))
            return function

        return register

    def _route(
        self, topic: str, group: str, types: Sequence[str], options: dict[str, Any]
    ) -> TypeRoutes | None:
        """The routes that a handler joins; None: it has a subscription for itself."""
        found = self._routes.get((topic, group))
        if found is None:
            if not types:
                return None
            found = TypeRoutes(topic, group, options)
            for number, one in enumerate(self._handlers):
                if one.info.place == (topic, group):  # it has no type: it is the default
                    found.has_begun = self._life is RUNNING
                    found.check((), one.options)
                    found.add((), one.call, one.info.workers)
                    self._handlers[number] = one._replace(routes=found)
        found.check(types, options)
        self._routes[topic, group] = found
        return found

    def handlers(self) -> list[HandlerInfo]:
        return [entry.info for entry in self._handlers]

    async def ready(self) -> None:
        for ready in list(self._starting):
            await ready.wait()
        self._raise_failed()

    async def start(self) -> None:
        """Let the handlers begin. Entering the bus does it."""
        if self._life is CLOSED:
            raise Closed("the bus is closed")
        if self._life is not RUNNING:
            self._life = RUNNING
            begun = set[TypeRoutes]()
            for entry in self._handlers:
                if entry.routes not in begun:
                    self._begin(entry)
                if entry.routes is not None:
                    begun.add(entry.routes)
            loop = asyncio.get_running_loop()
            self._timers += [loop.create_task(run()) for run in self._schedules]

    def _begin(self, entry: _Registered) -> None:
        subscription = entry.open()
        call, workers = entry.call, entry.info.workers
        if entry.routes is not None:
            call, workers = entry.routes.call, entry.routes.workers
        ready = asyncio.Event()
        self._starting.add(ready)

        async def work() -> None:
            try:
                await subscription.__aenter__()
            except Conflict as error:  # it is told far from where the handler was registered
                name = f"group {entry.info.group} on {entry.info.topic}"
                said = f"the handler of {name} cannot begin: {error.message}"
                raise Conflict(said, hint=error.hint, **error.fields) from None
            finally:
                ready.set()
                self._starting.discard(ready)
            async with contextlib.aclosing(subscription):
                await run(
                    subscription,
                    call,
                    workers,
                    self._middleware,
                    self._on_message,
                    Keeper(workers, self.clock, self.policy_of),
                )

        self._workers.append(asyncio.get_running_loop().create_task(work()))

    async def stop(self, timeout_s: float | None = None) -> None:
        """Let handlers finish what they have, for at most ``timeout_s``, and end them."""
        check_delay(timeout_s, "timeout_s")
        if self._life is RUNNING:
            self._life = BusLife.OPEN
        timeout_s = self.options.drain_timeout_s if timeout_s is None else timeout_s
        if self._is_away():  # a handler that has not begun cannot begin now
            timeout_s = min(timeout_s, AWAY_S)
        timers, self._timers = self._timers, []
        for timer in timers:
            timer.cancel()
        if timers:
            await asyncio.wait(timers)
        for ready in list(self._starting):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s or 0.001):
                    await ready.wait()
        for subscription in list(self._streams()):
            subscription.drain()
        for tell in self._told_to_stop:
            tell()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=timeout_s or 0.001)
            for task in late:
                task.cancel()
            if late:  # not gathered: a handler that waits here is cancelled, and waits no more
                await asyncio.wait(late)
            failed = self._failed()
            self._workers.clear()
            for error in failed:
                raise error

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until every group that has handlers here has settled all there is; False if that
        took longer than ``timeout_s``.
        """
        check_delay(timeout_s, "timeout_s")
        if self._handlers and self._life is not RUNNING:
            raise Closed("the handlers were not started", hint="async with bus, or bus.start()")
        # Not the clock's time: handlers work in real time, and a clock in a test may stand still.
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        await self.ready()
        while await self._unsettled():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_LOOK_S)
            self._raise_failed()
        self._raise_failed()  # what ended leaves nothing behind that could be unsettled here
        return True

    async def run(self) -> None:
        """Handle events until cancelled, or told to end by SIGINT or SIGTERM. Handlers may finish
        what they have begun; a second signal does not wait for them. A bus that was not entered
        is closed then.
        """
        end = self.stop if self._life is RUNNING else self.close
        await self.start()
        try:
            async with _told_to_end() as told:
                await asyncio.wait([told, *self._workers], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end()

    def at_stop(self, tell: Callable[[], None]) -> None:
        self._told_to_stop.append(tell)

    def at_close(self, end: Callable[[], Awaitable[None]]) -> None:
        self._endings.append(end)

    async def _end(self) -> None:
        """The last publishes: ``at_close`` of the parts of an application, then ``flush``."""
        for end in self._endings:
            await end()
        await self.flush()

    def _failed(self) -> list[BaseException]:
        """Why handler tasks ended."""
        ended = (task for task in self._workers if task.done() and not task.cancelled())
        return [only(task.exception()) for task in ended if task.exception() is not None]

    def _raise_failed(self) -> None:
        for error in self._failed():
            raise error


@contextlib.asynccontextmanager
async def _told_to_end() -> AsyncIterator[asyncio.Future[None]]:
    """A future that is done when the process is told to end. Only the main thread hears signals."""
    loop = asyncio.get_running_loop()
    told = loop.create_future()

    def tell() -> None:
        if not told.done():
            told.set_result(None)

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.getsignal(number)
            loop.add_signal_handler(number, tell)
    try:
        yield told
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
        told.cancel()


def only(error: BaseException | None) -> BaseException:
    """The one error inside a group of one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    assert error is not None
    return error


def fields_of(fields: dict[str, Any], now: Callable[[], datetime]) -> dict[str, Any]:
    """The fields of an event, from those that ``publish`` takes."""
    if fields.keys() <= _FIELDS and "priority" not in fields:
        return fields
    fields = dict(fields)
    delay_s = fields.pop("delay_s", None)
    if delay_s is not None:
        if fields.get("not_before") is not None:
            raise InvalidEvent("delay_s and not_before both say when", hint="give one of them")
        fields["not_before"] = now() + _span(delay_s)
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


def _refuse_fields(fields: Collection[str]) -> None:
    for name in fields:
        raise InvalidEvent(
            f"a whole event was given, and {name} besides",
            field=name,
            hint="msgspec.structs.replace(event, ...) makes an event with other fields",
        )


def _span(delay_s: Any) -> timedelta:
    if isinstance(delay_s, bool) or not isinstance(delay_s, int | float) or not 0 <= delay_s < 1e9:
        raise InvalidEvent(f"delay_s is a number of seconds, not {spelt(delay_s)}", field="delay_s")
    return timedelta(seconds=delay_s)
