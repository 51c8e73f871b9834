"""The broker's counts for Prometheus, written by its own library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from trunkline.broker.hub import Hub
from trunkline.dead import keeps_books
from trunkline.store import lag_of

_LAG_GROUPS = 1000


async def render(hub: Hub) -> tuple[bytes, str]:
    lags = await _lags(hub)
    health = await hub.bus.health()

    class Collector:
        def collect(self) -> Iterator[Any]:
            for name, value in hub.counts.totals().items():
                yield CounterMetricFamily(f"trunkline_{name}", f"{name} since the start", value)
            for name, gauge in hub.gauges().items():
                yield GaugeMetricFamily(f"trunkline_{name}", f"{name} now", gauge)
            full = float(bool(health.get("events_storage_full")))
            yield GaugeMetricFamily("events_storage_full", "1 if the device has no room", full)
            for what in ("published", "delivered"):
                family = CounterMetricFamily(
                    f"trunkline_topic_{what}", f"events {what} of a topic", labels=["topic"]
                )
                for topic, found in hub.counts.by_topic.items():
                    family.add_metric([topic], found[what])
                yield family
            lag = GaugeMetricFamily(
                "trunkline_group_lag_records",
                "records that a group has not settled",
                labels=["topic", "partition", "group"],
            )
            for (topic, partition, group), value in lags.items():
                lag.add_metric([topic, str(partition), group], value)
            yield lag

    registry = CollectorRegistry()
    registry.register(Collector())
    return generate_latest(registry), CONTENT_TYPE_LATEST


async def _lags(hub: Hub) -> dict[tuple[str, int, str], int]:
    store = hub.bus.store
    found: dict[tuple[str, int, str], int] = {}
    groups = [key for key in await store.groups() if not keeps_books(key)]
    for key in groups[:_LAG_GROUPS]:
        found[key] = await lag_of(store, key)
    return found
