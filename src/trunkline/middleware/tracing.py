"""Spans for publishing and handling, by OpenTelemetry's conventions for messaging.

A published event carries the span's ``traceparent`` in ``trace``; the span of its handling is a
child of that one, in whatever process it happens. The tags ``topic``, ``space_id``, ``size_bytes``
and ``topic``, ``group``, ``offset``, ``retries``, ``lat_ms`` stand beside the conventional ones.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider

from trunkline.bus import Delivery
from trunkline.clock import Clock, SystemClock
from trunkline.errors import HandlerSignal
from trunkline.event import Event, Receipt
from trunkline.middleware import HandleNext, PublishNext

_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Tracing:
    """``publish_name`` and ``handle_name`` name the spans; ``{topic}`` in them is filled in."""

    def __init__(
        self,
        provider: TracerProvider | None = None,
        *,
        publish_name: str = "publish {topic}",
        handle_name: str = "process {topic}",
        clock: Clock | None = None,
    ) -> None:
        self._tracer = trace.get_tracer("trunkline", tracer_provider=provider)
        self._publish_name = publish_name
        self._handle_name = handle_name
        self._clock = clock or SystemClock()

    async def publish(self, events: list[Event], call_next: PublishNext) -> list[Receipt]:
        first = events[0]
        name = self._publish_name.format(topic=first.topic)
        inside = trace.get_current_span().get_span_context().is_valid
        context = None if inside else _context(first)
        with self._tracer.start_as_current_span(name, context, SpanKind.PRODUCER) as span:
            if span.is_recording():
                span.set_attributes(_common(first, "publish", "send"))
                if first.space is not None:
                    span.set_attribute("space_id", first.space)
                size = sum(len(msgspec.json.encode(event.payload)) for event in events)
                span.set_attributes({"size_bytes": size, "messaging.message.body.size": size})
                if len(events) > 1:
                    span.set_attribute("messaging.batch.message_count", len(events))
            carrier: dict[str, str] = {}
            propagate.inject(carrier)
            return await call_next([_carrying(event, carrier) for event in events])

    async def handle(self, delivery: Delivery, call_next: HandleNext) -> Any:
        event = delivery.event
        name = self._handle_name.format(topic=event.topic)
        quiet: Any = {"record_exception": False, "set_status_on_exception": False}
        with self._tracer.start_as_current_span(
            name, _context(event), SpanKind.CONSUMER, **quiet
        ) as span:
            span.set_attributes(_common(event, "process", "process"))
            span.set_attributes(_place(delivery))
            try:
                return await call_next(delivery)
            except HandlerSignal as signal:
                span.add_event(type(signal).__name__, {"reason": str(signal)})
                raise
            except Exception as error:
                span.record_exception(error)
                span.set_status(Status(StatusCode.ERROR, str(error)))
                span.set_attribute("error.type", type(error).__qualname__)
                raise
            finally:
                lat = self._clock.now() - event.ts
                span.set_attribute("lat_ms", round(lat.total_seconds() * 1000, 3))


def _common(event: Event, name: str, kind: str) -> dict[str, str]:
    return {
        "messaging.system": "trunkline",
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": event.topic,
        "messaging.message.id": event.id,
        "topic": event.topic,
    }


def _place(delivery: Delivery) -> dict[str, str | int]:
    return {
        "messaging.consumer.group.name": delivery.group,
        "messaging.destination.partition.id": str(delivery.partition),
        "group": delivery.group,
        "offset": delivery.offset,
        "retries": delivery.attempt - 1,
    }


def _context(event: Event) -> Any:
    """The context an event came with, if it came with one."""
    if event.trace is None or not _TRACEPARENT.fullmatch(event.trace):
        return None
    return propagate.extract({"traceparent": event.trace})


def _carrying(event: Event, carrier: dict[str, str]) -> Event:
    """An id of another make in ``trace`` is its sender's and stays."""
    parent = carrier.get("traceparent")
    if parent is None or (event.trace is not None and not _TRACEPARENT.fullmatch(event.trace)):
        return event
    return msgspec.structs.replace(event, trace=parent)
