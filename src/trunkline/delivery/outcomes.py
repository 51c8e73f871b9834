"""The outcomes of deliveries that are not committed yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from trunkline.group import Group, Lease, backoff_s


class GivenUp(NamedTuple):
    """A record that needs a dead letter."""

    lease: Lease
    reason: str
    error: str


class Reported(NamedTuple):
    """``settled`` offsets, and records that need a dead letter."""

    settled: list[int]
    given_up: list[GivenUp]


class Outcomes:
    """``report`` tells the group, in a transaction. ``done`` forgets, after the commit: outcomes
    of a transaction that failed are reported again.
    """

    __slots__ = (
        "_draw",
        "_reported",
        "acks",
        "back",
        "longer",
        "lost",
        "nacks",
        "terms",
        "uncovered",
    )

    def __init__(self, draw: Callable[[], float]) -> None:
        self.acks: list[Lease] = []
        self.nacks: list[tuple[Lease, float | None, str]] = []
        self.terms: list[GivenUp] = []
        self.longer: list[Lease] = []
        self.back: list[Lease] = []  # no handler had them
        self.lost: list[Lease] = []  # their process or client ended without settling them
        self.uncovered: list[tuple[Lease, float | None, str, bool]] = []  # True: never again
        self._draw = draw
        self._reported = (0, 0, 0, 0, 0, 0, 0)

    def __bool__(self) -> bool:
        return bool(self.acks) or self._has_rest()

    def report(
        self, group: Group, now: float, unread: Callable[[Group, list[Lease]], list[Lease]]
    ) -> Reported:
        """Tell the group. ``unread`` gives those of some leases that no handler has."""
        acks, rest = self.acks, self._has_rest()
        settled = group.ack(acks) if acks else []
        given_up: list[GivenUp] = []
        if rest:  # most often there are acks alone
            given_up = [one for one in self.terms if group.hold(one.lease, now=now)]
            given_up += [
                GivenUp(lease, "retries", reason)
                for lease, delay_s, reason in self.nacks
                if self._fail(group, lease, now, delay_s)
            ]
            given_up += [
                GivenUp(lease, "retries", "its process or client ended without settling it")
                for lease in self.lost
                if group.fail(lease, now=now, delay_s=0.0, crashed=True)
            ]
            group.give_back(self.back)
            for lease in self.longer:
                group.extend(lease, now=now)
            given_up += self._bring_back(group, now)
        self._reported = (
            len(acks),
            len(self.nacks),
            len(self.terms),
            len(self.longer),
            len(self.back),
            len(self.uncovered),
            len(self.lost),
        )
        if timed_out := group.expired(now):
            group.give_back(unread(group, timed_out))  # no handler had them: that was no try
            why = "not settled within the ack timeout"
            late = [x for x in timed_out if self._fail(group, x, now, None)]
            given_up += [GivenUp(lease, "retries", why) for lease in late]
        return Reported(settled, given_up)

    def _has_rest(self) -> bool:
        return bool(
            self.nacks or self.terms or self.longer or self.back or self.uncovered or self.lost
        )

    def _bring_back(self, group: Group, now: float) -> list[GivenUp]:
        """Fail records that the cumulative ack of another record had settled."""
        given_up: list[GivenUp] = []
        for covered, delay_s, reason, is_last in self.uncovered:
            lease = group.bring_back(covered, now=now)
            if lease is None:
                continue
            if is_last:
                given_up.append(GivenUp(lease, "rejected", reason))
            elif self._fail(group, lease, now, delay_s):
                given_up.append(GivenUp(lease, "retries", reason))
        return given_up

    def _fail(self, group: Group, lease: Lease, now: float, delay_s: float | None) -> bool | None:
        if delay_s is None:
            delay_s = backoff_s(group.options, lease.attempt, self._draw())
        return group.fail(lease, now=now, delay_s=delay_s)

    def done(self) -> list[Lease]:
        """The transaction was committed. Returns the leases that a reader ended by a failure."""
        failed: list[Lease] = []
        acks, nacks, terms, longer, back, uncovered, lost = self._reported
        del self.acks[:acks]
        del self.uncovered[:uncovered], self.lost[:lost]
        if nacks or terms or longer or back:
            failed = [one[0] for one in (*self.nacks[:nacks], *self.terms[:terms])]
            del self.nacks[:nacks], self.terms[:terms], self.longer[:longer], self.back[:back]
        self._reported = (0, 0, 0, 0, 0, 0, 0)
        return failed
