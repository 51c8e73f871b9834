"""The bus in this process: a store, and pumps that move its records to subscribers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

from trunkline.bus import Delivery, GroupInfo, Health, Start, Where, groups
from trunkline.bus.app import CLOSED, BusBase, OnPublish
from trunkline.bus.groups import check_start
from trunkline.bus.once import publish_once
from trunkline.bus.subscription import LocalSubscription, Pumps
from trunkline.check import check_count
from trunkline.clock import Clock
from trunkline.delivery.deadletters import Desk, check_member
from trunkline.errors import InvalidEvent, NotFound, OutOfRange
from trunkline.event import Bounds, Event, EventFields, Receipt, Record
from trunkline.features import Features
from trunkline.filters import to_filter
from trunkline.group.members import MemberInfo
from trunkline.names import GroupKey, check_group, check_pattern, check_topic, is_dead
from trunkline.options import (
    BusOptions,
    Flow,
    GroupFields,
    GroupOptions,
    OnConflict,
    TopicFields,
    TopicOptions,
    check_on_conflict,
    check_policy,
    make,
)
from trunkline.store import Store


class LocalBus(BusBase):
    def __init__(
        self,
        store: Store,
        *,
        clock: Clock | None = None,
        middleware: Sequence[object] = (),
        on_publish: OnPublish | None = None,
        on_message: OnPublish | None = None,
        draw: Callable[[], float] = random.random,
        **options: Any,
    ) -> None:
        self.store = store
        clock = clock or store.clock
        limits = store.limits
        chosen = make(BusOptions, options)
        super().__init__(chosen, clock, limits, middleware, on_publish, on_message)
        self._pumps = Pumps(store, clock, draw, self._observers)
        self._checked: set[str] = set()

    @property
    def features(self) -> Features:
        return self.store.features

    # -- publishing ----------------------------------------------------------------------------

    async def publish(
        self, topic: str | Event, payload: Any = None, **fields: Unpack[EventFields]
    ) -> Receipt:
        if type(topic) is str and topic in self._checked and not fields:  # by far most often
            event = Event(topic=topic, payload=payload, ts=self.clock.now())
        elif isinstance(topic, Event):
            event = self._whole(topic, payload, {**fields})
        else:
            event = self._event(topic, payload, {**fields})
            if not is_dead(event.topic):  # there each event is looked at
                self._checked.add(event.topic)
        if self._plain and self._life is not CLOSED:
            return (await self.store.append(event.topic, (event,)))[0]
        return (await self._send([event]))[0]

    async def publish_many(
        self, topic: str, payloads: Sequence[Any], **fields: Unpack[EventFields]
    ) -> list[Receipt]:
        events = self._events(topic, payloads, {**fields})
        if not events:
            return []
        if self._plain and self._life is not CLOSED:
            return await self.store.append(topic, events)
        return await self._send(events)

    async def publish_again(self, topic: str, events: Sequence[Event]) -> list[Receipt]:
        return await publish_once(self.store, self.publish_many, topic, events) if events else []

    async def _append(self, events: list[Event]) -> list[Receipt]:
        if not events:  # a middleware kept all of them back
            return []
        topic = events[0].topic
        if len(events) > 1 and any(event.topic != topic for event in events):
            raise InvalidEvent("the events of one batch have one topic")
        return await self.store.append(topic, events)

    # -- subscribing ---------------------------------------------------------------------------

    def subscribe(
        self,
        topic: str,
        *,
        group: str,
        start: Start = "earliest",
        policy: GroupOptions | None = None,
        on_conflict: OnConflict = "raise",
        max_inflight: int | None = None,
        where: Where = None,
    ) -> LocalSubscription:
        check_pattern(topic)
        check_group(group)
        check_member(topic, group)
        flow = Flow() if max_inflight is None else Flow(max_inflight=max_inflight)
        if policy is not None:
            check_policy(policy)
        check_on_conflict(on_conflict)
        to_filter(where)  # refuses a value that is no filter
        check_start(start)
        return LocalSubscription(
            self._pumps, topic, group, start, policy, flow, where, on_conflict=on_conflict
        )

    def _streams(self) -> Iterable[LocalSubscription]:
        return self._pumps.subscriptions

    async def _unsettled(self) -> int:
        return await self._pumps.lag()

    async def policy_of(self, delivery: Delivery) -> GroupOptions:
        key = GroupKey(delivery.topic, delivery.partition, delivery.group)
        return await self.store.update(key, lambda group: group.options)

    # -- looking -------------------------------------------------------------------------------

    async def bounds(self, topic: str, partition: int = 0) -> Bounds:
        await self.check_partition(topic, partition)
        return await self.store.bounds(topic, partition)

    async def _read(self, topic: str, partition: int, start: int, limit: int) -> list[Record]:
        await self.check_partition(topic, partition)
        return await self.store.read(topic, partition, start, limit)

    async def check_partition(self, topic: str, partition: int) -> None:
        """A topic that is not there yet may come to have it."""
        check_topic(topic)
        check_count("partition", partition)
        options = (await self.topics()).get(topic) if partition else None
        if options is not None and partition >= options.partitions:
            raise OutOfRange(f"there is no partition {partition} in {topic}", partition=partition)

    async def topics(self) -> dict[str, TopicOptions]:
        return await self.store.topics()

    async def define(self, topic: str, **options: Unpack[TopicFields]) -> None:
        self._pumps.heed(topic, await self.store.edit(check_topic(topic), {**options}))

    async def remove(self, topic: str) -> None:
        if check_topic(topic) not in await self.topics():
            raise NotFound(f"there is no topic {topic}", topic=topic)
        await self.store.define(topic, None)

    async def trim(self, topic: str, before: int, *, partition: int = 0) -> Bounds:
        check_count("before", before)
        if check_topic(topic) not in await self.topics():
            raise NotFound(f"there is no topic {topic}", topic=topic)
        await self.check_partition(topic, partition)
        return await self.store.trim(topic, partition, before)

    def dead_letters(self, topic: str) -> Desk:
        return Desk(self.store, check_topic(topic), self.clock)

    async def groups(self, topic: str | None = None, group: str | None = None) -> list[GroupInfo]:
        return await groups.list_groups(self.store, topic, group)

    async def members(self, topic: str | None = None, group: str | None = None) -> list[MemberInfo]:
        self._pumps.tell()
        return await groups.list_members(self.store, topic, group)

    async def lag(self, topic: str, group: str) -> int:
        return sum(one.lag for one in await self.groups(topic, check_group(group)))

    async def seek(self, topic: str, group: str, to: Start) -> list[GroupInfo]:
        return await groups.seek_group(self.store, topic, group, to)

    async def pause(self, topic: str, group: str) -> list[GroupInfo]:
        return await groups.pause_group(self.store, topic, group, True)

    async def resume(self, topic: str, group: str) -> list[GroupInfo]:
        return await groups.pause_group(self.store, topic, group, False)

    async def edit(self, topic: str, group: str, **policy: Unpack[GroupFields]) -> list[GroupInfo]:
        return await groups.edit_group(self.store, topic, group, {**policy})

    async def forget(self, topic: str, group: str) -> None:
        await groups.forget_group(self.store, topic, group)

    async def health(self) -> Health:
        room = self.store.room()
        failed = [str(error) for error in self._failed()]
        found: Health = {
            "ok": not (self._life is CLOSED or room.full or failed or room.problem),
            "durability": self.store.features.durability,
            "events_storage_full": room.full,
            "free_bytes": room.free_bytes,
            "groups": len(self._pumps),
            "failed": failed,
        }
        if room.problem:
            found["problem"] = room.problem
        return found

    # -- life ----------------------------------------------------------------------------------

    async def close(self) -> None:
        if self._life is CLOSED:
            return
        try:
            await self.stop()
            await self._end()
        finally:
            self._life = CLOSED
            await self._pumps.close()
            await self.store.close()
