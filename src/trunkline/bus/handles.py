"""Leases by handle: a record that one process takes and any later process settles.

A handle is text. It names one lease: the record, the group and the attempt. The member of such a
lease is no process, so the end of a process frees nothing: the lease lasts until it is settled or
its time runs out.
"""

from __future__ import annotations

import asyncio
import binascii
import random
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple, TypeVar

import msgspec

from trunkline.bus import Delivery, Start, Where
from trunkline.bus.groups import check_start
from trunkline.bus.subscription import Default, Pumps, topics_of
from trunkline.clock import Clock
from trunkline.delivery.deadletters import check_member, write_letter
from trunkline.delivery.inbox import OPEN, DeliveryInbox
from trunkline.delivery.observers import Observers
from trunkline.delivery.pump import Pump
from trunkline.errors import Invalid, InvalidOption, NotFound, OutOfRange
from trunkline.event import Record
from trunkline.filters import to_filter
from trunkline.filters.named import name_of
from trunkline.group import Group, Lease, backoff_s
from trunkline.names import (
    HANDLE_PREFIX,
    GroupKey,
    check_group,
    check_pattern,
    check_topic,
    dead_topic,
    is_handle,
)
from trunkline.options import GroupOptions, TtlPolicy
from trunkline.store import Store

T = TypeVar("T")

LEASE_S = 300.0
_PAUSE_S = 10.0  # the longest pause between two looks: the wall clock may be set meanwhile
_HINT = "a handle is the text that 'trunkline take' printed"


class LeaseHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One lease. ``str`` writes it, ``parse`` reads it."""

    version: int
    topic: str
    partition: int
    group: str
    offset: int
    attempt: int
    era: int
    by: str

    @property
    def key(self) -> GroupKey:
        return GroupKey(self.topic, self.partition, self.group)

    @property
    def lease(self) -> Lease:
        return Lease(self.offset, self.attempt, 0.0, self.by, self.era)

    @property
    def place(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset}"

    def __str__(self) -> str:
        return urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> LeaseHandle:
        try:
            body = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
            handle = msgspec.json.decode(body, type=cls)
            check_topic(handle.topic)
            check_group(handle.group)
        except (UnicodeEncodeError, binascii.Error, Invalid, ValueError):
            raise InvalidOption(f"not a handle: {text[:40]!r}", name="handle", hint=_HINT) from None
        if handle.version != 1 or not is_handle(handle.by):
            raise InvalidOption(f"not a handle of this version: {text[:40]!r}", name="handle")
        return handle


class HeldRecord(NamedTuple):
    """A record that was taken, and the handle of its lease."""

    handle: LeaseHandle
    record: Record
    lease_s: float

    @property
    def attempt(self) -> int:
        return self.handle.attempt


class HandleState(Enum):
    """What a handle is to its group."""

    HELD = "held"  # the lease stands
    FREE = "free"  # the lease ran out, and no member has the record
    TAKEN = "taken"  # the lease ran out, and another member has the record
    SETTLED = "settled"
    GONE = "gone"  # the group was moved or removed, or never lent the record to this handle


def standing(group: Group, lease: Lease, now: float) -> HandleState:
    """A lease that ran out stands no longer, also while no member has looked at the group since."""
    if not group.created or group.era != lease.era:
        return HandleState.GONE
    if group.holds(lease):
        return HandleState.HELD if group.leases[lease.offset].until > now else HandleState.FREE
    if group.is_settled(lease.offset):
        return HandleState.SETTLED
    # A handle is text that anybody can write: one for a record that was not lent yet, or that is
    # not in the log yet, would settle what nobody has seen.
    if not 1 <= lease.attempt <= group.attempts.get(lease.offset, 0):
        return HandleState.GONE
    return HandleState.TAKEN if lease.offset in group.leases else HandleState.FREE


class Taker:
    """Takes records of a group for handles. At most one record of a key is taken at a time."""

    def __init__(
        self,
        store: Store,
        topic: str,
        group: str,
        *,
        lease_s: float = LEASE_S,
        start: Start = "earliest",
        where: Where = None,
        clock: Clock | None = None,
        draw: Callable[[], float] = random.random,
        default: Default = lambda _topic: GroupOptions(),
        observers: Observers | None = None,
    ) -> None:
        self._topic = check_pattern(topic)
        self._group = check_group(group)
        check_member(topic, group)
        check_start(start)
        to_filter(where)  # refuses a value that is no filter
        if not lease_s > 0:
            raise InvalidOption(f"a lease lasts longer than {lease_s} s", name="lease_s")
        self._start = start
        self._where = name_of(where)
        self._filter = where  # kept: the group's policy knows a function by its name alone
        self._store = store
        self._clock = clock or store.clock
        self._lease_s = lease_s
        self._by = HANDLE_PREFIX + secrets.token_hex(6)
        self._pumps = Pumps(
            store,
            self._clock,
            draw,
            observers or Observers(),
            by=self._by,
            lease_s=lease_s,
            run=1,
        )
        self._default = default
        self._changed = asyncio.Event()
        self._is_left = False

    @property
    def keys(self) -> list[GroupKey]:
        """The partitions that the last look was at."""
        return list(self._pumps)

    async def take(self, limit: int, wait_s: float = 0.0) -> list[HeldRecord]:
        """Up to ``limit`` records, the most important of each partition first. Without any, it
        waits for the first one. ``NotFound`` if no topic matches until then.
        """
        until = self._clock.monotonic() + wait_s
        inbox = self._inbox(limit)
        if wait_s > 0:
            self._store.watch()
            self._store.bell.listen(self._rung)
        try:
            while True:
                self._changed.clear()
                due_s = await self._look(inbox)
                left = until - self._clock.monotonic()
                if inbox.open or left <= 0 or self._is_left:
                    break
                await self._pause(min(due_s, left, _PAUSE_S))
        finally:
            self._store.bell.ignore(self._rung)
        if not inbox.open and not self.keys:
            raise NotFound(f"there is no topic {self._topic}", hint="trunkline topic ls")
        return [self._held(delivery) for delivery in inbox.open]

    async def _look(self, inbox: DeliveryInbox) -> float:
        """Take what is due now. Returns in how many seconds more may be due."""
        due_s = _PAUSE_S
        topics = await self._store.topics()
        for name, options in topics_of(self._topic, topics).items():
            if name not in topics:  # a group is made only for a topic that is there
                continue
            for partition in reversed(range(options.partitions)):
                pump = await self._pump(GroupKey(name, partition, self._group), options.ttl_policy)
                if inbox.room() > 0:
                    next_s = await pump.serve_once(inbox)
                    due_s = due_s if next_s is None else min(due_s, max(next_s, 0.0))
        return due_s

    async def _pump(self, key: GroupKey, ttl: TtlPolicy) -> Pump:
        return await self._pumps.get(
            key,
            self._start,
            None,
            self._default,
            ttl,
            "raise",
            self._where,
        )

    async def _pause(self, seconds: float) -> None:
        alarm = self._clock.call_later(max(seconds, 0.01), self._changed.set)
        try:
            await self._changed.wait()
        finally:
            alarm.cancel()

    def _rung(self, _topic: str | None) -> None:
        self._changed.set()

    def leave(self) -> None:
        """Wait no longer: ``take`` returns what it has."""
        self._is_left = True
        self._changed.set()

    async def give_back(self, held: Iterable[HeldRecord]) -> None:
        """Return records that nobody looked at: that was no try."""
        leases: dict[GroupKey, list[Lease]] = {}
        for one in held:
            leases.setdefault(one.handle.key, []).append(one.handle.lease)
        for key, mine in leases.items():
            await self._store.change(key, lambda group, mine=mine: group.give_back(mine))  # type: ignore[misc]
            _tell(self._store, key)

    def _inbox(self, limit: int) -> DeliveryInbox:
        inbox = DeliveryInbox(limit, lambda: None, _too_late)
        inbox.life = OPEN
        inbox.waiting = inbox.gathering = limit
        return inbox

    def _held(self, delivery: Delivery) -> HeldRecord:
        lease = delivery.lease
        topic, partition, group = delivery.topic, delivery.partition, self._group
        handle = LeaseHandle(
            1, topic, partition, group, lease.offset, lease.attempt, lease.era, lease.by
        )
        return HeldRecord(handle, delivery.record, self._lease_s)


def _too_late(*_outcome: object) -> None:
    """Deliveries are settled by their handles alone."""


async def _change(store: Store, handle: LeaseHandle, step: Callable[[Group], T]) -> T:
    if handle.key not in await store.groups():
        raise NotFound(f"there is no group {handle.group} on {handle.topic}/{handle.partition}")
    found = await store.change(handle.key, step)
    _tell(store, handle.key)
    return found


def _tell(store: Store, key: GroupKey) -> None:
    """Let the members of this process look: a record may be free, or the next of its key."""
    store.bell.tell(key)
    store.bell.ring(key.topic)


async def ack(store: Store, handle: LeaseHandle) -> HandleState:
    """Settle the record. ``HELD``, ``FREE`` and ``SETTLED`` say that it is settled now; else
    nothing was changed.
    """

    def step(group: Group) -> HandleState:
        found = standing(group, handle.lease, store.clock.monotonic())
        if found in (HandleState.HELD, HandleState.FREE):
            group.ack([handle.lease])
        return found

    return await _change(store, handle, step)


async def extend(store: Store, handle: LeaseHandle, lease_s: float = LEASE_S) -> HandleState:
    """Let the lease last ``lease_s`` from now on. Only ``HELD`` says that it does."""

    def step(group: Group) -> HandleState:
        now = store.clock.monotonic()
        found = standing(group, handle.lease, now)
        if found is HandleState.HELD:
            group.extend(handle.lease, now=now, lease_s=lease_s)
        return found

    return await _change(store, handle, step)


class Nacked(NamedTuple):
    standing: HandleState
    dead: bool = False  # no try was left: the record is a dead letter
    delay_s: float = 0.0


async def nack(
    store: Store,
    handle: LeaseHandle,
    delay_s: float | None = None,
    reason: str = "",
    observers: Observers | None = None,
) -> Nacked:
    """Deliver the record again after ``delay_s``, else the group's backoff. When no try is left,
    it becomes a dead letter. Only ``HELD`` says that something was changed.
    """
    lease = handle.lease

    def step(group: Group) -> Nacked:
        now = store.clock.monotonic()
        found = standing(group, lease, now)
        if found is not HandleState.HELD:
            return Nacked(found)
        wait_s = delay_s
        if wait_s is None:
            wait_s = backoff_s(group.options, lease.attempt, random.random())
        dead = group.fail(lease, now=now, delay_s=wait_s)
        return Nacked(found, bool(dead), wait_s)

    done = await _change(store, handle, step)
    if done.dead:
        await _bury(store, handle, "retries", reason or "nack by handle", observers)
    return done


async def term(
    store: Store, handle: LeaseHandle, reason: str = "", observers: Observers | None = None
) -> HandleState:
    """Make the record a dead letter now. Only ``HELD`` says that something was changed."""

    def step(group: Group) -> HandleState:
        now = store.clock.monotonic()
        found = standing(group, handle.lease, now)
        if found is HandleState.HELD:
            group.hold(handle.lease, now=now)
        return found

    found = await _change(store, handle, step)
    if found is HandleState.HELD:
        await _bury(store, handle, "rejected", reason or "rejected by handle", observers)
    return found


async def _bury(
    store: Store, handle: LeaseHandle, why: str, reason: str, observers: Observers | None
) -> None:
    """Write the dead letter, and settle the record once the letter is durable."""
    topic, partition, group = handle.key
    try:
        found = await store.read(topic, partition, handle.offset, 1)
    except OutOfRange:
        found = []  # retention removed the record
    if found and found[0].offset == handle.offset:
        at = store.clock.now()
        letter = write_letter(found[0], group, handle.attempt, why, reason, at)
        await store.append(dead_topic(topic), [letter])
        if observers is not None:
            observers.tell_dead_letter(handle.key, found[0], why, reason)
    await store.change(handle.key, lambda group: group.ack([handle.lease]))
    _tell(store, handle.key)
