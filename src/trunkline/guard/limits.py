"""Middleware that keeps events within a set of spaces, a band and a set of capabilities.

What may not be published raises ``Denied``. What may not be handled becomes a dead letter at once:
trying again would not make it allowed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from trunkline.bus import Delivery
from trunkline.errors import Denied, InvalidOption
from trunkline.event import BANDS, Band, Event, Receipt
from trunkline.guard.order import GuardReject
from trunkline.middleware import HandleNext, PublishNext


class Guard:
    """``spaces`` are those allowed, None for any; ``band`` the most sensitive one allowed; ``caps``
    what one may do here, of which an event may demand no more, None for anything.
    """

    stage: Final = "decide"

    def __init__(
        self,
        *,
        spaces: Collection[str] | None = None,
        band: Band = "BLACK",
        caps: Collection[str] | None = None,
    ) -> None:
        if band not in BANDS:
            raise InvalidOption(f"no band {band!r}", name="band", hint=f"bands: {', '.join(BANDS)}")
        self._spaces = None if spaces is None else frozenset(spaces)
        self._band = BANDS.index(band)
        self._caps = None if caps is None else frozenset(caps)

    def objection(self, event: Event) -> str:
        """Why the event is not allowed; empty if it is."""
        if self._spaces is not None and event.space not in self._spaces:
            return f"space {event.space}"
        if BANDS.index(event.band) > self._band:
            return f"band {event.band}"
        missing = set() if self._caps is None else set(event.caps) - self._caps
        return f"capability {', '.join(sorted(missing))}" if missing else ""

    async def publish(self, events: list[Event], call_next: PublishNext) -> list[Receipt]:
        for event in events:
            if objection := self.objection(event):
                raise Denied(f"not allowed: {objection}", topic=event.topic, actor=event.actor)
        return await call_next(events)

    async def handle(self, delivery: Delivery, call_next: HandleNext) -> Any:
        if objection := self.objection(delivery.event):
            raise GuardReject(f"not allowed: {objection}")
        return await call_next(delivery)
