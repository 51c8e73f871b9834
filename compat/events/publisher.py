"""Publishing with a check before, one event or many."""

from __future__ import annotations

from collections.abc import Sequence

import trunkline
from events.bus import EventBus
from events.types import Event
from events.validation import validate_event


class EventPublisher:
    def __init__(self, bus: EventBus) -> None:
        self._bus = bus

    async def publish(self, event: Event, topic: str | None = None) -> trunkline.Receipt:
        validate_event(event)
        return await self._bus.publish(event, topic)

    async def publish_batch(self, events: Sequence[Event]) -> list[trunkline.Receipt]:
        """All of them are checked before the first is published."""
        for event in events:
            validate_event(event)
        return [await self._bus.publish(event) for event in events]
