"""Deliveries on their way to the readers of one subscription, local or remote."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from itertools import count, groupby, islice
from time import monotonic
from typing import Protocol

from trunkline.bus import Delivery, Outcome, Settle
from trunkline.delivery.suspects import SuspectSlot
from trunkline.store import InHand

_SOON_S = 0.05
_numbers = count(1)


class Life(Enum):
    NEW = "new"
    OPEN = "open"
    DRAINING = "draining"  # nothing more is handed out; deliveries in hand may be finished
    CLOSED = "closed"


NEW, OPEN, DRAINING, CLOSED = Life
ACK = Outcome.ACK  # a global name costs less than a member of an enum


class DeliverySource(Protocol):
    """A pump, or the link to a broker: it brings deliveries and hears their outcomes."""

    @property
    def in_hand(self) -> InHand | None:
        """Where deliveries are marked that a reader has, if that is kept."""

    def settle(
        self, delivery: Delivery, outcome: Outcome, delay_s: float | None, reason: str
    ) -> None: ...

    def settle_all(self, deliveries: list[Delivery]) -> None: ...

    def give_back(self, delivery: Delivery) -> None: ...


class Run:
    """The deliveries of one lane in an inbox: some in hand, the rest behind them."""

    __slots__ = ("behind", "handed")

    def __init__(self) -> None:
        self.handed = 1  # in the queue or in a reader's hands
        self.behind: deque[Delivery] = deque()


class DeliveryInbox:
    """Hands out one record of a lane at a time: the next one when the record before it is acked.
    If a record fails, the rest of its lane goes back unread.

    An unread delivery is leased and its ack timeout runs. So a slow reader gets a record when it
    waits for one, and a quick reader gets as many in advance as ``limit`` allows. A new reader
    counts as slow: its first record may be its last. A reader is as quick as it comes back: how
    long it waits then is the store's time, not its own. ``ask`` is called when there is room, and
    ``late`` hears outcomes of deliveries that were lost before.
    """

    __slots__ = (
        "_arrived",
        "_ask",
        "_asked_at",
        "_behind",
        "_queue",
        "_runs",
        "ahead",
        "error",
        "gathering",
        "in_order",
        "in_runs",
        "last",
        "late",
        "life",
        "limit",
        "marks",
        "number",
        "open",
        "read_at",
        "revoked",
        "slot",
        "waiting",
    )

    def __init__(self, limit: int, ask: Callable[[], None], late: Settle) -> None:
        self.number = next(_numbers)
        self.life = NEW
        self.error: BaseException | None = None
        self.limit = limit
        self.slot = SuspectSlot()  # shared by the inboxes of one process or client
        self.in_order = False  # by offset, whole lanes at once: its reader works in that order
        self.marks = True  # whether a record that is read here is in a handler's hands
        self.in_runs = False  # all of a lane that is here at once: its reader takes them in turn
        self.ahead = 0  # how many deliveries may be unread
        self.waiting = 0  # readers of single deliveries that wait
        self.gathering = 0  # deliveries that readers of batches wait for
        self.open: dict[Delivery, DeliverySource] = {}  # every delivery that is not finished
        self.revoked: Callable[[Collection[Delivery]], None] | None = None  # hears of a seek
        self.last: DeliverySource | None = None  # the source of the newest delivery
        self.late = late
        self._ask = ask
        self._queue: deque[tuple[Delivery, float]] = deque()  # with the time at which it came
        self._runs: dict[tuple[object, str], Run] = {}
        self._behind = 0  # deliveries behind others of their lane
        self._arrived = asyncio.Event()
        self.read_at = 0.0  # when a reader last got a delivery
        self._asked_at = 0.0  # when a reader last began to wait

    # -- for the source --------------------------------------------------------------------------

    def room(self) -> int:
        """How many more deliveries to bring."""
        if self.life is not OPEN or self.error is not None:
            return 0
        wants = self.wants()
        room = self.limit - len(self.open)
        room = room if room < wants else wants  # asked for with every record
        return room if room > 0 else 0

    def wants(self) -> int:
        """How many more deliveries may be unread, or are waited for."""
        spare, hungry = self.spare(), self.waiting - len(self._queue)
        return spare if spare > hungry else hungry

    def spare(self) -> int:
        """How many more deliveries may be unread, also behind others of their lane."""
        ahead = self.ahead if self.ahead > self.gathering else self.gathering
        return ahead - len(self._queue) - self._behind

    def hands(self) -> int:
        """How many deliveries readers have or wait for."""
        unread = len(self._queue) + self._behind
        return len(self.open) - unread + self.waiting + self.gathering

    def hungry(self) -> int:
        """How many readers wait for a delivery that can be read at once."""
        return self.waiting - len(self._queue)

    def put(self, source: DeliverySource, delivery: Delivery, now: float) -> None:
        """Bring a delivery, at ``now`` of the real time."""
        self.open[delivery] = self.last = source
        lane = delivery.lane
        if lane is not None and not self.in_runs:
            run = self._runs.get(lane)
            if run is not None:
                run.behind.append(delivery)
                self._behind += 1
                return
            self._runs[lane] = Run()
        self._queue.append((delivery, now))
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """Let readers raise an error, once everything that is here was read."""
        if self.error is None:
            self.error = error
        self._arrived.set()

    def lose(self, lost: Collection[Delivery], revoked: Collection[Delivery] = ()) -> None:
        """These are leased no more: nobody reads them. Those that are ``revoked`` were leased
        before a seek or the removal of the group.
        """
        for delivery in lost:
            self._end_hold(delivery)
            self.open.pop(delivery, None)
        self._queue = deque(one for one in self._queue if one[0] not in lost)
        for lane in {d.lane for d in lost if d.lane is not None}:
            if self.in_runs:
                self._return_lane(lane)
            run = self._runs.get(lane)
            if run is not None:
                self._behind -= len(run.behind)
                run.behind = deque(d for d in run.behind if d not in lost)
                self._behind += len(run.behind)
                run.handed = sum(d.lane == lane for d in self.open) - len(run.behind)
                self._go_on(lane, run)
        if revoked and self.revoked is not None:
            self.revoked(revoked)
        self._ask()

    def unread(self) -> list[Delivery]:
        """Deliveries that no reader has."""
        found = [delivery for delivery, _ in self._queue]
        if self._behind:
            for run in self._runs.values():
                found += run.behind
        if self.in_runs:  # the reader has not come to those that follow another of their lane
            lanes = set[object]()
            for delivery in self.open:
                if delivery.lane in lanes:
                    found.append(delivery)
                elif delivery.lane is not None:
                    lanes.add(delivery.lane)
            return list(dict.fromkeys(found))
        return found

    # -- for readers -----------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether a delivery can be read at once."""
        return bool(self._queue)

    async def next(self) -> Delivery | None:
        """The next delivery; None when the inbox is left."""
        while not self._queue or self.life is not OPEN:
            if self.life is not OPEN:
                return None
            if self.error is not None:
                raise self.error
            self._arrived.clear()
            self._asked_at = monotonic()
            self.waiting += 1
            try:
                self._ask()
                await self._arrived.wait()
            finally:
                self.waiting -= 1
        return self.pop()

    async def gather(self, size: int, wait_s: float) -> list[Delivery]:
        """Up to ``size`` deliveries: at least one, more until ``wait_s`` is over. A lane may give
        several, in order. None at all when the inbox is left. A reader that is cancelled while it
        waits for more gives back what it has.
        """
        found: list[Delivery] = []
        try:
            await self._gather_into(found, size, wait_s)
        except BaseException:
            self.put_back(found)
            raise
        return found

    async def _gather_into(self, found: list[Delivery], size: int, wait_s: float) -> None:
        until: float | None = None
        while True:
            while self._queue and len(found) < size and self.life is OPEN:
                self._pop_runs(found, size)
            if self.life is not OPEN or len(found) >= size:
                return
            if self.error is not None:
                if found:
                    return
                raise self.error
            if until is None:
                until = monotonic() + wait_s if found else None
            left = None if until is None else until - monotonic()
            if left is not None and left <= 0:
                return
            try:
                async with asyncio.timeout(left):
                    await self._gather(size - len(found))
            except TimeoutError:
                return

    async def _gather(self, wanted: int) -> None:
        self._arrived.clear()
        self.gathering += wanted
        try:
            self._ask()
            await self._arrived.wait()
        finally:
            self.gathering -= wanted

    def _pop_runs(self, found: list[Delivery], size: int) -> None:
        """Read until there are ``size``: single deliveries, and of a lane all that are here."""
        queue, before = self._queue, len(found)
        self.read_at = monotonic()
        while queue and len(found) < size:
            delivery, _ = queue.popleft()
            found.append(delivery)
            lane = delivery.lane
            if lane is not None and not self.in_runs:
                run = self._runs[lane]
                while run.behind and len(found) < size:
                    found.append(run.behind.popleft())
                    run.handed += 1
                    self._behind -= 1
        if self.marks:
            opened = self.open
            by_source = groupby(islice(found, before, None), opened.get)
            for source, mine in by_source:
                if source is not None and (hands := source.in_hand) is not None:
                    hands.begin_all([delivery.lease.offset for delivery in mine])
        if not queue:
            self.ahead = self.limit  # a reader of batches is quick
            self._ask()

    def pop(self) -> Delivery:
        """The next delivery, which must be here."""
        delivery, came = self._queue.popleft()
        if self.marks:
            source = self.open.get(delivery)
            if source is not None and (hands := source.in_hand) is not None:
                hands.begin(delivery.lease.offset)
        left = len(self._queue) + self._behind
        now = monotonic()  # real time, whatever the bus's clock
        came_back = self._asked_at if self._asked_at > self.read_at else now
        is_quick = came_back - self.read_at <= _SOON_S
        self.read_at = now
        if now - came > _SOON_S:  # it waited for long: its ack timeout begins anew
            self.ahead //= 2
            delivery.extend()
        elif is_quick and not left:
            self.ahead = max(1, min(2 * self.ahead, self.limit))
        if not left or left == self.ahead // 2:
            self._ask()
        return delivery

    def put_back(self, deliveries: Sequence[Delivery]) -> None:
        """Deliveries that nobody looked at: they come first again, or go back at the end."""
        now = monotonic()
        self.hand_over(deliveries)
        self._queue.extendleft((delivery, now) for delivery in reversed(deliveries))
        self._arrived.set()

    def hand_over(self, deliveries: Iterable[Delivery]) -> None:
        """No handler of this process has these: another process does, or nobody."""
        for delivery in deliveries:
            self._end_hold(delivery)

    def _end_hold(self, delivery: Delivery) -> None:
        source = self.open.get(delivery) if self.marks else None
        if source is not None and source.in_hand is not None:
            source.in_hand.end(delivery.lease.offset)

    def keep_unread(self, most: int) -> None:
        """Give back the last unread deliveries beyond ``most``."""
        while self._behind and len(self._queue) + self._behind > most:
            run = next(run for run in reversed(self._runs.values()) if run.behind)
            self._behind -= 1
            self._give_back(run.behind.pop())
        while len(self._queue) > most:
            delivery, _ = self._queue.pop()
            self._give_back(delivery)
            self._end_of_lane(delivery)

    def _give_back(self, delivery: Delivery) -> None:
        source = self.open.pop(delivery, None)
        if source is not None:  # else it timed out
            source.give_back(delivery)

    # -- outcomes --------------------------------------------------------------------------------

    def settle(
        self, delivery: Delivery, outcome: Outcome, delay_s: float | None, reason: str
    ) -> None:
        """A delivery was finished. Its source hears of it, also of the rest of its lane."""
        was_full = len(self.open) >= self.limit
        source = self.finish(delivery, outcome)
        if source is None:
            self.late(delivery, outcome, delay_s, reason)
            return
        if was_full:  # for all sources: the source of this delivery is not the first to fill it
            self._ask()
        source.settle(delivery, outcome, delay_s, reason)

    def finish(self, delivery: Delivery, outcome: Outcome) -> DeliverySource | None:
        """A reader is done with a delivery; None if it was lost before. The next of its lane
        follows, or goes back if this one failed.
        """
        source = self.open.pop(delivery, None)
        if source is None:
            return None
        if outcome is ACK and self.marks and (hands := source.in_hand) is not None:
            hands.end(delivery.lease.offset)  # a failure counts once it is committed
        if delivery.lane is not None:
            self._finish_in_lane(delivery.lane, outcome)
        return source

    def _finish_in_lane(self, lane: tuple[object, str], outcome: Outcome) -> None:
        if self.in_runs and outcome is not ACK:
            self._return_lane(lane)
        run = self._runs.get(lane)
        if run is not None:
            run.handed -= 1
            if outcome is not ACK and run.behind:
                self._behind -= len(run.behind)
                for later in run.behind:
                    self._give_back(later)
                run.behind.clear()
            self._go_on(lane, run)

    def ack_all(self, deliveries: Iterable[Delivery]) -> int:
        """Ack many deliveries; how many of them were not finished before."""
        opened = self.open
        found: dict[DeliverySource, list[Delivery]] = {}
        count = 0
        for delivery in deliveries:
            if delivery.outcome is None:
                delivery.outcome = ACK
                count += 1
                source = opened.pop(delivery, None)
                if source is None:
                    self.late(delivery, ACK, None, "")
                    continue
                mine = found.get(source)
                if mine is None:
                    mine = found[source] = []
                mine.append(delivery)
                if delivery.lane is not None:
                    self._finish_in_lane(delivery.lane, ACK)
        for source, mine in found.items():
            if self.marks and (hands := source.in_hand) is not None:
                hands.end_all([delivery.lease.offset for delivery in mine])
            source.settle_all(mine)
        self._ask()
        return count

    def has_more(self, lane: tuple[object, str]) -> bool:
        """Whether a record of a lane is in hand or behind it."""
        return lane in self._runs

    def _return_lane(self, lane: tuple[object, str]) -> None:
        """A record of a lane failed: those of the lane behind it go back, and follow it again."""
        rest = [delivery for delivery in self.open if delivery.lane == lane]
        if rest:
            self._queue = deque(one for one in self._queue if one[0].lane != lane)
            for delivery in rest:
                self._give_back(delivery)
            if self.revoked is not None:
                self.revoked(rest)

    def _end_of_lane(self, delivery: Delivery) -> None:
        if delivery.lane is not None and (run := self._runs.get(delivery.lane)) is not None:
            run.handed -= 1
            self._go_on(delivery.lane, run)

    def _go_on(self, lane: tuple[object, str], run: Run) -> None:
        """Let the next record of a lane be read, once no record of the lane is in hand."""
        if run.handed > 0:
            return
        if run.behind:
            self._queue.appendleft((run.behind.popleft(), monotonic()))
            self._behind -= 1
            run.handed = 1
            self._arrived.set()
        else:
            del self._runs[lane]

    # -- life ------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Hand out nothing more. Readers end."""
        if self.life in (NEW, OPEN):
            self.life = DRAINING
        self._arrived.set()

    def clear(
        self,
    ) -> tuple[list[tuple[Delivery, DeliverySource]], list[tuple[Delivery, DeliverySource]]]:
        """Empty the inbox: unread deliveries, and those in hand. It is too late for their verbs."""
        unread = set(self.unread())
        mine, self.open = self.open, {}
        self._queue.clear()
        self._runs.clear()
        self._behind = 0
        left = [(delivery, source) for delivery, source in mine.items() if delivery in unread]
        held = [(delivery, source) for delivery, source in mine.items() if delivery not in unread]
        for delivery, _ in held:
            delivery.outcome = Outcome.NACK
        return left, held
