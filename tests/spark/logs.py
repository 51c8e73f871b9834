"""Logs to read, made with the log's own parts, and what they hold by its own reader."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from trunkline.codec import encode_event
from trunkline.event import Event, Record
from trunkline.folder import Folder
from trunkline.options import Limits, TopicOptions

START = datetime(2026, 1, 1, tzinfo=UTC)
TOPIC = "orders"


def make_event(number: int, **fields: Any) -> Event:
    fields = {"topic": TOPIC, "payload": {"n": number}, **fields}
    return Event(id=f"e{number}", ts=START + timedelta(seconds=number), **fields)


def append(folder: Folder, events: Sequence[Event], partition: int = 0) -> None:
    bodies = [encode_event(event, Limits()) for event in events]
    folder.append(events[0].topic, partition, bodies, events)


def make_log(path: Path, count: int, *, partitions: int = 1, batch: int = 10) -> str:
    """A log of ``count`` events e0, e1, …, batch by batch into one partition after another."""
    folder = Folder(str(path))
    folder.define(TOPIC, TopicOptions(partitions=partitions))
    for start in range(0, count, batch):
        events = [
            make_event(n, type=f"t{n % 3}", key=f"k{n % 7}", space=f"s{n % 2}")
            for n in range(start, min(count, start + batch))
        ]
        append(folder, events, start // batch % partitions)
    folder.close()
    return str(path)


def read_log(root: str, topic: str = TOPIC, partition: int = 0) -> list[Record]:
    """Every record, by the log's own reader."""
    folder = Folder(root)
    try:
        reader = folder.reader(topic, partition)
        start, _ = reader.bounds()
        found: list[Record] = []
        while records := reader.read(start):
            found += records
            start = records[-1].offset + 1
        return found
    finally:
        folder.close()


def as_row(record: Record) -> dict[str, Any]:
    """A record as a row of the table, its payload as a value and not as text."""
    event = record.event
    return {
        "key": event.key,
        "value": event.payload,
        "topic": event.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": event.ts.astimezone(UTC),
        "timestampType": 0,
        "type": event.type,
        "space": event.space,
        "id": event.id,
        "actor": event.actor,
        "subject": event.subject,
        "idem_key": event.idem_key,
        "trace": event.trace,
        "ttl_s": event.ttl_s,
        "priority": event.priority,
        "not_before": event.not_before.astimezone(UTC) if event.not_before else None,
        "band": event.band,
        "caps": list(event.caps),
        "cause": event.cause,
        "headers": dict(event.headers),
    }


def decoded(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its payload as a value and its map as a dict, without the time of the append."""
    row = {name: value for name, value in row.items() if name != "appended_at"}
    row = {**row, "value": msgspec.json.decode(row["value"]) if row["value"] else None}
    if "headers" in row:
        row["headers"] = dict(row["headers"])
    return row
