"""``TracingMiddleware`` and ``MetricsMiddleware``, and how a middleware of those programs fits in.

A middleware is one of Trunkline's, or has any of ``before_publish(event)``,
``after_publish(event)``, ``before_handle(event)`` and ``after_handle(event)``, which may be
asynchronous; what they raise counts like a failure of the handler.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from events.types import from_bus
from trunkline import Event, Receipt, StorageFull
from trunkline.bus import Delivery

Sink = Callable[[str, float, dict[str, str]], None]
_HOOKS = ("before_publish", "after_publish", "before_handle", "after_handle")


def TracingMiddleware(provider: Any = None) -> object:
    """Spans ``events.publish`` and ``events.handle``, where OpenTelemetry is installed."""
    try:
        from trunkline.middleware.tracing import Tracing
    except ImportError:
        return _NoTracing()
    return Tracing(provider, publish_name="events.publish", handle_name="events.handle")


class _NoTracing:
    """Stands where there is no OpenTelemetry: events keep their ``trace_id``, no span is made."""

    async def publish(self, events: list[Event], call_next: Any) -> list[Receipt]:
        receipts: list[Receipt] = await call_next(events)
        return receipts


class MetricsMiddleware:
    """Counts by the old names; ``sink(name, value, labels)`` is told of each step as well.
    ``events_storage_full`` is 1 from the first publish that finds no room to the next that does.
    """

    def __init__(self, sink: Sink | None = None) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()
        self._sink = sink
        self._is_full = False

    def dead(self, topic: str) -> None:
        """A dead letter was written, for whatever reason."""
        self._count("events_dlq_total", topic=topic)

    def _full(self, now: bool) -> None:
        if now != self._is_full:
            self._is_full = now
            self.counts["events_storage_full",] = int(now)
            self._tell("events_storage_full", float(now), {})

    def _count(self, name: str, **labels: str) -> None:
        self.counts[name, *labels.values()] += 1
        self._tell(name, 1.0, labels)

    def _tell(self, name: str, value: float, labels: dict[str, str]) -> None:
        if self._sink is not None:
            self._sink(name, value, labels)

    async def publish(self, events: list[Event], call_next: Any) -> list[Receipt]:
        try:
            receipts: list[Receipt] = await call_next(events)
        except StorageFull:
            self._full(True)
            raise
        self._full(False)
        for event in events:
            self._count("events_publish_count", topic=event.topic)
        return receipts

    async def handle(self, delivery: Delivery, call_next: Any) -> Any:
        place = {"topic": delivery.topic, "group": delivery.group}
        started = time.perf_counter()
        try:
            result = await call_next(delivery)
        except Exception:
            self._count("events_handle_err_total", **place)
            raise
        else:
            self._count("events_handle_ok_total", **place)
            return result
        finally:
            seconds = time.perf_counter() - started
            self._tell("events_handle_latency_seconds", seconds, place)


class _Hooked:
    def __init__(self, hooks: object) -> None:
        self._hooks = hooks

    async def _call(self, name: str, event: Event) -> None:
        hook = getattr(self._hooks, name, None)
        if hook is not None:
            result = hook(from_bus(event))
            if inspect.isawaitable(result):
                await result

    async def publish(self, events: list[Event], call_next: Any) -> list[Receipt]:
        for event in events:
            await self._call("before_publish", event)
        receipts: list[Receipt] = await call_next(events)
        for event in events:
            await self._call("after_publish", event)
        return receipts

    async def handle(self, delivery: Delivery, call_next: Any) -> Any:
        await self._call("before_handle", delivery.event)
        result = await call_next(delivery)
        await self._call("after_handle", delivery.event)
        return result


def adapted(middleware: object) -> object:
    return _Hooked(middleware) if any(hasattr(middleware, name) for name in _HOOKS) else middleware
