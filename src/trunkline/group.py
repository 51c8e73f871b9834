"""One group on one partition: who holds which offset, and what is settled.

Only offsets, times and names live here. There is no clock, no record and no I/O: callers pass
``now`` (monotonic) and ``wall`` (epoch seconds) and act on what comes back, so every path can be
driven from a test.

**The group is a fold.** Its lasting state changes in ``apply`` alone, and every change is an
``Op``. A method that changes something appends the op to ``ops``; whoever applies the same ops in
the same order holds the same state. That is how processes share a group: they share the list.

An offset above the floor is *free*, *leased*, *waiting* for a later try, or *settled*. The floor is
the highest offset with everything at or below it settled.

Beside the lasting state stands the window: what this process has read ahead and may lease. It is
never shared; each process has its own.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from trunkline.errors import NotFound
from trunkline.ops import (
    Anchored,
    AnyOp,
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
from trunkline.options import GroupOptions, TtlPolicy, check_policy, other_policy
from trunkline.ranges import Ranges, compress


class Lease(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A lease from before a seek, or of a removed group of that name, is of another ``era``."""

    offset: int
    attempt: int
    until: float
    by: str
    era: int = 0


class Item(msgspec.Struct, gc=False):
    """What the window knows of a record."""

    offset: int
    key: str | None
    rank: int
    not_before: float
    expires: float
    entered: float


class Taken(NamedTuple):
    """``leases`` are to be delivered; ``dead`` ran out of attempts and ``expired`` of time, and
    need a dead letter before they are settled; ``dropped`` expired and are settled already.
    """

    leases: list[Lease]
    dead: list[Lease]
    expired: list[Lease]
    dropped: list[int]


