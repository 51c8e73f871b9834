"""Spans for publishing and handling, by OpenTelemetry's conventions for messaging.

A published event carries the span's ``traceparent`` in ``trace``, and ``tracestate`` as a header;
the span of its handling is a child of that one and links to it, in whatever process it happens. An
event that comes with a trace of its own keeps it, and the span of publishing links to that one. The
tags ``topic``, ``space_id``, ``size_bytes`` and ``topic``, ``group``, ``offset``, ``retries``,
``lat_ms`` stand beside the conventional ones.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trunkline.bus import Delivery
from trunkline.clock import Clock, SystemClock
from trunkline.codec import encode_value
from trunkline.errors import HandlerSignal
from trunkline.event import Event, Receipt
from trunkline.middleware import HandleNext, PublishNext

_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_STATE = "tracestate"
_STATE_MAX = 512  # longer ones need not be passed on
_w3c = TraceContextTextMapPropagator()  # what ``trace`` holds, whatever else a process speaks


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
        brought = [(event.id, context) for event in events if (context := _context(event))]
        parent = None if _is_inside() else _context(first)
        kind = SpanKind.CLIENT if len(brought) == len(events) else SpanKind.PRODUCER
        links = [_link(context, {"messaging.message.id": id}) for id, context in brought]
        with self._tracer.start_as_current_span(name, parent, kind, links=links) as span:
            if span.is_recording():
                span.set_attributes(_common(first, "publish", "send"))
                if first.space is not None:
                    span.set_attribute("space_id", first.space)
                size = sum(len(encode_value(event.payload)) for event in events)
                span.set_attribute("size_bytes", size)
                if len(events) > 1:
                    span.set_attribute("messaging.batch.message_count", len(events))
                else:
                    span.set_attribute("messaging.message.id", first.id)
                    span.set_attribute("messaging.message.body.size", size)
            carrier: dict[str, str] = {}
            _w3c.inject(carrier)
            try:
                return await call_next([_carrying(event, carrier) for event in events])
            except Exception as error:
                span.set_attribute("error.type", type(error).__qualname__)
                raise

    async def handle(self, delivery: Delivery, call_next: HandleNext) -> Any:
        event = delivery.event
        name = self._handle_name.format(topic=event.topic)
        quiet: Any = {"record_exception": False, "set_status_on_exception": False}
        made = _context(event)
        links = [] if made is None else [_link(made)]
        if made is not None and _is_inside():
            links.append(Link(trace.get_current_span().get_span_context()))
        with self._tracer.start_as_current_span(
            name, made, SpanKind.CONSUMER, links=links, **quiet
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
        "topic": event.topic,
    }


def _place(delivery: Delivery) -> dict[str, str | int]:
    return {
        "messaging.message.id": delivery.event.id,
        "messaging.consumer.group.name": delivery.group,
        "messaging.destination.partition.id": str(delivery.partition),
        "group": delivery.group,
        "offset": delivery.offset,
        "retries": delivery.attempt - 1,
    }


def _is_inside() -> bool:
    return trace.get_current_span().get_span_context().is_valid


def _context(event: Event) -> Context | None:
    """The context an event came with, if it came with one."""
    if event.trace is None or not _TRACEPARENT.fullmatch(event.trace):
        return None
    state = event.headers.get(_STATE, "")
    found = _w3c.extract({"traceparent": event.trace, _STATE: state}, Context())
    return found if trace.get_current_span(found).get_span_context().is_valid else None


def _link(context: Context, about: dict[str, str] | None = None) -> Link:
    return Link(trace.get_current_span(context).get_span_context(), about)


def _carrying(event: Event, carrier: dict[str, str]) -> Event:
    """A trace that is there, of whatever make, is its sender's and stays."""
    if event.trace is not None or "traceparent" not in carrier:
        return event
    state = carrier.get(_STATE, "")
    headers = event.headers
    if 0 < len(state) <= _STATE_MAX:
        headers = {**headers, _STATE: state}
    return msgspec.structs.replace(event, trace=carrier["traceparent"], headers=headers)
