"""The bus for scripts: the same calls without ``await``, on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from trunkline.bus import (
    Bus,
    DeadLetters,
    Delivery,
    F,
    GroupInfo,
    H,
    HandlerInfo,
    Health,
    Outcome,
    Start,
    Subscription,
    Where,
)
from trunkline.bus.connect import connect
from trunkline.check import check_delay
from trunkline.clock import Clock
from trunkline.delivery.deadletters import Letter, Redrive
from trunkline.errors import Closed, TrunklineError
from trunkline.event import Bounds, Event, EventFields, Receipt, Record
from trunkline.group.members import MemberInfo
from trunkline.options import (
    ConnectFields,
    GroupFields,
    GroupOptions,
    OnConflict,
    TopicFields,
    TopicOptions,
)

if TYPE_CHECKING:
    from ssl import SSLContext

T = TypeVar("T")
_LOOK_S = 0.5


class SyncDelivery:
    """A delivery whose verbs are plain calls."""

    def __init__(self, delivery: Delivery, bus: SyncBus) -> None:
        self.record = delivery.record
        self.event = delivery.event
        self.attempt = delivery.attempt
        self.group = delivery.group
        self._delivery = delivery
        self._bus = bus

    @property
    def topic(self) -> str:
        return self.record.topic

    @property
    def offset(self) -> int:
        return self.record.offset

    def ack(self) -> bool:
        return self._finish(Outcome.ACK)

    def nack(self, delay_s: float | None = None, reason: str = "") -> bool:
        return self._finish(Outcome.NACK, delay_s, reason)

    def term(self, reason: str = "rejected") -> bool:
        return self._finish(Outcome.TERM, None, reason)

    def in_progress(self) -> None:
        self._bus.call(self._delivery.in_progress())

    def _finish(self, outcome: Outcome, delay_s: float | None = None, reason: str = "") -> bool:
        async def finish() -> bool:
            return self._delivery.finish(outcome, delay_s, reason)

        return self._bus.call(finish())

    def __repr__(self) -> str:
        return f"<Sync{repr(self._delivery)[1:]}"


class SyncDesk:
    """The dead letters of one topic, as lists; see ``trunkline.bus.DeadLetters``."""

    def __init__(self, desk: DeadLetters, bus: SyncBus) -> None:
        self._desk = desk
        self._bus = bus

    def letters(self, **which: Any) -> list[Letter]:
        return self._bus.call(_all(self._desk.letters(**which)))

    def letter(self, offset: int) -> Letter:
        return self._bus.call(self._desk.letter(offset))

    def redrive(self, **which: Any) -> list[Redrive]:
        return self._bus.call(_all(self._desk.redrive(**which)))

    def drop(self, **which: Any) -> list[Letter]:
        return self._bus.call(_all(self._desk.drop(**which)))


class SyncBus:
    def __init__(self, url: str, **options: Any) -> None:  # those of ``connect``
        self._loop = asyncio.new_event_loop()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="trunkline-sync", daemon=True)
        self._thread.start()
        try:
            self.bus: Bus = self.call(_opened(url, options))
        except BaseException:
            self._end()
            raise

    def _run(self) -> None:
        """A handler that exits ends its group here, as any error of its task would, and is told by
        ``drain`` and ``close``. asyncio lets it out of the loop besides, which others wait for.
        """
        while not self._ending:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    def call(self, job: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the bus to its end."""
        if not self._thread.is_alive():
            job.close()
            raise Closed("the bus is closed", hint="after a fork, open it again in the child")
        if threading.current_thread() is self._thread:
            job.close()
            raise RuntimeError("an async handler would wait for itself: make it a plain function")
        future: Future[T] = asyncio.run_coroutine_threadsafe(job, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def publish(
        self, topic: str | Event, payload: Any = None, **fields: Unpack[EventFields]
    ) -> Receipt:
        return self.call(self.bus.publish(topic, payload, **fields))

    def publish_many(
        self, topic: str, payloads: Sequence[Any], **fields: Unpack[EventFields]
    ) -> list[Receipt]:
        return self.call(self.bus.publish_many(topic, payloads, **fields))

    def fire(
        self, topic: str | Event, payload: Any = None, **fields: Unpack[EventFields]
    ) -> Future[Receipt]:
        """Publish without waiting. Ask the future, or ``flush``, before you rely on the event."""
        told: Future[Receipt] = Future()

        async def begin() -> None:
            task = self.bus.fire(topic, payload, **fields)
            task.add_done_callback(lambda done: _tell(done, told))

        self.call(begin())
        return told

    def flush(self) -> None:
        """Wait for every event that was fired; raises the first error since the last ``flush``."""
        self.call(self.bus.flush())

    def read(
        self, topic: str, start: int | None = None, limit: int = 1000, *, partition: int = 0
    ) -> list[Record]:
        return self.call(self.bus.read(topic, start, limit, partition=partition))

    def bounds(self, topic: str, partition: int = 0) -> Bounds:
        return self.call(self.bus.bounds(topic, partition))

    def topics(self) -> dict[str, TopicOptions]:
        return self.call(self.bus.topics())

    def define(self, topic: str, **options: Unpack[TopicFields]) -> None:
        self.call(self.bus.define(topic, **options))

    def remove(self, topic: str) -> None:
        self.call(self.bus.remove(topic))

    def trim(self, topic: str, before: int, *, partition: int = 0) -> Bounds:
        return self.call(self.bus.trim(topic, before, partition=partition))

    def forget(self, topic: str, group: str) -> None:
        self.call(self.bus.forget(topic, group))

    def groups(self, topic: str | None = None, group: str | None = None) -> list[GroupInfo]:
        return self.call(self.bus.groups(topic, group))

    def members(self, topic: str | None = None, group: str | None = None) -> list[MemberInfo]:
        return self.call(self.bus.members(topic, group))

    def lag(self, topic: str, group: str) -> int:
        return self.call(self.bus.lag(topic, group))

    def seek(self, topic: str, group: str, to: Start) -> list[GroupInfo]:
        return self.call(self.bus.seek(topic, group, to))

    def pause(self, topic: str, group: str) -> list[GroupInfo]:
        return self.call(self.bus.pause(topic, group))

    def resume(self, topic: str, group: str) -> list[GroupInfo]:
        return self.call(self.bus.resume(topic, group))

    def edit(self, topic: str, group: str, **policy: Unpack[GroupFields]) -> list[GroupInfo]:
        return self.call(self.bus.edit(topic, group, **policy))

    def health(self) -> Health:
        return self.call(self.bus.health())

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
        timeout_s: float | None = None,
    ) -> Iterator[SyncDelivery]:
        """Deliveries until nothing came for ``timeout_s``; without it, for ever."""
        check_delay(timeout_s, "timeout_s")
        subscription = self.bus.subscribe(
            topic,
            group=group,
            start=start,
            policy=policy,
            on_conflict=on_conflict,
            max_inflight=max_inflight,
            where=where,
        )
        self.call(subscription.__aenter__())
        try:
            while True:
                try:
                    delivery = self.call(_next(subscription, timeout_s))
                except (TimeoutError, StopAsyncIteration):
                    return
                if delivery is None:
                    return
                yield SyncDelivery(delivery, self)
        finally:
            if self._thread.is_alive():  # else the bus was closed first, and with it this
                self.call(subscription.close())

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
        """Make a plain function the handler of a group. It begins at once, in threads of its own:
        ``workers`` of them, or one.
        """

        def register(handler: H) -> H:
            async def begin() -> None:
                await self.bus.start()
                self.bus.on(
                    topic,
                    group=group,
                    workers=workers,
                    start=start,
                    policy=policy,
                    on_conflict=on_conflict,
                    max_inflight=max_inflight,
                    where=where,
                    type=type,
                    timeout_s=timeout_s,
                )(handler)

            self.call(begin())
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
        """Call a plain function every ``period``; see ``trunkline.Bus.every``."""

        def register(function: F) -> F:
            async def begin() -> None:
                await self.bus.start()
                self.bus.every(
                    period,
                    name=name,
                    missed=missed,
                    tz=tz,
                    policy=policy,
                    on_conflict=on_conflict,
                    timeout_s=timeout_s,
                )(function)

            self.call(begin())
            return function

        return register

    def handlers(self) -> list[HandlerInfo]:
        return self.bus.handlers()

    def run(self) -> None:
        """Wait until SIGINT or SIGTERM, then let the handlers finish and close. Call it in the main
        thread: only that one hears signals.
        """
        told = threading.Event()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, lambda *_: told.set())
        try:
            while not told.wait(_LOOK_S):
                if failed := self.health().get("failed"):
                    raise TrunklineError(f"a handler ended: {failed[0]}")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.close()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until the handlers have settled all there is; False if that took longer."""
        return self.call(self.bus.drain(timeout_s))

    def dead_letters(self, topic: str) -> SyncDesk:
        return SyncDesk(self.bus.dead_letters(topic), self)

    def close(self) -> None:
        if self._thread.is_alive():
            try:
                self.call(self.bus.close())
            finally:
                self._end()

    def _end(self) -> None:
        self._ending = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _tell(done: asyncio.Task[T], told: Future[T]) -> None:
    error = None if done.cancelled() else done.exception()
    if done.cancelled():
        told.cancel()
    elif error is not None:
        told.set_exception(error)
    else:
        told.set_result(done.result())


async def _opened(url: str, options: dict[str, Any]) -> Bus:
    return connect(url, **options)


async def _all(found: AsyncIterator[T]) -> list[T]:
    return [one async for one in found]


async def _next(subscription: Subscription, timeout_s: float | None) -> Delivery | None:
    try:
        async with asyncio.timeout(timeout_s):
            return await subscription.__anext__()
    except StopAsyncIteration:
        return None


def open(
    url: str,
    *,
    middleware: Sequence[object] = (),
    clock: Clock | None = None,
    token: str | None = None,
    tls: SSLContext | None = None,
    **options: Unpack[ConnectFields],
) -> SyncBus:
    """Open a bus for a script, with the options of ``connect``. Use it in a ``with``, or ``close``
    it.
    """
    return SyncBus(url, middleware=middleware, clock=clock, token=token, tls=tls, **options)
