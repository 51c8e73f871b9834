"""One event as a row of a batch: its JSON, and what upkeep looks at."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from trunkline.event import Event
from trunkline.log.line import close_line, parse


def to_row(event: Event, offset: int, body: bytes) -> dict[str, Any]:
    if event.key is None:
        return {"offset": offset, "body": body.decode()}
    row = {"offset": offset, "key": event.key, "body": body.decode()}
    if event.payload is None:
        row["tombstone"] = True
    return row


def from_body(body: str) -> Event:
    event = parse(close_line(b'{"meta":' + body.encode())[:-1]).meta
    assert event is not None
    return event


def micros(moment: datetime) -> int:
    return round(moment.timestamp() * 1_000_000)
