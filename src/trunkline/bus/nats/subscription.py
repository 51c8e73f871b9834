"""A subscription of the bus on NATS: deliveries of one group from the topics that match."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from time import monotonic
from types import TracebackType
from typing import Protocol, Self

from trunkline.bus import Delivery, DeliveryBatch, Outcome, Start
from trunkline.bus.nats.membership import Membership, NatsRecord
from trunkline.check import check_count, check_delay
from trunkline.clock import Clock
from trunkline.delivery.ahead import Ahead
from trunkline.errors import Closed, InvalidFilter
from trunkline.event import Event
from trunkline.group import Lease
from trunkline.group.members import MemberInfo
from trunkline.names import is_dead, is_pattern, matches
from trunkline.options import Flow, GroupOptions, OnConflict, TopicOptions


class _Home(Protocol):
    """The bus, as a subscription sees it."""

    subscriptions: set[NatsSubscription]
    clock: Clock

    @property
    def is_closed(self) -> bool: ...

    async def known_topics(self) -> dict[str, TopicOptions]: ...

    async def join(
        self, subscription: NatsSubscription, topic: str, *, since: bool
    ) -> Membership: ...

    async def leave(self, member: Membership) -> None: ...


class NatsSubscription:
    def __init__(
        self,
        home: _Home,
        topic: str,
        group: str,
        start: Start,
        policy: GroupOptions | None,
        on_conflict: OnConflict,
        flow: Flow,
        match: Callable[[Event], bool] | None,
    ) -> None:
        self.topic = topic
        self.group = group
        self.start = start
        self.policy = policy
        self.on_conflict = on_conflict
        self.members: dict[str, Membership] = {}
        self._home = home
        self._match = match
        self._most = flow.max_inflight
        self._ahead = Ahead(flow.max_inflight)
        self._queue: deque[tuple[NatsRecord, float]] = deque()  # with the time it came
        self._hands: dict[Delivery, NatsRecord] = {}
        self._arrived = asyncio.Event()
        self._finding = asyncio.Lock()
        self._error: BaseException | None = None
        self._entered = False
        self._since = 0.0
        self._last: float | None = None  # when a reader got a delivery
        self._draining = False
        self._closed = False
        self._left = asyncio.Event()

    def describe(self) -> MemberInfo:
        """What others may know of it."""
        return MemberInfo(
            topic=self.topic,
            group=self.group,
            member=f"{os.getpid():x}-{id(self):x}",
            pid=os.getpid(),
            host=os.uname().nodename,
            since=self._since,
            in_flight=len(self._hands) + len(self._queue),
            last_delivery=self._last,
        )

    # -- life ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._entered or self._closed:
            raise Closed("a subscription is entered once")
        if self._home.is_closed:
            raise Closed("the bus is closed")
        self._entered = True
        self._since = self._home.clock.now().timestamp()
        self._home.subscriptions.add(self)
        try:
            await self.find(first=True)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def find(self, *, first: bool = False) -> None:
        """Join the group on every topic that matches, and on partitions that were added."""
        async with self._finding:
            if is_pattern(self.topic):
                # Dead letters are asked for by name: a pattern would deliver a failure as an event.
                wanted = [
                    name
                    for name in await self._home.known_topics()
                    if matches(self.topic, name) and (not is_dead(name) or is_dead(self.topic))
                ]
            else:
                wanted = [self.topic]
            for topic in wanted:
                if self._closed:
                    return
                member = await self._home.join(self, topic, since=not first)
                if topic not in self.members:
                    self.members[topic] = member
                    member.attach(self)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                await self._leave()
            finally:
                self._left.set()
        await self._left.wait()

    async def aclose(self) -> None:
        await self.close()

    async def _leave(self) -> None:
        self.drain()
        async with self._finding:
            unread = [held for held, _ in self._queue]
            self._queue.clear()
            hands, self._hands = self._hands, {}
            for delivery in hands:
                delivery.outcome = Outcome.NACK  # too late for any other verb
            for member in self.members.values():
                mine = [held for held in unread if held.record.topic == member.topic]
                held_by = [held for held in hands.values() if held.record.topic == member.topic]
                if await member.detach(self, mine, held_by):
                    await self._home.leave(member)
        self._home.subscriptions.discard(self)

    def drain(self) -> None:
        """Hand out nothing more: unread deliveries go back, the iteration ends."""
        self._draining = True
        self._arrived.set()

    # -- as the reader sees it -----------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        while self._draining or not self._queue:
            if self._error is not None:
                raise self._error
            if self._closed or self._draining:
                raise StopAsyncIteration
            if not self._entered:
                raise Closed("enter the subscription first", hint="async with bus.subscribe(...)")
            await self._ahead.wait(self._arrived, self._refill)
        return self._next()

    async def batches(self, size: int, wait_s: float = 0.0) -> AsyncIterator[DeliveryBatch]:
        """Batches of at most ``size`` deliveries. A batch with fewer waits ``wait_s`` for more."""
        check_count("size", size, 1)
        check_delay(wait_s, "wait_s")
        async for first in self:
            found, until = [first], monotonic() + wait_s
            while len(found) < size and not self._draining:
                if self._queue:
                    found.append(self._next())
                    continue
                left = until - monotonic()
                if left <= 0 or self._error is not None:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._ahead.wait(self._arrived, self._refill)
            yield DeliveryBatch(found, _ack_all)

    def _next(self) -> Delivery:
        held, came = self._queue.popleft()
        member = self.members[held.record.topic]
        left = len(self._queue)
        if self._ahead.took(came, left):
            member.extend(held)
        lease = Lease(held.offset, held.attempt, float("inf"), "nats")
        delivery = Delivery(held.record, lease, self.group, self._settle, self._extend)
        held.delivery = delivery
        self._hands[delivery] = held
        self._last = self._home.clock.now().timestamp()
        if not left or left == self._ahead.limit // 2:
            self._refill()
        return delivery

    def _refill(self) -> None:
        if self.room() > 0:
            for member in self.members.values():
                member.offer()
                member.refill()

    def _settle(
        self, delivery: Delivery, outcome: Outcome, delay_s: float | None, reason: str
    ) -> None:
        held = self._hands.pop(delivery, None)
        if held is not None:
            self.members[delivery.topic].settle(held, outcome, delay_s, reason)
            if len(self.members) > 1:
                self._refill()

    def _extend(self, delivery: Delivery) -> None:
        held = self._hands.get(delivery)
        if held is not None:
            self.members[delivery.topic].extend(held)

    # -- as its members see it -----------------------------------------------------------------

    def room(self) -> int:
        if self._draining or self._error is not None:
            return 0
        unread = len(self._queue)
        room = self._most - len(self._hands) - unread
        ahead = self._ahead.room() - unread
        room = room if room < ahead else ahead  # asked for with every record
        return room if room > 0 else 0

    def accepts(self, event: Event) -> bool:
        if self._match is None or self._error is not None:
            return self._error is None
        try:
            return bool(self._match(event))
        except Exception as error:  # noqa: BLE001 -- the reader is told
            failed = InvalidFilter(f"the filter failed on event {event.id}: {error!r}")
            failed.__cause__ = error
            self.fail(failed)
            return False

    def put(self, held: NatsRecord) -> None:
        self._queue.append((held, monotonic()))
        self._arrived.set()

    def lose(self, held: NatsRecord) -> None:
        if held.delivery is not None:
            self._hands.pop(held.delivery, None)
        else:
            self._queue = deque(one for one in self._queue if one[0] is not held)

    def fail(self, error: BaseException) -> None:
        self._error = error
        for member in self.members.values():
            if self in member.seats:
                member.seats.remove(self)
        self._arrived.set()


def _ack_all(deliveries: list[Delivery]) -> int:
    return sum(one.finish(Outcome.ACK) for one in deliveries)
