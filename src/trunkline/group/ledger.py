"""The facts of one group on one partition: a pure fold over the group's journal.

``apply`` is the only writer, for the verbs of this process and for the journal lines of every
other member alike. The ledger holds facts and no index. The schedule derives which record may be
leased next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from trunkline.group.changes import (
    Anchored,
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
    Spans,
)
from trunkline.options import GroupOptions
from trunkline.ranges import Ranges


class Lease(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One member holds one record. A seek, and a removal of the group, begin another ``era``: a
    lease of an earlier era settles nothing.
    """

    offset: int
    attempt: int
    until: float
    by: str
    era: int = 0


class Saved(msgspec.Struct, frozen=True):
    """The snapshot of a ledger. ``scheduled``, ``next_due`` and ``read_to`` are no facts of the
    ledger: they are what the writer had read of the log, for processes that do not read it.
    """

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
    suspects: list[int] = []
    filtered: int = 0
    scheduled: int = 0  # records that were not due
    next_due: float | None = None  # when the first of them is due, in epoch seconds
    read_to: int = 0  # the log was read up to here
    dropped: list[tuple[int, int]] = []  # in the books of dead letters, those that were dropped


def each(spans: Spans) -> Iterator[int]:
    """Every offset of the spans."""
    for first, last in spans:
        yield from range(first, last + 1)


