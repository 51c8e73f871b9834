"""The rules meeting the log: one pump moves the records of one partition through one group to the
subscribers in this process.

A pump works in rounds. Each round tells the group what became of earlier deliveries, reads ahead,
takes what there is room for and hands it out; then it sleeps until something happens or comes due.
Whatever happened while a round ran is done together in the next: that is where batches come from.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence, Sized
from typing import NamedTuple, Protocol

from trunkline.backoff import backoff_s
from trunkline.bus import Delivery, Outcome
from trunkline.clock import Clock, Handle
from trunkline.dead import write_letter
from trunkline.errors import Corrupt, LockTimeout, OutOfRange, StorageFull
from trunkline.event import RANK, Event, Record
from trunkline.group import Group, Item, Lease, Taken
from trunkline.options import TtlPolicy
from trunkline.stock import READ_RECORDS, Stock
from trunkline.store import GroupKey, Store
from trunkline.topics import dead_topic
from trunkline.turns import Turns

logger = logging.getLogger(__name__)

_NEVER = float("inf")
_SPARE_RECORDS = 64
_ACK_S = 0.005
_RETRY_S = 0.2
_LOOK_S = 10.0  # the wall clock may be set meanwhile, and what it made far is then near
_CLOSE_S, _VAIN_S, _VAIN_ROUNDS = 1.0, 0.02, 16


class Outlet(Protocol):
    """A subscriber, as a pump sees it."""

    def room(self) -> int: ...

    def accepts(self, event: Event) -> bool: ...

    def put(self, pump: Pump, record: Record, lease: Lease) -> None: ...

    def keep(self, pump: Pump, group: Group) -> float: ...

    def fail(self, error: BaseException) -> None: ...


class Hooks(NamedTuple):
    """Called for what happens to records; they must not block."""

    settled: Callable[[GroupKey, int, str], None] | None = None
    dead: Callable[[GroupKey, Record, str, str], None] | None = None


class _Dead(NamedTuple):
    lease: Lease
    reason: str
    error: str


class _Ahead(NamedTuple):
    """What the log holds from ``start`` on: nothing before ``first``, then these."""

    start: int
    first: int
    records: list[Record]


class _Said:
    """What became of deliveries, as far as the group was not told."""

    __slots__ = ("acks", "back", "longer", "nacks", "terms")

    def __init__(self) -> None:
        self.acks: list[Lease] = []
        self.nacks: list[tuple[Lease, float | None, str]] = []
        self.terms: list[_Dead] = []
        self.longer: list[Lease] = []
        self.back: list[Lease] = []  # never handed out

    def say_again(self, earlier: _Said) -> None:
        for name in self.__slots__:
            getattr(self, name)[:0] = getattr(earlier, name)


class Pump:
    def __init__(
        self,
        store: Store,
        key: GroupKey,
        ttl: TtlPolicy,
        clock: Clock,
        draw: Callable[[], float] = random.random,
        hooks: Hooks = Hooks(),
        others: Sized = (),
        turns: Turns | None = None,
    ) -> None:
        self.key = key
        self._turns = turns or Turns()
        self._store = store
        self.ttl = ttl
        self._clock = clock
        self._draw = draw
        self._hooks = hooks
        self._by = store.member
        self._outlets: deque[Outlet] = deque()
        self._group: Group | None = None
        self._era = 0  # of the group, when something was last noted
        self._stock = Stock(store, key, others)
        self._has_plenty = False
        self._ahead: _Ahead | None = None
        self._gone: set[int] = set()  # in the window or redriven, but no longer in the log
        self._more = False
        self._vain = 0  # rounds in a row that gave back all they took: nobody has room
        self._is_damaged = False  # the log, behind what is available
        self._said = _Said()
        self._buried: list[_Dead] = []  # held until their letters are durable
        self._wake = asyncio.Event()
        self._told = True  # whether more than a new record may have happened
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._until = _NEVER  # when the first of what subscribers hold may have timed out
        self._timer: asyncio.TimerHandle | None = None
        self._alarm: Handle | None = None
        self._alarm_at = _NEVER

    # -- subscribers ---------------------------------------------------------------------------

    def attach(self, outlet: Outlet) -> None:
        if outlet not in self._outlets:
            self._outlets.append(outlet)
        self.wake()
        if self._task is None or self._task.done():
            self._store.bell.listen(self._rung, self.key.topic, self.key)
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name=f"pump {self.key.topic}/{self.key.partition} {self.key.group}"
            )

    def release(self, outlet: Outlet) -> None:
        """Hand nothing more to a subscriber; what it has stays its own."""
        if outlet in self._outlets:
            self._outlets.remove(outlet)
            self.wake()

    async def detach(self, outlet: Outlet, unread: list[Delivery], open_: list[Delivery]) -> None:
        """Give back what a leaving subscriber has: ``unread`` as if it was never taken, ``open_``
        for a next try at once.
        """
        self.release(outlet)
        self._said.back += [delivery.lease for delivery in unread]
        self._said.nacks += [(delivery.lease, 0.0, "the subscriber left") for delivery in open_]
        await self.flush()

    async def flush(self) -> None:
        """Write down what became of deliveries so far."""
        if self._task is not None and not self._task.done():
            self.wake()
        await self._update(take=False)

    async def close(self) -> None:
        self._closing = True
        self._store.bell.ignore(self._rung)
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self.wake()
            await asyncio.wait([self._task], timeout=_CLOSE_S)  # it may be writing a dead letter
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._cancel_alarm()
            try:
                await self._bury()
            finally:
                await self._update(take=False)

    def idle(self) -> bool:
        return not self._outlets

    def wake(self) -> None:
        self._told = True
        self._wake.set()

    def refill(self) -> None:
        """A subscriber has room again: see what there is for it, if anything was left."""
        group = self._group
        if group is None or self._said.back or self._more or self._is_damaged or group.available():
            self._wake.set()

    def _rung(self, topic: str | None) -> None:
        if topic is None:
            self._told = True  # by another process, perhaps: the group changed
        elif self._is_full():
            self._more = True  # one more that nobody has room for
            return
        self._wake.set()

    def _is_full(self) -> bool:
        """Whether more is known than anybody here has room for; room that is made wakes. Asked with
        every record of everybody: what only a round can change was looked at after the last one.
        """
        return self._has_plenty and self._room() <= 0

    def _count_stock(self) -> None:
        available = self._group.available() if self._group is not None else 0
        stocked = available > 0 and self._stock.is_ample
        self._has_plenty = stocked or available >= _SPARE_RECORDS

    # -- what deliveries say -------------------------------------------------------------------

    def settle(
        self, delivery: Delivery, outcome: Outcome, delay_s: float | None, reason: str
    ) -> None:
        if outcome is Outcome.ACK:
            self._said.acks.append(delivery.lease)
            if self._told:
                return  # a round is about to be
            if not self._is_waited_for():
                if self._timer is None:  # real time, whatever the clock: nothing here is due
                    loop = asyncio.get_running_loop()
                    self._timer = loop.call_later(_ACK_S, self._note_acks)
                return
        elif outcome is Outcome.NACK:
            self._said.nacks.append((delivery.lease, delay_s, reason))
        else:
            self._said.terms.append(_Dead(delivery.lease, "rejected", reason))
        self.wake()

    def _is_waited_for(self) -> bool:
        """Whether an ack lets something else be handed out. If not it is written down together with
        those that follow, most often in the round that the next record brings about.
        """
        group = self._group
        return group is None or len(group.window) > len(group.leases) or group.wants() <= 0

    def _note_acks(self) -> None:
        self._timer = None
        if self._said.acks:
            self.wake()

    def extend(self, delivery: Delivery) -> None:
        self._said.longer.append(delivery.lease)
        self.wake()

    def give_back(self, delivery: Delivery) -> None:
        """Let whoever has room have what nobody looked at, as if it was never taken."""
        self._said.back.append(delivery.lease)
        self.wake()

    # -- the round -----------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            if self._more or (self._group is not None and self._group.available()):
                await self._turns.wait()
            try:
                again = await self._round()
            except (StorageFull, LockTimeout) as error:
                logger.warning("%s waits: %s", self.key, error)
                self._told = True
                await self._clock.sleep(_RETRY_S)
                continue
            except Exception as error:  # noqa: BLE001 -- who waits for records must hear of it
                await self._give_up(error)
                return
            self._count_stock()
            if again:
                await asyncio.sleep(0)
            else:
                await self._sleep()
                if self._vain > _VAIN_ROUNDS:  # or two members tell each other of it for ever
                    await asyncio.sleep(_VAIN_S)

    async def _give_up(self, error: Exception) -> None:
        """Tell the subscribers, and keep none: who comes later has a new try."""
        with contextlib.suppress(Exception):
            await self._update(take=False)
        while self._outlets:
            self._outlets.popleft().fail(error)

    async def _sleep(self) -> None:
        """Until woken, or until the group has something due."""
        group = self._group
        assert group is not None
        now, wall = self._clock.monotonic(), self._clock.now().timestamp()
        delay = group.next_wakeup(now, wall)
        if delay is not None and not (group.paused and delay <= 0):
            at = now + min(delay, _LOOK_S)
            if at < self._alarm_at:  # most often what is due first is due later than last time
                self._cancel_alarm()
                self._alarm_at = at
                self._alarm = self._clock.call_later(at - now, self._ring_alarm)
        await self._wake.wait()

    def _ring_alarm(self) -> None:
        self._alarm_at = _NEVER
        self.wake()

    def _cancel_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    async def _round(self) -> bool:
        """One round; True if there is more to do at once."""
        if self._group is None:
            self._group = await self._store.update(self.key, lambda group: group)
            self._era = self._group.era
        told, self._told = self._told, False
        looked = await self._look_ahead(told)
        group = self._group
        found = bool(self._ahead or self._gone or group.again or group.blocked)
        found = found or (bool(group.available() or self._said.back) and self._room() > 0)
        if not (told or found):
            # What the group's files hold is known; what the log holds, if it was looked at.
            self._more = not looked and await self._is_behind()
            return False
        passed_over = len(self._said.back)
        taken = await self._update(take=True)
        silent = "no try is left: who had it last ended without a word"
        dead = [_Dead(lease, "retries", silent) for lease in taken.dead]
        dead += [_Dead(lease, "expired", "its time to live ran out") for lease in taken.expired]
        self._buried += dead
        handed_out = 0
        try:
            await self._stock.fetch(lease.offset for lease in taken.leases)
            records = self._stock.records
            for lease in taken.leases:
                self._hand_out(lease, records.pop(lease.offset, None))
                handed_out += 1
        except BaseException:
            self._said.back += taken.leases[handed_out:]
            raise
        if self._buried:
            await self._bury()
        needs = len(self._said.back) > passed_over
        self._vain = self._vain + 1 if len(self._said.back) >= len(taken.leases) > 0 else 0
        if self._more or not looked:  # what was noted may have made room in the window
            strays = bool(self._group.strays())
            needs = needs or strays
            self._more = strays or await self._is_behind()
        if self._told or (self._more and not self._has_enough()):
            return True
        return needs and self._room() > 0

    async def _is_behind(self) -> bool:
        assert self._group is not None
        _, end = await self._store.bounds(self.key.topic, self.key.partition)
        return self._group.read_to < end

    def _room(self) -> int:
        if len(self._outlets) == 1:  # most often
            return self._outlets[0].room()
        return sum([outlet.room() for outlet in self._outlets])

    async def _look_ahead(self, told: bool) -> bool:
        """Read what the window may hold next, outside of the group's lock; False if there was no
        need to.
        """
        group = self._group
        assert group is not None
        room = self._room()
        stock = self._stock
        stock.measure(room, group.window)
        if strays := group.strays():
            await stock.fetch(strays)
            self._gone.update(offset for offset in strays if offset not in stock.records)
        if group.wants() <= 0:  # what was purged shall not fill the window until it is due
            first, _ = await self._store.bounds(self.key.topic, self.key.partition)
            if group.floor + 1 < first:
                free = group.window.keys() - group.leases.keys()
                self._gone.update(offset for offset in free if offset < first)
        if self._ahead or self._has_enough():
            return False
        topic, partition, _ = self.key
        limit = min(group.wants(), READ_RECORDS, max(room, stock.room, 1))
        self._is_damaged = False
        start = group.read_to
        try:
            found, end = await self._store.read(topic, partition, start, limit), start
            if told and not found:  # what comes last may have been compacted away
                _, end = await self._store.bounds(topic, partition)
                if end > start:
                    found = await self._store.read(topic, partition, start, limit)
        except OutOfRange as error:
            self._ahead = _Ahead(start, error.first, [])
        except Corrupt:
            self._is_damaged = group.available() > 0  # what comes before it comes first
            if not self._is_damaged:
                raise
        else:
            if found:
                self._ahead = _Ahead(start, start, found)
                stock.weigh(found, _SPARE_RECORDS)
            elif end > start:
                self._ahead = _Ahead(start, end, [])
        return True

    def _has_enough(self) -> bool:
        """What is not in the window cannot come first, however much it matters: keep it well
        filled, or fill it when there is room: a subscriber that takes nothing shall cost little.
        """
        group = self._group
        assert group is not None
        wants, available = group.wants(), group.available()
        if group.paused or wants <= 0:
            return True
        filled = 4 * wants < group.options.lookahead or self._stock.is_ample
        if not filled and available < _SPARE_RECORDS:
            return False
        room = self._room()
        return available >= room if filled else room <= 0

    async def _update(self, *, take: bool) -> Taken:
        """Tell the group what became of deliveries, and take what there is room for. What could not
        be written is said again.
        """
        said: _Said | None = None
        settled: Sequence[int] = ()
        buried: Sequence[_Dead] = ()

        def step(group: Group) -> Taken:
            nonlocal said, settled, buried
            group.news = False
            said, self._said = self._said, _Said()
            settled, buried = self._note(group, said)
            # What was passed over comes first again, and must not stand in the way.
            return self._take(group, len(said.back)) if take else Taken([], [], [], [])

        try:
            taken = await self._store.update(self.key, step)
        except Exception:
            if said is not None:
                self._said.say_again(said)
                self.wake()
            raise
        self._buried += buried
        if self._hooks.settled is not None:
            for offset in settled:
                self._hooks.settled(self.key, offset, "ack")
        return taken

    def _note(self, group: Group, said: _Said) -> tuple[list[int], list[_Dead]]:
        """Returns what is settled now, and what needs a dead letter."""
        if group.era != self._era:  # it was sought, or removed: perhaps offsets are other records
            self._era, self._more, self._ahead = group.era, True, None
            self._stock.records.clear()
            self._buried.clear()
            self._gone.clear()
            self._until = 0.0  # nobody shall read what lies unread of it
        now = self._clock.monotonic()
        settled = group.ack(said.acks) if said.acks else []
        buried: list[_Dead] = []
        if said.terms or said.nacks or said.back or said.longer:  # most often acks alone
            buried = self._note_rest(group, said, now)
        if timed_out := group.expired(now):
            late = [lease for lease in timed_out if self._fail(group, lease, now, None)]
            why = "not settled within the ack timeout"
            buried += [_Dead(lease, "retries", why) for lease in late]
        if now >= self._until:
            held = [outlet.keep(self, group) for outlet in self._outlets]
            self._until = min(held, default=_NEVER)
        return settled, buried

    def _note_rest(self, group: Group, said: _Said, now: float) -> list[_Dead]:
        buried = [dead for dead in said.terms if group.hold(dead.lease, now=now)]
        buried += [
            _Dead(lease, "retries", reason)
            for lease, delay_s, reason in said.nacks
            if self._fail(group, lease, now, delay_s)
        ]
        group.give_back(said.back)
        for lease in said.longer:
            group.extend(lease, now=now)
        return buried

    def _fail(self, group: Group, lease: Lease, now: float, delay_s: float | None) -> bool | None:
        if delay_s is None:
            delay_s = backoff_s(group.options, lease.attempt, self._draw())
        return group.fail(lease, now=now, delay_s=delay_s)

    def _take(self, group: Group, passed_over: int) -> Taken:
        if group is not self._group:  # read anew from its files: what the window held is not there
            self._group, self._more = group, True
        now, wall = self._clock.monotonic(), self._clock.now().timestamp()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._more = True  # there may be yet more behind it
            group.begin_anew()
            if ahead.start == group.read_to:  # else it was read for an older state: read again
                if ahead.first != ahead.start:
                    _skip_to(group, ahead.first)
                for record in ahead.records:
                    if record.offset != group.read_to:
                        _skip_to(group, record.offset)
                    self._offer(group, record, now)
        for offset in group.strays():
            stray = self._stock.records.get(offset)
            if stray is not None:
                self._offer(group, stray, now)
            elif offset not in self._gone:  # redriven by another process since we looked ahead
                self._more = True
        if self._gone:
            group.settle(self._gone)
            self._gone.clear()
            self._more = True
        if self._closing:
            return Taken([], [], [], [])
        room = self._room()
        limit = room + passed_over if room > 0 else 0
        taken = group.take(self._by, now=now, wall=wall, limit=limit, ttl=self.ttl)
        self._more = self._more or group.blocked
        return taken

    def _offer(self, group: Group, record: Record, now: float) -> None:
        event = record.event
        due = event.not_before.timestamp() if event.not_before is not None else 0.0
        expires = _NEVER
        if event.ttl_s is not None and record.offset not in group.again:  # who redrives wants it
            expires = event.ts.timestamp() + event.ttl_s
        group.offer(
            Item(
                record.offset,
                event.key,
                RANK[event.priority],
                due,
                expires,
                now,
            )
        )
        if record.offset in group.window:
            self._stock.keep(record)

    def _hand_out(self, lease: Lease, record: Record | None) -> None:
        if record is not None:
            for _ in range(len(self._outlets)):
                outlet = self._outlets[0]
                self._outlets.rotate(-1)
                if outlet.room() > 0 and outlet.accepts(record.event):
                    if lease.until < self._until:
                        self._until = lease.until
                    outlet.put(self, record, lease)
                    return
            if self._is_wanted(record):
                self._said.back.append(lease)
                return
        # Compacted away or trimmed since it was read ahead, or filtered out: done with, now.
        self._said.acks.append(lease)
        self._told = True

    def _is_wanted(self, record: Record) -> bool:
        # One whose filter fails is none of them any more.
        accepted = any(outlet.accepts(record.event) for outlet in list(self._outlets))
        return accepted or not self._outlets

    async def _bury(self) -> None:
        """Write dead letters, and only then let their records be settled."""
        buried, self._buried = self._buried, []
        try:
            given_up = await self._write_letters(buried)
        except BaseException:
            self._buried = buried + self._buried
            raise
        self._said.acks += [dead.lease for dead in buried]
        self._told = True
        if self._hooks.dead is not None:
            for record, dead in given_up:
                self._hooks.dead(self.key, record, dead.reason, dead.error)

    async def _write_letters(self, buried: list[_Dead]) -> list[tuple[Record, _Dead]]:
        await self._stock.fetch(dead.lease.offset for dead in buried)
        given_up: list[tuple[Record, _Dead]] = []
        for dead in buried:
            record = self._stock.records.get(dead.lease.offset)
            if record is not None and (dead.reason != "expired" or self._is_wanted(record)):
                given_up.append((record, dead))
        if given_up:
            group, at = self.key.group, self._clock.now()
            letters = [
                write_letter(record, group, dead.lease.attempt, dead.reason, dead.error, at)
                for record, dead in given_up
            ]
            await self._store.append(dead_topic(self.key.topic), letters)
        for dead in buried:
            self._stock.records.pop(dead.lease.offset, None)
        return given_up


def _skip_to(group: Group, offset: int) -> None:
    """The log holds none between where it was read to and ``offset``."""
    if offset > group.read_to:
        group.skip(group.read_to, offset - 1)
        group.read_to = offset
