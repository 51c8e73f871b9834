"""Counts and durations for Prometheus.

::

    metrics = Metrics()
    bus = trunkline.connect("file:.bus", middleware=[metrics])

Counted are ``trunkline_published_total`` by topic and result (ok, duplicate, or the error's name),
``trunkline_settled_total`` by topic, group and outcome (ack, nack, term), ``trunkline_dlq_total``
by topic, group and reason. Measured are ``trunkline_publish_duration_seconds`` by topic and
``trunkline_process_duration_seconds`` by topic and group. ``trunkline_storage_full`` is 1 while
publishing fails for want of room.

Beside them stand the older names, which mean the same: ``events_publish_count``,
``events_handle_ok_total``, ``events_handle_err_total``, ``events_dlq_total``,
``events_handle_latency_seconds`` and ``events_storage_full``.
"""

from __future__ import annotations

import time
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from trunkline.bus import Delivery
from trunkline.errors import Reject, StorageFull
from trunkline.event import Event, Receipt, Record
from trunkline.middleware import HandleNext, PublishNext
from trunkline.names import GroupKey

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class _Meters:
    """What one registry holds; a second bus on the same registry counts on."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def make(kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
            return kind(f"trunkline_{name}", text, labels, registry=registry, **more)

        spans = {"buckets": _BUCKETS}
        took = "_duration_seconds"
        self.published = make(
            Counter,
            "published_total",
            "Events that this process has published, by result",
            "topic",
            "result",
        )
        self.settled = make(
            Counter,
            "settled_total",
            "Deliveries that were settled, by outcome: ack, nack or term",
            "topic",
            "group",
            "outcome",
        )
        self.publish_s = make(
            Histogram,
            f"publish{took}",
            "Time until the receipt of a publish, or of a batch of them",
            "topic",
            **spans,
        )
        self.process_s = make(
            Histogram,
            f"process{took}",
            "Time that the handling of a delivery took",
            "topic",
            "group",
            **spans,
        )
        self.dlq = make(
            Counter,
            "dlq_total",
            "Dead letters that this process has written",
            "topic",
            "group",
            "reason",
        )
        self.full = make(Gauge, "storage_full", "1 while there is no room to publish")

        def old(kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
            return kind(f"events_{name}", text, labels, registry=registry, **more)

        # A Counter would be called events_publish_count_total.
        self.old_published = old(
            Gauge, "publish_count", "The older name of trunkline_published_total", "topic"
        )
        self.old_ok = old(
            Counter,
            "handle_ok_total",
            "Deliveries that were acked; the older name",
            "topic",
            "group",
        )
        self.old_err = old(
            Counter, "handle_err_total", "Deliveries that failed; the older name", "topic", "group"
        )
        self.old_dlq = old(Counter, "dlq_total", "The older name of trunkline_dlq_total", "topic")
        self.old_latency = old(
            Histogram,
            "handle_latency_seconds",
            "Time that the handling of a delivery took",
            "topic",
            "group",
            **spans,
        )
        self.old_full = old(Gauge, "storage_full", "1 while there is no room to publish")


_meters: WeakKeyDictionary[CollectorRegistry, _Meters] = WeakKeyDictionary()


class Metrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        if registry not in _meters:
            _meters[registry] = _Meters(registry)
        self._m = _meters[registry]

    async def publish(self, events: list[Event], call_next: PublishNext) -> list[Receipt]:
        topic, started = events[0].topic, time.perf_counter()
        try:
            receipts = await call_next(events)
        except BaseException as error:
            self._m.published.labels(topic, type(error).__name__).inc(len(events))
            if isinstance(error, StorageFull):
                self._m.full.set(1)
                self._m.old_full.set(1)
            raise
        self._m.publish_s.labels(topic).observe(time.perf_counter() - started)
        repeated = sum(receipt.duplicate for receipt in receipts)
        self._m.published.labels(topic, "ok").inc(len(receipts) - repeated)
        self._m.old_published.labels(topic).inc(len(receipts) - repeated)
        if repeated:
            self._m.published.labels(topic, "duplicate").inc(repeated)
        self._m.full.set(0)
        self._m.old_full.set(0)
        return receipts

    async def handle(self, delivery: Delivery, call_next: HandleNext) -> Any:
        started, outcome = time.perf_counter(), "nack"
        try:
            result = await call_next(delivery)
            outcome = "ack" if delivery.outcome is None else delivery.outcome.value
            return result
        except Reject:
            outcome = "term"
            raise
        finally:
            place = (delivery.topic, delivery.group)
            took_s = time.perf_counter() - started
            self._m.process_s.labels(*place).observe(took_s)
            self._m.old_latency.labels(*place).observe(took_s)
            self._m.settled.labels(*place, outcome).inc()
            (self._m.old_ok if outcome == "ack" else self._m.old_err).labels(*place).inc()

    def on_dead_letter(self, key: GroupKey, record: Record, reason: str, error: str) -> None:
        del record, error
        self._m.dlq.labels(key.topic, key.group, reason).inc()
        self._m.old_dlq.labels(key.topic).inc()