class Ledger:
    """Invariants: a leased offset has no ``waiting`` time; no offset is both settled and leased;
    the floor is below every range of ``settled``; a ``redriven`` offset counts as unsettled, also
    below the floor. A suspect was in hand when its process ended: it may have ended the process.
    """

    __slots__ = (
        "anchor",
        "attempts",
        "dropped",
        "era",
        "filtered",
        "floor",
        "leases",
        "options",
        "paused",
        "redriven",
        "settled",
        "suspects",
        "waiting",
    )

    def __init__(self, saved: Saved | None = None, *, era: int = 0) -> None:
        self.options: GroupOptions | None = saved.options if saved else None  # None: not created
        self.floor = saved.committed if saved else 0
        self.settled = Ranges(saved.settled if saved else ())
        self.leases = {lease.offset: lease for lease in saved.leases} if saved else {}
        self.waiting = dict(saved.waiting if saved else ())  # offset: monotonic time of its retry
        self.attempts = dict(saved.attempts if saved else ())
        self.redriven = set(saved.again if saved else ())
        self.suspects = set(saved.suspects if saved else ())
        self.paused = saved.paused if saved else False
        self.era = saved.era if saved else era
        self.anchor = saved.anchor if saved else None
        self.dropped = Ranges(saved.dropped if saved else ())
        self.filtered = saved.filtered if saved else 0  # records that the filter refused

    def is_settled(self, offset: int) -> bool:
        return (offset <= self.floor or offset in self.settled) and offset not in self.redriven

    def unsettled(self, next_offset: int, first: int = 1) -> int:
        """How many offsets in ``[first, next_offset)`` are not settled."""
        floor = max(self.floor, first - 1)
        above = max(0, next_offset - 1 - floor - self.settled.count(floor))
        return above + sum(offset >= first for offset in self.redriven)

    def apply(self, change: Change) -> None:
        """Take in one change. No other code writes a fact."""
        match change:
            case Leased():
                attempts, leases, waiting = self.attempts, self.leases, self.waiting
                by, until, era = change.by, change.until, self.era
                for first, last in change.offsets:
                    for offset in range(first, last + 1):
                        attempts[offset] = attempt = attempts.get(offset, 0) + 1
                        leases[offset] = Lease(offset, attempt, until, by, era)
                        if waiting:
                            waiting.pop(offset, None)
                for offset in each(change.held):  # not delivered: no attempt is counted
                    leases[offset] = Lease(offset, attempts.get(offset, 0), until, by, era)
                    waiting.pop(offset, None)
            case Settled():
                for first, last in change.offsets:
                    self._settle(first, last)
                    if change.dropped:
                        self.dropped.add(first, last)
                    if change.filtered:
                        self.filtered += last - first + 1
            case Failed():
                for offset, at in change.again:
                    self.leases.pop(offset, None)
                    self.waiting[offset] = at
                    if change.crashed:
                        self.suspects.add(offset)
                    elif self.suspects:  # its process survived it
                        self.suspects.discard(offset)
            case Returned():
                for offset in each(change.offsets):
                    self.leases.pop(offset, None)
                    left = self.attempts.pop(offset, 1) - 1
                    if left:
                        self.attempts[offset] = left
            case Extended():
                for offset in each(change.offsets):
                    old = self.leases.get(offset)
                    if old is not None:
                        until, attempt = change.until, self.attempts.get(offset, 0)
                        self.leases[offset] = Lease(offset, attempt, until, old.by, self.era)
            case Freed():
                gone = change.by
                self.suspects.update(o for o, lease in self.leases.items() if lease.by == gone)
                self.leases = {o: lease for o, lease in self.leases.items() if lease.by != gone}
            case _:
                self._apply_rare(change)

    def _apply_rare(self, change: Change) -> None:
        match change:
            case Created():
                self.options, self.era = change.options, change.era
                self._reset(change.floor)
            case Sought():
                self.era += 1
                self._reset(change.floor)
            case Redriven():
                for offset in each(change.offsets):
                    self.redriven.add(offset)
                    self.attempts.pop(offset, None)
                    self.suspects.discard(offset)
            case Paused():
                self.paused = change.on
            case Edited():
                self.options = change.options
            case Anchored():
                self._rebase(change)

    def _settle(self, first: int, last: int) -> None:
        leases, attempts, waiting = self.leases, self.attempts, self.waiting
        redriven, suspects = self.redriven, self.suspects
        touched: Iterable[int] = range(first, last + 1)
        if last - first > len(leases) + len(attempts) + len(redriven):
            known = {*leases, *attempts, *waiting, *redriven}  # few of a long range were begun
            touched = [offset for offset in known if first <= offset <= last]
        for offset in touched:
            leases.pop(offset, None)
            attempts.pop(offset, None)
            if waiting:
                waiting.pop(offset, None)
            if redriven:
                redriven.discard(offset)
            if suspects:
                suspects.discard(offset)
        if last > self.floor:
            if first <= self.floor + 1:
                self.floor = last
            else:
                self.settled.add(first, last)
            if self.settled:
                self.floor = self.settled.pop_from(self.floor + 1)

    def _reset(self, floor: int) -> None:
        self.floor, self.settled, self.dropped = floor, Ranges(), Ranges()
        self.leases, self.waiting, self.attempts = {}, {}, {}
        self.redriven, self.suspects = set(), set()

    def _rebase(self, anchor: Anchored) -> None:
        """Carry monotonic times over from an earlier boot. The members of that boot are gone."""
        old, self.anchor = self.anchor, anchor
        if old is not None and old.boot != anchor.boot:
            shift = anchor.mono - old.mono - (anchor.wall - old.wall)
            self.suspects |= self.leases.keys()
            self.leases = {}
            self.waiting = {o: at + shift if at else 0.0 for o, at in self.waiting.items()}

    def dump(self) -> dict[str, Any]:
        """The fields of ``Saved``."""
        more: dict[str, Any] = {"suspects": sorted(self.suspects)} if self.suspects else {}
        if self.dropped:
            more["dropped"] = list(self.dropped)
        if self.filtered:
            more["filtered"] = self.filtered
        return {
            "committed": self.floor,
            "settled": list(self.settled),
            "leases": list(self.leases.values()),
            "waiting": list(self.waiting.items()),
            "attempts": list(self.attempts.items()),
            "again": sorted(self.redriven),
            "paused": self.paused,
            "era": self.era,
            "options": self.options or GroupOptions(),
            "anchor": self.anchor,
            **more,
        }
