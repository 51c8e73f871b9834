"""A subscription of the local bus, and the pumps it draws from."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from time import monotonic
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from trunkline.bus import Delivery, Outcome, Start
from trunkline.bus.groups import agree, floor_at
from trunkline.clock import Clock
from trunkline.delivery.batches import DeliveryBatch, batches
from trunkline.delivery.inbox import CLOSED, NEW, OPEN, DeliveryInbox
from trunkline.delivery.observers import Observers
from trunkline.delivery.pump import Pump
from trunkline.delivery.suspects import SuspectSlot
from trunkline.delivery.wakes import Turns
from trunkline.errors import Closed, Conflict, LockTimeout, TrunklineError
from trunkline.filters import Filter
from trunkline.filters.named import name_of
from trunkline.group import RUN, Group
from trunkline.group.members import MemberInfo
from trunkline.names import GroupKey, is_dead, is_pattern, matches
from trunkline.options import Flow, GroupOptions, OnConflict, TopicOptions, TtlPolicy
from trunkline.store import Store, lag_of

logger = logging.getLogger(__name__)

_FIND_S = 0.25  # new topics are rare, rings are not
_TELL_S = 2.0  # how often others hear what a member has in hand

# What a group of a topic is to be, if it is made by a subscription that does not say so itself.
Default = Callable[[str], GroupOptions]


def _plain(_topic: str) -> GroupOptions:
    return GroupOptions()


class Pumps:
    """The pumps of this process, one for each group and partition that somebody listens to."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        draw: Callable[[], float],
        observers: Observers,
        *,
        by: str | None = None,
        lease_s: float | None = None,
        run: int = RUN,
    ) -> None:
        self.store = store
        self._by = by
        self._lease_s = lease_s
        self._run = run
        self.subscriptions: set[LocalSubscription] = set()
        self.closed = False
        self.clock = clock
        self._draw = draw
        self._observers = observers
        self._turns = Turns()
        self.slot = SuspectSlot()
        self._pumps: dict[GroupKey, Pump] = {}
        self._told: list[MemberInfo] = []
        self._teller: asyncio.Task[None] | None = None

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
        on_conflict: OnConflict,
        where: str | None = None,
    ) -> Pump:
        """The pump of one group and partition, made when it is first asked for."""
        if key not in self._pumps:
            await self._define_group(key, start, policy, default, on_conflict, where)
        elif policy is not None or where is not None:

            def check(group: Group) -> Callable[[], None] | None:
                return agree(group, key, brought(group.options, policy, where), on_conflict)

            log = await self.store.change(key, check)
            if log is not None:
                log()
        found = self._pumps.get(key)  # only now: it may have been closed meanwhile
        if found is None:
            found = Pump(
                self.store,
                key,
                ttl,
                self.clock,
                self._draw,
                self._observers,
                self._pumps,
                self._turns,
                self._by,
                self._lease_s,
                self._run,
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
        """Use options that this process defined. Those of others are found a little later."""
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

    # -- the members that are subscribed ----------------------------------------------------------

    def enter(self, subscription: LocalSubscription) -> None:
        self.subscriptions.add(subscription)
        self.tell()
        if self._teller is None and self._by is None:
            self._teller = asyncio.get_running_loop().create_task(self._keep_telling())

    def leave(self, subscription: LocalSubscription) -> None:
        self.subscriptions.discard(subscription)
        self.tell()
        if not self.subscriptions and self._teller is not None:
            self._teller.cancel()
            self._teller = None

    def tell(self) -> None:
        """Let others see what is subscribed to here, and what is in hand. A lease that belongs to
        a handle has no member.
        """
        if self._by is not None:
            return
        found = [one.describe(self.store.member) for one in self.subscriptions]
        if found != self._told:
            try:
                self.store.announce(found)
            except TrunklineError as error:  # people look at it, nothing depends on it
                logger.debug("the list of subscribers could not be written: %s", error)
            self._told = found

    async def _keep_telling(self) -> None:
        while True:
            await asyncio.sleep(_TELL_S)
            self.tell()

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
        self,
        key: GroupKey,
        start: Start,
        policy: GroupOptions | None,
        default: Default,
        on_conflict: OnConflict,
        where: str | None,
    ) -> None:
        wanted, paused = policy or default(key.topic), False
        if where is not None:
            wanted = replace(wanted, where=where)
        if key.partition:  # it may be younger than the group, and then is as the first
            first = key._replace(partition=0)
            have, paused, exists = await self.store.change(first, _ways)
            if exists:
                keeps = on_conflict == "keep"
                wanted = have if keeps else brought(have, policy, where)
                start = "earliest" if start == "latest" else start
        floor = await floor_at(self.store, key, start)

        def define(group: Group) -> tuple[int, Callable[[], None] | None]:
            log = None
            if not group.created:
                group.define(wanted, floor)
                group.pause(paused)
            else:
                log = agree(group, key, brought(group.options, policy, where), on_conflict)
            return group.last_settled, log

        settled, log = await self.store.change(key, define)
        if log is not None:
            log()
        _, end = await self.store.bounds(key.topic, key.partition)  # now: others go on meanwhile
        if settled >= end:
            raise Conflict(
                f"group {key.group} has settled offset {settled} of {key.topic}/{key.partition}, "
                f"which ends before {end}",
                hint="records were lost, by a power cut for example, or the topic was made anew: "
                f"'trunkline group seek {key.topic} {key.group} --to N' lets the group go on",
            )


