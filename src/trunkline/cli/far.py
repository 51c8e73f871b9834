"""A bus that is no folder, as a command sees it: behind a broker, on NATS, in MongoDB.

The calls do not await: each runs the loop until it is answered. ``FarLog`` has the calls of a
``Folder`` that read records, so a command that reads is the same on every bus.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from typing import Any, TypeVar

from trunkline.bus import Bus
from trunkline.bus.connect import connect
from trunkline.bus.local import LocalBus
from trunkline.clock import Clock
from trunkline.errors import NotFound, OutOfRange
from trunkline.event import Bounds, Event, Receipt, Record
from trunkline.features import Features
from trunkline.group import Group
from trunkline.group.members import MemberInfo
from trunkline.names import GroupKey
from trunkline.options import TopicOptions

T = TypeVar("T")

PATIENCE_S = 5.0  # how long a command waits for a server that is away
_POLL_S = 0.25


def open_bus(
    url: str, token: str | None = None, *, create: bool = True, patience_s: float = PATIENCE_S
) -> Bus:
    """``connect`` with the patience of a command."""
    options: dict[str, Any] = {"create": create}
    if url.partition(":")[0] in ("ws", "wss", "nats", "nats+tls"):
        options = {"patience_s": patience_s, "connect_timeout_s": patience_s}
    if url.partition(":")[0] in ("ws", "wss"):
        # A broker that is back within the command's patience is seen within it.
        options["backoff_max_s"] = min(0.5, max(0.05, patience_s / 10))
    return connect(url, token=token, **options)


class FarReader:
    """One partition. What was trimmed is passed over."""

    def __init__(self, log: FarLog, topic: str, partition: int) -> None:
        self._log = log
        self._topic = topic
        self._partition = partition

    def bounds(self) -> Bounds:
        return self._log.bounds(self._topic, self._partition)

    def count(self) -> int:
        first, end = self.bounds()
        return end - first

    def read(self, start: int, limit: int = 1000, *, strict: bool = True) -> list[Record]:
        if not strict:
            start = max(start, 1)
        try:
            return self._read(start, limit)
        except OutOfRange:
            if strict:
                raise
            return self._read(max(start, self.bounds().first), limit)

    def _read(self, start: int, limit: int) -> list[Record]:
        bus = self._log.bus
        return self._log.call(bus.read(self._topic, start, limit, partition=self._partition))

    def seek(self, when: datetime) -> int:
        """The offset of the first record at or after ``when``, by halves."""
        low, high = self.bounds()
        while low < high:
            middle = (low + high) // 2
            found = self.read(middle, 1, strict=False)
            if not found or found[0].event.ts >= when:
                high = middle
            else:
                low = found[0].offset + 1
        return low

    def id_at(self, offset: int) -> str | None:
        found = self.read(offset, 1, strict=False)
        return found[0].event.id if found and found[0].offset == offset else None


class FarLog:
    """The bus at a URL."""

    poll_s = _POLL_S

    def __init__(self, url: str, token: str | None = None, *, create: bool = False) -> None:
        self.url = url
        self._runner = asyncio.Runner()
        self._bus: Bus | None = None
        try:
            self.bus: Bus = self.call(self._open(token, create))
        except BaseException:
            self.close()
            raise

    async def _open(self, token: str | None, create: bool) -> Bus:
        self._bus = open_bus(self.url, token, create=create)
        await self._bus.start()
        await self._bus.topics()  # a server that is away, or refuses, is told here
        return self._bus

    @property
    def features(self) -> Features:
        return self.bus.features

    @property
    def clock(self) -> Clock:
        return self.bus.clock

    def call(self, job: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(job)

    def pause(self, seconds: float) -> None:
        """Wait, and keep the connection alive meanwhile."""
        self.call(asyncio.sleep(seconds))

    def topics(self) -> dict[str, TopicOptions]:
        return self.call(self.bus.topics())

    def topic(self, name: str) -> TopicOptions:
        return self.topics().get(name) or TopicOptions()

    def bounds(self, topic: str, partition: int) -> Bounds:
        return self.call(self.bus.bounds(topic, partition))

    def reader(self, topic: str, partition: int) -> FarReader:
        return FarReader(self, topic, partition)

    def publish(self, topic: str, events: Sequence[Event]) -> list[Receipt]:
        """Publish in batches that the bus takes."""
        most = self.features.batch_max or len(events) or 1
        found: list[Receipt] = []
        for start in range(0, len(events), most):
            found += self.call(self.bus.publish_many(topic, events[start : start + most]))
        return found

    def close(self) -> None:
        try:
            if self._bus is not None:
                self.call(self._bus.close())
        finally:
            self._runner.close()


class StoreLog(FarLog):
    """A bus whose groups are in a store that this process works on itself, as in a folder."""

    @property
    def _store(self) -> Any:
        assert isinstance(self.bus, LocalBus)
        return self.bus.store

    def groups(self) -> list[GroupKey]:
        return sorted(self.call(self._store.groups()))

    def listening(self) -> list[MemberInfo]:
        found: list[MemberInfo] = self.call(self._store.members())
        return found

    def has_group(self, key: GroupKey) -> bool:
        return key in self.groups()

    def group(self, key: GroupKey) -> Group:
        if not self.has_group(key):
            raise NotFound(f"there is no group {key.group} on {key.topic}", group=key.group)
        return self.look(key, lambda group: group)

    def look(self, key: GroupKey, action: Callable[[Group], T]) -> T:
        """Run ``action`` on a copy of the group: what it changes is forgotten."""

        async def look() -> T:
            async with self._store.group(key) as group:
                return action(copy.deepcopy(group))

        return self.call(look())

    def step(self, key: GroupKey, action: Callable[[Group], T]) -> T:
        found: T = self.call(self._store.change(key, action))
        self._store.bell.ring(key.topic)
        return found

    def remove_group(self, key: GroupKey) -> None:
        self.call(self._store.remove_group(key))


def open_far(url: str, token: str | None = None, *, create: bool = False) -> FarLog:
    is_store = url.partition(":")[0] in ("mongodb", "mongodb+srv")
    return (StoreLog if is_store else FarLog)(url, token, create=create)
