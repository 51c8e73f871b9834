"""A subscription of the local bus, and the pumps it draws from."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime
from time import monotonic
from types import TracebackType
from typing import Self

from trunkline.bus import Delivery, Outcome, Start
from trunkline.buses.ahead import Ahead
from trunkline.clock import Clock
from trunkline.errors import Closed, Conflict, InvalidFilter, TrunklineError
from trunkline.event import Event, Record
from trunkline.group import Group, Lease
from trunkline.options import Flow, GroupOptions, TopicOptions, TtlPolicy
from trunkline.pump import Hooks, Pump
from trunkline.store import GroupKey, Store, lag_of, watch
from trunkline.topics import is_dead, is_pattern, matches
from trunkline.turns import Turns

logger = logging.getLogger(__name__)

_FIND_S = 0.25  # new topics are rare, rings are not

# What a group of a topic is to be, if it is made by a subscription that does not say so itself.
Default = Callable[[str], GroupOptions]


def _plain(_topic: str) -> GroupOptions:
    return GroupOptions()


class Pumps:
    """The pumps of this process, one for each group and partition that somebody listens to."""

    def __init__(self, store: Store, clock: Clock, draw: Callable[[], float], hooks: Hooks) -> None:
        self.store = store
        self.subscriptions: set[LocalSubscription] = set()
        self.closed = False
        self._clock = clock
        self._draw = draw
        self._hooks = hooks
        self._turns = Turns()
        self._pumps: dict[GroupKey, Pump] = {}

    def __iter__(self) -> Iterator[GroupKey]:
        return iter(list(self._pumps))

    def __len__(self) -> int:
        return len(self._pumps)

    async def get(
        self,
        key: GroupKey,
        start: Start,
        policy: GroupOptions | None,
        default: Default,
        ttl: TtlPolicy,
    ) -> Pump:
        """The pump of one group and partition, made when it is first asked for."""
        if key not in self._pumps:
            await self._define_group(key, start, policy, default)
        elif policy is not None:
            topic, name = key.topic, key.group
            await self.store.update(
                key, lambda group: group.define(policy, 0, topic=topic, name=name)
            )
        found = self._pumps.get(key)  # only now: it may have been closed meanwhile
        if found is None:
            found = Pump(
                self.store,
                key,
                ttl,
                self._clock,
                self._draw,
                self._hooks,
                self._pumps,
                self._turns,
            )
            self._pumps[key] = found
        return found

    def drop(self, key: GroupKey, pump: Pump) -> bool:
        """Let go of a pump that nobody listens to, before any wait: nobody shall join it then."""
        if not pump.idle() or self._pumps.get(key) is not pump:
            return False
        del self._pumps[key]
        return True

    def heed(self, topic: str, options: TopicOptions) -> None:
        """Who defined these here relies on them now. What others define is found a little later."""
        for key, pump in self._pumps.items():
            if key.topic == topic:
                pump.ttl = options.ttl_policy

    async def lag(self) -> int:
        """How many records the groups here have not settled; one more for each that is being left,
        of which that cannot be told any more.
        """
        for subscription in list(self.subscriptions):
            await subscription.find()
        lags = [await lag_of(self.store, key) for key in self]
        return sum(lags) + sum(one.is_leaving for one in self.subscriptions)

    async def close(self) -> None:
        self.closed = True
        for subscription in list(self.subscriptions):
            await subscription.close()
        for pump in list(self._pumps.values()):
            try:
                await pump.close()
            except Exception:  # the store is closed all the same
                logger.exception("%s did not end well", pump.key)
        self._pumps.clear()

    async def _define_group(
        self, key: GroupKey, start: Start, policy: GroupOptions | None, default: Default
    ) -> None:
        wanted, paused = policy or default(key.topic), False
        if key.partition:  # it may be younger than the group, and then is as the first
            first = key._replace(partition=0)
            have, paused, exists = await self.store.update(first, _ways)
            if exists:
                wanted = policy or have
                start = "earliest" if start == "latest" else start
        floor = await self._floor(key, start)

        def define(group: Group) -> int:
            if not group.created:
                group.define(wanted, floor)
                group.pause(paused)
            elif policy is not None:
                group.define(policy, floor, topic=key.topic, name=key.group)
            return group.last_settled

        settled = await self.store.update(key, define)
        _, end = await self.store.bounds(key.topic, key.partition)  # now: others go on meanwhile
        if settled >= end:
            raise Conflict(
                f"group {key.group} has settled offset {settled} of {key.topic}/{key.partition}, "
                f"which ends before {end}",
                hint="records were lost or the topic was made anew: 'trunkline group seek'",
            )

    async def _floor(self, key: GroupKey, start: Start) -> int:
        first, end = await self.store.bounds(key.topic, key.partition)
        if isinstance(start, datetime):
            return await self.store.seek(key.topic, key.partition, start) - 1
        if isinstance(start, int):
            return min(max(start, first), end) - 1
        return (first if start == "earliest" else end) - 1


class LocalSubscription:
    """Deliveries of one group from every partition of the topics that match."""

    def __init__(
        self,
        pumps: Pumps,
        topic: str,
        group: str,
        start: Start,
        policy: GroupOptions | None,
        flow: Flow,
        match: Callable[[Event], bool] | None,
    ) -> None:
        self._home = pumps
        self._topic = topic
        self._group = group
        self._start = start
        self._policy = policy
        self.default: Default = _plain
        self.revoked: Callable[[Collection[Delivery]], None] | None = None  # by a seek or removal
        self._room = flow.max_inflight
        self._ahead = Ahead(flow.max_inflight)
        self._match = match
        self._queue: deque[tuple[Delivery, float]] = deque()  # with the time it came
        self._open: dict[Delivery, Pump] = {}
        self._arrived = asyncio.Event()
        self._pumps: dict[GroupKey, Pump] = {}
        self._last: Pump | None = None  # of them to put something here
        self._error: BaseException | None = None
        self._draining = False
        self._closed = False
        self._entered = False
        self._left = asyncio.Event()
        self._finder: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._known: set[str] = set()

    async def __aenter__(self) -> Self:
        if self._entered or self._closed:
            raise Closed("a subscription is entered once")
        if self._home.closed:
            raise Closed("the bus is closed")
        self._entered = True
        self._home.subscriptions.add(self)
        watch(self._home.store)
        try:
            await self.find()
        except BaseException:
            await self.close()  # part of it may have begun
            raise
        self._home.store.bell.listen(self._rung)
        self._finder = asyncio.get_running_loop().create_task(self._keep_finding())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

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

    @property
    def is_ready(self) -> bool:
        """Whether a delivery is here already."""
        return bool(self._queue)

    @property
    def is_leaving(self) -> bool:
        return self._closed and not self._left.is_set()

    def take(self, limit: int) -> list[Delivery]:
        """Up to ``limit`` deliveries that are here already."""
        return [self._next() for _ in range(min(limit, len(self._queue)))]

    def _next(self) -> Delivery:
        delivery, came = self._queue.popleft()
        left = len(self._queue)
        if self._ahead.took(came, left):
            delivery.extend()
        if not left or left == self._ahead.limit // 2:
            self._refill()
        return delivery

    def _refill(self) -> None:
        """Let the pumps see that there is room. They share it: who had its turn comes last."""
        if self.room() > 0:
            pumps: Collection[Pump] = self._pumps.values()
            if len(pumps) > 1:
                order = list(pumps)
                at = order.index(self._last) + 1 if self._last in order else 0
                pumps = order[at:] + order[:at]
            for pump in pumps:
                pump.refill()

    def put_back(self, deliveries: Sequence[Delivery]) -> None:
        """Deliveries that nobody looked at: they come first again, or go back at the end as if they
        had never been taken.
        """
        now = monotonic()
        self._queue.extendleft((delivery, now) for delivery in reversed(deliveries))
        self._arrived.set()

    def resize(self, max_inflight: int) -> None:
        """From now on hold at most so many deliveries that are not settled."""
        if max_inflight == self._room:
            return
        was_full = self.room() <= 0
        self._room = self._ahead.most = max_inflight
        if was_full and self.room() > 0:
            self._wake()

    def keep_unread(self, most: int) -> None:
        """Let others have what lies here beyond so many deliveries, as if it was never taken."""
        while len(self._queue) > most:
            delivery, _ = self._queue.pop()
            if (pump := self._open.pop(delivery, None)) is not None:  # else it timed out
                pump.give_back(delivery)

    def _wake(self) -> None:
        for pump in self._pumps.values():
            pump.wake()

    @property
    def partitions(self) -> Collection[GroupKey]:
        return self._pumps.keys()

    def draw_from(self, partitions: Collection[GroupKey]) -> None:
        """Get more from these partitions alone, until there are new ones."""
        for key, pump in self._pumps.items():
            if key in partitions:
                pump.attach(self)
            else:
                pump.release(self)

    def drain(self) -> None:
        """Hand out nothing more: what is buffered goes back, the iteration ends."""
        self._draining = True
        self._arrived.set()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                await self._leave()
            finally:
                self._left.set()
        await self._left.wait()  # who closes the bus must not take it from who is about to leave

    async def _leave(self) -> None:
        self.drain()  # its pumps are left one after the other, and none shall hand out more
        home = self._home
        home.store.bell.ignore(self._rung)
        if self._finder is not None:
            self._finder.cancel()
            await asyncio.gather(self._finder, return_exceptions=True)
        unread = {delivery for delivery, _ in self._queue}
        self._queue.clear()
        held, self._open = self._open, {}
        for delivery in held.keys() - unread:
            delivery.outcome = Outcome.NACK  # too late for any other verb
        for key, pump in self._pumps.items():
            mine = [d for d, owner in held.items() if owner is pump]
            with contextlib.suppress(TrunklineError):
                await pump.detach(
                    self, [d for d in mine if d in unread], [d for d in mine if d not in unread]
                )
            if home.drop(key, pump):
                try:
                    await pump.close()
                except TrunklineError as error:  # whoever leaves is not held up by it
                    logger.warning("what was settled last on %s may come again: %s", key, error)
        home.subscriptions.discard(self)

    # -- as a pump sees it ---------------------------------------------------------------------

    def room(self) -> int:
        if self._draining:
            return 0
        room, ahead = self._room - len(self._open), self._ahead.room() - len(self._queue)
        room = room if room < ahead else ahead  # asked for with every record
        return room if room > 0 else 0  # one that has too many takes nothing from the others

    async def aclose(self) -> None:
        await self.close()

    def accepts(self, event: Event) -> bool:
        if self._match is None:
            return True
        try:
            return bool(self._match(event))
        except Exception as error:  # noqa: BLE001 -- told below; the others of the group have theirs
            failed = InvalidFilter(f"the filter failed on event {event.id}: {error!r}")
            failed.__cause__ = error
            for pump in self._pumps.values():
                pump.release(self)
            self.fail(failed)
            return False

    def put(self, pump: Pump, record: Record, lease: Lease) -> None:
        delivery = Delivery(record, lease, self._group, self._settle, pump.extend)
        self._open[delivery] = self._last = pump
        self._queue.append((delivery, monotonic()))
        self._arrived.set()

    def _settle(
        self, delivery: Delivery, outcome: Outcome, delay_s: float | None, reason: str
    ) -> None:
        pump = self._open.pop(delivery, None)
        if pump is None:  # too late, which only the group can judge
            pump = self._pumps.get(GroupKey(delivery.topic, delivery.partition, self._group))
        elif len(self._pumps) > 1 and len(self._open) == self._room - 1:
            self._refill()  # it was full, for all of them
        if pump is not None:
            pump.settle(delivery, outcome, delay_s, reason)

    def keep(self, pump: Pump, group: Group) -> float:
        """Let go of deliveries of ``pump`` that are leased no longer; when to look again."""
        until = float("inf")
        lost: set[Delivery] = set()
        for delivery, owner in self._open.items():
            if owner is not pump:
                continue
            lease, mine = group.leases.get(delivery.offset), delivery.lease
            if lease is not None and (lease.attempt, lease.era) == (mine.attempt, mine.era):
                until = min(until, lease.until)
                continue
            lost.add(delivery)
        if lost:
            for delivery in lost:
                del self._open[delivery]
            self._queue = deque(waiting for waiting in self._queue if waiting[0] not in lost)
            old = {delivery for delivery in lost if delivery.lease.era != group.era}
            if old and self.revoked is not None:
                self.revoked(old)
            self._refill()
        return until

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._room = 0  # of its other pumps
        self._arrived.set()

    # -- finding topics ------------------------------------------------------------------------

    def _rung(self, topic: str | None) -> None:
        if topic is None or (topic not in self._known and matches(self._topic, topic)):
            self._changed.set()

    async def _keep_finding(self) -> None:
        """Notice topics that match and partitions that are new."""
        trouble = ""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self.find()
                if trouble:
                    logger.warning("topics are found again")
                trouble = ""
            except (TrunklineError, OSError) as error:
                if isinstance(error, TrunklineError) and "errno" not in error.fields:
                    self.fail(error)
                    return
                # No file can be opened at the moment, for example.
                if str(error) != trouble:  # it is tried again soon, and may last
                    logger.warning("topics could not be looked for: %s", error)
                trouble = str(error)
                self._changed.set()
            await asyncio.sleep(_FIND_S)

    async def find(self) -> None:
        """Begin with the topics and partitions that are there and were not before."""
        topics = await self._home.store.topics()
        # What came into being since we began is new from its first record on.
        since = self._finder is not None and self._start == "latest"
        start: Start = "earliest" if since else self._start
        if is_pattern(self._topic):
            # Dead letters are asked for by name: a pattern would deliver a failure as an event.
            wanted = {
                name: options
                for name, options in topics.items()
                if matches(self._topic, name) and (not is_dead(name) or is_dead(self._topic))
            }
        else:
            wanted = {self._topic: topics.get(self._topic, TopicOptions())}
        self._known |= wanted.keys()
        for name, options in wanted.items():
            # The first one last: where a group has it, what it lacks was added since.
            for partition in reversed(range(options.partitions)):
                key = GroupKey(name, partition, self._group)
                if key not in self._pumps:
                    pump = await self._home.get(
                        key, start, self._policy, self.default, options.ttl_policy
                    )
                    if key not in self._pumps and not self._closed:
                        self._pumps[key] = pump
                        pump.attach(self)
                    await asyncio.sleep(0)  # there may be many, and others have their turn, too
                else:
                    self._pumps[key].ttl = options.ttl_policy  # it may be another one now


def _ways(group: Group) -> tuple[GroupOptions, bool, bool]:
    return group.options, group.paused, group.created
