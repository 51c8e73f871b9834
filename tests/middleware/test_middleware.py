"""Middleware: how it is composed, and each that is shipped, with the real libraries."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry import propagate, trace
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
)
from prometheus_client import CollectorRegistry

import trunkline
from trunkline.bus import Delivery
from trunkline.bus.local import LocalBus
from trunkline.errors import Denied, InvalidEvent, InvalidOption, Reject, StorageFull
from trunkline.event import Event, Receipt
from trunkline.guard.limits import Guard
from trunkline.middleware import compose
from trunkline.middleware.dedup import Dedup
from trunkline.middleware.metrics import Metrics
from trunkline.middleware.tracing import Tracing
from trunkline.options import GroupOptions
from trunkline.store.memory import MemoryStore
from trunkline.testing import ManualClock
from trunkline.testing.clock import EPOCH

POLICY = GroupOptions(backoff_base_s=0.0, max_retries=1)


def make_bus(*middleware: object, **options: Any) -> LocalBus:
    clock = ManualClock()
    bus = LocalBus(MemoryStore(clock=clock), clock=clock, **options)
    bus.use(*middleware)
    return bus


class Outer:
    async def handle(self, value: str, call_next: Any) -> str:
        return f"outer({await call_next(value + '>')})"


class Inner(Outer):
    async def handle(self, value: str, call_next: Any) -> str:
        return f"inner({await call_next(value + '>')})"


class Other:
    async def publish(self, events: list[Event], call_next: Any) -> Any:
        raise AssertionError("it has no part in this side")


async def test_the_first_middleware_is_the_outermost() -> None:
    async def last(value: str) -> str:
        return value

    chain = compose([Outer(), Other(), Inner()], "handle", last)
    assert await chain("x") == "outer(inner(x>>))"


@pytest.mark.parametrize("wrong", [Outer, object(), print, "metrics"])
def test_what_can_wrap_nothing_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidOption, match="not a middleware"):
        make_bus(wrong)
    with pytest.raises(InvalidOption, match="not a middleware"):
        LocalBus(MemoryStore(), middleware=[wrong])


def test_without_middleware_nothing_is_between() -> None:
    assert compose([Other()], "handle", print) is print


# -- tracing -----------------------------------------------------------------------------------


class Spans:
    """A real tracer whose spans are kept."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


