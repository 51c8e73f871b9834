"""A store in this process's memory: everything the file store does, except that it ends with it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from trunkline.clock import Clock, SystemClock
from trunkline.errors import Closed, Conflict, NotFound, OutOfRange
from trunkline.event import Event, Receipt, Record, encode_event
from trunkline.group import Group
from trunkline.log.line import close_line, parse
from trunkline.options import GroupOptions, StoreOptions, TopicOptions, make
from trunkline.store import Bell, Bounds, Features, GroupKey, pick_partition
from trunkline.topics import check_group, check_topic, is_dead

T = TypeVar("T")

_REMOVED = 256
_COMPACT_FROM = 64  # records; then each time there are twice as many as it left


class _Kept(NamedTuple):
    offset: int
    body: bytes
    ts: datetime
    key: str | None
    is_tombstone: bool


class _Partition:
    def __init__(self) -> None:
        self.kept: list[_Kept] = []
        self.first = 1
        self.next = 1
        self.size = 0
        self.compact_at = _COMPACT_FROM
        self.keys: dict[str, tuple[int, float, str]] = {}  # offset, time and id of the first


class MemoryStore:
    features = Features(persistent=False, shared=False, durability="none")
    member = "local"

    def __init__(self, clock: Clock | None = None, **options: Any) -> None:
        self.bell = Bell()
        self.options = make(StoreOptions, options)
        self.clock = clock or SystemClock()
        # A dead letter is its record and the reason: it may be a little larger.
        self._dead_limits = replace(
            self.options.limits, record_bytes=self.options.limits.record_bytes + 64 * 1024
        )
        self._topics: dict[str, TopicOptions] = {}
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._groups: dict[GroupKey, Group] = {}
        self._removed: dict[GroupKey, GroupOptions] = {}  # the policies they had
        self._era = 0  # later than that of any of them
        self._turn = 0
        self._closed = False

    async def append(self, topic: str, events: Sequence[Event]) -> list[Receipt]:
        self._check()
        check_topic(topic)
        limits = self._dead_limits if is_dead(topic) else self.options.limits
        bodies = [encode_event(event, limits) for event in events]
        options = self._topics.setdefault(topic, TopicOptions())
        receipts = []
        for event, body in zip(events, bodies, strict=True):
            number = pick_partition(event, options.partitions, self._turn)
            self._turn += event.key is None
            partition = self._partition(topic, number)
            known = self._repeated(partition, event, options)
            if known is None:
                receipts.append(Receipt(topic, number, partition.next, event.id, False, "none"))
                self._keep(partition, event, body, options)
            else:
                offset, _, first = known
                receipts.append(Receipt(topic, number, offset, first, True, "none"))
        self.bell.ring(topic)
        return receipts

    def _repeated(
        self, partition: _Partition, event: Event, options: TopicOptions
    ) -> tuple[int, float, str] | None:
        if not options.dedup_window_s or event.idem_key is None:
            return None
        known = partition.keys.get(event.idem_key)
        now = self.clock.now().timestamp()
        if known is not None and now - known[1] < options.dedup_window_s:
            return known
        partition.keys.pop(event.idem_key, None)
        partition.keys[event.idem_key] = (partition.next, now, event.id)
        while len(partition.keys) > options.dedup_keys:
            del partition.keys[next(iter(partition.keys))]
        return None

    def _keep(
        self, partition: _Partition, event: Event, body: bytes, options: TopicOptions
    ) -> None:
        is_tombstone = event.key is not None and event.payload is None
        kept = _Kept(partition.next, body, event.ts, event.key, is_tombstone)
        partition.kept.append(kept)
        partition.next += 1
        partition.size += len(body)
        before = partition.first
        if options.retention_records is not None:
            before = partition.next - options.retention_records
        if options.retention_age_s is not None:
            oldest = self.clock.now() - timedelta(seconds=options.retention_age_s)
            before = max(before, _first_since(partition, oldest))
        room = options.retention_bytes
        if room is not None and partition.size > room:
            size = partition.size
            for kept in partition.kept:
                if size <= room:
                    break
                size -= len(kept.body)
                before = max(before, kept.offset + 1)
        self._trim(partition, self._settled(event.topic, partition, before, options))
        if options.compact and len(partition.kept) >= partition.compact_at:
            self._compact(event.topic, partition, options)

    def _compact(self, topic: str, partition: _Partition, options: TopicOptions) -> None:
        """Keep the latest record of each key, records without one, and what is not settled."""
        latest = {kept.key: kept.offset for kept in partition.kept}
        free = self._settled(topic, partition, partition.next, options)
        partition.kept = [
            kept
            for kept in partition.kept
            if kept.offset >= free
            or kept.key is None
            or (latest[kept.key] == kept.offset and not kept.is_tombstone)
        ]
        partition.size = sum(len(kept.body) for kept in partition.kept)
        partition.compact_at = max(_COMPACT_FROM, 2 * len(partition.kept))

    def _settled(
        self, topic: str, partition: _Partition, before: int, options: TopicOptions
    ) -> int:
        """``before``, or less where a group has not settled that far."""
        if before <= partition.first or not options.retain_unsettled:
            return before
        floors = [
            min([group.floor + 1, *group.again])
            for key, group in self._groups.items()
            if self._partitions.get((key.topic, key.partition)) is partition and key.topic == topic
        ]
        return min([before, *floors])

    async def read(self, topic: str, partition: int, start: int, limit: int) -> list[Record]:
        self._check()
        place = self._partition(check_topic(topic), partition)
        if start < place.first:
            raise OutOfRange(
                f"{topic}/{partition} begins at offset {place.first}, not {start}",
                offset=start,
                first=place.first,
                next=place.next,
            )
        at = bisect_left(place.kept, start, key=lambda kept: kept.offset)
        # Decoded anew for each reader, as from a file: nobody can change another's payload.
        found = []
        for kept in place.kept[at : at + limit]:
            event = parse(close_line(b'{"meta":' + kept.body)[:-1]).meta
            assert event is not None
            found.append(Record(event, partition, kept.offset))
        return found

    async def bounds(self, topic: str, partition: int) -> Bounds:
        self._check()
        place = self._partition(check_topic(topic), partition)
        return Bounds(place.first, place.next)

    async def seek(self, topic: str, partition: int, when: datetime) -> int:
        self._check()
        place = self._partition(check_topic(topic), partition)
        return _first_since(place, when)

    async def trim(self, topic: str, partition: int, before: int) -> Bounds:
        self._check()
        place = self._partition(check_topic(topic), partition)
        self._trim(place, min(before, place.next))
        return Bounds(place.first, place.next)

    def _trim(self, place: _Partition, before: int) -> None:
        if before > place.first:
            place.first = before
            gone = bisect_left(place.kept, before, key=lambda kept: kept.offset)
            place.size -= sum(len(kept.body) for kept in place.kept[:gone])
            del place.kept[:gone]

    async def update(self, key: GroupKey, step: Callable[[Group], T] | None) -> T:
        self._check()
        check_topic(key.topic)
        check_group(key.group)
        if step is None:
            if key not in self._groups:
                raise NotFound(f"there is no group {key.group} on {key.topic}", group=key.group)
            removed = self._groups.pop(key)
            self._era = max(self._era, removed.era + 1)
            self._removed[key] = removed.options
            if len(self._removed) > _REMOVED:
                del self._removed[next(iter(self._removed))]
            self.bell.ring(None)
            return None  # type: ignore[return-value]
        group = self._groups.get(key)
        if group is None:
            group = Group(era=self._era)
            group.was = self._removed.get(key)
        group.ops.clear()
        result = step(group)
        if group.created:
            self._groups[key] = group
        return result

    async def groups(self) -> list[GroupKey]:
        self._check()
        return sorted(self._groups)

    async def topics(self) -> dict[str, TopicOptions]:
        self._check()
        return dict(self._topics)

    async def define(self, topic: str, options: TopicOptions | None) -> None:
        self._check()
        check_topic(topic)
        if options is None:
            if self._topics.pop(topic, None) is None:
                raise NotFound(f"there is no topic {topic}", topic=topic)
            for place in [p for p in self._partitions if p[0] == topic]:
                del self._partitions[place]
            for key in [k for k in self._groups if k.topic == topic]:
                await self.update(key, None)
            return
        have = self._topics.get(topic, TopicOptions()).partitions
        if options.partitions < have:
            raise Conflict(f"{topic} has {have} partitions, they cannot be reduced", topic=topic)
        for key in [k for k in self._groups if (k.topic, k.partition) == (topic, 0)]:
            for partition in range(have, options.partitions):
                await self.update(key._replace(partition=partition), self._groups[key].spread)
        self._topics[topic] = options
        self.bell.ring(None)  # a subscriber may have partitions to find

    async def close(self) -> None:
        self._closed = True

    def _partition(self, topic: str, number: int) -> _Partition:
        return self._partitions.setdefault((topic, number), _Partition())

    def _check(self) -> None:
        if self._closed:
            raise Closed("the bus is closed")


def _first_since(place: _Partition, when: datetime) -> int:
    return next((kept.offset for kept in place.kept if kept.ts >= when), place.next)
