"""Streams are made when they are first used, and never changed by a later user."""

from __future__ import annotations

from trunkline.bus import Bus
from trunkline.errors import NotFound
from trunkline.options import TopicFields


async def ensure_stream(bus: Bus, stream: str, create: bool, options: TopicFields | None) -> None:
    if stream in await bus.topics():
        return
    if not create:
        raise NotFound(f"there is no stream {stream}", topic=stream)
    await bus.define(stream, **(options or {}))
