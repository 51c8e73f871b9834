"""The bus in this process: a store, and pumps that move its records to subscribers."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from trunkline.bus import Delivery, Start
from trunkline.buses.base import BusBase, OnPublish, check_start
from trunkline.buses.stream import LocalSubscription, Pumps
from trunkline.clock import Clock, SystemClock
from trunkline.dead import Desk, check_member
from trunkline.errors import InvalidEvent, OutOfRange, check_count
from trunkline.event import Event, Receipt, Record
from trunkline.filters import to_filter
from trunkline.options import BusOptions, Flow, GroupOptions, TopicOptions, check_policy, make
from trunkline.pump import Hooks
from trunkline.store import Bounds, GroupKey, Store
from trunkline.topics import check_group, check_pattern, check_topic, is_dead


class LocalBus(BusBase):
    def __init__(
        self,
        store: Store,
        *,
        clock: Clock | None = None,
        middleware: Sequence[object] = (),
        on_publish: OnPublish | None = None,
        on_message: OnPublish | None = None,
        hooks: Hooks = Hooks(),
        draw: Callable[[], float] = random.random,
        **options: Any,
    ) -> None:
        self.store = store
        clock = clock or SystemClock()
        limits = store.options.limits  # type: ignore[attr-defined]
        chosen = make(BusOptions, options)
        super().__init__(chosen, clock, limits, middleware, on_publish, on_message)
        self._pumps = Pumps(store, clock, draw, hooks)
        self._checked: set[str] = set()
        self._endings: list[Callable[[], Awaitable[None]]] = []

    # -- publishing ----------------------------------------------------------------------------

    async def publish(self, topic: str | Event, payload: Any = None, **fields: Any) -> Receipt:
        """Publish one event; returns once it is durable.

        ``fields`` are those of ``Event``, and ``delay_s`` in the place of ``not_before``.
        """
        if type(topic) is str and topic in self._checked and not fields:  # by far most often
            event = Event(topic=topic, payload=payload, ts=self.clock.now())
        elif isinstance(topic, Event):
            event = self._whole(topic, payload, fields)
        else:
            event = self._event(topic, payload, fields)
            if not is_dead(event.topic):  # there each event is looked at
                self._checked.add(event.topic)
        if self._plain and not self._closed:
            return (await self.store.append(event.topic, (event,)))[0]
        return (await self._send([event]))[0]

    async def publish_many(
        self, topic: str, payloads: Sequence[Any], **fields: Any
    ) -> list[Receipt]:
        """Publish payloads, or whole events, as one batch: all of them are kept or none. Where the
        topic has several partitions that holds for each partition's share.
        """
        events = self._events(topic, payloads, fields)
        if not events:
            return []
        if self._plain and not self._closed:
            return await self.store.append(topic, events)
        return await self._send(events)

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
        max_inflight: int | None = None,
        where: str | Callable[[Event], bool] | None = None,
    ) -> LocalSubscription:
        check_pattern(topic)
        check_group(group)
        check_member(topic, group)
        flow = Flow() if max_inflight is None else Flow(max_inflight=max_inflight)
        if policy is not None:
            check_policy(policy)
        match = to_filter(where)
        check_start(start)
        return LocalSubscription(self._pumps, topic, group, start, policy, flow, match)

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

    async def define(self, topic: str, **options: Any) -> None:
        """Set a topic's options; see ``TopicOptions``."""
        wanted = make(TopicOptions, options)
        await self.store.define(check_topic(topic), wanted)
        self._pumps.heed(topic, wanted)

    def dead_letters(self, topic: str) -> Desk:
        return Desk(self.store, check_topic(topic), self.clock)

    async def health(self) -> dict[str, Any]:
        """What an operator wants to know at a glance."""
        folder = getattr(self.store, "folder", None)
        full = bool(folder and folder.is_full)
        failed = [str(error) for error in self._failed()]
        return {
            "ok": not (self._closed or full or failed),
            "durability": self.store.features.durability,
            "events_storage_full": full,
            "groups": len(self._pumps),
            "failed": failed,
        }

    # -- life ----------------------------------------------------------------------------------

    def at_close(self, end: Callable[[], Awaitable[None]]) -> None:
        """Call ``end`` when the bus closes, while it still takes events."""
        self._endings.append(end)

    async def close(self) -> None:
        if self._closed:
            return
        try:
            await self.stop()
            for end in self._endings:
                await end()
            await self.flush()
        finally:
            self._closed = True
            await self._pumps.close()
            await self.store.close()
