"""Which record this process may lease next.

The schedule is derived from the ledger and from the records that were read so far. It is never
shared: each process has its own and can derive it anew from the log.

A record that is not due has no item here, only 16 bytes in an agenda. So records that are not due
never fill the window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from heapq import heappop, heappush

import msgspec

from trunkline.group.agenda import Agenda
from trunkline.group.changes import (
    Anchored,
    Change,
    Created,
    Edited,
    Extended,
    Failed,
    Freed,
    Leased,
    Redriven,
    Returned,
    Settled,
    Sought,
)
from trunkline.group.ledger import Ledger, each
from trunkline.options import GroupOptions

_NEVER = float("inf")
_DUE = 1024  # records that came due and are not read yet, at most
_WINDOWS = 16  # windows of records QUEUED behind a key that waits, at most
_DEFAULT = GroupOptions()


class Standing(Enum):
    """Where a record stands that this process has read and that is due."""

    QUEUED = "queued"  # behind another record of its lane
    READY = "ready"  # any consumer may lease it
    RESERVED = "reserved"  # next of a lane that a consumer here holds: for that consumer alone
    LEASED = "leased"
    WAITING = "waiting"  # failed, until its retry; its lane waits with it


# A member of an enum is slow to look up, and these are looked up for every record.
QUEUED, READY, RESERVED, LEASED, WAITING = Standing


class Lane:
    """Records that are handled one after the other. All leases of a lane have one holder."""

    __slots__ = ("alone", "holder", "leased", "line", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.line: deque[int] = deque()  # not leased: begun records first, then by offset
        self.leased = 0
        self.holder = 0  # the number of a consumer here; 0: another member, or nobody
        self.alone = False  # the leased record was begun before: no other is leased beside it

    def place(self, offset: int, begun: dict[int, int]) -> None:
        """Insert an offset where it belongs in the line."""
        line, place = self.line, (offset not in begun, offset)
        if not line or place > (line[-1] not in begun, line[-1]):
            line.append(offset)
            return
        at = 0
        while place > (line[at] not in begun, line[at]):
            at += 1
        line.insert(at, offset)


class Item(msgspec.Struct, gc=False):
    """A record that was read, is due and is not settled."""

    offset: int
    key: str | None
    lane: Lane | None  # None: no other record has to wait for it
    rank: int
    expires: float
    entered: float
    standing: Standing = QUEUED


class Schedule:
    """Invariants: the ledger decides whether an offset is leased, waiting or settled; a lane has
    at most one READY or RESERVED record, the first of its line; READY only if none is leased.
    """

    __slots__ = (
        "_apart",
        "_deadlines",
        "_ready",
        "_reserved",
        "_shape",
        "_where",
        "items",
        "lanes",
        "ledger",
        "missing",
        "read_to",
        "retries",
        "scheduled",
        "strangers",
    )

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.reset()

    def reset(self) -> None:
        """Forget the records that were read: the log is read again from the floor."""
        ledger = self.ledger
        self.read_to = ledger.floor + 1
        self.items: dict[int, Item] = {}
        self.scheduled = Agenda()  # by wall time: not_before
        self.missing = set(ledger.redriven)  # due or redriven: to be read
        self.line_up()

    def line_up(self) -> None:
        """Derive everything but ``items`` and ``scheduled`` anew from the ledger."""
        ledger = self.ledger
        options = ledger.options or _DEFAULT
        self._shape, self._where = options.ordering, options.where
        self.lanes: dict[str, Lane] = {}
        self._ready: tuple[list[int], ...] = ([], [], [], [])
        self._reserved: dict[int, list[int]] = {}
        self._apart: list[int] = []  # READY suspects
        self.retries = Agenda()  # by monotonic time
        for offset, at in ledger.waiting.items():
            self.retries.add(at, offset)
        self._deadlines = sorted((x.until, x.offset, x.offset) for x in ledger.leases.values())
        # Records that a member began and that were not read here: their lanes are not known.
        self.strangers = (ledger.attempts.keys() | ledger.leases.keys()) - self.items.keys()
        for offset in sorted(self.items):
            item = self.items[offset]
            if ledger.is_settled(offset):
                del self.items[offset]
            else:
                item.lane = self._lane_of(item.key)
                self._place(item, offset in ledger.waiting)

    # -- which records to read -------------------------------------------------------------------

    def wants(self) -> int:
        """How many more records to read. Where no record can be leased before another one ends,
        the window is larger.
        """
        options = self.ledger.options or _DEFAULT
        left = options.lookahead - len(self.items)
        if left > 0 or self.available():
            return left
        return left + (_WINDOWS - 1) * options.lookahead

    @property
    def has_suspects(self) -> bool:
        """Whether a suspect may be ready."""
        return bool(self._apart)

    def available(self) -> int:
        """About how many lanes and single records can be leased from now, without suspects."""
        found = 0
        for heap in self._ready:
            found += len(heap)
        if self._reserved:
            found += sum(map(len, self._reserved.values()))
        return found

    def wanted(self) -> list[int]:
        """Records to read out of turn, in the order in which to offer them."""
        if not (self.missing or self.strangers):
            return []
        late = bool(self.missing)
        strangers = [o for o in self.strangers if late or o < self.read_to]
        return [*sorted(strangers), *sorted(self.missing - self.strangers)]

    def next_gap(self) -> int:
        """Where to read on: behind a settled range. A redriven record in it is ``missing``."""
        settled = self.ledger.settled
        return settled.end_of(self.read_to) + 1 if settled else self.read_to

    def offer(
        self,
        offset: int,
        key: str | None,
        rank: int,
        due: float,
        expires: float,
        now: float,
        wall: float,
    ) -> None:
        """Take in a record, in the log's order or as one of ``wanted``."""
        ledger = self.ledger
        if offset == self.read_to:
            self.read_to = offset + 1
        if self.strangers:
            self.strangers.discard(offset)
        is_behind = offset <= ledger.floor or offset in ledger.settled
        if offset in self.items or (is_behind and ledger.is_settled(offset)):
            self.missing.discard(offset)
            return
        begun = ledger.attempts
        if due > wall and offset not in begun and offset not in ledger.redriven:
            self.missing.discard(offset)
            self.scheduled.add(due, offset)
            return
        lane = None if key is None and self._shape != "partition" else self._lane_of(key)
        if (
            self.strangers
            and lane is not None
            and offset not in begun
            and (due or offset in self.missing)
        ):
            # It comes late, and another member may be at a record of its lane behind it: first
            # read the records that were begun.
            self.missing.add(offset)
            if not lane.line and not lane.leased:
                del self.lanes[lane.name]
            return
        if self.missing:
            self.missing.discard(offset)
        item = Item(offset, key, lane, rank, expires, now)
        waits = bool(ledger.waiting) and ledger.waiting.get(offset, 0.0) > now
        self.items[offset] = item
        if lane is None and not waits and offset not in ledger.leases:  # most often
            self._make_ready(item)
        else:
            self._place(item, waits)

    def come_due(self, now: float, wall: float) -> None:
        """Let records go on whose time has come."""
        if self.scheduled.first <= wall:
            for offset in self.scheduled.pop_due(wall, _DUE - len(self.missing)):
                if offset not in self.items and not self.ledger.is_settled(offset):
                    self.missing.add(offset)
        if self.retries.first <= now:
            for offset in self.retries.pop_due(now, max(1, _DUE - len(self.missing))):
                if self.ledger.waiting.get(offset, _NEVER) <= now:
                    item = self.items.get(offset)
                    if item is None:
                        self.missing.add(offset)
                    elif item.standing is WAITING:
                        item.standing = QUEUED
                        if item.lane is not None:
                            self._advance(item.lane)
                        else:
                            self._make_ready(item)

    def next_due(self, now: float, wall: float) -> float:
        """In how many seconds a lease ends or a record is due; infinity: never."""
        deadline = self._deadlines[0][0] - now if self._deadlines else _NEVER
        return max(0.0, min(deadline, self.retries.first - now, self.scheduled.first - wall))

    def expired(self, now: float) -> Iterator[int]:
        """Offsets whose lease has run out."""
        while self._deadlines and self._deadlines[0][0] <= now:
            until, first, last = heappop(self._deadlines)
            for offset in range(first, last + 1):
                lease = self.ledger.leases.get(offset)
                if lease is not None and lease.until == until:
                    yield offset

    # -- picking ---------------------------------------------------------------------------------

    def pick(
        self,
        consumer: int,
        now: float,
        limit: int,
        run: int,
        hungry: int,
        spare: int,
        in_order: bool,
        suspects: int | None = None,
    ) -> list[Item]:
        """Lend up to ``limit`` records to a consumer: at most ``run`` records of one lane at a
        time, and a record that was begun before alone. The first ``hungry`` records have no other
        of their lane before them; at most ``spare`` records have. ``in_order``: by offset, whole
        lanes. At most ``suspects`` suspects, which come first.
        """
        found: list[Item] = []
        if self.strangers and any(offset < self.read_to for offset in self.strangers):
            return found  # another member began it: its lane must be known first
        begun = self.ledger.attempts
        own = self._reserved.setdefault(consumer, [])
        none: list[int] = []
        full: list[int] = []
        is_open = bool(self._apart) and (in_order or suspects is None)
        if self._apart and not is_open:
            self._pick_suspects(consumer, min(limit, suspects or 0), found)
        elif not (own or self._apart):
            self._pick_single(limit, found)
        while len(found) < limit:
            is_hungry = len(found) < hungry and not in_order
            item = self._first(consumer, none if is_hungry else own, now, in_order, is_open)
            if item is None:
                if is_hungry and own:
                    hungry = 0
                    continue
                break
            lane = item.lane
            if lane is None:
                item.standing = LEASED
                found.append(item)
                continue
            alone = item.offset in begun and not in_order
            if item.standing is RESERVED and not in_order:
                if spare <= 0 or lane.leased >= run or lane.alone or alone:
                    full.append(item.offset)
                    continue
                spare -= 1
            lane.line.popleft()
            item.standing = LEASED
            lane.leased, lane.holder, lane.alone = lane.leased + 1, consumer, alone
            found.append(item)
            if lane.line:
                if run > 1 and spare > 0 and not (alone or in_order or is_hungry):
                    most = min(limit, len(found) + spare)
                    before = len(found)
                    self._follow_lane(lane, item.rank, found, most, run)
                    spare -= len(found) - before
                self._advance(lane)
        for offset in full:
            heappush(own, offset)
        if not own:
            self._reserved.pop(consumer, None)
        return found

    def _pick_single(self, limit: int, found: list[Item]) -> None:
        """Lend records that have no lane, as long as all that are ready have one priority."""
        heaps = [heap for heap in self._ready if heap]
        if len(heaps) != 1:
            return
        heap, items = heaps[0], self.items
        while heap and len(found) < limit:
            item = items.get(heap[0])
            if item is not None and item.standing is READY:
                if item.lane is not None:
                    return
                item.standing = LEASED
                found.append(item)
            heappop(heap)

    def _pick_suspects(self, consumer: int, most: int, found: list[Item]) -> None:
        while self._apart and len(found) < most:
            item = self.items.get(heappop(self._apart))
            if item is not None and item.standing is READY:
                item.standing = LEASED
                found.append(item)
                lane = item.lane
                if lane is not None:
                    lane.line.popleft()
                    lane.leased, lane.holder, lane.alone = lane.leased + 1, consumer, True
                    self._advance(lane)

    def _follow_lane(self, lane: Lane, rank: int, found: list[Item], most: int, run: int) -> None:
        """Lend the records behind a lane's first one in the same pick: no heap sees them."""
        line, items, begun = lane.line, self.items, self.ledger.attempts
        while line and lane.leased < run and len(found) < most:
            item = items.get(line[0])
            if item is not None:
                if item.rank != rank or item.offset in begun:
                    return
                item.standing = LEASED
                lane.leased += 1
                found.append(item)
            line.popleft()

    def _first(
        self, consumer: int, own: list[int], now: float, in_order: bool, is_open: bool
    ) -> Item | None:
        """The record of the highest priority: a record that waits gains a step in ``aging_s``."""
        items = self.items
        best: Item | None = None
        best_heap = own
        best_place = (0.0, 0)
        for heap in (*self._ready, self._apart, own) if is_open else (*self._ready, own):
            while heap:
                item = items.get(heap[0])
                if item is not None:
                    if heap is not own:
                        if item.standing is READY:
                            break
                    elif item.standing is RESERVED and item.lane.holder == consumer:  # type: ignore[union-attr]
                        break
                heappop(heap)
            else:
                continue
            if best is None:
                best, best_heap = item, heap
                continue
            options = self.ledger.options or _DEFAULT
            aging = options.aging_s
            if best_place == (0.0, 0):
                score = 0.0 if in_order else best.rank - (now - best.entered) / aging
                best_place = (score, best.offset)
            score = 0.0 if in_order else item.rank - (now - item.entered) / aging
            if (score, item.offset) < best_place:
                best, best_heap, best_place = item, heap, (score, item.offset)
        if best is not None:
            heappop(best_heap)
        return best

    def _lend(self, item: Item, alone: bool) -> None:
        """Another member has leased a record."""
        item.standing = LEASED
        lane = item.lane
        if lane is not None:
            if item.offset in lane.line:
                lane.line.remove(item.offset)
            lane.leased, lane.holder, lane.alone = lane.leased + 1, 0, alone
            self._advance(lane)

    # -- lanes -----------------------------------------------------------------------------------

    def _lane_of(self, key: str | None) -> Lane | None:
        ordering = self._shape
        if ordering == "none" or (key is None and ordering == "key"):
            return None
        name = key if key is not None and ordering == "key" else ""
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = Lane(name)
        return lane

    def _place(self, item: Item, waits: bool) -> None:
        """Give a record that is not settled the standing that the ledger says."""
        offset, ledger = item.offset, self.ledger
        if offset in ledger.leases:
            self._lend(item, ledger.attempts.get(offset, 1) > 1)
            return
        lane = item.lane
        if lane is not None:
            item.standing = WAITING if waits else QUEUED
            lane.place(offset, ledger.attempts)
            if lane.line[0] == offset:
                self._advance(lane)
        elif waits:
            item.standing = WAITING
            if not self._may_wait():
                del self.items[offset]
        else:
            self._make_ready(item)

    def _make_ready(self, item: Item) -> None:
        item.standing = READY
        suspects = self.ledger.suspects
        is_apart = suspects and item.offset in suspects
        heappush(self._apart if is_apart else self._ready[item.rank], item.offset)

    def _may_wait(self) -> bool:
        """Whether a failed record without a lane may keep its item. With many of them only the
        time stays, in ``retries``, and the record is read again when it is due.
        """
        options = self.ledger.options or _DEFAULT
        return 4 * len(self.retries) <= options.lookahead

    def _advance(self, lane: Lane) -> None:
        """Let the first of a lane's line be READY, or RESERVED for a holder that is here."""
        line, items = lane.line, self.items
        while line and line[0] not in items:  # settled meanwhile
            line.popleft()
        if not line:
            if not lane.leased:
                self.lanes.pop(lane.name, None)
            return
        if len(line) > 1:
            second = items.get(line[1])
            if second is not None and second.standing in (READY, RESERVED):
                second.standing = QUEUED  # a record was placed before it
        first = items[line[0]]
        wished = READY
        if lane.leased:
            wished = RESERVED if lane.holder else QUEUED
        if first.standing is WAITING or first.standing is wished:
            return
        first.standing = wished
        if wished is READY:
            self._make_ready(first)
        elif wished is RESERVED:
            heappush(self._reserved.setdefault(lane.holder, []), first.offset)

    # -- what happened ---------------------------------------------------------------------------

    def follow(self, change: Change) -> None:
        """Let standings follow a change that the ledger has applied."""
        match change:
            case Leased():
                attempts = self.ledger.attempts
                for offset in each((*change.offsets, *change.held)):
                    item = self.items.get(offset)
                    if item is None:
                        self.strangers.add(offset)
                    elif item.standing is not LEASED:
                        self._lend(item, attempts.get(offset, 1) > 1)
                self.expect(change.until, (*change.offsets, *change.held))
            case Settled():
                self._drop(change)
            case Failed():
                for offset, at in change.again:
                    self.retries.add(at, offset)
                self._end_leases([offset for offset, _ in change.again])
            case Returned():
                self._end_leases(each(change.offsets))
            case Extended():
                self.expect(change.until, change.offsets)
            case Freed():
                leases = self.ledger.leases
                held = [x.offset for x in self.items.values() if x.standing is LEASED]
                self._end_leases([offset for offset in held if offset not in leases])
            case Redriven():
                self.missing |= {o for o in each(change.offsets) if o not in self.items}
            case Created() | Sought():
                self.reset()
            case Edited():
                if change.options.where != self._where:
                    self.reset()  # records that were refused are settled; others are read anew
                elif change.options.ordering != self._shape:
                    self.line_up()
            case Anchored():
                self.line_up()

    def expect(self, until: float, spans: Iterable[tuple[int, int]]) -> None:
        """Note when leases run out. A lease that ended in time leaves its note behind."""
        for first, last in spans:
            heappush(self._deadlines, (until, first, last))
        if len(self._deadlines) > 4 * len(self.ledger.leases) + 4096:
            leases = self.ledger.leases.values()
            self._deadlines = sorted((x.until, x.offset, x.offset) for x in leases)

    def _end_leases(self, offsets: Iterable[int]) -> None:
        """Let records that are leased no more stand where the ledger says. The last comes first:
        each record then becomes the first of its line.
        """
        for offset in sorted(offsets, reverse=True):
            item = self.items.get(offset)
            if item is not None and item.standing is LEASED:
                lane = item.lane
                if lane is not None:
                    self._release(lane)
                self._place(item, offset in self.ledger.waiting)
                if lane is not None and not lane.leased:
                    self._advance(lane)

    def _release(self, lane: Lane) -> None:
        lane.leased -= 1
        if not lane.leased:
            lane.alone, lane.holder = False, 0

    def _drop(self, change: Settled) -> None:
        items, strangers, missing = self.items, self.strangers, self.missing
        for first, last in change.offsets:
            touched: Iterable[int] = range(first, last + 1)
            if last - first > len(items) + len(strangers) + len(missing):
                known = (*items, *strangers, *missing)
                touched = [offset for offset in known if first <= offset <= last]
                if self.scheduled and first < self.read_to:
                    self.scheduled.keep(lambda offset: not self.ledger.is_settled(offset))
            for offset in touched:
                if strangers:
                    strangers.discard(offset)
                if missing:
                    missing.discard(offset)
                item = items.pop(offset, None)
                if item is None:
                    if offset < self.read_to:
                        self.scheduled.discard(offset)
                    continue
                lane = item.lane
                if lane is None:
                    continue
                if item.standing is not LEASED:
                    self._advance(lane)
                    continue
                lane.leased -= 1
                if not lane.leased:
                    lane.alone, lane.holder = False, 0
                    if lane.line:
                        self._advance(lane)
                    else:
                        self.lanes.pop(lane.name, None)
