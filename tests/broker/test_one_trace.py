"""One trace from a producer through a broker and a handler to what the handler publishes."""

from __future__ import annotations

import asyncio

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import trunkline
from trunkline.broker.server import Broker
from trunkline.event import Event
from trunkline.middleware.tracing import Tracing


def tracing() -> tuple[Tracing, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    named = Tracing(provider, publish_name="events.publish", handle_name="events.handle")
    return named, exporter


def trace_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.trace_id)


async def test_one_trace_runs_through_the_broker_and_the_handler(broker: Broker) -> None:
    producer, produced = tracing()
    worker, worked = tracing()
    done = asyncio.Event()
    async with (
        trunkline.connect(broker.url, middleware=[producer]) as sender,
        trunkline.connect(broker.url, middleware=[worker]) as receiver,
    ):

        @receiver.on("actions", group="arbiter")
        async def decide(event: Event) -> None:
            await receiver.publish("decisions", {"for": event.id}, cause=event.id, space="home")

        @receiver.on("decisions", group="actuator")
        async def act(event: Event) -> None:
            done.set()

        await sender.publish("actions", {"n": 1}, space="home")
        async with asyncio.timeout(20):
            await done.wait()
        assert await receiver.drain(20)
    (first,) = produced.get_finished_spans()
    spans = worked.get_finished_spans()
    assert sorted(span.name for span in spans) == [
        "events.handle",
        "events.handle",
        "events.publish",
    ]
    assert {trace_of(span) for span in spans} == {trace_of(first)}
    assert first.attributes is not None
    assert {"topic", "space_id", "size_bytes"} <= first.attributes.keys()
    for span in spans:
        if span.name == "events.handle":
            assert span.attributes is not None
            wanted = {"topic", "group", "offset", "retries", "lat_ms"}
            assert wanted <= span.attributes.keys()
