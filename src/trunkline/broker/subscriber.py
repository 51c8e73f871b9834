"""One SUBSCRIBE: a subscription of the bus, turned into MESSAGE frames within its window."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable
from random import uniform
from typing import Any, Literal, Protocol

import msgspec

from trunkline.access import Principal
from trunkline.broker.hub import Hub
from trunkline.broker.sent import Sent
from trunkline.bus import Delivery, Outcome, Start
from trunkline.bus.subscription import LocalSubscription
from trunkline.clock import Handle
from trunkline.delivery.suspects import SuspectSlot
from trunkline.delivery.wakes import LATE_S, LATE_TURNS
from trunkline.errors import InvalidFilter, InvalidOption, TrunklineError
from trunkline.event import Event, Record
from trunkline.filters.where import compile_where
from trunkline.names import SYSTEM_PREFIX, is_pattern
from trunkline.options import GroupOptions, make
from trunkline.wire.cloudevents import to_cloudevent
from trunkline.wire.envelope import envelope_of, headers_of, time_of
from trunkline.wire.frames import From, Message, Revoked, Subscribe, Wanted, dump

logger = logging.getLogger(__name__)

_FRAMES_A_TURN = 64

# How much the bus may lease beyond what the client has: a client that stalls costs no more.
_AHEAD_BYTES = 64 * 1024
_AHEAD_RECORDS = 16  # as long as their size is not known
_LIGHT_BYTES = 1024
_LINGER_S = 0.005
_PROBE_S = 1.0  # before a lease runs out a silent client is asked whether it is alive
_EARLY_S = 0.01  # of the ack timeout, before it runs out
_WIDE = 64  # a window that a few acks which come late do not fill


class Owner(Protocol):
    """The session, as one of its subscribers sees it."""

    hub: Hub
    who: Principal
    batch: bool
    cloudevents: bool
    credits: int | None
    held: dict[tuple[str, int, str], dict[int, Held]]
    writable: asyncio.Event
    slot: SuspectSlot
    heard_at: float  # when the client said something last

    @property
    def taken(self) -> int: ...

    @property
    def label(self) -> str: ...

    def put(self, data: bytes) -> None: ...

    def flush(self) -> None: ...

    def refill(self) -> None: ...

    def forget(self, one: Held) -> None: ...

    def ended(self, subscriber: Subscriber, error: TrunklineError) -> None: ...

    def evict(self, why: str) -> None: ...

    def probe(self) -> None: ...


class Held(msgspec.Struct, eq=False, gc=False):
    """A delivery in a client's hands."""

    delivery: Delivery
    subscriber: Subscriber
    until: float
    since: float
    number: int = 0

    @property
    def place(self) -> tuple[str, int]:
        return (self.delivery.topic, self.delivery.partition)

    @property
    def offset(self) -> int:
        return self.delivery.offset

    @property
    def lane(self) -> tuple[object, str] | None:
        return self.delivery.lane


