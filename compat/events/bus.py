"""``EventBus``: a bus in the folder ``workspace/.bus``."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trunkline
from events.filters import Filter
from events.middleware import adapted
from events.subscription import Subscription, SubscriptionRegistry
from events.types import Event, Nack, from_bus, to_bus

Handler = Callable[[Event], Any]


class EventBus:
    """Needs no ``start``, but takes one. ``options`` are those of ``trunkline.connect``."""

    def __init__(
        self,
        middlewares: Sequence[object] = (),
        *,
        base_dir: str = "workspace/.bus",
        registry: SubscriptionRegistry | None = None,
        **options: Any,
    ) -> None:
        self.registry = registry or SubscriptionRegistry()
        self._bus = trunkline.connect(f"file:{base_dir}", **options)
        self._bus.use(*(adapted(one) for one in middlewares))

    async def start(self) -> None:
        """Begin with what is in the registry; what is put there later needs another ``start``."""
        await self._bus.start()
        for subscription in self.registry.not_begun():
            await self._begin(subscription)

    async def publish(self, event: Event, topic: str | None = None) -> trunkline.Receipt:
        """Returns once the event is on disk. Waits while too many others do the same."""
        return await self._bus.publish(to_bus(event, topic))

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
    ) -> Subscription:
        """A durable group begins with the first event there is, or goes on where it was."""
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
        )
        await self._bus.start()
        await self._begin(subscription)
        return subscription

    async def _begin(self, subscription: Subscription) -> None:
        subscription.begun = True
        where = subscription.wants if subscription.filters else None
        self._bus.on(
            subscription.topic,
            group=subscription.group,
            workers=subscription.workers,
            max_inflight=max(subscription.max_inflight, subscription.workers),
            policy=subscription.policy,
            where=where and (lambda event: subscription.wants(from_bus(event))),
        )(_called(subscription.handler))
        await self._bus.drain(0)  # raises what kept the group from beginning

    async def close(self) -> None:
        await self._bus.close()

    stop = close

    async def __aenter__(self) -> EventBus:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _called(handler: Handler) -> Callable[[trunkline.Event], Awaitable[Any]]:
    """The handler as the bus calls it: a ``Nack``, returned or raised, asks for another try."""
    if not inspect.iscoroutinefunction(handler):

        def plain(event: trunkline.Event) -> Any:
            return _judged(lambda: handler(from_bus(event)))

        return plain

    async def call(event: trunkline.Event) -> Any:
        try:
            result = await handler(from_bus(event))
        except Nack as nack:
            result = nack
        return _judged(lambda: result)

    return call


def _judged(get: Callable[[], Any]) -> Any:
    try:
        result = get()
    except Nack as nack:
        result = nack
    if isinstance(result, Nack) or result is Nack:
        delay_s = getattr(result, "delay_s", None) if isinstance(result, Nack) else None
        raise trunkline.Retry(delay_s, str(result) if isinstance(result, Nack) else "")
    return result
