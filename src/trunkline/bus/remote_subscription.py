"""What a bus behind a broker hands out: streams of deliveries, and the desk of dead letters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from itertools import chain
from random import random
from time import monotonic
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from trunkline.bus import Delivery, Outcome
from trunkline.bus.link import Link
from trunkline.clock import Clock
from trunkline.delivery.batches import DeliveryBatch, batches
from trunkline.delivery.deadletters import MEANWHILE, Letter, Redrive, check_choice, check_open
from trunkline.delivery.inbox import ACK, CLOSED, NEW, OPEN, DeliveryInbox
from trunkline.errors import Closed, InvalidFilter, NotFound, TrunklineError
from trunkline.event import Event, Record
from trunkline.filters import Filter, to_filter
from trunkline.group import Lease
from trunkline.options import BusOptions, Flow
from trunkline.wire.frames import (
    Credit,
    Extend,
    Message,
    Nack,
    Revoked,
    Subscribe,
    Unsubscribe,
    dump,
)

_REASON_CHARS = 3000  # an error and the end of its traceback


class Home(Protocol):
    """The bus, as a stream of it sees it."""

    link: Link
    clock: Clock
    options: BusOptions
    streams: dict[str, RemoteSubscription]
    heard_at: float  # by its clock: when the message came whose frames are taken in now

    @property
    def is_closed(self) -> bool: ...


class RemoteSubscription:
    in_hand = None  # the broker counts the tries: it sees the connection end

    def __init__(self, bus: Home, frame: Subscribe, match: Callable[[Event], bool] | None) -> None:
        self.frame = frame
        self._bus = bus
        self._match = match
        self.inbox = DeliveryInbox(
            frame.max_inflight or Flow().max_inflight, self._grant, self.settle
        )
        self._linger_s: float | None = None
        self._granted = 0  # credits that the broker has left
        self._hands = 0  # as the broker knows
        # Answers to failures by lane. What comes of the lane before one was sent before it too.
        self._failing: dict[tuple[object, str], asyncio.Future[Any]] = {}
        self._later: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        if self._bus.is_closed:
            raise Closed("the bus is closed")
        if self.inbox.life is not NEW:
            raise Closed("a subscription is entered once")
        self.inbox.life = OPEN
        link = self._bus.link
        corr = link.next_corr()
        asked = link.ask(corr, self._subscribe(corr), repeat=True)
        # From here on it may get deliveries: they can come in one message with the answer.
        self._bus.streams[str(self.frame.sub)] = self
        self._asked: asyncio.Future[Any] | None = asked
        try:
            self._linger_s = (await asked).linger_s
        except BaseException:
            self._bus.streams.pop(str(self.frame.sub), None)
            self.inbox.drain()
            self.inbox.life = CLOSED
            raise
        finally:
            self._asked = None
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        inbox = self.inbox
        if inbox.life is NEW:
            raise Closed("enter the subscription first", hint="async with bus.subscribe(...)")
        while True:
            if inbox.life is OPEN and inbox.is_ready:
                delivery = inbox.pop()
            elif (found := await inbox.next()) is not None:
                delivery = found
            else:
                raise StopAsyncIteration
            if delivery.lease.until > self._bus.clock.monotonic():
                return delivery
            self._drop_late(delivery)

    def _drop_late(self, delivery: Delivery) -> None:
        """This process was stopped: the record is another member's by now."""
        lane = delivery.lane
        late = [d for d in self.inbox.open if d is delivery or (lane and d.lane == lane)]
        self.inbox.lose(late)
        for one in late:
            one.outcome = Outcome.NACK

    async def batches(self, size: int, wait_s: float = 0.0) -> AsyncIterator[DeliveryBatch]:
        """Batches of at most ``size`` deliveries. A batch with fewer waits ``wait_s`` for more."""
        async for batch in batches(self.inbox, size, wait_s):
            now = self._bus.clock.monotonic()
            for delivery in batch.deliveries:
                if delivery.outcome is None and delivery.lease.until <= now:
                    self._drop_late(delivery)
            kept = [one for one in batch.deliveries if one.outcome is None]
            if kept:
                batch.deliveries = kept
                yield batch

    def _subscribe(self, corr: int) -> bytes:
        self._granted = max(0, self.inbox.wants())
        return dump(msgspec.structs.replace(self.frame, corr=corr, credits=self._granted))

    def _grant(self) -> None:
        """Let more come as soon as half of the deliveries that may be unread were read."""
        inbox = self.inbox
        wanted = inbox.wants() - self._granted
        if wanted > 0 and 2 * wanted >= inbox.ahead and inbox.life is OPEN:
            self._granted += wanted
            hands = inbox.hands()
            more, self._hands = hands > self._hands, max(hands, self._hands)
            told = hands if more else None
            self._bus.link.tell(Credit(credits=wanted, sub=self.frame.sub, hands=told))

    def drain(self) -> None:
        """Hand out nothing more: what is buffered goes back, the iteration ends."""
        if self.inbox.life in (NEW, OPEN):
            self.inbox.drain()
            self._bus.link.tell(Credit(credits=0, sub=self.frame.sub))

    async def close(self) -> None:
        inbox, entered = self.inbox, self.inbox.life is not NEW
        if inbox.life is CLOSED:
            return
        inbox.drain()
        if entered and self._bus.link.is_up and inbox.error is None:
            with contextlib.suppress(TrunklineError, TimeoutError):
                async with asyncio.timeout(self._bus.options.drain_timeout_s or 1.0):
                    await self._leave()
        inbox.life = CLOSED
        inbox.clear()
        self._bus.streams.pop(str(self.frame.sub), None)

    async def _leave(self) -> None:
        """First let nothing more come, then give back what came and was not looked at."""
        link, frame = self._bus.link, self.frame
        corr = link.next_corr()
        await link.ask(corr, dump(Credit(corr=corr, credits=0, sub=frame.sub)))
        unread = [(d.topic, d.partition, d.offset) for d in self.inbox.unread()]
        self.inbox.clear()
        corr = link.next_corr()
        left = Unsubscribe(
            corr=corr, topic=frame.topic, group=frame.group, sub=frame.sub, unread=unread or None
        )
        link.flush()
        await link.ask(corr, dump(left))

    async def aclose(self) -> None:
        await self.close()

    # -- as the bus sees it ------------------------------------------------------------------------

    def put(self, message: Message, event: Event) -> None:
        inbox = self.inbox
        if inbox.life is CLOSED:
            return
        if self._granted:
            self._granted -= 1
        lane: tuple[object, str] | None = None
        if message.lane is not None:
            key = event.key if message.lane == "key" else None
            lane = ((message.topic, message.partition), key or "")
            failing = self._failing.get(lane)
            if failing is not None and not failing.done():
                self._grant()  # the broker takes it back, and sends it after the one that failed
                return
        attempt = message.attempt if isinstance(message.attempt, int) else 1
        record = Record(event, message.partition, message.offset)
        lease_s = float("inf") if message.lease_s is None else message.lease_s
        until = self._bus.heard_at + lease_s
        lease = Lease(message.offset, attempt, until, "remote")
        delivery = Delivery(record, lease, message.group, inbox.settle, self._extend, lane)
        if self._match is not None:
            try:
                wanted = bool(self._match(event))
            except Exception as error:  # noqa: BLE001 -- a filter may fail in any way
                inbox.open[delivery] = self
                self.fail(InvalidFilter(f"the filter failed on event {event.id}: {error!r}"))
                return
            if not wanted:
                inbox.open[delivery] = self
                delivery.finish(Outcome.ACK)
                self._grant()
                return
        inbox.put(self, delivery, monotonic())

    def revoke(self, frame: Revoked) -> None:
        """Unread deliveries are not read, and those in hand settle nothing: the offset may be
        another record now.
        """
        place, offsets = (frame.topic, frame.partition), {frame.offset, *(frame.offsets or ())}
        if frame.group != self.frame.group:
            return
        mine = list(self.inbox.open)
        lost = {d for d in mine if (d.topic, d.partition) == place and d.offset in offsets}
        for delivery in lost:
            delivery.outcome = Outcome.NACK
        self.inbox.lose(lost)

    def fail(self, error: BaseException) -> None:
        self.inbox.fail(error)

    def interrupt(self) -> None:
        """The connection is lost: the broker has given what was in hand to others."""
        self._failing.clear()
        self._hands = 0
        unread, _ = self.inbox.clear()
        for delivery, _ in unread:
            delivery.outcome = Outcome.NACK
        if self._later is not None:
            self._later.cancel()

    def resume(self) -> None:
        """There is a new connection: ask for the same again."""
        if self.inbox.life is not OPEN or self.inbox.error is not None or self._asked is not None:
            return
        link = self._bus.link
        corr = link.next_corr()
        link.ask(corr, self._subscribe(corr)).add_done_callback(self._resumed)

    def _resumed(self, asked: asyncio.Future[Any]) -> None:
        error = None if asked.cancelled() else asked.exception()
        if error is not None and self._bus.link.is_up:
            wait_s = getattr(error, "retry_s", None)
            if wait_s is None:
                self.fail(error)
            else:  # of many that come back at once, some are told to come later
                wait_s += random()
                self._later = asyncio.get_running_loop().call_later(wait_s, self.resume)
        elif error is None and not asked.cancelled():
            self._linger_s = asked.result().linger_s

    def settle(
        self, delivery: Delivery, outcome: Outcome, delay_s: float | None, reason: str
    ) -> None:
        """Send an outcome to the broker."""
        if outcome is ACK:
            record, lane = delivery.record, delivery.lane
            event = record.event
            keyed = event.key is not None
            is_waited_for = keyed if lane is None else not self.inbox.has_more(lane)
            place = (event.topic, record.partition, delivery.group)
            self._bus.link.ack(place, record.offset, None if is_waited_for else self._linger_s)
            if delivery.attempt > 1:  # if this process is killed now, the ack must not go with it
                self._bus.link.flush()
            return
        link, lane = self._bus.link, delivery.lane
        nack = Nack(
            topic=delivery.topic,
            partition=delivery.partition,
            group=delivery.group,
            offset=delivery.offset,
            delay_s=delay_s,
            reason=reason[:_REASON_CHARS] or None,
            dead=outcome is Outcome.TERM,
        )
        if lane is None or not link.is_up:
            link.tell(nack)
            return
        link.flush()  # the acks of the records before it in its lane
        corr = link.next_corr()
        asked = link.ask(corr, dump(msgspec.structs.replace(nack, corr=corr)))
        self._failing[lane] = asked
        asked.add_done_callback(lambda answer: self._failed(lane, answer))
        self._grant()  # those behind it in its lane are gone

    def _failed(self, lane: tuple[object, str], answer: asyncio.Future[Any]) -> None:
        """The broker knows of a failure: what comes of the lane from now on follows it."""
        if not answer.cancelled():
            answer.exception()  # the connection was lost: the broker gives the record back
        if self._failing.get(lane) is answer:
            del self._failing[lane]

    def settle_all(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self.settle(delivery, Outcome.ACK, None, "")
        # The next batch may be here, and its reader goes on at once. If that batch kills the
        # process, the acks must not go with it: records that are done would count as tries.
        self._bus.link.flush()

    def give_back(self, delivery: Delivery) -> None:
        """A delivery behind one that failed: the broker takes it back with that one."""
        delivery.outcome = Outcome.NACK

    def _extend(self, delivery: Delivery) -> None:
        self._bus.link.tell(
            Extend(
                topic=delivery.topic,
                partition=delivery.partition,
                group=delivery.group,
                offset=delivery.offset,
            )
        )


class RemoteDesk:
    """The dead letters of one topic, behind a broker."""

    def __init__(self, bus: Home, topic: str) -> None:
        self._bus = bus
        self.topic = topic.removesuffix(".DLQ")

    async def letters(
        self, *, group: str | None = None, closed: bool = False
    ) -> AsyncIterator[Letter]:
        async for page in self._pages(group=group, closed=closed):
            for letter in page:
                yield letter

    async def letter(self, offset: int) -> Letter:
        async for page in self._pages(closed=True, offsets=[offset]):
            return page[0]
        raise NotFound(f"there is no dead letter {offset} of {self.topic}", offset=offset)

    async def redrive(
        self,
        *,
        group: str | None = None,
        offsets: set[int] | None = None,
        where: str | Filter | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        max_redrives: int = 3,
    ) -> AsyncIterator[Redrive]:
        """Give each record back to the one group that gave it up: those of a page at once, or one
        after the other where there is a ``rate``.
        """
        check_choice(offsets, rate, max_redrives)
        pause_s = 0.0  # before the next one
        for page in await self._chosen(group, offsets, to_filter(where)):
            for part in [[letter] for letter in page] if rate else [page]:
                if pause_s:
                    await self._bus.clock.sleep(pause_s)
                found = await self._bus.link.call(
                    "redrive",
                    topic=self.topic,
                    offsets=[letter.offset for letter in part],
                    dry_run=dry_run,
                    max_redrives=max_redrives,
                )
                done = {one.letter.offset: one for one in msgspec.convert(found, list[Redrive])}
                given = not dry_run and any(not one.refused for one in done.values())
                pause_s = 1 / rate if rate and given else 0.0
                for letter in part:  # what it says nothing of is open no more
                    yield done.get(letter.offset) or Redrive(letter, MEANWHILE)

    async def drop(
        self,
        *,
        group: str | None = None,
        offsets: set[int] | None = None,
        where: str | Filter | None = None,
        dry_run: bool = False,
    ) -> AsyncIterator[Letter]:
        """Close letters without giving their records back."""
        check_choice(offsets)
        for page in await self._chosen(group, offsets, to_filter(where)):
            if not dry_run:
                places = [letter.offset for letter in page]
                found = await self._bus.link.call("drop", topic=self.topic, offsets=places)
                page = msgspec.convert(found, list[Letter])  # without what others closed meanwhile
            for letter in page:
                yield letter

    async def _pages(self, **args: Any) -> AsyncIterator[list[Letter]]:
        """The letters, as many at a time as the broker gives at once."""
        start = 0
        while True:
            found = await self._bus.link.call("letters", topic=self.topic, start=start, **args)
            if not found:
                return
            page = msgspec.convert(found, list[Letter])
            yield page
            start = page[-1].offset + 1

    async def _chosen(
        self,
        group: str | None,
        offsets: set[int] | None,
        wanted: Filter | None,
    ) -> list[list[Letter]]:
        """All of them, before any becomes another one."""
        places = None if offsets is None else sorted(offsets)
        found = [page async for page in self._pages(group=group, offsets=places)]
        check_open(self.topic, offsets, chain.from_iterable(found))
        pages = [[one for one in page if wanted is None or wanted(one.event)] for page in found]
        return [page for page in pages if page]
