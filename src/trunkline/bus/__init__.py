"""The second plug: what an application holds.

``Bus`` names every call of every bus: local, behind a broker, or on a cluster. The base of all of
them is a stream of deliveries (``subscribe``). Handlers (``on``) are built on that stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from datetime import datetime, timedelta
from enum import Enum
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NotRequired,
    Protocol,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
)

import msgspec

from trunkline.check import check_delay
from trunkline.clock import Clock
from trunkline.delivery.deadletters import Letter, Redrive
from trunkline.event import Bounds, Event, EventFields, P, Receipt, Record
from trunkline.features import Features
from trunkline.group import Lease
from trunkline.group.members import MemberInfo
from trunkline.options import GroupFields, GroupOptions, OnConflict, TopicFields, TopicOptions

if TYPE_CHECKING:
    import asyncio  # a command that looks does without

Start = str | int | datetime
"""Where a new group begins: ``earliest``, ``latest``, an offset, or a time."""

Where = str | Callable[[Event], bool] | None
"""Which events a subscription wants: a condition in SQL, or a function. ``None`` is all."""


class Outcome(Enum):
    ACK = "ack"
    NACK = "nack"
    TERM = "term"


Settle = Callable[["Delivery", Outcome, float | None, str], None]


class Delivery(Generic[P]):
    """A record in a consumer's hands, until it is settled or its ack timeout runs out.

    The first of ``ack``, ``nack`` and ``term`` wins; each tells whether it was the one. A handler
    that asks for ``Delivery[Order]`` gets an ``Order`` as its ``payload``.
    """

    __slots__ = ("_extend", "_settle", "attempt", "group", "lane", "lease", "outcome", "record")

    def __init__(
        self,
        record: Record,
        lease: Lease,
        group: str,
        settle: Settle,
        extend: Callable[[Delivery], None],
        lane: tuple[object, str] | None = None,
    ) -> None:
        self.record = record
        self.lease = lease
        self.attempt = lease.attempt
        self.group = group
        self.lane = lane  # the records of one lane are handled one after the other
        self.outcome: Outcome | None = None
        self._settle = settle
        self._extend = extend

    @property
    def event(self) -> Event[P]:
        return self.record.event

    @property
    def payload(self) -> P:
        return self.event.payload

    def with_event(self, event: Event[Any]) -> Delivery[Any]:
        """A delivery of another form of the event, such as one that was decrypted. It settles
        this one, which stays as it is: a dead letter is written from that.
        """

        def settle(_: Delivery, outcome: Outcome, delay_s: float | None, reason: str) -> None:
            self.finish(outcome, delay_s, reason)

        record = Record(event, self.partition, self.offset)
        return Delivery(record, self.lease, self.group, settle, lambda _: self.extend(), self.lane)

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


class DeliveryBatch:
    """Deliveries that were read together, in the order in which to handle them.

    ``ack`` finishes all of them that are not finished. A single delivery has its own verbs: finish
    those that failed first, then ``ack`` the batch.
    """

    __slots__ = ("_ack_all", "deliveries")

    def __init__(
        self, deliveries: list[Delivery], ack_all: Callable[[list[Delivery]], int]
    ) -> None:
        self._ack_all = ack_all
        self.deliveries = deliveries

    def __len__(self) -> int:
        return len(self.deliveries)

    def __iter__(self) -> Iterator[Delivery]:
        return iter(self.deliveries)

    def __getitem__(self, index: int) -> Delivery:
        return self.deliveries[index]

    @property
    def events(self) -> list[Event]:
        return [delivery.record.event for delivery in self.deliveries]

    async def ack(self) -> int:
        """Ack every delivery that is not finished; how many there were."""
        return self._ack_all(self.deliveries)

    async def nack(self, delay_s: float | None = None, reason: str = "") -> int:
        """Deliver every delivery again that is not finished; how many there were."""
        return sum(one.finish(Outcome.NACK, delay_s, reason) for one in self.deliveries)

    async def in_progress(self) -> None:
        """Begin the ack timeout of every delivery anew that is not finished."""
        for delivery in self.deliveries:
            delivery.extend()


class Subscription(Protocol):
    """Enter a subscription to begin, iterate over it, leave it to stop. A delivery that is not
    settled by then is delivered again, to another member of the group or to the next one.
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

    def batches(self, size: int, wait_s: float = 0.0) -> AsyncIterator[DeliveryBatch]:
        """Batches of at most ``size`` deliveries. A batch with fewer waits ``wait_s`` for more."""

    async def close(self) -> None:
        """Leave the subscription. Idempotent."""

    async def aclose(self) -> None:
        """``close``, under the name that ``contextlib.aclosing`` calls."""


