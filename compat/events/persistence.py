"""The files of a bus: appending, replaying, and where groups stand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import trunkline
from events.types import Event, from_bus, to_bus


class EventPersistence:
    """The folder of an ``EventBus``, also while one runs."""

    def __init__(self, base_dir: str = "workspace/.bus") -> None:
        self._bus = trunkline.open(f"file:{base_dir}")

    def append_event(self, event: Event, topic: str | None = None) -> int:
        """Append an event and return its offset."""
        return self._bus.publish(to_bus(event, topic)).offset

    def replay(self, topic: str, start: int = 1) -> Iterator[tuple[int, Event]]:
        """The events of a topic from an offset on."""
        while records := self._bus.read(topic, start):
            for record in records:
                yield record.offset, from_bus(record.event)
            start = records[-1].offset + 1

    def dead_letters(self, topic: str) -> list[tuple[Event, dict[str, Any]]]:
        """The open dead letters, each with group, attempts, reason and error."""
        return [
            (
                from_bus(one.event),
                {
                    "group": one.group,
                    "attempts": one.attempts,
                    "reason": one.reason,
                    "error": one.error,
                },
            )
            for one in self._bus.dead_letters(topic).letters()
        ]

    def close(self) -> None:
        self._bus.close()
