"""A store in this process's memory: everything the file store does, except that it ends with it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, NamedTuple

from trunkline.clock import Clock, SystemClock
from trunkline.codec import encode_event
from trunkline.errors import Closed, Conflict, NotFound, OutOfRange
from trunkline.event import Bounds, Event, Receipt, Record
from trunkline.features import Features
from trunkline.group import Group, Saved, load
from trunkline.group.changes import AnyOp
from trunkline.log.line import close_line, parse
from trunkline.names import GroupKey, check_group, check_topic
from trunkline.options import GroupOptions, StoreOptions, TopicOptions, make
from trunkline.store import Bell, Store, limits_of, pick_partition

_REMOVED = 256
_SAVE_FROM = 4096  # changes of a group
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


class _History:
    """A group, and how it became what it is: to take a transaction back, the group is made anew."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._era = group.era
        self._saved: Saved | None = None
        self._since: list[AnyOp] = []  # changes since then
        self._save_at = _SAVE_FROM

    def commit(self) -> None:
        self._since += self.group.ops
        if len(self._since) > self._save_at:
            saved = self._saved = Saved(**self.group.dump())
            self._since.clear()
            size = len(saved.settled) + len(saved.leases) + len(saved.attempts)
            self._save_at = max(_SAVE_FROM, size)

    def roll_back(self) -> None:
        if not self.group.ops:
            return
        was = self.group.was
        self.group = Group(era=self._era) if self._saved is None else load(self._saved)
        for change in self._since:
            self.group.apply(change)
        self.group.was = was


class _Transaction:
    """Nobody else is there, so it never races. The body does not await."""

    __slots__ = ("_groups", "_history", "_key", "_open")

    def __init__(
        self,
        open_: Callable[[GroupKey], _History],
        groups: dict[GroupKey, _History],
        key: GroupKey,
    ) -> None:
        self._open = open_
        self._groups = groups
        self._key = key

    async def __aenter__(self) -> Group:
        self._history = self._open(self._key)
        group = self._history.group
        group.ops.clear()
        return group

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._history.roll_back()
        elif self._history.group.created:
            self._history.commit()
            self._groups[self._key] = self._history


class MemoryStore(Store):
    features = Features(persistent=False, shared=False, durability="none")
    member = "local"

    def __init__(self, clock: Clock | None = None, **options: Any) -> None:
        self.bell = Bell()
        self.options = make(StoreOptions, options)
        self.clock = clock or SystemClock()
        self.limits = self.options.limits
        self._topics: dict[str, TopicOptions] = {}
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._groups: dict[GroupKey, _History] = {}
        self._removed: dict[GroupKey, GroupOptions] = {}  # the policies they had
        self._era = 0  # later than that of any of them
        self._turn = 0
        self._closed = False

    async def append(self, topic: str, events: Sequence[Event]) -> list[Receipt]:
        self._check()
        check_topic(topic)
        limits = limits_of(topic, self.limits)
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
            min([history.group.floor + 1, *history.group.again])
            for key, history in self._groups.items()
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

    def group(self, key: GroupKey) -> AbstractAsyncContextManager[Group]:
        return _Transaction(self._open_group, self._groups, key)

    def _open_group(self, key: GroupKey) -> _History:
        self._check()
        check_topic(key.topic)
        check_group(key.group)
        history = self._groups.get(key)
        if history is None:
            history = _History(Group(era=self._era, was=self._removed.get(key)))
        return history

    async def remove_group(self, key: GroupKey) -> None:
        self._check()
        if key not in self._groups:
            raise NotFound(f"there is no group {key.group} on {key.topic}", group=key.group)
        removed = self._groups.pop(key).group
        self._era = max(self._era, removed.era + 1)
        self._removed[key] = removed.options
        if len(self._removed) > _REMOVED:
            del self._removed[next(iter(self._removed))]
        self.bell.ring(None)

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
                await self.remove_group(key)
            return
        have = self._topics.get(topic, TopicOptions()).partitions
        if options.partitions < have:
            raise Conflict(f"{topic} has {have} partitions, they cannot be reduced", topic=topic)
        for key in [k for k in self._groups if (k.topic, k.partition) == (topic, 0)]:
            for partition in range(have, options.partitions):
                async with self.group(key._replace(partition=partition)) as later:
                    self._groups[key].group.spread(later)
        self._topics[topic] = options
        self.bell.ring(None)  # a subscriber may have partitions to find

    def watch(self) -> None:
        """There is no other process."""

    async def close(self) -> None:
        self._closed = True

    def _partition(self, topic: str, number: int) -> _Partition:
        return self._partitions.setdefault((topic, number), _Partition())

    def _check(self) -> None:
        if self._closed:
            raise Closed("the bus is closed")


def _first_since(place: _Partition, when: datetime) -> int:
    return next((kept.offset for kept in place.kept if kept.ts >= when), place.next)