class Subscriber:
    def __init__(self, session: Owner, frame: Subscribe) -> None:
        self.frame = frame
        self.upto = frame.ack == "upto"
        self._session = session
        self._hub = session.hub
        self._window = min(
            frame.max_inflight or self._hub.options.max_inflight,
            self._hub.options.max_inflight_limit,
        )
        self._sent = Sent(self._window)
        self._is_muted = False  # the client lets frames time out and says nothing
        self._whole = frame.form == "event"
        self._held: set[Held] = set()
        self._unsent: list[Delivery] = []
        self._late: deque[Held] = deque()
        self._own_credits = frame.credits
        self._ahead = _AHEAD_RECORDS
        self._timeout_s = 0.0
        self._timer: Handle | None = None
        self._task: asyncio.Task[None] | None = None
        self._match = _filter(frame.where, frame.filter)
        self.subscription: LocalSubscription

    async def start(self) -> None:
        frame = self.frame
        self.subscription = self._hub.bus.subscribe(
            frame.topic,
            group=frame.group,
            start=start_of(frame.start),
            policy=None if frame.policy is None else make(GroupOptions, frame.policy),
            on_conflict=frame.on_conflict,
            max_inflight=self._window,
            where=frame.where if frame.filter is None else self._match,
        )
        self.subscription.default = self._hub.policy
        self.subscription.client = self._session.label
        if self.upto:
            self.subscription.hand_out_in_order()
        elif frame.runs:
            self.subscription.hand_out_runs()
        self.subscription.inbox.revoked = self._revoke
        self.subscription.inbox.marks = False  # its client has the records, not this process
        self.subscription.inbox.slot = self._session.slot
        await self.subscription.__aenter__()
        if frame.batch:
            self._session.batch = True
        self.refill()

    async def linger_s(self) -> float | None:
        """How long the acks of records without a key may wait for each other."""
        if self._window < _WIDE or is_pattern(self.frame.topic):
            return None
        store = self._hub.bus.store
        for key in list(self.subscription.partitions):
            if await store.update(key, lambda group: group.options.ordering) == "partition":
                return None
        return _LINGER_S

    def begin(self) -> None:
        if self.frame.sticky:
            self._hub.sticky.join((self.frame.topic, self.frame.group), self)
        self._task = asyncio.get_running_loop().create_task(self._deliver())

    def stop(self) -> None:
        """Send nothing more; frames in the client's hands may still be settled."""
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self.subscription.resize(0)

    async def close(
        self,
        unread: Iterable[tuple[str, int, int]] = (),
        *,
        counts: bool = True,
        crashed: bool = False,
    ) -> None:
        """Frames that the client has not looked at do not count as a try: those that it names as
        ``unread``, those that it cannot have begun, and all of them where the broker ends the
        connection (``counts`` is off). ``crashed``: the client went without a word.
        """
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        places, begun = set(unread), self._sent.begun() if counts else set[int]()
        back = [
            one.delivery
            for one in self._held
            if one.number not in begun or (*one.place, one.offset) in places
        ]
        self.subscription.put_back(back + self._unsent)
        for one in (*self._held, *self._late):
            self._session.forget(one)
        self._held.clear()
        if self.frame.sticky:
            self._hub.sticky.leave((self.frame.topic, self.frame.group), self)
        await (self.subscription.abandon() if crashed else self.subscription.close())

    # -- what the client says ----------------------------------------------------------------------

    def acked(self, one: Held) -> list[Held]:
        """What an ACK of this frame settles."""
        found = self._sent.upto(one) if self.upto else [one]
        self._sent.speak(one)
        return found  # type: ignore[return-value]

    def heard_of(self, one: Held) -> None:
        """The client spoke of this frame alone."""
        self._sent.speak(one)

    def close_frame(self, one: Held) -> None:
        """The client acked this frame alone."""
        self._held.discard(one)
        self._sent.close(one)

    def uncover(self, topic: str, partition: int, offset: int) -> Delivery | None:
        """The delivery of a record that only the ACK of another one settled."""
        found = self._sent.uncover((topic, partition), offset)
        return None if found is None else found.delivery  # type: ignore[attr-defined]

    def heard(self) -> None:
        """The client said something: it is alive."""
        if self._is_muted:
            self._is_muted = False
            self.refill()

    # -- the window ------------------------------------------------------------------------------

    def credits(self) -> int | None:
        """How many records may be sent, as far as the client has said."""
        shared, own = self._session.credits, self._own_credits
        if shared is None or own is None:
            return own if shared is None else shared
        return min(shared, own)

    def flow(self, credits: int, hands: int | None) -> None:
        """Credits of this subscription's own; 0 takes back what it has."""
        if hands is not None:
            self._sent.hands = max(self._sent.hands, hands)
        self._own_credits = (self._own_credits or 0) + credits if credits else 0
        self.refill()

    def refill(self) -> None:
        """Let the bus lease no more than may be sent: what is leased and kept here would age."""
        if self._is_muted:
            self.subscription.resize(0)
            return
        credits = self.credits()
        spare = self._sent.spare() if self.upto else 0
        room = min(self._window + spare, len(self._held) + self._ahead)
        if credits is not None:
            room = min(room, len(self._held) + credits)
            self.subscription.keep_unread(credits)
        self.subscription.resize(room)

    def let_go(self, one: Held) -> None:
        self._held.discard(one)
        self._sent.remove(one)

    def extend(self, one: Held) -> None:
        one.until = self._hub.clock.monotonic() + self._timeout_s
        one.delivery.extend()

    def _revoke(self, lost: Collection[Delivery]) -> None:
        """The group of these, which are of one partition, was sought or removed: a handler that has
        not begun them shall not read them. A client that says how far ahead it reads is told.
        """
        self._unsent = [delivery for delivery in self._unsent if delivery not in lost]
        held = [one for one in self._held if one.delivery in lost]
        for one in held:
            self.let_go(one)
            self._session.forget(one)
        if held and self.frame.credits is not None:
            topic, partition = held[0].delivery.topic, held[0].delivery.partition
            offset, *offsets = [one.delivery.offset for one in held]
            frame = Revoked(
                topic=topic,
                partition=partition,
                group=self.frame.group,
                offset=offset,
                offsets=offsets,
            )
            self._session.put(dump(frame))
            self._session.flush()
        self.refill()

    # -- out -------------------------------------------------------------------------------------

    async def _deliver(self) -> None:
        session, subscription = self._session, self.subscription
        try:
            async for delivery in subscription:
                limit = min(_FRAMES_A_TURN, self._ahead // 2)
                self._unsent = [delivery, *subscription.take(limit - 1)]
                await self._writable()
                count = self.credits()  # other subscriptions may have used them meanwhile
                if count is not None and count < len(self._unsent):
                    subscription.put_back(self._unsent[count:])
                batch, self._unsent = self._allowed(self._unsent[:count]), []
                if batch:
                    self._send(batch)
                (self if session.credits is None else session).refill()
                session.flush()
                if subscription.is_ready:
                    await asyncio.sleep(0)  # others have their turn, too
        except TrunklineError as error:
            session.ended(self, error)
        except Exception:  # whatever it is, nothing more will come, and the client is told
            logger.exception("deliveries of %s ended", self.frame.topic)
            session.ended(self, TrunklineError("internal error", code="internal"))

    def _allowed(self, batch: list[Delivery]) -> list[Delivery]:
        """The deliveries that the policy lets this client have. Any other becomes a dead letter:
        trying again would not make it allowed.
        """
        if not self._hub.reads_by_record:
            return batch
        may_read, who = self._hub.may_read, self._session.who
        found = []
        for delivery in batch:
            if may_read(who, delivery.record, delivery.group):
                found.append(delivery)
            else:
                delivery.finish(Outcome.TERM, None, "the policy does not allow it")
        return found

    async def _writable(self) -> None:
        """Wait until the client takes more."""
        session = self._session
        while not session.writable.is_set():
            patience_s = self._hub.options.stall_s * uniform(1.0, 1.2)  # not all at one moment
            taken = session.taken
            try:
                async with asyncio.timeout(patience_s):
                    await session.writable.wait()
            except TimeoutError:
                if session.taken > taken:
                    continue  # slow is not stalled
                session.evict(f"it took nothing for {self._hub.options.stall_s:g} s")
                await asyncio.Event().wait()  # until the session closes this

    def _send(self, batch: list[Delivery]) -> None:
        session = self._session
        now = self._hub.clock.monotonic()
        again = total = 0
        if session.credits is not None:
            session.credits -= len(batch)
        if self._own_credits is not None:
            self._own_credits -= len(batch)
        audit = self._hub.options.audit
        for delivery in batch:
            record, until = delivery.record, delivery.lease.until
            topic, offset = record.event.topic, record.offset
            place = (topic, record.partition, delivery.group)
            mine = session.held.get(place)
            if mine is None:
                mine = session.held[place] = {}
            stale = mine.get(offset)
            if stale is not None:
                stale.subscriber.let_go(stale)
                stale.delivery.finish(Outcome.NACK, 0.0, "delivered again")
            one = mine[offset] = Held(delivery, self, until, now)
            self._held.add(one)
            self._sent.add(one)
            if until - now > self._timeout_s:
                self._timeout_s = until - now
            data = self._encoded(delivery, now)
            total += len(data)
            session.put(data)
            if len(data) > _LIGHT_BYTES:  # it is kept until it is settled: keep its place alone
                delivery.record = _emptied(record)
            if delivery.attempt > 1:
                again += 1
                if audit and not topic.startswith(SYSTEM_PREFIX):
                    self._hub.system.audit(
                        "redelivery",
                        topic=topic,
                        offset=offset,
                        group=delivery.group,
                        attempt=delivery.attempt,
                    )
        self._hub.counts.sent(batch[0].topic, len(batch), again)
        self._ahead = max(4, min(512, _AHEAD_BYTES * len(batch) // total))
        if self._timer is None:
            self._arm(now)

    def _encoded(self, delivery: Delivery, now: float) -> bytes:
        record = delivery.record
        if self._session.cloudevents:
            event = to_cloudevent(record)
            event |= {"group": delivery.group, "attempt": delivery.attempt}
            return msgspec.json.encode(event)
        message = Message(
            topic=record.event.topic,
            partition=record.partition,
            group=delivery.group,
            offset=record.offset,
            attempt=delivery.attempt,
            sub=self.frame.sub,
            lease_s=int(1000 * (delivery.lease.until - now)) / 1000,
            lane=None if delivery.lane is None else self._lane(delivery),
            event=record.event if self._whole else None,
            envelope=None if self._whole else envelope_of(record, delivery.attempt),
        )
        return dump(message)

    def _lane(self, delivery: Delivery) -> Literal["key", "partition"] | None:
        """What a client that takes runs has to keep in order."""
        if delivery.lane is None or not self.frame.runs:
            return None
        return "key" if delivery.lane[1] else "partition"

    def _arm(self, now: float) -> None:
        """Ask a client that is silent whether it is alive, a little before a frame times out."""
        self._timer = None
        if self._held:
            first = min(one.until for one in self._held)
            early_s = min(_PROBE_S, self._timeout_s / 4)
            wait_s = max(0.001, first - early_s - now)
            self._timer = self._hub.clock.call_later(wait_s, self._probe)

    def _probe(self) -> None:
        now = self._hub.clock.monotonic()
        if not self._held:
            self._timer = None
            return
        first = min(self._held, key=_until)
        if self._session.heard_at < first.since:
            self._session.probe()
        wait_s = max(0.001, first.until - _EARLY_S * self._timeout_s - now)
        self._timer = self._hub.clock.call_later(wait_s, self._sweep)

    def _sweep(self, turns: int = LATE_TURNS) -> None:
        """Free the places of frames that time out. The group delivers them again; an ack that comes
        all the same is worth as much as before. A client that is not even alive gets no more, and
        frames that it cannot have begun go back uncounted.
        """
        now = self._hub.clock.monotonic()
        if turns and self._held and now - min(one.until for one in self._held) > LATE_S:
            # This process stood still: acks that wait in its sockets are read first.
            asyncio.get_running_loop().call_soon(self._sweep, turns - 1)
            return
        margin_s = 2 * _EARLY_S * self._timeout_s
        over = sorted((one for one in self._held if one.until - margin_s <= now), key=_until)
        if over and self._session.heard_at < min(one.since for one in over):
            self._mute()
        else:
            for one in over:
                self._time_out(one)
        self.refill()
        self._arm(now)

    def _time_out(self, one: Held) -> None:
        self.let_go(one)
        self._late.append(one)
        if len(self._late) > self._window:
            self._session.forget(self._late.popleft())

    def _mute(self) -> None:
        self._is_muted = True
        begun = self._sent.begun()
        back = []
        for one in sorted(self._held, key=_until):
            if one.number in begun:
                self._time_out(one)
            else:
                self.let_go(one)
                self._session.forget(one)
                back.append(one.delivery)
        self.subscription.put_back(back)
        self.subscription.keep_unread(0)
        logger.info(
            "%s is sent nothing more of %s: it lets records time out and says nothing",
            self._session.who.agent,
            self.frame.topic,
        )


def _until(one: Held) -> float:
    return one.until


def _emptied(record: Record) -> Record:
    event = record.event
    return Record(
        Event(id=event.id, ts=event.ts, topic=event.topic), record.partition, record.offset
    )


def start_of(start: From | None) -> Start:
    if start is None or start.kind in ("latest", "earliest"):
        return "latest" if start is None else start.kind
    if start.kind == "offset":
        offset = int(start.value or 0)
        if offset != (start.value or 0):
            raise InvalidOption(f"an offset is a whole number, not {start.value}", name="from")
        return offset
    if start.value is None:
        raise InvalidOption("from a timestamp needs a value", name="from")
    return time_of(start.value)


def _filter(where: str | None, wanted: Wanted | None) -> Callable[[Event], bool] | None:
    tests: list[Callable[[Event], Any]] = []
    if where is not None:
        tests.append(compile_where(where))
    if wanted is not None and wanted.key is not None:
        key = wanted.key
        tests.append(lambda event: event.key == key)
    if wanted is not None and wanted.header is not None:
        name, value = wanted.header
        if not name:
            raise InvalidFilter("a header has a name")
        tests.append(lambda event: headers_of(event).get(name) == value)
    if not tests:
        return None
    return tests[0] if len(tests) == 1 else lambda event: all(test(event) for test in tests)