def topics_of(pattern: str, topics: Mapping[str, TopicOptions]) -> dict[str, TopicOptions]:
    """The topics that a subscription reads: a topic that is named may be made later."""
    if not is_pattern(pattern):
        return {pattern: topics.get(pattern, TopicOptions())}
    # Dead letters are asked for by name: a pattern would deliver a failure as an event.
    return {
        name: options
        for name, options in topics.items()
        if matches(pattern, name) and (not is_dead(name) or is_dead(pattern))
    }


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
        where: str | Filter | None,
        *,
        on_conflict: OnConflict = "raise",
    ) -> None:
        self._on_conflict: OnConflict = on_conflict
        self._home = pumps
        self._topic = topic
        self._group = group
        self._start = start
        self._policy = policy
        self._filter = where  # kept: the group's policy knows a function by its name alone
        self._where = name_of(where)
        self.default: Default = _plain
        self.inbox = DeliveryInbox(flow.max_inflight, self._refill, self._settle_late)
        self.inbox.slot = pumps.slot
        self._crashed = False
        self._pumps: dict[GroupKey, Pump] = {}
        self._left = asyncio.Event()
        self._finder: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._known: set[str] = set()
        self.client = ""  # behind a broker: the client that has the deliveries
        self._since = 0.0
        self._last = (0.0, 0.0)  # of the last delivery: monotonic, and epoch seconds

    async def __aenter__(self) -> Self:
        if self.inbox.life is not NEW:
            raise Closed("a subscription is entered once")
        if self._home.closed:
            raise Closed("the bus is closed")
        self.inbox.life = OPEN
        self._since = self._home.clock.now().timestamp()
        self._home.enter(self)
        self._home.store.watch()
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

    def describe(self, member: str) -> MemberInfo:
        """What others may know of it."""
        read_at = self.inbox.read_at
        if read_at != self._last[0]:
            wall = self._home.clock.now().timestamp() - (monotonic() - read_at)
            self._last = (read_at, max(self._since, round(wall, 3)))
        return MemberInfo(
            topic=self._topic,
            group=self._group,
            member=member,
            pid=os.getpid(),
            host=os.uname().nodename,
            since=round(self._since, 3),
            in_flight=len(self.inbox.open),
            last_delivery=self._last[1] if read_at else None,
            client=self.client,
        )

    # -- for readers -----------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        inbox = self.inbox
        if inbox.life is NEW:
            raise Closed("enter the subscription first", hint="async with bus.subscribe(...)")
        if inbox.life is OPEN and inbox.is_ready:
            return inbox.pop()
        delivery = await inbox.next()
        if delivery is None:
            raise StopAsyncIteration
        return delivery

    def batches(self, size: int, wait_s: float = 0.0) -> AsyncIterator[DeliveryBatch]:
        """Batches of at most ``size`` deliveries. A batch with fewer waits ``wait_s`` for more."""
        return batches(self.inbox, size, wait_s)

    def hand_out_in_order(self) -> None:
        """Before it is entered: hand out by offset whatever the keys. The reader works in order."""
        self.inbox.in_order = True

    def hand_out_runs(self) -> None:
        """Before it is entered: hand out every record of a key that is here. The reader handles
        them one after the other, and gives the rest back when one of them fails.
        """
        self.inbox.in_runs = True

    def bring_back(
        self, delivery: Delivery, outcome: Outcome, delay_s: float | None, reason: str
    ) -> None:
        """A record that the cumulative ack of another one settled has failed."""
        pump = self._pumps.get(GroupKey(delivery.topic, delivery.partition, self._group))
        if pump is not None and self.inbox.life is not CLOSED:
            pump.bring_back(delivery, outcome, delay_s, reason)

    @property
    def is_ready(self) -> bool:
        """Whether a delivery can be read at once."""
        return self.inbox.is_ready

    @property
    def is_leaving(self) -> bool:
        return self.inbox.life is CLOSED and not self._left.is_set()

    def take(self, limit: int) -> list[Delivery]:
        """Up to ``limit`` deliveries that can be read at once."""
        inbox = self.inbox
        found: list[Delivery] = []
        while inbox.is_ready and len(found) < limit:
            found.append(inbox.pop())
        return found

    def put_back(self, deliveries: Sequence[Delivery]) -> None:
        """Deliveries that nobody looked at: they come first again, or go back at the end."""
        self.inbox.put_back(deliveries)

    def resize(self, max_inflight: int) -> None:
        """From now on hold at most so many deliveries that are not settled."""
        inbox = self.inbox
        if max_inflight == inbox.limit:
            return
        was_full = inbox.room() <= 0
        inbox.limit = max_inflight
        if was_full and inbox.room() > 0:
            for pump in self._pumps.values():
                pump.wake()

    def keep_unread(self, most: int) -> None:
        """Give back unread deliveries beyond ``most``. That was no try."""
        self.inbox.keep_unread(most)

    @property
    def partitions(self) -> Collection[GroupKey]:
        return self._pumps.keys()

    def draw_from(self, partitions: Collection[GroupKey]) -> None:
        """Get more from these partitions alone, until there are new ones."""
        for key, pump in self._pumps.items():
            if key in partitions:
                pump.attach(self.inbox)
            else:
                pump.release(self.inbox)

    # -- life ------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Hand out nothing more. Unread deliveries go back, the iteration ends."""
        self.inbox.drain()

    def fail(self, error: BaseException) -> None:
        self.inbox.fail(error)

    async def abandon(self) -> None:
        """Leave it: the client that had the deliveries ended without a word."""
        self._crashed = True
        await self.close()

    async def close(self) -> None:
        if self.inbox.life is not CLOSED:
            self.inbox.drain()
            self.inbox.life = CLOSED
            try:
                await self._leave()
            finally:
                self._left.set()
        await self._left.wait()  # the bus must not be closed while a subscriber leaves

    async def aclose(self) -> None:
        await self.close()

    async def _leave(self) -> None:
        home = self._home
        home.store.bell.ignore(self._rung)
        if self._finder is not None:
            self._finder.cancel()
            await asyncio.gather(self._finder, return_exceptions=True)
        unread, held = self.inbox.clear()
        for key, pump in self._pumps.items():
            with contextlib.suppress(TrunklineError):
                await pump.detach(
                    self.inbox,
                    [delivery for delivery, source in unread if source is pump],
                    [delivery for delivery, source in held if source is pump],
                    crashed=self._crashed,
                )
            if home.drop(key, pump):
                try:
                    await pump.close()
                except TrunklineError as error:  # it does not hold up the subscriber
                    logger.warning("the last settled records of %s may come again: %s", key, error)
        home.leave(self)

    # -- pumps -----------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Let the pumps see that there is room. They share it: the pump that brought the newest
        delivery comes last.
        """
        if self.inbox.room() > 0:
            pumps: Collection[Pump] = self._pumps.values()
            if len(pumps) > 1:
                order = list(pumps)
                last = self.inbox.last
                at = order.index(last) + 1 if isinstance(last, Pump) and last in order else 0
                pumps = order[at:] + order[:at]
            for pump in pumps:
                pump.refill()

    def _settle_late(
        self, delivery: Delivery, outcome: Outcome, delay_s: float | None, reason: str
    ) -> None:
        """The lease was lost before: the group decides what the outcome is worth."""
        pump = self._pumps.get(GroupKey(delivery.topic, delivery.partition, self._group))
        if pump is not None and self.inbox.life is not CLOSED:
            pump.settle(delivery, outcome, delay_s, reason)

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
        # A topic that was made since this began is new: it is read from its first record on.
        since = self._finder is not None and self._start == "latest"
        start: Start = "earliest" if since else self._start
        wanted = topics_of(self._topic, topics)
        self._known |= wanted.keys()
        for name, options in wanted.items():
            # Partition 0 last: a group that has it lacks only partitions that were added later.
            for partition in reversed(range(options.partitions)):
                key = GroupKey(name, partition, self._group)
                if key not in self._pumps:
                    try:
                        pump = await self._home.get(
                            key,
                            start,
                            self._policy,
                            self.default,
                            options.ttl_policy,
                            self._on_conflict,
                            self._where,
                        )
                    except LockTimeout as error:
                        # A process that was stopped holds it. The others go on; it is tried again.
                        logger.warning("%s waits: %s", key, error)
                        self._changed.set()
                        continue
                    if key not in self._pumps and self.inbox.life is not CLOSED:
                        self._pumps[key] = pump
                        pump.attach(self.inbox)
                    await asyncio.sleep(0)  # there may be many, and others have their turn, too
                else:
                    self._pumps[key].ttl = options.ttl_policy  # it may be another one now


def _ways(group: Group) -> tuple[GroupOptions, bool, bool]:
    return group.options, group.paused, group.created


def brought(have: GroupOptions, policy: GroupOptions | None, where: str | None) -> GroupOptions:
    """The policy that a member relies on. A member without a filter adopts the group's filter."""
    want = have if policy is None else policy
    where = where or (policy.where or None if policy is not None else None)
    return replace(want, where=have.where if where is None else where)