def seen(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def linked(span: ReadableSpan) -> list[str]:
    return [told(link.context) for link in span.links]


def told(context: SpanContext | None) -> str:
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


async def test_a_span_of_handling_is_a_child_of_the_span_of_publishing() -> None:
    spans = Spans()
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    async with LocalBus(store, clock=clock) as bus:
        bus.use(Tracing(spans.provider, clock=clock))
        await bus.publish("orders", {"id": 1}, space="home", ts=EPOCH - timedelta(seconds=2))
        bus.on("orders", group="billing")(lambda event: None)
        await bus.drain()
        (record,) = await bus.read("orders")

    (sent,) = spans.named("publish orders")
    (handled,) = spans.named("process orders")
    assert (sent.kind, handled.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert sent.context is not None
    assert handled.parent is not None
    assert handled.parent.span_id == sent.context.span_id
    assert linked(handled) == [record.event.trace]
    assert record.event.trace == told(sent.context)
    assert seen(sent) == {
        "messaging.system": "trunkline",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.message.id": record.event.id,
        "messaging.message.body.size": 8,
        "topic": "orders",
        "space_id": "home",
        "size_bytes": 8,
    }
    assert seen(handled) == {
        "messaging.system": "trunkline",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "0",
        "messaging.consumer.group.name": "billing",
        "messaging.message.id": record.event.id,
        "topic": "orders",
        "group": "billing",
        "offset": 1,
        "retries": 0,
        "lat_ms": 2000.0,
    }


async def test_a_trace_goes_on_from_where_the_producer_was() -> None:
    spans = Spans()
    theirs = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with make_bus(Tracing(spans.provider)) as bus:
        with spans.tracer.start_as_current_span("request") as request:
            await bus.publish_many("orders", [1, 2])
        await bus.publish("orders", 3, trace=theirs)
        await bus.publish("orders", 4, trace="trace-123")
        records = await bus.read("orders")

    batch, single, _ = spans.named("publish orders")
    assert batch.parent is not None
    assert batch.parent.span_id == request.get_span_context().span_id
    assert seen(batch)["messaging.batch.message_count"] == 2
    assert not any(name.startswith("messaging.message.") for name in seen(batch))  # of one message
    assert single.parent is not None
    assert f"{single.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert (single.kind, linked(single)) == (SpanKind.CLIENT, [theirs])
    assert records[2].event.trace == theirs
    assert records[3].event.trace == "trace-123"


async def test_every_event_of_a_batch_keeps_the_trace_it_came_with() -> None:
    spans = Spans()
    traces = [f"00-{'a' * 32}-{n:016x}-01" for n in (1, 2)]
    async with make_bus(Tracing(spans.provider)) as bus:
        with spans.tracer.start_as_current_span("relay"):
            events = [Event(topic="orders", trace=trace) for trace in (*traces, None)]
            await bus.publish_many("orders", events)
        records = await bus.read("orders")

    (sent,) = spans.named("publish orders")
    assert (sent.kind, linked(sent)) == (SpanKind.PRODUCER, traces)
    assert [record.event.trace for record in records[:2]] == traces
    assert records[2].event.trace == told(sent.context)


async def test_a_handler_inside_of_another_span_links_to_it() -> None:
    spans = Spans()
    async with make_bus(Tracing(spans.provider)) as bus:
        await bus.publish("orders", 1)
        with spans.tracer.start_as_current_span("service"):
            bus.on("orders", group="billing")(lambda event: None)
            await bus.drain()
        (record,) = await bus.read("orders")

    (handled,) = spans.named("process orders")
    (service,) = spans.named("service")
    assert linked(handled) == [record.event.trace, told(service.context)]


@pytest.fixture
def other_headers() -> Iterator[None]:
    """A process that speaks of traces by other headers than those of W3C, B3 say."""
    before = propagate.get_global_textmap()
    propagate.set_global_textmap(CompositePropagator([]))
    yield
    propagate.set_global_textmap(before)


@pytest.mark.usefixtures("other_headers")
async def test_what_vendors_add_to_a_trace_reaches_the_handler() -> None:
    spans = Spans()
    found: list[Any] = []
    remote = SpanContext(1, 2, True, TraceFlags(1), TraceState([("vendor", "x")]))
    async with make_bus(Tracing(spans.provider)) as bus:
        with trace.use_span(NonRecordingSpan(remote)):
            await bus.publish("orders", 1)

        @bus.on("orders", group="billing")
        async def bill(event: Event) -> None:
            found.append(trace.get_current_span().get_span_context())

        await bus.drain()
        (record,) = await bus.read("orders")
    assert record.event.headers == {"tracestate": "vendor=x"}
    assert [(one.trace_id, one.trace_state.to_header()) for one in found] == [(1, "vendor=x")]


async def test_a_failure_shows_in_its_span_and_a_signal_does_not() -> None:
    spans = Spans()
    async with make_bus(Tracing(spans.provider, handle_name="events.handle")) as bus:

        @bus.on("orders", group="billing", policy=POLICY)
        async def bill(event: Event, delivery: Delivery) -> None:
            if delivery.attempt == 1:
                raise ValueError("no")
            raise Reject("never")

        await bus.publish("orders", 1)
        await bus.drain()
        with pytest.raises(InvalidEvent):
            await bus.publish("orders", float("nan"))

    failed, rejected = spans.named("events.handle")
    assert (failed.status.status_code, rejected.status.status_code) == (
        StatusCode.ERROR,
        StatusCode.UNSET,
    )
    assert (seen(failed)["retries"], seen(rejected)["retries"]) == (0, 1)
    assert [event.name for event in failed.events] == ["exception"]
    assert [event.name for event in rejected.events] == ["Reject"]
    refused = spans.named("publish orders")[-1]
    assert refused.status.status_code is StatusCode.ERROR
    assert seen(refused)["error.type"] == "InvalidEvent"


# -- metrics -----------------------------------------------------------------------------------


async def test_what_happens_is_counted() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    async with make_bus(metrics) as bus:
        await bus.define("orders", dedup_window_s=60)

        @bus.on("orders", group="billing", policy=POLICY)
        async def bill(event: Event) -> None:
            if event.payload == "bad":
                raise ValueError("bad")
            if event.payload == "worse":
                raise Reject("worse")

        await bus.publish_many("orders", ["good", "bad", "worse"])
        await bus.publish("orders", "good", idem_key="a")
        await bus.publish("orders", "good", idem_key="a")
        with pytest.raises(InvalidEvent):
            await bus.publish("orders", float("nan"))
        await bus.drain()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    total = "trunkline_published_total"
    assert value(total, topic="orders", result="ok") == 4
    assert value(total, topic="orders", result="duplicate") == 1
    assert value(total, topic="orders", result="InvalidEvent") == 1
    place = {"topic": "orders", "group": "billing"}
    settled = "trunkline_settled_total"
    assert value(settled, **place, outcome="ack") == 2
    assert value(settled, **place, outcome="nack") == 2
    assert value(settled, **place, outcome="term") == 1
    assert value("trunkline_dlq_total", **place, reason="retries") == 1
    assert value("trunkline_dlq_total", **place, reason="rejected") == 1
    assert value("trunkline_publish_duration_seconds_count", topic="orders") == 3
    assert value("trunkline_process_duration_seconds_count", **place) == 5
    assert value("trunkline_storage_full") == 0


async def test_a_full_disk_shows_until_there_is_room() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    full = True

    class Disk:
        async def publish(self, events: list[Event], call_next: Any) -> list[Receipt]:
            if full:
                raise StorageFull
            done: list[Receipt] = await call_next(events)
            return done

    async with make_bus(metrics, Disk()) as bus:
        with pytest.raises(StorageFull):
            await bus.publish("orders", 1)
        assert registry.get_sample_value("trunkline_storage_full") == 1
        full = False
        await bus.publish("orders", 1)
        assert registry.get_sample_value("trunkline_storage_full") == 0


async def test_two_buses_may_count_in_one_registry() -> None:
    registry = CollectorRegistry()
    for _ in range(2):
        async with make_bus(Metrics(registry)) as bus:
            await bus.publish("orders", 1)
    labels = {"topic": "orders", "result": "ok"}
    assert registry.get_sample_value("trunkline_published_total", labels) == 2


# -- dedup -------------------------------------------------------------------------------------


async def test_what_was_handled_is_not_handled_again() -> None:
    calls: list[Any] = []
    async with make_bus(Dedup()) as bus:

        @bus.on("orders", group="billing", policy=POLICY)
        async def bill(event: Event, delivery: Delivery) -> None:
            calls.append((event.payload, delivery.attempt))
            if event.payload == "fails once" and delivery.attempt == 1:
                raise ValueError("once")

        for payload in ("one", "one again"):
            await bus.publish("orders", payload, idem_key="a")
        await bus.publish("orders", "two", idem_key="b")
        await bus.publish("orders", "fails once")
        assert await bus.drain()
    assert sorted(calls) == [("fails once", 1), ("fails once", 2), ("one", 1), ("two", 1)]


async def test_each_group_handles_it_once() -> None:
    calls: list[str] = []
    async with make_bus(Dedup()) as bus:
        for group in ("billing", "audit"):

            @bus.on("orders", group=group)
            async def note(event: Event, delivery: Delivery) -> None:
                calls.append(delivery.group)

        await bus.publish("orders", 1, idem_key="a")
        await bus.publish("orders", 1, idem_key="a")
        await bus.drain()
    assert sorted(calls) == ["audit", "billing"]


async def test_only_as_much_is_remembered_as_allowed() -> None:
    calls: list[Any] = []
    async with make_bus(Dedup(size=2)) as bus:
        await bus.define("orders", dedup_window_s=0.0)  # else the second is the first
        bus.on("orders", group="billing")(lambda event: calls.append(event.idem_key))
        for key in ("a", "b", "a", "c", "a", "b"):  # a is met again in time, b is not
            await bus.publish("orders", 1, idem_key=key)
            await bus.drain()
    assert calls == ["a", "b", "c", "b"]
    with pytest.raises(InvalidOption):
        Dedup(size=0)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_copy_waits_for_the_one_that_is_being_handled(fails: bool) -> None:
    """However long that takes it loses no try by it."""
    calls: list[tuple[int, int]] = []
    go = asyncio.Event()
    once = GroupOptions(max_retries=0)
    async with make_bus(Dedup()) as bus:
        await bus.define("orders", dedup_window_s=0.0)  # else the second is the first

        @bus.on("orders", group="billing", workers=2, policy=once)
        async def bill(event: Event, delivery: Delivery) -> None:
            calls.append((delivery.offset, delivery.attempt))
            await go.wait()
            if fails and delivery.offset == 1:
                raise ValueError

        await bus.publish("orders", 1, idem_key="a")
        await bus.publish("orders", 1, idem_key="a")
        assert await bus.drain(0.1) is False
        assert calls == [(1, 1)]
        go.set()
        assert await bus.drain(10)
        dead = [letter.origin async for letter in bus.dead_letters("orders").letters()]
    assert (calls, dead) == (([(1, 1), (2, 1)], [1]) if fails else ([(1, 1)], []))


async def test_a_copy_waits_for_one_that_another_loop_handles() -> None:
    calls: list[tuple[str, int]] = []
    begun, go = threading.Event(), threading.Event()
    dedup = Dedup()

    def there(_event: Event, delivery: Delivery) -> None:
        calls.append(("there", delivery.attempt))
        begun.set()
        go.wait(10)

    with trunkline.open("memory:", middleware=[dedup]) as other:
        other.on("orders", group="billing", workers=2)(there)
        other.publish_many("orders", [1, 1], idem_key="a")
        assert begun.wait(10)
        assert other.drain(0.1) is False  # a copy waits there, too
        async with make_bus(dedup) as bus:

            @bus.on("orders", group="billing")
            async def here(_event: Event, delivery: Delivery) -> None:
                calls.append(("here", delivery.attempt))

            await bus.publish("orders", 1, idem_key="a")
            assert await bus.drain(0.1) is False
            go.set()
            assert await bus.drain(10)
    assert calls == [("there", 1)]


async def test_a_copy_that_waits_no_more_leaves_the_one_that_is_handled_alone() -> None:
    dedup, go = Dedup(), asyncio.Event()

    async def handle(_delivery: Delivery) -> str:
        await go.wait()
        return "done"

    async with make_bus() as bus, bus.subscribe("orders", group="billing") as stream:
        await bus.define("orders", dedup_window_s=0.0)  # else the second is the first
        await bus.publish("orders", 1, idem_key="a")
        await bus.publish("orders", 1, idem_key="a")
        first = asyncio.create_task(dedup.handle(await anext(stream), handle))
        copy = asyncio.create_task(dedup.handle(await anext(stream), handle))
        await asyncio.sleep(0.01)
        copy.cancel()
        await asyncio.wait([copy])
        go.set()
        assert await first == "done"


# -- guard -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"space": "home"}, ""),
        ({"space": "work"}, "space work"),
        ({}, "space None"),
        ({"space": "home", "band": "RED"}, "band RED"),
        ({"space": "home", "caps": ("WRITE",)}, ""),
        ({"space": "home", "caps": ("WRITE", "RECALL")}, "capability RECALL"),
    ],
)
async def test_what_is_not_allowed_is_not_published(fields: dict[str, Any], why: str) -> None:
    guard = Guard(spaces={"home"}, band="AMBER", caps=["WRITE"])
    async with make_bus(guard) as bus:
        if not why:
            assert (await bus.publish("orders", 1, **fields)).offset == 1
            return
        with pytest.raises(Denied, match=f"not allowed: {why}"):
            await bus.publish("orders", 1, **fields)
        assert await bus.read("orders") == []


async def test_what_may_not_be_handled_is_a_dead_letter_at_once() -> None:
    calls: list[Any] = []
    async with make_bus() as bus:
        await bus.publish("orders", 1, band="BLACK")
        await bus.publish("orders", 2)
        bus.use(Guard(band="GREEN"))
        bus.on("orders", group="billing")(lambda event: calls.append(event.payload))
        await bus.drain()
        letters = [letter async for letter in bus.dead_letters("orders").letters()]
    assert calls == [2]
    assert [(x.origin, x.attempts, x.error) for x in letters] == [(1, 1, "not allowed: band BLACK")]
    with pytest.raises(InvalidOption):
        Guard(band="PINK")  # type: ignore[arg-type]
