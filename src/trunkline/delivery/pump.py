"""Moves the records of one partition through one group to the inboxes of this process.

A pump works in rounds. A round reads ahead; then, in one transaction, it reports the outcomes of
earlier deliveries, offers the records that were read, and takes as many as the inboxes have room
for; then it hands them out. Then it sleeps until there is a reason for the next round.
Everything that happens while a round runs is done together in the next one: so batches arise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Sized
from time import monotonic
from typing import NamedTuple

from trunkline.bus import Delivery, Outcome
from trunkline.clock import Clock
from trunkline.delivery.inbox import OPEN, DeliveryInbox
from trunkline.delivery.letter_writer import LetterWriter
from trunkline.delivery.observers import Observers
from trunkline.delivery.outcomes import GivenUp, Outcomes
from trunkline.delivery.prefetch import Prefetch
from trunkline.delivery.suspects import SuspectSlot
from trunkline.delivery.wakes import GROUP, OUTCOMES, RECORDS, ROOM, TOLD, Turns, Wakes
from trunkline.errors import ConnectionLost, LockTimeout, Raced, StorageFull
from trunkline.filters import Filter
from trunkline.filters.named import filter_named
from trunkline.group import RUN, Group, Lease, Taken
from trunkline.names import GroupKey
from trunkline.options import TtlPolicy
from trunkline.store import AWAY, InHand, Store

logger = logging.getLogger(__name__)

_NEVER = float("inf")
_RETRY_S = 0.2
_CLOSE_S = 1.0


class _Round(NamedTuple):
    """What a committed transaction of a round came to."""

    settled: list[int]
    given_up: list[GivenUp]
    taken: list[tuple[DeliveryInbox, Taken]]


class Pump:
    def __init__(
        self,
        store: Store,
        key: GroupKey,
        ttl: TtlPolicy,
        clock: Clock,
        draw: Callable[[], float],
        observers: Observers,
        others: Sized = (),
        turns: Turns | None = None,
        by: str | None = None,
        lease_s: float | None = None,
        run: int = RUN,
    ) -> None:
        self.key = key
        self._by = store.member if by is None else by
        self._keeps_marks = by is None  # else the leases outlast this process
        self.in_hand: InHand | None = None
        self._lease_s = lease_s
        self._most_of_a_key = run
        self.ttl = ttl
        self._store = store
        self._clock = clock
        self._observers = observers
        self._turns = turns or Turns()
        self._inboxes: deque[DeliveryInbox] = deque()
        self._group: Group | None = None
        self._era = 0  # of the group, at the last transaction
        self._filter: tuple[str | None, Filter | None] = (None, None)
        self._wakes = Wakes(clock)
        self._prefetch = Prefetch(store, key, others)
        self._outcomes = Outcomes(draw)
        self._letters = LetterWriter(store, key, clock, observers)
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._until = _NEVER  # when the first lease in an inbox may have run out

    # -- inboxes ---------------------------------------------------------------------------------

    def attach(self, inbox: DeliveryInbox) -> None:
        if inbox not in self._inboxes:
            self._inboxes.append(inbox)
        self.wake()
        if self._task is None or self._task.done():
            self._store.bell.listen(self._rung, self.key.topic, self.key)
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name=f"pump {self.key.topic}/{self.key.partition} {self.key.group}"
            )

    def release(self, inbox: DeliveryInbox) -> None:
        """Hand nothing more to an inbox. Its deliveries stay its own."""
        if inbox in self._inboxes:
            self._inboxes.remove(inbox)
            self.wake()

    async def serve_once(self, inbox: DeliveryInbox) -> float | None:
        """Hand an inbox the records that are due now, by rounds in the caller's task. Their leases
        outlast the pump. Returns in how many seconds more may be due, as far as is known.
        """
        self._inboxes.append(inbox)
        self.wake()
        again = True
        try:
            while again:
                again = await self._round(bool(self._wakes.take() & TOLD))
                self._prefetch.count(self._group)
        finally:
            self._inboxes.remove(inbox)
            await self._commit(take=False)
        return self._next_due()

    async def detach(
        self,
        inbox: DeliveryInbox,
        unread: Collection[Delivery],
        held: Collection[Delivery],
        *,
        crashed: bool = False,
    ) -> None:
        """An inbox is left: unread deliveries go back and count as no try, those in hand failed.
        ``crashed``: their process or client ended without settling them.
        """
        self.release(inbox)
        outcomes = self._outcomes
        outcomes.back += [delivery.lease for delivery in unread]
        if crashed:
            outcomes.lost += [delivery.lease for delivery in held]
        else:
            outcomes.nacks += [(delivery.lease, 0.0, "the subscriber left") for delivery in held]
        try:
            await self.flush()
        finally:
            inbox.slot.look()

    async def flush(self) -> None:
        """Commit the outcomes so far."""
        if self._task is not None and not self._task.done():
            self.wake()
        await self._commit(take=False)

    async def close(self) -> None:
        self._closing = True
        self._store.bell.ignore(self._rung)
        if self._task is not None:
            self.wake()
            await asyncio.wait([self._task], timeout=_CLOSE_S)  # it may be writing a dead letter
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._wakes.close()
            try:
                await self._bury()
            finally:
                await self._commit(take=False)
        self._wakes.close()

    def idle(self) -> bool:
        return not self._inboxes

    def wake(self) -> None:
        self._wakes.add(GROUP)

    def refill(self) -> None:
        """An inbox has room: run a round if there is anything for it."""
        group, prefetch = self._group, self._prefetch
        if (
            group is None
            or prefetch.is_behind
            or self._outcomes.back
            or prefetch.is_damaged
            or group.schedule.available()
            or group.schedule.has_suspects
        ):
            self._wakes.add(ROOM)

    def _rung(self, topic: str | None) -> None:
        if topic is None:
            self._wakes.add(GROUP)  # by another process, perhaps: the group changed
        elif self._prefetch.has_plenty and self._room() <= 0:
            self._prefetch.is_behind = True  # one more record that no inbox has room for
        else:
            self._wakes.add(RECORDS)

    def _room(self) -> int:
        if len(self._inboxes) == 1:  # most often
            return self._inboxes[0].room()
        return sum([inbox.room() for inbox in self._inboxes])

    # -- as the source of deliveries -------------------------------------------------------------

    def settle(
        self, delivery: Delivery, outcome: Outcome, delay_s: float | None, reason: str
    ) -> None:
        outcomes = self._outcomes
        if outcome is Outcome.ACK:
            outcomes.acks.append(delivery.lease)
            if not self._wakes.why & TOLD:  # else a round is about to be
                self._acked()
            return
        if outcome is Outcome.NACK:
            outcomes.nacks.append((delivery.lease, delay_s, reason))
        else:
            outcomes.terms.append(GivenUp(delivery.lease, "rejected", reason))
        self._wakes.add(OUTCOMES)

    def bring_back(
        self, delivery: Delivery, outcome: Outcome, delay_s: float | None, why: str
    ) -> None:
        """A record that the cumulative ack of another one settled has failed."""
        is_last = outcome is Outcome.TERM
        self._outcomes.uncovered.append((delivery.lease, delay_s, why, is_last))
        self._wakes.add(OUTCOMES)

    def settle_all(self, deliveries: list[Delivery]) -> None:
        """Ack many deliveries at once."""
        self._outcomes.acks += [delivery.lease for delivery in deliveries]
        self._acked()

    def _acked(self) -> None:
        """Commit acks at once if they let other records go on. Else they wait a moment for each
        other; most often the next record brings the round about.
        """
        group = self._group
        if group is not None:
            schedule = group.schedule
            if len(schedule.items) <= len(group.ledger.leases) and schedule.wants() > 0:
                self._wakes.add_soon()
                return
        self._wakes.add(OUTCOMES)

    def extend(self, delivery: Delivery) -> None:
        self._outcomes.longer.append(delivery.lease)
        self._wakes.add(OUTCOMES)

    def give_back(self, delivery: Delivery) -> None:
        """A delivery that nobody looked at: any inbox with room may have it."""
        self._outcomes.back.append(delivery.lease)
        self._wakes.add(OUTCOMES)

    # -- the round -------------------------------------------------------------------------------

    async def _run(self) -> None:
        again = False
        while not self._closing:
            if again:
                await asyncio.sleep(0)
            else:
                await self._wakes.wait(self._next_due())
            if self._prefetch.is_behind or self._has_supply():
                await self._turns.wait()
            why = self._wakes.take()
            try:
                again = await self._round(bool(why & TOLD))
            except (StorageFull, LockTimeout, ConnectionLost) as error:
                logger.warning("%s waits: %s", self.key, error)
                self._wakes.add(GROUP)
                await self._clock.sleep(_RETRY_S)
            except Exception as error:  # noqa: BLE001 -- a reader that waits must hear of it
                await self._give_up(error)
                return
            self._prefetch.count(self._group)

    def _has_supply(self) -> bool:
        if self._group is None:
            return False
        schedule = self._group.schedule
        return schedule.available() > 0 or (
            schedule.has_suspects and any(inbox.slot.is_free for inbox in self._inboxes)
        )

    def _next_due(self) -> float | None:
        group = self._group
        if group is None:
            return 0.0
        delay = group.next_wakeup(self._clock.monotonic(), self._clock.now().timestamp())
        return None if group.paused and delay is not None and delay <= 0 else delay

    async def _give_up(self, error: Exception) -> None:
        """Let the readers hear of an error. A later subscriber has a new try."""
        with contextlib.suppress(Exception):
            await self._commit(take=False)
        while self._inboxes:
            self._inboxes.popleft().fail(error)

    async def _round(self, told: bool) -> bool:
        """One round; True if there is more to do at once."""
        prefetch = self._prefetch
        if self._group is None:
            self._group = await self._store.change(self.key, lambda group: group)
            self._era = self._group.era
            self.in_hand = self._store.in_hand(self.key) if self._keeps_marks else None
        looked = await prefetch.fill(self._group, self._room(), told)
        found = prefetch.has_news or bool(self._group.wanted())
        found = found or ((self._has_supply() or bool(self._outcomes.back)) and self._room() > 0)
        if not (told or found):
            if looked:
                prefetch.is_behind = False
            else:
                await prefetch.look(self._group)
            return False
        done = await self._commit(take=True)
        for inbox, taken in done.taken:
            await self._hand_out(inbox, taken)
        await self._bury()
        if prefetch.is_behind or not looked:  # the outcomes may have made room in the window
            await prefetch.look(self._group)
            prefetch.is_behind = prefetch.is_behind or bool(self._group.wanted())
        if self._wakes.why & TOLD:
            return True
        return prefetch.is_behind and not prefetch.has_enough(self._group, self._room())

    async def _commit(self, *, take: bool) -> _Round:
        """Report outcomes and take records in one transaction. A transaction that fails leaves no
        trace; the outcomes are reported again.
        """
        while True:
            try:
                async with self._store.group(self.key) as group:
                    done = self._transact(group, take)
                break
            except Raced:
                await asyncio.sleep(0)
            except Exception:
                if self._outcomes:
                    self._wakes.add(OUTCOMES)
                raise
        failed = self._outcomes.done()
        if failed and self.in_hand is not None:
            kept = {one.lease.offset for one in done.given_up}  # until their letters are written
            for lease in failed:
                if lease.offset not in kept:
                    self.in_hand.end(lease.offset)
        for inbox in self._inboxes:
            inbox.slot.look()
        if take:
            self._prefetch.done()
        self._letters.add(done.given_up)
        for tell in self._observers.settled:
            for offset in done.settled:
                tell(self.key, offset, "ack")
        return done

    def _transact(self, group: Group, take: bool) -> _Round:
        """The body of the transaction: no await, and no effect but on the group."""
        group.take_news()  # this round sees every change
        now, wall = self._clock.monotonic(), self._clock.now().timestamp()
        if group.era != self._era:  # it was sought or removed: an offset may be another record
            self._era = group.era
            self._prefetch.forget()
            self._letters.forget()
            self._until = 0.0  # unread deliveries of the era before are lost
        settled, given_up = self._outcomes.report(group, now, self._unread)
        if now >= self._until:
            self._until = min([self._keep(inbox, group) for inbox in self._inboxes], default=_NEVER)
        taken: list[tuple[DeliveryInbox, Taken]] = []
        if take:
            if group is not self._group:  # it was read anew from its files
                self._group, self._prefetch.is_behind = group, True
            more = self._prefetch.offer(group, now, wall, self._wanted(group))
            taken = self._take(group, now, wall)
            self._prefetch.is_behind = self._prefetch.is_behind or more or bool(group.wanted())
        return _Round(settled, given_up, taken)

    def _wanted(self, group: Group) -> Filter | None:
        """The group's filter; None: it wants every record."""
        where = group.options.where or None
        if where != self._filter[0]:
            self._filter = (where, filter_named(where) if where else None)
        return self._filter[1]

    def _take(self, group: Group, now: float, wall: float) -> list[tuple[DeliveryInbox, Taken]]:
        """Take for each inbox. Several inboxes share what can be leased, in turns."""
        inboxes = [] if self._closing else [x for x in self._inboxes if x.room() > 0]
        if not inboxes:
            group.schedule.come_due(now, wall)
            return []
        if len(inboxes) > 1:
            group.schedule.come_due(now, wall)
            self._inboxes.rotate(-1)
        found: list[tuple[DeliveryInbox, Taken]] = []
        left = len(inboxes)
        has_suspects, used = group.schedule.has_suspects, set[SuspectSlot]()
        for inbox in inboxes:
            limit = inbox.room()
            if left > 1:
                limit = min(limit, max(1, -(-group.schedule.available() // left)))
            left -= 1
            suspects: int | None = None
            if has_suspects:
                suspects = int(inbox.slot.is_free and inbox.slot not in used)
                if suspects:
                    used.add(inbox.slot)
                else:
                    inbox.slot.wait(self.wake)
            taken = group.take(
                self._by,
                now=now,
                wall=wall,
                limit=limit,
                ttl=self.ttl,
                consumer=inbox.number,
                run=self._most_of_a_key,
                hungry=inbox.hungry(),
                spare=inbox.spare(),
                lease_s=self._lease_s,
                in_order=inbox.in_order,
                suspects=suspects,
            )
            if taken.leases or taken.dead or taken.expired:
                found.append((inbox, taken))
        return found

    async def _hand_out(self, inbox: DeliveryInbox, taken: Taken) -> None:
        assert self._group is not None
        dead = [GivenUp(lease, "retries", _no_try_left(self._group, lease)) for lease in taken.dead]
        late = "its time to live ran out"
        self._letters.add(dead + [GivenUp(lease, "expired", late) for lease in taken.expired])
        try:
            await self._prefetch.fetch(lease.offset for lease in taken.leases)
        except BaseException:
            self._outcomes.back += taken.leases
            raise
        if inbox.life is not OPEN:
            self._outcomes.back += taken.leases
            self._wakes.add(OUTCOMES)
            return
        if not inbox.marks and self.in_hand is not None:
            self.in_hand.begin(AWAY)
        self._put(inbox, taken.leases, self._group)

    def _put(self, inbox: DeliveryInbox, leases: list[Lease], group: Group) -> None:
        records, suspects = self._prefetch.records, group.ledger.suspects
        ordering = "none" if inbox.in_order else group.options.ordering
        name, settle, extend = self.key.group, inbox.settle, self.extend
        now = monotonic()  # real time, whatever the bus's clock
        lane: tuple[object, str] | None = (self, "") if ordering == "partition" else None
        for lease in leases:
            record = records.pop(lease.offset, None)
            if record is None:  # compacted away or trimmed since it was read ahead
                self._outcomes.acks.append(lease)
                self._wakes.add(OUTCOMES)
                continue
            if lease.until < self._until:
                self._until = lease.until
            if ordering == "key":
                key = record.event.key
                lane = None if key is None else (self, key)
            delivery = Delivery(record, lease, name, settle, extend, lane)
            inbox.put(self, delivery, now)
            if suspects and lease.offset in suspects:
                inbox.slot.hold(delivery, inbox)

    def _unread(self, group: Group, leases: list[Lease]) -> list[Lease]:
        """Those of some leases that no handler has, here or in the process that holds them."""
        mine = {
            delivery.offset: delivery.lease
            for inbox in self._inboxes
            for delivery in inbox.unread()
            if inbox.open.get(delivery) is self
        }
        others = {lease.by for lease in leases} - {self._by}
        marked = {by: self._store.marked_by(self.key, by) for by in others}
        found: list[Lease] = []
        for lease in leases:
            offset = lease.offset
            if lease.by == self._by:
                is_unread = offset in mine and group.holds(mine[offset])
            else:
                is_in_hand = marked[lease.by]
                is_unread = is_in_hand is not None and not (is_in_hand(offset) or is_in_hand(AWAY))
            if is_unread:
                found.append(lease)
        return found

    def _keep(self, inbox: DeliveryInbox, group: Group) -> float:
        """Take deliveries from an inbox that are leased no longer; when to look again."""
        until, leases = _NEVER, group.ledger.leases
        lost: set[Delivery] = set()
        revoked: set[Delivery] = set()
        for delivery, source in inbox.open.items():
            if source is not self:
                continue
            mine, lease = delivery.lease, leases.get(delivery.offset)
            if lease is not None and group.holds(mine):
                until = min(until, lease.until)
                continue
            lost.add(delivery)
            if mine.era != group.era:
                revoked.add(delivery)
        if lost:
            inbox.lose(lost, revoked)
        return until

    async def _bury(self) -> None:
        """Write dead letters. Only then their records are settled."""
        if self._letters:
            written = await self._letters.write(self._prefetch)
            self._outcomes.acks += written
            if self.in_hand is not None:
                for lease in written:
                    self.in_hand.end(lease.offset)
            self._wakes.add(OUTCOMES)


def _no_try_left(group: Group, lease: Lease) -> str:
    """Why a record becomes a dead letter before it is delivered again."""
    if lease.offset in group.ledger.suspects:
        return "no try is left: the process that had it last ended without settling it"
    allowed = group.options.max_retries + 1
    return f"no try is left: tries that failed: {lease.attempt}, tries that are allowed: {allowed}"
