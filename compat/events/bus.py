"""``EventBus``: a bus in the folder ``workspace/.bus``."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import trunkline
from events.filters import Filter
from events.middleware import MetricsMiddleware, adapted
from events.subscription import Subscription, SubscriptionRegistry
from events.types import Event, EventBusState, Nack, from_bus, is_nack, to_bus
from trunkline.names import GroupKey

__all__ = ["EventBus", "EventBusState"]

Handler = Callable[[Event], Any]
_handled: ContextVar[trunkline.Event | None] = ContextVar("handled", default=None)
_LOOK_S = 0.5


class _DeadLetters:
    """An observer of dead letters."""

    def __init__(self, tell: Callable[[GroupKey, trunkline.Record, str, str], None]) -> None:
        self.on_dead_letter = tell


class EventBus:
    """Needs no ``start``, but takes one. ``ack_deadlines`` has milliseconds by topic: a handler
    that takes longer has failed. ``options`` are those of ``trunkline.connect``.
    """

    def __init__(
        self,
        middlewares: Sequence[object] = (),
        *,
        base_dir: str = "workspace/.bus",
        registry: SubscriptionRegistry | None = None,
        ack_deadlines: Mapping[str, float] | None = None,
        **options: Any,
    ) -> None:
        self.registry = registry or SubscriptionRegistry()
        self._metrics = [one for one in middlewares if isinstance(one, MetricsMiddleware)]
        self._deadlines = dict(ack_deadlines or {})
        self._full: list[_Window] = []
        self._state = EventBusState.STOPPED
        self._bus = trunkline.connect(f"file:{base_dir}", **options)
        self._bus.use(*(adapted(one) for one in middlewares), _DeadLetters(self._dead))

    @property
    def state(self) -> EventBusState:
        return self._state

    async def start(self) -> None:
        """Begin with what is in the registry; what is put there later needs another ``start``."""
        await self._bus.start()
        self._state = EventBusState.RUNNING
        for subscription in self.registry.not_begun():
            await self._begin(subscription)

    async def publish(self, event: Event, topic: str | None = None) -> trunkline.Receipt:
        """Returns once the event is on disk. Waits while a subscription of this bus to the topic
        has ``max_inflight`` events that are not done; a handler that publishes does not wait.
        """
        sent = to_bus(event, topic)
        inside = _handled.get()
        if inside is not None:
            more: dict[str, Any] = {"cause": inside.id}
            if sent.trace is None and inside.trace is not None:
                more["trace"] = inside.trace
            sent = trunkline.Event(**{**_fields(sent), **more})
        windows = [one for one in self._full if one.subscription.topic == sent.topic]
        if inside is None:
            for window in windows:
                await window.wait(self._bus)
        for window in windows:
            window.begin(sent)
        try:
            receipt = await self._bus.publish(sent)
        except BaseException:
            for window in windows:
                window.end(sent.id)
            raise
        if receipt.duplicate:
            for window in windows:
                window.end(sent.id)
        return receipt

    async def subscribe(
        self,
        topic: str,
        group: str,
        handler: Handler,
        *,
        max_inflight: int = 100,
        workers: int = 1,
        backoff_base: float = 0.5,
        backoff_mult: float = 2.0,
        backoff_max: float = 30.0,
        max_retries: int = 5,
        filters: Sequence[Filter] = (),
        deadline_ms: float | None = None,
    ) -> Subscription:
        """A durable group begins with the first event there is, or goes on where it was. A changed
        policy holds from now on.
        """
        subscription = Subscription(
            topic=topic,
            group=group,
            handler=handler,
            filters=tuple(filters),
            max_inflight=max_inflight,
            workers=workers,
            policy=trunkline.GroupOptions(
                backoff_base_s=backoff_base,
                backoff_mult=backoff_mult,
                backoff_max_s=backoff_max,
                max_retries=max_retries,
            ),
            deadline_ms=deadline_ms,
        )
        await self._bus.start()
        self._state = EventBusState.RUNNING
        await self._begin(subscription)
        return subscription

    async def _begin(self, subscription: Subscription) -> None:
        subscription.begun = True
        window = _Window(subscription)
        self._full.append(window)

        def wanted(event: trunkline.Event) -> bool:
            if subscription.wants(from_bus(event)):
                return True
            window.end(event.id)
            return False

        deadline = subscription.deadline_ms or self._deadlines.get(subscription.topic)
        self._bus.on(
            subscription.topic,
            group=subscription.group,
            workers=subscription.workers,
            max_inflight=max(subscription.max_inflight, subscription.workers),
            policy=subscription.policy,
            on_conflict="update",
            where=wanted if subscription.filters else None,
        )(_called(subscription.handler, window, None if deadline is None else deadline / 1000))
        await self._bus.drain(0)  # raises what kept the group from beginning

    def _dead(self, key: GroupKey, record: trunkline.Record, reason: str, error: str) -> None:
        del reason, error
        for metrics in self._metrics:
            metrics.dead(key.topic)
        for window in self._full:
            if (window.subscription.topic, window.subscription.group) == (key.topic, key.group):
                window.end(record.event.id)

    async def replay(self, topic: str, start: int = 1) -> AsyncIterator[tuple[int, Event]]:
        """The events of a topic from an offset on, with their offsets, for no group."""
        while records := await self._bus.read(topic, start):
            for record in records:
                yield record.offset, from_bus(record.event)
            start = records[-1].offset + 1

    async def health(self) -> dict[str, Any]:
        """``ok``, ``events_storage_full`` and more."""
        return {**await self._bus.health(), "state": self._state.value}

    async def close(self) -> None:
        self._state = EventBusState.STOPPED
        await self._bus.close()

    stop = close

    async def __aenter__(self) -> EventBus:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _fields(event: trunkline.Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


class _Window:
    """The events that this bus published for a subscription and that are not done yet."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self._open: dict[str, float | None] = {}  # until when an event may live
        self._less = asyncio.Event()

    def begin(self, event: trunkline.Event) -> None:
        self._open[event.id] = None if event.ttl_s is None else event.ts.timestamp() + event.ttl_s

    def end(self, id_: str) -> None:
        if id_ in self._open:
            del self._open[id_]
            self._less.set()

    async def wait(self, bus: Any) -> None:
        """Until there is room. Another process may have handled events of this group, and then the
        group itself is asked.
        """
        most = self.subscription.max_inflight
        while len(self._open) >= most:
            self._less.clear()
            try:
                await asyncio.wait_for(self._less.wait(), _LOOK_S)
            except TimeoutError:
                now = bus.clock.now().timestamp()
                for id_ in [i for i, until in self._open.items() if until and until <= now]:
                    self.end(id_)
                if await bus.lag(self.subscription.topic, self.subscription.group) < most:
                    self._open.clear()


def _called(
    handler: Handler, window: _Window, deadline_s: float | None
) -> Callable[[trunkline.Event], Awaitable[Any]]:
    """The handler as the bus calls it: a ``Nack``, returned or raised, asks for another try."""
    is_async = inspect.iscoroutinefunction(handler)

    async def call(event: trunkline.Event) -> Any:
        token = _handled.set(event)
        try:
            async with asyncio.timeout(deadline_s):
                if is_async:
                    result = await handler(from_bus(event))
                else:
                    result = await asyncio.to_thread(handler, from_bus(event))
                    if inspect.isawaitable(result):
                        result = await result
        except Exception as error:
            if not is_nack(error):
                raise
            result = error
        finally:
            _handled.reset(token)
        if is_nack(result):
            said = str(result) if isinstance(result, Nack) else ""
            raise trunkline.Retry(getattr(result, "delay_s", None), said)
        window.end(event.id)
        return result

    return call
