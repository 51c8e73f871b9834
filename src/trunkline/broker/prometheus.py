"""The broker's counts for Prometheus, written by its own library. docs/broker.md has the table."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest

from trunkline.broker.exposition import write
from trunkline.broker.hub import Hub
from trunkline.broker.snapshot import Pace
from trunkline.patterns.measures import Families, Family

_TOTALS: Final = {
    "publishes": "Events that were published through this broker, repeats too",
    "delivered": "MESSAGE frames that were sent, and records that were fetched over HTTP",
    "redelivered": "Those of the delivered records that were a second try or a later one",
    "acked": "Deliveries that an ack settled",
    "nacked": "Deliveries that a nack ended, also those that it made a dead letter",
    "dead": "Dead letters that this broker has written",
    "denied": "Requests without the token or the rights that they need",
    "evicted": "Connections that were ended because they took nothing",
    "bad_frames": "Frames that could not be read",
    "connected": "WebSocket connections that began",
    "lost": "Events about the broker itself that could not be written",
}
_GAUGES: Final = {
    "connections": "WebSocket connections that are open now",
    "subscriptions": "Subscriptions on the open connections",
    "inflight": "Deliveries that were sent over WebSocket and are not settled",
}


async def render(hub: Hub, figures: bytes) -> bytes:
    """The broker's own counts, the figures of its bus, and those of its process."""
    counts = await write(own(hub), Pace().turn)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return counts + figures + generate_latest(registry)


def own(hub: Hub) -> list[Family]:
    """What this broker counts itself, since it began."""
    found, counts = Families(), hub.counts
    for name, value in counts.totals().items():
        found.add(f"trunkline_{name}_total", "counter", _TOTALS[name], value)
    for name, gauge in hub.gauges().items():
        found.add(f"trunkline_{name}", "gauge", _GAUGES[name], gauge)
    for topic, row in counts.by_topic.items():
        about = "Events of a topic that were published through this broker"
        name = "trunkline_topic_published_total"
        found.add(name, "counter", about, row["published"], topic=topic)
        about = "Records of a topic that this broker has delivered"
        name = "trunkline_topic_delivered_total"
        found.add(name, "counter", about, row["delivered"], topic=topic)
    about = "Deliveries of this broker by what became of them: ack, nack or term"
    for (topic, group, outcome), count in counts.settled.items():
        labels = {"topic": topic, "group": group, "outcome": outcome}
        found.add("trunkline_settled_total", "counter", about, count, **labels)
    about = "Time until the receipt of a publish, or of a batch of them"
    for topic, spans in counts.publish_s.items():
        found.histogram("trunkline_publish_duration_seconds", about, spans, topic=topic)
    about = "Time from the sending of a MESSAGE to its ack, nack or term"
    for (topic, group), spans in counts.process_s.items():
        name = "trunkline_process_duration_seconds"
        found.histogram(name, about, spans, topic=topic, group=group)
    about = "Series of this broker's own metrics that are too many to be kept"
    found.add("trunkline_broker_series_dropped", "gauge", about, len(counts.dropped))
    return found.all()