Handler = Callable[[Any], Any] | Callable[[Any, Delivery[Any]], Any]
"""A function of the event, the payload or the delivery; or of one of the first two and the latter.
The annotation of its first argument decides which. It is plain or async.
"""

H = TypeVar("H", bound=Handler)
F = TypeVar("F", bound=Callable[[], Any] | Callable[[Any], Any])


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where a group stands on one partition."""

    topic: str
    partition: int
    group: str
    floor: int  # every offset up to this one is settled
    last_settled: int  # the highest settled offset
    lag: int  # records that are due and not settled
    leases: int  # records in consumers' hands
    waiting: int  # records that wait for their next try
    members: int  # living members: subscribed, or holding records
    paused: bool
    policy: GroupOptions
    scheduled: int = 0  # records that are not due, as far as the log was read
    next_due: float | None = None  # when the first of them is due, in epoch seconds
    filtered: int = 0  # records that the group's filter refused, since the group began


class HandlerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A handler that was registered with ``on``."""

    topic: str
    group: str
    name: str  # of the function
    workers: int
    policy: GroupOptions | None  # None: the group's own
    timeout_s: float | None = None
    types: tuple[str, ...] = ()  # of events that it handles; none: all, or those of no other route

    @property
    def place(self) -> tuple[str, str]:
        return self.topic, self.group


class Health(TypedDict):
    """What an operator wants to know at a glance."""

    ok: bool
    durability: NotRequired[str]
    events_storage_full: NotRequired[bool]
    free_bytes: NotRequired[int | None]  # on the device of the folder, where there is one
    groups: NotRequired[int]
    failed: NotRequired[list[str]]  # why handlers ended
    problem: NotRequired[str]  # why nothing can be written: the folder is gone, or read-only
    connected: NotRequired[bool]  # of a bus behind a broker


class DeadLetters(Protocol):
    """The dead letters of one topic."""

    topic: str

    def letters(self, *, group: str | None = None, closed: bool = False) -> AsyncIterator[Letter]:
        """The open letters in order; with ``closed`` those that were redriven or dropped too."""

    async def letter(self, offset: int) -> Letter:
        """The letter at an offset of the dead letter topic; ``NotFound`` if there is none."""

    def redrive(
        self,
        *,
        group: str | None = None,
        offsets: set[int] | None = None,
        where: Where = None,
        rate: float | None = None,
        dry_run: bool = False,
        max_redrives: int = 3,
    ) -> AsyncIterator[Redrive]:
        """Give each record back to the one group that gave it up, with all its tries.

        ``rate`` is letters per second. A record that was redriven ``max_redrives`` times is left
        alone. Iterate over the result: each step redrives one letter.
        """

    def drop(
        self,
        *,
        group: str | None = None,
        offsets: set[int] | None = None,
        where: Where = None,
        dry_run: bool = False,
    ) -> AsyncIterator[Letter]:
        """Close letters without giving their records back. Iterate over the result."""


