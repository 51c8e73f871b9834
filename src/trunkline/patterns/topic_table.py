"""A table that is kept on the bus: one record for each change, and the fold of all records.

Tokens, schemas, topic rules and feature flags are such tables. Each process folds the topic
for itself, so the bus needs no other place to keep them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from trunkline.event import Bounds, Event, Record

T = TypeVar("T", bound=msgspec.Struct)


class TableBus(Protocol):
    """What a table needs of a bus. A folder that is opened without an event loop has it, too."""

    async def topics(self) -> Collection[str]: ...

    async def bounds(self, topic: str, /) -> Bounds: ...

    async def read(self, topic: str, start: int, /) -> Sequence[Record]: ...

    async def define(self, topic: str, /, *, compact: bool) -> object: ...

    async def publish(self, event: Event, /) -> object: ...


class TopicTable(Generic[T]):
    """``take`` is called with each value of the topic, in order. A record that is not a ``kind`` is
    passed over: this code did not write it.
    """

    def __init__(self, bus: TableBus, topic: str, kind: type[T], take: Callable[[T], None]) -> None:
        self._bus = bus
        self._topic = topic
        self._kind = kind
        self._take = take
        self._next = 1

    async def refresh(self) -> bool:
        """Read the records since the last time; True if there were any."""
        first, end = await self._bus.bounds(self._topic)
        if not first <= self._next <= end:  # trimmed, or made anew
            self._next = first
        changed = False
        while self._next < end:
            for record in await self._bus.read(self._topic, self._next):
                self._next = record.offset + 1
                changed = True
                with contextlib.suppress(msgspec.ValidationError):
                    self._take(msgspec.convert(record.event.payload, self._kind))
        return changed

    async def put(self, key: str, value: T, *, type: str, compact: bool = True) -> None:
        """Publish a value. A new topic keeps the last record of each key alone, if ``compact``."""
        if compact and self._topic not in await self._bus.topics():
            await self._bus.define(self._topic, compact=True)
        payload = msgspec.to_builtins(value)
        await self._bus.publish(Event(topic=self._topic, key=key, type=type, payload=payload))
