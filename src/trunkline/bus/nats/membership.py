"""This process as a member of one group on one topic.

A member pulls from the group's consumers, one for each partition, and gives the records to the
subscriptions of this process. It keeps the order of each key, parks delayed records, and settles.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from bisect import insort
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from time import monotonic
from typing import Protocol

import msgspec
from nats.aio.msg import Msg

from trunkline.bus import Delivery, Outcome
from trunkline.bus.nats.connection import NatsLink, end_task
from trunkline.bus.nats.consumers import PIN_GROUP, ConsumerInfo, Consumers, again_name
from trunkline.bus.nats.place import flat
from trunkline.bus.nats.pull import Pull
from trunkline.bus.nats.records import GivenBack, fetch, read_record
from trunkline.clock import Clock
from trunkline.delivery.deadletters import write_letter
from trunkline.errors import Corrupt, NotFound, TrunklineError
from trunkline.event import Event, Record
from trunkline.group import backoff_s
from trunkline.options import GroupOptions, TtlPolicy

logger = logging.getLogger(__name__)

_NS = 1_000_000_000
_EARLY_S = 0.002  # a parked record shall not come a moment too soon
_TICKS = 10  # looks at the deadlines in one ack timeout
_AFTER_TROUBLE_S = 1.0


class Seat(Protocol):
    """A subscription, as its member sees it."""

    def room(self) -> int: ...

    def accepts(self, event: Event) -> bool: ...

    def put(self, held: NatsRecord) -> None: ...

    def lose(self, held: NatsRecord) -> None:
        """The delivery timed out: it is no longer this subscription's."""

    def fail(self, error: BaseException) -> None: ...


class NatsRecord:
    """A record that the server gave to this process and that is not settled."""

    __slots__ = (
        "again",
        "attempt",
        "delivery",
        "due",
        "early",
        "offset",
        "record",
        "reply",
        "seat",
        "touched",
    )

    def __init__(self, record: Record, reply: str, attempt: int, again: int, now: float) -> None:
        self.record = record
        self.offset = record.offset
        self.reply = reply
        self.attempt = attempt
        self.early = 0  # deliveries before it was due: they are no tries
        self.again = again  # how often the record was redriven; 0 if it came from the log
        self.touched = now  # when the server last heard of it
        self.due = float("inf")  # when its holder runs out of time
        self.seat: Seat | None = None
        self.delivery: Delivery | None = None

    def __lt__(self, other: NatsRecord) -> bool:
        return self.offset < other.offset


class Acks:
    """Sends acknowledgements in order, without a task for each."""

    def __init__(self, link: NatsLink) -> None:
        self._link = link
        self._queue: deque[tuple[str, bytes]] = deque()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def send(self, subject: str, data: bytes) -> None:
        self._queue.append((subject, data))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        queue, tell = self._queue, self._link.tell
        while queue:
            subject, data = queue.popleft()
            await tell(subject, data)

    async def flush(self) -> None:
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await self._link.flush()