class Bus(ABC):
    """What every bus can do; see the module. ``connect`` opens one."""

    clock: Clock

    @property
    @abstractmethod
    def features(self) -> Features:
        """What this bus promises."""

    # -- publishing ----------------------------------------------------------------------------

    @abstractmethod
    async def publish(
        self, topic: str | Event, payload: Any = None, **fields: Unpack[EventFields]
    ) -> Receipt:
        """Publish one event; returns once the event is durable.

        ``fields`` are those of ``Event``, and ``delay_s`` in the place of ``not_before``.
        """

    @abstractmethod
    async def publish_many(
        self, topic: str, payloads: Sequence[Any], **fields: Unpack[EventFields]
    ) -> list[Receipt]:
        """Publish payloads, or whole events, as one batch: all of them are kept or none. Where the
        topic has several partitions that holds for each partition's share.
        """

    @abstractmethod
    async def publish_again(self, topic: str, events: Sequence[Event]) -> list[Receipt]:
        """Publish events that may have been published before: each id is kept once. This reads the
        log from the time of the first event on.
        """

    @abstractmethod
    def fire(
        self, topic: str | Event, payload: Any = None, **fields: Unpack[EventFields]
    ) -> asyncio.Task[Receipt]:
        """Publish without waiting. Await the task, or ``flush``, before you rely on the event."""

    @abstractmethod
    async def flush(self) -> None:
        """Wait for every event that was fired; raises the first error since the last ``flush``."""

    @abstractmethod
    def use(self, *middleware: object) -> None:
        """Add middleware inside of those there are; see ``trunkline.middleware``."""

    # -- consuming -----------------------------------------------------------------------------

    @abstractmethod
    def subscribe(
        self,
        topic: str,
        *,
        group: str,
        start: Start = "earliest",
        policy: GroupOptions | None = None,
        on_conflict: OnConflict = "raise",
        max_inflight: int | None = None,
        where: Where = None,
    ) -> Subscription:
        """A stream of the records of ``topic``, which may be a pattern, for ``group``. The members
        of a group share its records.

        ``start`` and ``policy`` count when the group is new. A group that exists keeps its place.
        If it has another policy, ``on_conflict`` decides: ``raise`` a ``Conflict``, ``update`` the
        group to this policy for every member, or ``keep`` the group's own. The last two are logged.
        """

    @abstractmethod
    def on(
        self,
        topic: str,
        *,
        group: str,
        workers: int = 1,
        start: Start = "earliest",
        policy: GroupOptions | None = None,
        on_conflict: OnConflict = "raise",
        max_inflight: int | None = None,
        where: Where = None,
        type: str | Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> Callable[[H], H]:
        """Make a function the handler of a group, ``workers`` calls at a time. A handler begins
        with ``start``; a handler that is added later begins at once. A call that takes longer than
        ``timeout_s`` fails as if it had raised ``TimeoutError``; without it a handler may take as
        long as it likes. The other arguments are those of ``subscribe``.

        With ``type`` several functions handle one group, each the events of its types. One without
        a type gets the rest. If there is none, the group's filter is those types: what no function
        handles is settled, and ``GroupInfo.filtered`` counts it.
        """

    @abstractmethod
    def every(
        self,
        period: str | float | timedelta,
        *,
        name: str | None = None,
        missed: Literal["skip", "all"] = "skip",
        tz: str = "UTC",
        policy: GroupOptions | None = None,
        on_conflict: OnConflict = "raise",
        timeout_s: float | None = None,
    ) -> Callable[[F], F]:
        """Call a function every ``period``: ``"5m"``, seconds, or a cron expression in the zone
        ``tz``. Whatever number of processes run it, each period fires once, in one of them.

        The function takes nothing, or a ``Tick``, or what a handler takes. Periods in which no
        process ran are skipped, or fired late with ``missed="all"``. ``name`` is the function's
        unless given: the firings are events of the topic ``schedule.<name>``.
        """

    @abstractmethod
    def handlers(self) -> list[HandlerInfo]:
        """The handlers that were registered here, in their order."""

    @abstractmethod
    async def ready(self) -> None:
        """Wait until the handlers that were started have begun; raises why one cannot."""

    @abstractmethod
    async def start(self) -> None:
        """Let the handlers begin. Entering the bus does it."""

    @abstractmethod
    async def stop(self, timeout_s: float | None = None) -> None:
        """Let handlers finish their deliveries, for at most ``timeout_s``, and end them."""

    @abstractmethod
    async def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until every group that has handlers here has settled every record that is due; False
        if that took longer than ``timeout_s``. Records that are scheduled for later are not waited
        for: ``groups`` counts them.
        """

    @abstractmethod
    async def run(self) -> None:
        """Handle events until cancelled, or ended by SIGINT or SIGTERM. Handlers may finish their
        deliveries; a second signal does not wait for them. A bus that was not entered is closed
        then.
        """

    # -- topics and records --------------------------------------------------------------------

    @abstractmethod
    async def topics(self) -> dict[str, TopicOptions]:
        """Every topic there is, with its options."""

    @abstractmethod
    async def define(self, topic: str, **options: Unpack[TopicFields]) -> None:
        """Set a topic's options; see ``TopicOptions``."""

    @abstractmethod
    async def remove(self, topic: str) -> None:
        """Remove a topic, its records and its groups for good; ``NotFound`` if there is none."""

    @abstractmethod
    async def trim(self, topic: str, before: int, *, partition: int = 0) -> Bounds:
        """Remove the records of a partition below an offset, settled or not."""

    @abstractmethod
    async def bounds(self, topic: str, partition: int = 0) -> Bounds:
        """The first offset there is, and the next one to be given."""

    @abstractmethod
    async def read(
        self, topic: str, start: int | None = None, limit: int = 1000, *, partition: int = 0
    ) -> list[Record]:
        """Up to ``limit`` records of one partition, for no group, from ``start`` on or from the
        first there is.
        """

    # -- groups --------------------------------------------------------------------------------

    @abstractmethod
    async def groups(self, topic: str | None = None, group: str | None = None) -> list[GroupInfo]:
        """Where each group stands, by partition; of one topic or pattern, of one group."""

    @abstractmethod
    async def members(self, topic: str | None = None, group: str | None = None) -> list[MemberInfo]:
        """The members that are subscribed, idle ones too: process, host, since when, what is in
        flight, the last delivery. On NATS those of this process alone.
        """

    @abstractmethod
    async def lag(self, topic: str, group: str) -> int:
        """How many records of a topic or pattern are due and not settled by a group."""

    @abstractmethod
    async def seek(self, topic: str, group: str, to: Start) -> list[GroupInfo]:
        """Move a group: the record at ``to`` is its next one. An offset outside of the log is moved
        to its nearest end.
        """

    @abstractmethod
    async def pause(self, topic: str, group: str) -> list[GroupInfo]:
        """Deliver nothing to the members of a group until ``resume``."""

    @abstractmethod
    async def resume(self, topic: str, group: str) -> list[GroupInfo]:
        """Undo ``pause``."""

    @abstractmethod
    async def edit(self, topic: str, group: str, **policy: Unpack[GroupFields]) -> list[GroupInfo]:
        """Change a group's policy for every member; options that are not named stay."""

    @abstractmethod
    async def forget(self, topic: str, group: str) -> None:
        """Remove a group and its place; ``NotFound`` if there is no such group."""

    @abstractmethod
    async def policy_of(self, delivery: Delivery) -> GroupOptions:
        """The policy of a delivery's group as it is now."""

    @abstractmethod
    def dead_letters(self, topic: str) -> DeadLetters:
        """The dead letters of a topic."""

    # -- life ----------------------------------------------------------------------------------

    @abstractmethod
    async def health(self) -> Health:
        """What an operator wants to know at a glance."""

    @abstractmethod
    def at_stop(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` when the handlers are to end, before they are waited for."""

    @abstractmethod
    def at_close(self, end: Callable[[], Awaitable[None]]) -> None:
        """Call ``end`` when the bus closes, while it still takes events."""

    @abstractmethod
    async def close(self) -> None:
        """Finish the work at hand, within limits, and let go. Idempotent."""

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:  # nobody leaves what was not entered
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
