"""The write workflow over an ``EventBus``."""

from __future__ import annotations

from typing import Any

from events.bus import EventBus
from events.types import Event, to_bus
from trunkline.cognition.options import MemoryOptions
from trunkline.cognition.writing import Redact, Written
from trunkline.cognition.writing import WriteHandler as _WriteHandler


class WriteHandler:
    """``handle`` writes an event whose payload has ``subject`` and ``content``."""

    def __init__(
        self, bus: EventBus, *, redact: Redact | None = None, options: MemoryOptions | None = None
    ) -> None:
        self.inner = _WriteHandler(bus._bus, options, redact=redact)

    async def handle(self, event: Event) -> Written:
        payload, plain = event.payload, to_bus(event)
        more: dict[str, Any] = {}
        if "confidence" in payload:
            more["confidence"] = payload["confidence"]
        return await self.inner.write(
            payload["subject"],
            payload["content"],
            space=plain.space,
            id=plain.id,
            valid_at=plain.ts,
            actor=plain.actor,
            band=plain.band,
            caps=plain.caps,
            trace=plain.trace,
            **more,
        )
