"""Code that awaits, run on a bus folder without an event loop.

None of these calls ever suspends, so ``run_still`` runs such code to its end: a command starts
without importing asyncio.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from trunkline.clock import Clock
from trunkline.errors import Conflict
from trunkline.event import Bounds, Event, Receipt, Record
from trunkline.folder import Folder
from trunkline.folder.direct import DirectBus
from trunkline.group import Group
from trunkline.names import GroupKey
from trunkline.options import TopicOptions, merged
from trunkline.store.bell import Bell

T = TypeVar("T")


def run_still(job: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        job.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    job.close()
    raise RuntimeError("this needs an event loop")


class StillBus:
    """A ``DirectBus`` for code that awaits."""

    def __init__(self, direct: DirectBus) -> None:
        self._direct = direct
        self.clock: Clock = direct.folder.clock

    async def topics(self) -> dict[str, TopicOptions]:
        return self._direct.topics()

    async def bounds(self, topic: str, partition: int = 0) -> Bounds:
        return self._direct.bounds(topic, partition)

    async def read(
        self, topic: str, start: int | None = None, limit: int = 1000, *, partition: int = 0
    ) -> list[Record]:
        return self._direct.read(topic, start, limit, partition=partition)

    async def define(self, topic: str, **options: Any) -> None:
        self._direct.folder.edit(topic, lambda before: merged(before, options))

    async def publish(self, event: Event) -> Receipt:
        return self._direct.publish_many(event.topic, [event])[0]


class StillStore:
    """The calls of a store that look, and leave everything as it is."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.bell = Bell()

    async def bounds(self, topic: str, partition: int) -> Bounds:
        return self.folder.bounds(topic, partition)

    async def read(self, topic: str, partition: int, start: int, limit: int) -> list[Record]:
        return self.folder.read(topic, partition, start, limit)

    async def groups(self) -> list[GroupKey]:
        return self.folder.groups()

    async def update(self, key: GroupKey, step: Callable[[Group], T]) -> T:
        return self.folder.look(key, step)

    async def change(self, key: GroupKey, verb: Callable[[Group], T]) -> T:  # noqa: ARG002
        raise Conflict(f"{key.group} is opened to be looked at", code="read_only")
