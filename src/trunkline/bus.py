"""The second plug: what an application holds.

A stream of deliveries is the primitive; handlers are sugar over it. Every bus, whatever is behind
it, has these three methods and means the same by them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, Self

from trunkline.errors import check_delay
from trunkline.event import Event, Receipt, Record
from trunkline.group import Lease
from trunkline.options import GroupOptions

Start = str | int | datetime
"""Where a new group begins: ``earliest``, ``latest``, an offset, or a time."""


class Outcome(Enum):
    ACK = "ack"
    NACK = "nack"
    TERM = "term"


Settle = Callable[["Delivery", Outcome, float | None, str], None]


class Delivery:
    """A record in a consumer's hands, until it is settled or its ack timeout runs out.

    The first of ``ack``, ``nack`` and ``term`` wins; each tells whether it was the one.
    """

    __slots__ = ("_extend", "_settle", "attempt", "group", "lease", "outcome", "record")

    def __init__(
        self,
        record: Record,
        lease: Lease,
        group: str,
        settle: Settle,
        extend: Callable[[Delivery], None],
    ) -> None:
        self.record = record
        self.lease = lease
        self.attempt = lease.attempt
        self.group = group
        self.outcome: Outcome | None = None
        self._settle = settle
        self._extend = extend

    @property
    def event(self) -> Event:
        return self.record.event

    @property
    def topic(self) -> str:
        return self.record.event.topic

    @property
    def partition(self) -> int:
        return self.record.partition

    @property
    def offset(self) -> int:
        return self.record.offset

    async def ack(self) -> bool:
        """It is done: this group never gets it again."""
        return self.finish(Outcome.ACK)

    async def nack(self, delay_s: float | None = None, reason: str = "") -> bool:
        """Deliver it again, after ``delay_s`` or the group's backoff. When no try is left it
        becomes a dead letter.
        """
        return self.finish(Outcome.NACK, delay_s, reason)

    async def term(self, reason: str = "rejected") -> bool:
        """Never deliver it to this group again: it becomes a dead letter now."""
        return self.finish(Outcome.TERM, None, reason)

    async def in_progress(self) -> None:
        """Begin the ack timeout anew."""
        self.extend()

    def extend(self) -> None:
        """``in_progress`` without the await."""
        if self.outcome is None:
            self._extend(self)

    def finish(self, outcome: Outcome, delay_s: float | None = None, reason: str = "") -> bool:
        """``ack``, ``nack`` and ``term`` without the await."""
        if self.outcome is not None:
            return False
        if delay_s is not None:
            check_delay(delay_s)
        self.outcome = outcome
        self._settle(self, outcome, delay_s, reason)
        return True

    def __repr__(self) -> str:
        place = f"{self.topic}/{self.partition}@{self.offset}"
        return f"<Delivery {place} attempt {self.attempt} of {self.group}>"


class Subscription(Protocol):
    """Enter it to begin, iterate over it, leave it to stop. What was delivered and not settled by
    then is delivered again, to this group's other members or to the next one.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Delivery: ...


class Bus(Protocol):
    """What every bus can do; see the module."""

    async def publish(self, topic: str | Event, payload: Any = None, **fields: Any) -> Receipt:
        """Returns once the event is durable. ``fields`` are those of ``Event``."""

    def subscribe(
        self,
        topic: str,
        *,
        group: str,
        start: Start = "earliest",
        policy: GroupOptions | None = None,
        max_inflight: int = ...,
        where: str | Callable[[Event], bool] | None = None,
    ) -> Subscription:
        """A stream of what ``topic``, which may be a pattern, holds for ``group``.

        ``start`` and ``policy`` count when the group is new; a group that exists keeps its own,
        and another policy is a ``Conflict``. Members of a group share its records.
        """

    async def close(self) -> None:
        """Settle what is under way, within limits, and let go. Idempotent."""