class Membership:
    def __init__(
        self,
        link: NatsLink,
        consumers: Consumers,
        sender: Acks,
        clock: Clock,
        bury: Callable[[Event, str], Awaitable[None]],
        topic: str,
        group: str,
        policy: GroupOptions,
        ttl: TtlPolicy,
    ) -> None:
        self.topic = topic
        self.group = group
        self.policy = policy
        self.ttl = ttl
        self.seats: list[Seat] = []
        self._link = link
        self._consumers = consumers
        self._sender = sender
        self._clock = clock
        self._bury = bury
        self._delayed_max = link.options.delayed_max
        self._pulls: dict[int, Pull] = {}
        self._again: Pull | None = None
        self._ready: deque[NatsRecord] = deque()
        self._lanes: dict[tuple[int, str], list[NatsRecord]] = {}  # behind the first of a key
        self._first: dict[tuple[int, str], int] = {}  # of each key at work: the offset
        self._hands: set[NatsRecord] = set()
        self._given_up: list[NatsRecord] = []
        self._parked: dict[tuple[int, int], tuple[float, int]] = {}  # until when, how often
        self._early: dict[tuple[int, int], tuple[float, int]] = {}  # of delayed records that failed
        self._held_back: dict[int, float] = {}  # partitions whose keys wait for an earlier member
        self._counts: dict[int, int] = {}  # of each partition: the consumer's last delivery
        self._work: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._closing = False

    # -- life ----------------------------------------------------------------------------------

    async def begin(self, partition: int, info: ConsumerInfo) -> None:
        """Pull from one partition."""
        if partition in self._pulls or self._closing:
            return
        pinned = self.policy.ordering == "key"
        pull = Pull(
            self._link,
            self._link.place.stream(self.topic, partition),
            flat(self.group),
            came=lambda message: self._came(message, partition),
            room=self._room,
            gone=self._gone,
            group=PIN_GROUP if pinned else None,
            keep_s=self._ack_wait_s / 3,
        )
        self._pulls[partition] = pull
        if pinned and info.num_ack_pending:
            self._held_back[partition] = _now() + self._ack_wait_s
            self._start(self._wait_for_others(partition))
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick())
        await pull.start()

    async def begin_again(self) -> None:
        """Pull the records that were redriven to this group."""
        if self._again is not None or self._closing:
            return
        self._again = Pull(
            self._link,
            self._link.place.again,
            again_name(self.topic, self.group),
            came=self._came_again,
            room=self._room,
            gone=lambda _: None,
        )
        await self._again.start()

    def follow(self, policy: GroupOptions) -> None:
        """The group has this policy now."""
        self.policy = policy
        for pull in self._pulls.values():
            pull.serve(PIN_GROUP if policy.ordering == "key" else None)

    @property
    def partitions(self) -> set[int]:
        return set(self._pulls)

    @property
    def _ack_wait_s(self) -> float:
        return self._consumers.ack_wait_s(self.policy)

    def attach(self, seat: Seat) -> None:
        self.seats.append(seat)
        self.refill()

    async def detach(self, seat: Seat, unread: list[NatsRecord], held: list[NatsRecord]) -> bool:
        """Let a subscription go: the next one gets its records. True if it was the last one."""
        if seat in self.seats:
            self.seats.remove(seat)
        for one in held:
            self._let_go(one)
            if self.seats:
                self._nak(one, 0.0)
            else:
                self._given_up.append(one)  # after the last pull: else it comes here again
        for one in reversed(unread):
            self._hands.discard(one)
            one.seat, one.delivery, one.due = None, None, float("inf")
            self._ready.appendleft(one)
        if self.seats:
            self.offer()
        return not self.seats

    async def close(self) -> None:
        """Stop pulling and give back every record."""
        self._closing = True
        await end_task(self._ticker)
        pulls = [*self._pulls.values(), *([self._again] if self._again else [])]
        await asyncio.gather(*(pull.stop() for pull in pulls))
        if self._work:  # letters are written before their records are settled
            await asyncio.wait(set(self._work), timeout=self._link.options.patience_s)
        waiting = [*self._ready, *(one for lane in self._lanes.values() for one in lane)]
        for one in sorted([*waiting, *self._given_up]):
            self._nak(one, 0.0)
        self._given_up.clear()
        self._ready.clear()
        self._lanes.clear()
        self._first.clear()
        await self._sender.flush()
        if self.policy.ordering == "key":
            for partition, pull in self._pulls.items():
                if pull.is_pinned:
                    await self._consumers.unpin(self.topic, partition, self.group)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    # -- what comes ----------------------------------------------------------------------------

    def refill(self) -> None:
        for pull in self._pulls.values():
            pull.refill()
        if self._again is not None:
            self._again.refill()

    def _room(self) -> int:
        if self._closing or len(self._parked) >= self._delayed_max:
            return 0
        behind = sum(map(len, self._lanes.values())) if self._lanes else 0
        if behind >= self.policy.lookahead:
            return 0
        room = sum(seat.room() for seat in self.seats) - len(self._ready)
        if room <= 0:
            return 0
        return max(1, room // (len(self._pulls) or 1))

    def _came(self, message: Msg, partition: int) -> None:
        attempt, offset, count = _numbers(message.reply)
        if count <= self._counts.get(partition, 0):  # the group was moved: the count began anew
            self.revoke(partition)
        self._counts[partition] = count
        try:
            record = read_record(message.data, self.topic, partition, offset)
        except Corrupt as error:
            logger.error("%s: not delivered to %s", error, self.group)
            for seat in list(self.seats):
                seat.fail(error)
            self._sender.send(message.reply, _nak(_AFTER_TROUBLE_S))
            return
        due = record.event.not_before
        early = 0 if due is None else self._early_of((partition, offset), attempt)
        held = NatsRecord(record, message.reply, attempt - early, 0, _now())
        held.early = early
        if self._closing:
            self._nak(held, 0.0)
            return
        if due is not None and (wait := due - self._clock.now()) > timedelta(0):
            self._park(held, wait.total_seconds() + _EARLY_S, early + 1)
            return
        self._admit(held)

    def _early_of(self, place: tuple[int, int], attempt: int) -> int:
        """How many deliveries of a delayed record came before it was due. Another member that
        parked it does not say so: then one did.
        """
        failed, parked = self._early.pop(place, None), self._parked.pop(place, None)
        known = parked or failed
        return known[1] if known is not None else min(1, attempt - 1)

    def _came_again(self, message: Msg) -> None:
        attempt, _, _ = _numbers(message.reply)
        self._start(self._fetch_again(message, attempt))

    async def _fetch_again(self, message: Msg, attempt: int) -> None:
        told = msgspec.json.decode(message.data, type=GivenBack)
        try:
            record = await fetch(self._link, self.topic, told.partition, told.offset)
        except NotFound:
            logger.warning("a redriven record is gone: %s", told)
            self._sender.send(message.reply, b"+TERM")
            return
        except TrunklineError as error:
            logger.warning("a redriven record cannot be read now: %s", error)
            self._sender.send(message.reply, _nak(_AFTER_TROUBLE_S))
            return
        held = NatsRecord(record, message.reply, attempt, told.redrives, _now())
        if self._closing:
            self._nak(held, 0.0)
        else:
            self._admit(held)

    def _park(self, held: NatsRecord, wait_s: float, early: int) -> None:
        self._parked[held.record.partition, held.offset] = (_now() + wait_s, early)
        self._nak(held, wait_s)
        if len(self._parked) == self._delayed_max:
            logger.warning(
                "group %s on %s waits: %d records are delayed",
                self.group,
                self.topic,
                self._delayed_max,
            )
        self.refill()

    def _admit(self, held: NatsRecord) -> None:
        """Let a record be delivered, or wait behind the earlier records of its key."""
        if held.attempt > self.policy.max_retries + 1:
            # Its last holder ended without a word.
            self._dead(held, "retries", "the process of its holder ended")
            return
        lane = self._lane(held)
        if lane is not None:
            first = self._first.get(lane)
            if first is not None and first != held.offset:
                insort(self._lanes.setdefault(lane, []), held)
                self.refill()
                return
            if held.attempt == 1 and held.record.partition in self._held_back:
                insort(self._lanes.setdefault(lane, []), held)
                return
            self._first[lane] = held.offset
        self._ready.append(held)
        self.offer()

    def _lane(self, held: NatsRecord) -> tuple[int, str] | None:
        key = held.record.event.key
        if key is None or self.policy.ordering != "key":
            return None
        return held.record.partition, key

    def offer(self) -> None:
        """Give ready records to subscriptions that have room, in turn."""
        while self._ready and self.seats:
            held = self._ready[0]
            if self._is_expired(held):
                self._ready.popleft()
                self._expire(held)
                continue
            wanted = [seat for seat in [*self.seats] if seat.accepts(held.record.event)]
            if not self.seats:
                return  # the last filter failed: the record waits for the next subscription
            if not wanted:
                self._ready.popleft()
                self._settled(held)
                self._sender.send(held.reply, b"+ACK")
                continue
            seat = next((seat for seat in wanted if seat.room() > 0), None)
            if seat is None:
                return
            self._ready.popleft()
            if len(self.seats) > 1:
                self.seats.remove(seat)
                self.seats.append(seat)
            held.seat = seat
            held.due = _now() + self.policy.ack_timeout_s
            self._hands.add(held)
            seat.put(held)

    # -- time to live --------------------------------------------------------------------------

    def _is_expired(self, held: NatsRecord) -> bool:
        event = held.record.event
        if event.ttl_s is None or self.ttl == "deliver" or held.again:
            return False
        return self._clock.now() >= event.ts + timedelta(seconds=event.ttl_s)

    def _expire(self, held: NatsRecord) -> None:
        if self.ttl == "dlq":
            self._dead(held, "expired", "")
        else:
            self._settled(held)
            self._sender.send(held.reply, b"+ACK")

    # -- outcomes ------------------------------------------------------------------------------

    def settle(
        self, held: NatsRecord, outcome: Outcome, delay_s: float | None, reason: str
    ) -> None:
        if held not in self._hands:
            return  # it timed out, or its subscription left: the server delivers it again
        self._hands.discard(held)
        if outcome is Outcome.ACK:
            self._sender.send(held.reply, b"+ACK")
            self._settled(held)
        elif outcome is Outcome.TERM:
            self._dead(held, "rejected", reason)
        else:
            self._failed(held, delay_s, reason)
        if self._ready:
            self.offer()

    def extend(self, held: NatsRecord) -> None:
        if held in self._hands:
            held.due = _now() + self.policy.ack_timeout_s
            self._touch(held)

    def _failed(self, held: NatsRecord, delay_s: float | None, reason: str) -> None:
        if held.attempt > self.policy.max_retries:
            self._dead(held, "retries", reason)
            return
        if delay_s is None:
            delay_s = backoff_s(self.policy, held.attempt, random.random())
        if held.early or held.record.event.not_before is not None:
            place = (held.record.partition, held.offset)
            self._early[place] = (_now() + delay_s, held.early)
        self._nak(held, delay_s)

    def _settled(self, held: NatsRecord) -> None:
        """The next record of its key may come."""
        lane = self._lane(held)
        if lane is None or self._first.get(lane) != held.offset:
            return
        del self._first[lane]
        self._next_of(lane)

    def _next_of(self, lane: tuple[int, str]) -> None:
        waiting = self._lanes.get(lane)
        if waiting and lane not in self._first:
            following = waiting.pop(0)
            if not waiting:
                del self._lanes[lane]
            self._first[lane] = following.offset
            self._ready.append(following)

    def _let_go(self, held: NatsRecord) -> None:
        self._hands.discard(held)
        held.seat = None

    def _nak(self, held: NatsRecord, delay_s: float) -> None:
        self._sender.send(held.reply, _nak(delay_s))

    def _touch(self, held: NatsRecord) -> None:
        held.touched = _now()
        self._sender.send(held.reply, b"+WPI")

    def _dead(self, held: NatsRecord, reason: str, error: str) -> None:
        self._start(self._write_letter(held, reason, error))

    async def _write_letter(self, held: NatsRecord, reason: str, error: str) -> None:
        """The letter is durable first; then the record is settled."""
        record, attempts = held.record, held.attempt
        if reason == "expired":
            attempts = 0
        letter = write_letter(record, self.group, attempts, reason, error, self._clock.now())
        place = f"{record.partition}:{record.offset}:{held.again}:{record.event.id}"
        try:
            await self._bury(letter, f"dlq:{self.group}:{place}")
        except TrunklineError as trouble:
            logger.warning("a dead letter of %s waits: %s", self.topic, trouble)
            self._nak(held, _AFTER_TROUBLE_S)
            return
        self._sender.send(held.reply, b"+TERM")
        self._settled(held)
        self.offer()

    # -- time ----------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """End what ran out of time, and keep what waits here from being given to others."""
        while True:
            await asyncio.sleep(max(0.02, self.policy.ack_timeout_s / _TICKS))
            now = _now()
            for held in [one for one in self._hands if one.due <= now]:
                seat = held.seat
                self._let_go(held)
                if seat is not None:
                    seat.lose(held)
                self._failed(held, None, f"not settled within {self.policy.ack_timeout_s:g} s")
            stale = now - self._ack_wait_s / 3
            waiting = [*self._ready, *(one for lane in self._lanes.values() for one in lane)]
            for held in [one for one in [*waiting, *self._hands] if one.touched < stale]:
                self._touch(held)
            for places in (self._parked, self._early):
                for place in [at for at, (until, _) in places.items() if until + 60 < now]:
                    del places[place]  # another member has it
            self.offer()
            self.refill()

    async def _wait_for_others(self, partition: int) -> None:
        """Records that an earlier member holds come before later ones of their keys."""
        while not self._closing and _now() < self._held_back[partition]:
            await asyncio.sleep(0.1)
            with contextlib.suppress(TrunklineError):
                info = await self._consumers.info(self.topic, partition, self.group)
                here = sum(one.record.partition == partition for one in self._everything())
                if info.num_ack_pending <= here:
                    break
        self._held_back.pop(partition, None)
        for lane in [at for at in self._lanes if at[0] == partition]:
            self._next_of(lane)
        self.offer()

    def _everything(self) -> list[NatsRecord]:
        lanes = [one for lane in self._lanes.values() for one in lane]
        return [*self._ready, *lanes, *self._hands]

    def leases(self, partition: int) -> int:
        """How many records of a partition are in this process."""
        return sum(one.record.partition == partition for one in self._everything())

    def revoke(self, partition: int | None = None) -> None:
        """The group was moved: no record here settles anything any more."""

        def is_old(held: NatsRecord) -> bool:
            return not held.again and partition in (None, held.record.partition)

        for held in [one for one in self._hands if is_old(one)]:
            seat = held.seat
            self._let_go(held)
            if seat is not None:
                seat.lose(held)
        self._ready = deque(held for held in self._ready if not is_old(held))
        for lane, waiting in list(self._lanes.items()):
            kept = [held for held in waiting if not is_old(held)]
            if kept:
                self._lanes[lane] = kept
            else:
                del self._lanes[lane]
        for lane in [lane for lane in self._first if partition in (None, lane[0])]:
            del self._first[lane]
            self._next_of(lane)
        for places in (self._parked, self._early):
            for at in [at for at in places if partition in (None, at[0])]:
                del places[at]
        self.refill()

    def _gone(self, text: str) -> None:
        error = NotFound(f"group {self.group} on {self.topic} was removed: {text}")
        for seat in list(self.seats):
            seat.fail(error)


_now = monotonic


def _nak(delay_s: float) -> bytes:
    return b'-NAK {"delay":%d}' % int(delay_s * _NS) if delay_s > 0 else b"-NAK"


def _numbers(reply: str) -> tuple[int, int, int]:
    """How often the message was delivered, its sequence number, and the consumer's count."""
    parts = reply.split(".")
    at = 4 if len(parts) == 9 else 6
    return int(parts[at]), int(parts[at + 1]), int(parts[at + 2])
