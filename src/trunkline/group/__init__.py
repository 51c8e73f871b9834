"""One group on one partition: its verbs.

A verb decides, writes a ``Change`` and applies it. The ``Ledger`` holds the facts, the ``Schedule``
holds what this process may lease next. There is no clock, no record and no I/O here: callers pass
``now`` (monotonic) and ``wall`` (epoch seconds), so a test can drive every path.

A process that applies the same changes in the same order holds the same facts. That is how
processes share a group: they share the list of changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from trunkline.errors import NotFound
from trunkline.group.changes import (
    Anchored,
    AnyOp,
    Change,
    Created,
    Edited,
    Extended,
    Failed,
    Freed,
    Leased,
    Paused,
    Redriven,
    Returned,
    Settled,
    Sought,
)
from trunkline.group.ledger import Lease, Ledger, Saved
from trunkline.group.schedule import Schedule
from trunkline.options import GroupOptions, TtlPolicy, check_policy, other_policy
from trunkline.ranges import Ranges, compress

__all__ = [
    "RUN",
    "AnyOp",
    "Change",
    "Group",
    "Lease",
    "Outlook",
    "Saved",
    "Taken",
    "backoff_s",
    "load",
]

RUN = 64  # records of one key that a consumer may hold at once
_DEFAULT = GroupOptions()
_NEVER = float("inf")


class Taken(NamedTuple):
    """``leases`` are to be delivered. ``dead`` have no attempt left and ``expired`` no time: both
    need a dead letter before they are settled. ``dropped`` expired and are settled.
    """

    leases: list[Lease]
    dead: list[Lease]
    expired: list[Lease]
    dropped: list[int]


class Outlook(NamedTuple):
    """Records that are not due: how many, when the first is due, and how far the log was read."""

    scheduled: int = 0
    next_due: float | None = None
    read_to: int = 0


class Group:
    def __init__(
        self,
        options: GroupOptions | None = None,
        floor: int = 0,
        *,
        era: int = 0,
        was: GroupOptions | None = None,
    ) -> None:
        self.ledger = Ledger(era=era)
        self.schedule = Schedule(self.ledger)
        self.told = Outlook()  # of the process that wrote the snapshot
        self.ops: list[Change] = []  # of the transaction that is under way
        self.was = was  # its policy before it was removed
        self._news = False  # whether others changed it, and no pump of this process was told
        if options is not None:
            self.apply(Created(floor, options, era))

    def apply(self, change: Change) -> None:
        """Take in a change, this process's own or another member's."""
        self.ledger.apply(change)
        self.schedule.follow(change)
        if self.told.read_to and isinstance(change, Created | Sought | Edited):
            self.told = Outlook()

    def _do(self, change: Change) -> None:
        self.ops.append(change)
        self.apply(change)

    def roll_back(self, ledger: Ledger) -> None:
        """Undo a transaction that was not committed. ``ledger`` holds the facts before it."""
        self.ops = []
        self.ledger = self.schedule.ledger = ledger
        self.schedule.line_up()

    def add_news(self) -> None:
        """Note that another member changed the group."""
        self._news = True

    def take_news(self) -> bool:
        """Whether another member changed the group since the last call."""
        news, self._news = self._news, False
        return news

    # -- facts -----------------------------------------------------------------------------------

    @property
    def options(self) -> GroupOptions:
        return self.ledger.options or _DEFAULT

    @property
    def created(self) -> bool:
        return self.ledger.options is not None

    @property
    def floor(self) -> int:
        """The highest offset with everything at or below it settled."""
        return self.ledger.floor

    @property
    def settled(self) -> Ranges:
        return self.ledger.settled

    @property
    def leases(self) -> dict[int, Lease]:
        return self.ledger.leases

    @property
    def waiting(self) -> dict[int, float]:
        return self.ledger.waiting

    @property
    def attempts(self) -> dict[int, int]:
        return self.ledger.attempts

    @property
    def again(self) -> set[int]:
        """Redriven offsets: unsettled, though perhaps below the floor."""
        return self.ledger.redriven

    @property
    def paused(self) -> bool:
        return self.ledger.paused

    @property
    def era(self) -> int:
        return self.ledger.era

    @property
    def anchor(self) -> Anchored | None:
        return self.ledger.anchor

    @property
    def last_settled(self) -> int:
        return max(self.ledger.floor, self.ledger.settled.last)

    def is_settled(self, offset: int) -> bool:
        return self.ledger.is_settled(offset)

    def is_dropped(self, offset: int) -> bool:
        """In the books of dead letters: whether the letter was dropped, and not redriven."""
        return offset in self.ledger.dropped

    def holders(self) -> set[str]:
        return {lease.by for lease in self.ledger.leases.values()}

    def holds(self, lease: Lease) -> bool:
        """Whether this very lease still stands, perhaps extended."""
        held = self.ledger.leases.get(lease.offset)
        return (
            held is not None
            and held.attempt == lease.attempt
            and held.by == lease.by
            and held.era == lease.era
        )

    def lag(self, next_offset: int, first: int = 1, *, wall: float = 0.0) -> int:
        """How many records in ``[first, next_offset)`` are due and not settled. A record that was
        not read counts as due.
        """
        unsettled = self.ledger.unsettled(next_offset, first)
        return max(0, unsettled - self.outlook(wall).scheduled)

    def outlook(self, wall: float = 0.0) -> Outlook:
        """The records that are not due at ``wall``, as far as the log was read. A process that has
        read less than the writer of the snapshot says what the snapshot says, until the first
        record of it is due: how many followed that one is not known then.
        """
        own, told = self.schedule.scheduled, self.told
        if told.read_to > self.schedule.read_to:
            if told.next_due is None or told.next_due <= wall:
                return Outlook(read_to=self.schedule.read_to)
            left = min(told.scheduled, self.ledger.unsettled(told.read_to))
            return told._replace(scheduled=left) if left else Outlook(read_to=told.read_to)
        scheduled = len(own) - own.count_due(wall)
        next_due = own.first if own else None
        return Outlook(scheduled, next_due, self.schedule.read_to)

    @property
    def scheduled(self) -> int:
        """How many records that are not due were read here."""
        return len(self.schedule.scheduled)

    # -- what the log holds ----------------------------------------------------------------------

    @property
    def read_to(self) -> int:
        """The log was read up to here."""
        return self.schedule.read_to

    def offer(
        self,
        offset: int,
        key: str | None = None,
        rank: int = 2,
        due: float = 0.0,
        expires: float = _NEVER,
        *,
        now: float = 0.0,
        wall: float = 0.0,
    ) -> None:
        """Take in a record, in the log's order or as one of ``wanted``."""
        self.schedule.offer(offset, key, rank, due, expires, now, wall)

    def wanted(self) -> list[int]:
        """Records to read out of turn, in the order in which to offer them."""
        return self.schedule.wanted()

    def next_wakeup(self, now: float, wall: float) -> float | None:
        """In how many seconds a lease runs out or a record is due."""
        delay = self.schedule.next_due(now, wall)
        return delay if delay < _NEVER else None

    # -- verbs of a member -----------------------------------------------------------------------

    def take(
        self,
        by: str,
        *,
        now: float,
        wall: float,
        limit: int,
        ttl: TtlPolicy = "drop",
        consumer: int = 1,
        run: int = 1,
        hungry: int = 0,
        spare: int | None = None,
        in_order: bool = False,
        lease_s: float | None = None,
        suspects: int | None = None,
    ) -> Taken:
        """Lease up to ``limit`` records to a consumer of the member ``by``: at most ``run`` of
        one key at a time. The first ``hungry`` records can be handled at once; at most ``spare``
        records wait for others of their key that the consumer has. A lease lasts ``lease_s``, else
        the group's ack timeout. At most ``suspects`` records that were in hand when their process
        ended; None: as many as there are.
        """
        taken = Taken([], [], [], [])
        ledger, schedule = self.ledger, self.schedule
        schedule.come_due(now, wall)
        if ledger.paused or limit <= 0:
            return taken
        options = ledger.options or _DEFAULT
        retries, attempts = options.max_retries, ledger.attempts
        run = run if retries else 1  # each lease is the only try
        spare = limit if spare is None else spare
        lent: list[int] = []
        held: list[int] = []
        dead: list[int] = []
        more = True
        while more:
            dropped: list[int] = []
            room = limit - len(lent) - len(held) - len(dead)
            picked = schedule.pick(consumer, now, room, run, hungry, spare, in_order, suspects)
            for item in picked:
                offset = item.offset
                if wall >= item.expires and ttl != "deliver":
                    (dropped if ttl == "drop" else held).append(offset)
                elif attempts and attempts.get(offset, 0) > retries:
                    dead.append(offset)
                else:
                    lent.append(offset)
            more = bool(dropped)  # records behind them can be leased now
            if dropped:
                taken.dropped.extend(self.settle(dropped))
                if suspects and not ledger.suspects.isdisjoint(lent):
                    suspects = 0
        if lent or held or dead:
            until = now + (options.ack_timeout_s if lease_s is None else lease_s)
            kept = compress((*held, *dead)) if held or dead else ()
            change = Leased(by, until, compress(lent) if lent else (), kept)
            self.ops.append(change)
            ledger.apply(change)
            schedule.expect(until, (*change.offsets, *kept))  # the pick has lent the records
            leases = ledger.leases
            taken.leases.extend([leases[offset] for offset in lent])
            taken.dead.extend([leases[offset] for offset in dead])
            taken.expired.extend([leases[offset] for offset in held])
        return taken

    def settle(
        self, offsets: Iterable[int], *, dropped: bool = False, filtered: bool = False
    ) -> list[int]:
        """Finish these for good. Returns those that were not settled before. ``dropped`` is for the
        books of dead letters. ``filtered``: nobody handled them, because the group's filter refused
        them.
        """
        ledger = self.ledger
        if ledger.settled or ledger.redriven:
            fresh = [offset for offset in offsets if not ledger.is_settled(offset)]
        else:
            floor = ledger.floor
            fresh = [offset for offset in offsets if offset > floor]
        if fresh:
            self._do(Settled(compress(fresh), dropped, filtered))
        return fresh

    def ack(self, leases: Iterable[Lease]) -> list[int]:
        """Settle the records of these leases. A lease that ran out counts as long as no other
        member holds the record: that member is at work, and its key stays taken.
        """
        era, held = self.ledger.era, self.ledger.leases
        offsets: list[int] = []
        for lease in leases:
            if lease.era == era:
                now = held.get(lease.offset)
                if now is None or (now.attempt == lease.attempt and now.by == lease.by):
                    offsets.append(lease.offset)
        return self.settle(offsets)

    def skip(self, first: int, last: int) -> None:
        """Settle a whole range that the log does not hold."""
        ledger = self.ledger
        first = max(first, ledger.floor + 1)
        if first <= last and not ledger.settled.covers(first, last):
            self._do(Settled([(first, last)]))

    def trim(self, first: int) -> None:
        """The log begins at ``first`` now: settle every record before it that nobody holds."""
        ledger, start = self.ledger, self.ledger.floor + 1
        spans: list[tuple[int, int]] = []
        for offset in sorted(offset for offset in ledger.leases if start <= offset < first):
            if start < offset:
                spans.append((start, offset - 1))
            start = offset + 1
        if start < first:
            spans.append((start, first - 1))
        fresh = [span for span in spans if not ledger.settled.covers(*span)]
        if fresh:
            self._do(Settled(fresh))

    def fail(
        self, lease: Lease, *, now: float, delay_s: float, crashed: bool = False
    ) -> bool | None:
        """End a lease for a later try. True: no try is left, so the record stays leased until its
        dead letter is durable and it is settled. None: the lease was lost before. ``crashed``:
        the process or client that had the record ended, perhaps because of it.
        """
        if not self.holds(lease):
            return None
        if lease.attempt > self.options.max_retries:
            return self.hold(lease, now=now)
        self._do(Failed([(lease.offset, now + delay_s)], crashed))
        return False

    def hold(self, lease: Lease, *, now: float, lease_s: float | None = None) -> bool:
        """Keep a lease while its dead letter is written; False if it was lost before."""
        if not self.holds(lease):
            return False
        until = now + (self.options.ack_timeout_s if lease_s is None else lease_s)
        self._do(Extended(until, [(lease.offset, lease.offset)]))
        return True

    def bring_back(self, lease: Lease, *, now: float) -> Lease | None:
        """Lease a settled record once more, with the tries that it had: a cumulative ack of another
        record covered it, and its consumer failed. None if it was not settled by that lease.
        """
        offset, ledger = lease.offset, self.ledger
        if lease.era != ledger.era or not ledger.is_settled(offset):
            return None
        spans = [(offset, offset)]
        self._do(Redriven(spans))
        for _ in range(lease.attempt):
            self._do(Leased(lease.by, now + self.options.ack_timeout_s, spans))
        return ledger.leases.get(offset)

    def extend(self, lease: Lease, *, now: float, lease_s: float | None = None) -> Lease | None:
        """Let a lease last ``lease_s`` from now on, else the ack timeout; None if it was lost
        before.
        """
        held = self.hold(lease, now=now, lease_s=lease_s)
        return self.ledger.leases.get(lease.offset) if held else None

    def give_back(self, leases: Iterable[Lease]) -> None:
        """Return leases of records that no handler had: that was no try."""
        if offsets := [lease.offset for lease in leases if self.holds(lease)]:
            self._do(Returned(compress(offsets)))

    def expired(self, now: float) -> list[Lease]:
        """Leases that have run out."""
        found = dict.fromkeys(self.schedule.expired(now))
        return [self.ledger.leases[offset] for offset in found]

    def free(self, by: str, in_hand: Callable[[int], bool] | None = None) -> None:
        """Free the records of a member that is gone. What was ``in_hand`` counts as a try, the rest
        does not; without ``in_hand`` nobody knows, and each record counts.
        """
        held = [lease.offset for lease in self.ledger.leases.values() if lease.by == by]
        if in_hand is not None:
            unread = [offset for offset in held if not in_hand(offset)]
            if unread:
                self._do(Returned(compress(unread)))
            held = [offset for offset in held if in_hand(offset)]
        if held:
            self._do(Freed(by))

    # -- verbs of an operator --------------------------------------------------------------------

    def seek(self, floor: int) -> None:
        self._do(Sought(floor))

    def redrive(self, offsets: Iterable[int]) -> list[int]:
        """Let settled offsets be delivered again, with all their attempts. An offset that is not
        settled is on its way and left alone.
        """
        back = [offset for offset in offsets if self.is_settled(offset)]
        if back:
            self._do(Redriven(compress(back)))
        return back

    def pause(self, on: bool) -> None:
        if on != self.paused:
            self._do(Paused(on))

    def edit(self, options: GroupOptions) -> None:
        """Give the group another policy. A lease keeps its deadline."""
        if not self.created:
            raise NotFound("there is no group to edit")
        if options != self.options:
            self._do(Edited(options))

    def define(self, options: GroupOptions, floor: int, *, topic: str = "", name: str = "") -> None:
        """Create the group, or check that it has this policy."""
        check_policy(options)
        if not self.created:
            self._do(Created(floor, options, self.era))
        elif options != self.options:
            raise other_policy(topic, name, self.options, options)

    def begin_anew(self) -> None:
        """Create a group again that was removed while its members are at work."""
        if self.was and not self.created:
            self.define(self.was, 0)

    def spread(self, later: Group) -> None:
        """Begin the group of a partition that was added: as this one, before its first record."""
        if self.created and not later.created:
            later.define(self.options, 0)
            later.pause(self.paused)

    def dump(self) -> dict[str, Any]:
        """The fields of ``Saved``, to be read back by ``load``."""
        found, told = self.ledger.dump(), self.outlook()
        if told.scheduled:  # else the fields are left out
            found |= told._asdict()
        return found


def load(saved: Saved) -> Group:
    group = Group()
    group.roll_back(Ledger(saved))
    group.schedule.reset()
    group.told = Outlook(saved.scheduled, saved.next_due, saved.read_to)
    return group


JITTER_FLOOR: Final = 0.75
"""So much of a backoff is never left out: the retries of a policy last as long as it says."""


def backoff_s(options: GroupOptions, attempt: int, draw: float) -> float:
    """How long a record waits after the given failed attempt: at least ``JITTER_FLOOR`` of the
    delay. The rest is by chance: ``draw`` is in [0, 1).
    """
    # Far-out attempts would overflow; the cap is reached long before.
    delay = options.backoff_base_s * options.backoff_mult ** min(attempt - 1, 64)
    return (JITTER_FLOOR + (1 - JITTER_FLOOR) * draw) * min(delay, options.backoff_max_s)