class Group:
    def __init__(
        self, options: GroupOptions | None = None, floor: int = 0, *, era: int = 0
    ) -> None:
        self.options = options or GroupOptions()
        self.floor = floor
        self.created = options is not None
        self.was: GroupOptions | None = None  # its policy before it was removed
        self.paused = False
        self.era = era
        self.ops: list[AnyOp] = []
        self.news = False  # whether others changed it, and no pump of this process was told
        self.settled = Ranges()
        self.leases: dict[int, Lease] = {}
        self.waiting: dict[int, float] = {}
        self.attempts: dict[int, int] = {}
        self.again: set[int] = set()  # redriven, and so unsettled though perhaps below the floor
        self.anchor: Anchored | None = None
        self._deadlines: list[tuple[float, int, int]] = []
        self._due: list[tuple[float, int]] = []
        self.clear_window()

    # -- the window: what may be leased --------------------------------------------------------

    def clear_window(self) -> None:
        self.window: dict[int, Item] = {}
        self.read_to = self.floor + 1
        self._ready: tuple[list[int], ...] = ([], [], [], [])
        self._delayed: list[tuple[float, int]] = []
        self._lanes: dict[str, deque[int]] = {}
        self._passed: set[int] = set()  # ready, were not others of their lane before them by now
        self._late: set[int] = set()  # those in a lane that were delayed or redriven
        self._moved = False  # whether one stands before others because it was begun
        self.blocked = False  # whether one that comes late waits for what the window does not hold

    def wants(self) -> int:
        """How many more records the window has room for."""
        return self.options.lookahead - len(self.window)

    def offer(self, item: Item) -> None:
        """Add a record to the window; one that is settled is passed over."""
        offset = item.offset
        if offset == self.read_to:  # else it is a stray, and what lies between is yet to be read
            self.read_to = offset + 1
        if self.is_settled(offset) or offset in self.window:
            return
        self.window[offset] = item
        if (item.not_before > 0 or offset in self.again) and offset not in self.attempts:
            heapq.heappush(self._delayed, (item.not_before, offset))
            self._passed.add(offset)  # it may be in line since it was here before
        else:
            self._enter(item)

    def _enter(self, item: Item) -> None:
        """Let a record that is due stand in its lane: what was begun first, then by offset. What
        comes late, delayed or redriven, so never passes one that some member is at.
        """
        name, offset = self._lane_of(item), item.offset
        if name is None:
            heapq.heappush(self._ready[item.rank], offset)
            return
        lane = self._lanes.setdefault(name, deque())
        at, begun = len(lane), offset in self.attempts
        if begun or offset in self._late:
            while at and lane[at - 1] not in self.attempts and (begun or lane[at - 1] > offset):
                at -= 1
            self._moved = self._moved or (begun and at < len(lane))
            self._passed.update((offset,) if at else (*lane,)[:1])
        lane.insert(at, offset)
        if at == 0:
            self._passed.discard(offset)
            heapq.heappush(self._ready[item.rank], offset)

    def _come_first(self, offset: int) -> None:
        """Another process began a record: let none of its lane stand before it."""
        item = self.window.get(offset)
        if item is None or (name := self._lane_of(item)) is None:
            return
        if item.not_before > 0 or offset in self.again:  # it was due there before it was here
            self._delayed = [entry for entry in self._delayed if entry[1] != offset]
            heapq.heapify(self._delayed)
        lane = self._lanes.setdefault(name, deque())
        if not lane or lane[0] != offset:
            if offset in lane:
                lane.remove(offset)
            self._enter(item)

    def _lane_of(self, item: Item) -> str | None:
        """In whose line a record stands; None if it goes alone."""
        ordering = self.options.ordering
        if ordering == "key":
            return item.key
        return "" if ordering == "partition" else None

    def _line_up(self) -> None:
        """Let all that is due stand in line anew."""
        self._ready, self._lanes, self._passed, self._moved = ([], [], [], []), {}, set(), False
        delayed = {offset for _, offset in self._delayed}
        for offset in sorted(self.window.keys() - delayed):
            self._enter(self.window[offset])

    def _leave(self, offset: int) -> None:
        """Take a settled record out of the window and let the next of its lane come up."""
        item = self.window.pop(offset, None)
        if self._late or self._passed:
            self._late.discard(offset)
            self._passed.discard(offset)
        name = None if item is None else self._lane_of(item)
        lane = None if name is None else self._lanes.get(name)
        if name is None or lane is None:
            return
        head = lane[0]
        while lane and lane[0] not in self.window:
            lane.popleft()
        if not lane:
            del self._lanes[name]
        elif lane[0] != head:
            self._passed.discard(lane[0])
            heapq.heappush(self._ready[self.window[lane[0]].rank], lane[0])

    # -- what a member does --------------------------------------------------------------------

    def take(
        self, by: str, *, now: float, wall: float, limit: int, ttl: TtlPolicy = "drop"
    ) -> Taken:
        """Lease up to ``limit`` records of the window to ``by``."""
        taken = Taken([], [], [], [])
        self._come_due(now, wall)
        if self.paused or (self.blocked and self._late):
            return taken
        until = now + self.options.ack_timeout_s
        picked: list[int] = []
        held: list[int] = []
        while len(picked) < limit:
            offset = self._pick(now)
            if offset is None:
                break
            item = self.window[offset]
            if wall >= item.expires and ttl != "deliver":
                if ttl == "drop":
                    taken.dropped.append(offset)
                    self._leave(offset)
                else:
                    held.append(offset)
                    taken.expired.append(self._lease(offset, by, until, counts=False))
            elif self.attempts.get(offset, 0) > self.options.max_retries:
                held.append(offset)
                taken.dead.append(self._lease(offset, by, until, counts=False))
            else:
                picked.append(offset)
                taken.leases.append(self._lease(offset, by, until, counts=True))
        if picked or held:
            op = Leased(by, until, compress(picked) or (), compress(held) if held else ())
            self._expect(until, (*op.offsets, *op.held))
            self.ops.append(op)
        if taken.dropped:
            self.settle(taken.dropped)
        return taken

    def _pick(self, now: float) -> int | None:
        """The next free record: the highest priority first, where a record gains one step for
        every ``aging_s`` it has waited, so that none waits for ever.
        """
        best: tuple[float, int] | None = None
        for rank, heap in enumerate(self._ready):
            while heap and not self._is_free(heap[0]):
                heapq.heappop(heap)
            if heap:
                waited = now - self.window[heap[0]].entered
                score = rank - waited / self.options.aging_s
                if best is None or score < best[0]:
                    best = (score, rank)
        return None if best is None else heapq.heappop(self._ready[best[1]])

    def _is_free(self, offset: int) -> bool:
        if offset in self.leases or offset in self.waiting or offset in self._passed:
            return False
        return offset in self.window

    def _come_due(self, now: float, wall: float) -> None:
        late = bool(self._late) or bool(self._delayed and self._delayed[0][0] <= wall)
        self.blocked = late and not self.attempts.keys() <= self.window.keys()
        while not self.blocked and self._delayed and self._delayed[0][0] <= wall:
            _, offset = heapq.heappop(self._delayed)
            if (item := self.window.get(offset)) is not None:
                self._late.add(offset)
                self._passed.discard(offset)
                self._enter(item)
        while self._due and self._due[0][0] <= now:
            at, offset = heapq.heappop(self._due)
            if self.waiting.get(offset) == at:
                del self.waiting[offset]
                item = self.window.get(offset)
                if item is not None and self._is_first(item):
                    heapq.heappush(self._ready[item.rank], offset)

    def _is_first(self, item: Item) -> bool:
        """Whether none of its lane stands before it; none does but after an edit of the order."""
        lane = self._lanes.get(name) if (name := self._lane_of(item)) is not None else None
        return lane is None or lane[0] == item.offset

    def settle(self, offsets: Iterable[int]) -> list[int]:
        """Finish these for good. Returns those that were not settled before."""
        fresh = [offset for offset in offsets if not self.is_settled(offset)]
        if fresh:
            self._do(Settled(compress(fresh)))
        return fresh

    def ack(self, leases: Iterable[Lease]) -> list[int]:
        """Settle what these leases stand for, also if they ran out, but of this era."""
        return self.settle([lease.offset for lease in leases if lease.era == self.era])

    def skip(self, first: int, last: int) -> None:
        """Settle a whole range that the log does not hold."""
        first = max(first, self.floor + 1)
        if first <= last and not self.settled.covers(first, last):
            self._do(Settled([(first, last)]))

    def fail(self, lease: Lease, *, now: float, delay_s: float) -> bool | None:
        """Give a lease back for a later try. True: no try is left, so it stays leased until its
        dead letter is durable and it is settled. None: the lease was lost already.
        """
        if not self._holds(lease):
            return None
        if lease.attempt > self.options.max_retries:
            return self.hold(lease, now=now)
        self._do(Failed([(lease.offset, now + delay_s)]))
        return False

    def hold(self, lease: Lease, *, now: float) -> bool:
        """Keep a lease while its dead letter is written; False if it was lost already."""
        if not self._holds(lease):
            return False
        self._do(Extended(now + self.options.ack_timeout_s, [(lease.offset, lease.offset)]))
        return True

    def _holds(self, lease: Lease) -> bool:
        held = self.leases.get(lease.offset)
        return held is not None and msgspec.structs.replace(held, until=lease.until) == lease

    def give_back(self, leases: Iterable[Lease]) -> None:
        """Return leases whose records were never handed out."""
        if offsets := [lease.offset for lease in leases if self._holds(lease)]:
            self._do(Returned(compress(offsets)))

    def extend(self, lease: Lease, *, now: float) -> Lease | None:
        """Begin the ack timeout of a lease anew; None if it was lost already."""
        return self.leases.get(lease.offset) if self.hold(lease, now=now) else None

    def expired(self, now: float) -> list[Lease]:
        """Leases whose time is up."""
        found: list[Lease] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            until, first, last = heapq.heappop(self._deadlines)
            for offset in range(first, last + 1):
                lease = self.leases.get(offset)
                if lease is not None and lease.until == until:
                    found.append(lease)
        return found

    def free(self, by: str) -> None:
        """Free what a member that is gone held."""
        if any(lease.by == by for lease in self.leases.values()):
            self._do(Freed(by))

    def seek(self, floor: int) -> None:
        self._do(Sought(floor))

    def redrive(self, offsets: Iterable[int]) -> list[int]:
        """Give settled offsets back to this group, once more with all their attempts. Those that
        are not settled are still on their way and left alone.
        """
        back = [offset for offset in offsets if self.is_settled(offset)]
        if back:
            self._do(Redriven(compress(back)))
        return back

    def pause(self, on: bool) -> None:
        if on != self.paused:
            self._do(Paused(on))

    def edit(self, options: GroupOptions) -> None:
        """Give the group another policy. What is leased keeps its deadline."""
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
        """Be a group again, if it was removed: its members are at work, and there is something."""
        if self.was and not self.created:
            self.define(self.was, 0)

    def spread(self, later: Group) -> None:
        """Begin the group of a partition that was added: as this one, before its first record."""
        if self.created and not later.created:
            later.define(self.options, 0)
            later.pause(self.paused)

    # -- what it knows -------------------------------------------------------------------------

    def is_settled(self, offset: int) -> bool:
        return (offset <= self.floor or offset in self.settled) and offset not in self.again

    @property
    def last_settled(self) -> int:
        return max(self.floor, self.settled.last)

    def holders(self) -> set[str]:
        return {lease.by for lease in self.leases.values()}

    def lag(self, next_offset: int, first: int = 1) -> int:
        """How many records in ``[first, next_offset)`` are not settled."""
        floor = max(self.floor, first - 1)
        behind = max(0, next_offset - 1 - floor - self.settled.count(floor))
        return behind + sum(offset >= first for offset in self.again)

    def next_wakeup(self, now: float, wall: float) -> float | None:
        """How many seconds until something becomes due."""
        times: list[float] = []
        if self._deadlines:
            times.append(self._deadlines[0][0] - now)
        if self._due:
            times.append(self._due[0][0] - now)
        if self._delayed:
            times.append(self._delayed[0][0] - wall)
        return max(0.0, min(times)) if times else None

    def available(self) -> int:
        """About how many records of the window could be leased now."""
        return sum(map(len, self._ready))

    def strays(self) -> list[int]:
        """What the window lacks and needs: what was redriven, and if ``blocked`` what was begun."""
        wanted = {*self.again, *self.attempts} if self.blocked else self.again
        return [offset for offset in wanted if offset not in self.window]

    # -- the fold ------------------------------------------------------------------------------

    def _do(self, op: AnyOp) -> None:
        self.ops.append(op)
        self.apply(op)

    def apply(self, op: AnyOp) -> None:
        """Take one change in. The only place where the lasting state changes."""
        match op:
            case Leased():
                for counts, spans in ((True, op.offsets), (False, op.held)):
                    for first, last in spans:
                        for offset in range(first, last + 1):
                            self._lease(offset, op.by, op.until, counts=counts)
                            if self.window:
                                self._come_first(offset)
                self._expect(op.until, (*op.offsets, *op.held))
            case Settled():
                for first, last in op.offsets:
                    self._settle(first, last)
            case Failed():
                for offset, at in op.again:
                    self.leases.pop(offset, None)
                    self._wait(offset, at)
            case Returned():
                for first, last in op.offsets:
                    for offset in range(first, last + 1):
                        self.leases.pop(offset, None)
                        left = self.attempts.pop(offset, 1) - 1
                        if left:
                            self.attempts[offset] = left
                        self._wait(offset, 0.0)
                if self._moved:  # what is begun no more stands where its offset says
                    self._line_up()
            case Extended():
                for first, last in op.offsets:
                    for offset in range(first, last + 1):
                        lease = self.leases.get(offset)
                        if lease is not None:
                            self._lease(offset, lease.by, op.until, counts=False)
                self._expect(op.until, op.offsets)
            case Freed():
                for lease in [x for x in self.leases.values() if x.by == op.by]:
                    del self.leases[lease.offset]
                    self._wait(lease.offset, 0.0)
            case _:
                self._apply_rare(op)

    def _apply_rare(self, op: AnyOp) -> None:
        match op:
            case Created():
                self.options, self.created, self.era = op.options, True, op.era
                self._reset(op.floor)
            case Sought():
                self.era += 1
                self._reset(op.floor)
            case Redriven():
                for first, last in op.offsets:
                    for offset in range(first, last + 1):
                        self.again.add(offset)
                        self.attempts.pop(offset, None)
            case Paused():
                self.paused = op.on
            case Edited():
                old, self.options = self.options, op.options
                if op.options.ordering != old.ordering:  # else a redriven one could pass its lane
                    self._line_up()
            case Anchored():
                self._rebase(op)

    def _lease(self, offset: int, by: str, until: float, *, counts: bool) -> Lease:
        attempt = self.attempts.get(offset, 0) + counts
        if counts:
            self.attempts[offset] = attempt
        lease = Lease(offset, attempt, until, by, self.era)
        self.leases[offset] = lease
        self.waiting.pop(offset, None)
        return lease

    def _expect(self, until: float, spans: Iterable[tuple[int, int]]) -> None:
        """Note a deadline. Those of leases that end in time stay until then: drop them at times."""
        for first, last in spans:
            heapq.heappush(self._deadlines, (until, first, last))
        if len(self._deadlines) > 4 * len(self.leases) + 4096:
            live = {(lease.until, lease.offset, lease.offset) for lease in self.leases.values()}
            self._deadlines = sorted(live)

    def _settle(self, first: int, last: int) -> None:
        leases, attempts, waiting, again = self.leases, self.attempts, self.waiting, self.again
        if last - first > len(leases) + len(attempts) + len(again) + len(self.window):
            known = {*leases, *attempts, *again, *self.window}
            touched: Iterable[int] = [offset for offset in known if first <= offset <= last]
        else:
            touched = range(first, last + 1)
        for offset in touched:
            leases.pop(offset, None)
            attempts.pop(offset, None)
            waiting.pop(offset, None)
            again.discard(offset)
            self._leave(offset)
        if last > self.floor:
            if first <= self.floor + 1:
                self.floor = last
            else:
                self.settled.add(first, last)
            if self.settled:
                self.floor = self.settled.pop_from(self.floor + 1)

    def _wait(self, offset: int, at: float) -> None:
        self.waiting[offset] = at
        heapq.heappush(self._due, (at, offset))

    def _reset(self, floor: int) -> None:
        self.floor = floor
        self.settled = Ranges()
        self.leases, self.waiting, self.attempts, self.again = {}, {}, {}, set()
        self._deadlines, self._due = [], []
        self.clear_window()

    def _rebase(self, op: Anchored) -> None:
        """Carry monotonic times over from an earlier boot; its members are all gone."""
        old, self.anchor = self.anchor, op
        if old is None or old.boot == op.boot:
            return
        shift = op.mono - old.mono - (op.wall - old.wall)
        for offset in list(self.leases):
            self._wait(offset, 0.0)
        self.leases, self._deadlines = {}, []
        self.waiting = {o: at + shift if at else 0.0 for o, at in self.waiting.items()}
        self._due = [(at, offset) for offset, at in self.waiting.items()]
        heapq.heapify(self._due)

    def dump(self) -> dict[str, Any]:
        """The lasting state, to be read back by ``load``."""
        return {
            "committed": self.floor,
            "settled": list(self.settled),
            "leases": list(self.leases.values()),
            "waiting": list(self.waiting.items()),
            "attempts": list(self.attempts.items()),
            "again": sorted(self.again),
            "paused": self.paused,
            "era": self.era,
            "options": self.options,
            "anchor": self.anchor,
        }


class Saved(msgspec.Struct, frozen=True):
    """The shape of what ``dump`` gives."""

    committed: int
    options: GroupOptions
    settled: list[tuple[int, int]] = []
    leases: list[Lease] = []
    waiting: list[tuple[int, float]] = []
    attempts: list[tuple[int, int]] = []
    again: list[int] = []
    paused: bool = False
    era: int = 0
    anchor: Anchored | None = None


def load(saved: Saved) -> Group:
    group = Group(saved.options, saved.committed, era=saved.era)
    group.settled = Ranges(saved.settled)
    group.attempts = dict(saved.attempts)
    group.again = set(saved.again)
    group.paused = saved.paused
    group.anchor = saved.anchor
    for lease in saved.leases:
        group.leases[lease.offset] = lease
        group._expect(lease.until, [(lease.offset, lease.offset)])
    for offset, at in saved.waiting:
        group._wait(offset, at)
    return group
