"""What a bus behind a broker hands out: streams of deliveries, and the desk of dead letters."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from itertools import chain
from random import random
from time import monotonic
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from trunkline.bus import Delivery, Outcome
from trunkline.buses.ahead import Ahead
from trunkline.buses.link import Link
from trunkline.clock import Clock
from trunkline.dead import MEANWHILE, Letter, Redrive, check_choice, check_open
from trunkline.errors import Closed, InvalidFilter, NotFound, TrunklineError
from trunkline.event import Event, Record
from trunkline.filters import Filter, to_filter
from trunkline.frames import Credit, Extend, Message, Nack, Revoked, Subscribe, Unsubscribe, dump
from trunkline.group import Lease
from trunkline.options import BusOptions, Flow


class Home(Protocol):
    """The bus, as a stream of it sees it."""

    link: Link
    clock: Clock
    options: BusOptions
    streams: dict[str, RemoteSubscription]

    @property
    def is_closed(self) -> bool: ...


class RemoteSubscription:
    def __init__(self, bus: Home, frame: Subscribe, match: Callable[[Event], bool] | None) -> None:
        self.frame = frame
        self._bus = bus
        self._match = match
        self._ahead = Ahead(frame.max_inflight or Flow().max_inflight)
        self._linger_s: float | None = None
        self._granted = 0  # credits that the broker has left
        self._queue: deque[tuple[Delivery, float]] = deque()  # with the time it came
        self._open: set[Delivery] = set()
        self._arrived = asyncio.Event()
        self._error: BaseException | None = None
        self._later: asyncio.TimerHandle | None = None
        self._draining = False
        self._entered = False
        self._closed = False

    async def __aenter__(self) -> Self:
        if self._bus.is_closed:
            raise Closed("the bus is closed")
        if self._entered or self._closed:
            raise Closed("a subscription is entered once")
        self._entered = True
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
            self._closed = True
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
        while True:
            if self._closed or self._draining:
                raise StopAsyncIteration
            if self._queue:
                return self._next()
            if self._error is not None:
                raise self._error
            if not self._entered:
                raise Closed("enter the subscription first", hint="async with bus.subscribe(...)")
            await self._ahead.wait(self._arrived, self._grant)

    def _subscribe(self, corr: int) -> bytes:
        self._granted = max(0, self._ahead.room() - len(self._queue))
        return dump(msgspec.structs.replace(self.frame, corr=corr, credits=self._granted))

    def _next(self) -> Delivery:
        delivery, came = self._queue.popleft()
        if self._ahead.took(came, len(self._queue)):
            delivery.extend()
        self._grant()
        return delivery

    def _grant(self) -> None:
        """Let more come as soon as half of what may lie here has been read."""
        wanted = self._ahead.room() - len(self._queue) - self._granted
        if wanted > 0 and 2 * wanted >= self._ahead.limit:
            self._granted += wanted
            self._bus.link.tell(Credit(credits=wanted, sub=self.frame.sub))

    def drain(self) -> None:
        """Hand out nothing more: what is buffered goes back, the iteration ends."""
        if not self._draining:
            self._draining = True
            self._arrived.set()
            self._bus.link.tell(Credit(credits=0, sub=self.frame.sub))

    async def close(self) -> None:
        if self._closed:
            return
        self._draining = True
        self._arrived.set()
        if self._entered and self._bus.link.is_up and self._error is None:
            with contextlib.suppress(TrunklineError, TimeoutError):
                async with asyncio.timeout(self._bus.options.drain_timeout_s or 1.0):
                    await self._leave()
        self._closed = True
        self._give_up()
        self._bus.streams.pop(str(self.frame.sub), None)

    async def _leave(self) -> None:
        """First let nothing more come, then give back what came and was not looked at."""
        link, frame = self._bus.link, self.frame
        corr = link.next_corr()
        await link.ask(corr, dump(Credit(corr=corr, credits=0, sub=frame.sub)))
        unread = [(d.topic, d.partition, d.offset) for d, _ in self._queue]
        self._give_up()
        corr = link.next_corr()
        left = Unsubscribe(
            corr=corr, topic=frame.topic, group=frame.group, sub=frame.sub, unread=unread or None
        )
        link.flush()
        await link.ask(corr, dump(left))

    def _give_up(self) -> None:
        """What is in hand is no longer this subscriber's."""
        self._queue.clear()
        for delivery in self._open:
            delivery.outcome = Outcome.NACK
        self._open.clear()

    async def aclose(self) -> None:
        await self.close()

    # -- as the bus sees it ------------------------------------------------------------------------

    def put(self, message: Message, event: Event) -> None:
        if self._closed:
            return
        self._granted = max(0, self._granted - 1)
        attempt = message.attempt if isinstance(message.attempt, int) else 1
        record = Record(event, message.partition, message.offset)
        lease = Lease(message.offset, attempt, float("inf"), "remote")
        delivery = Delivery(record, lease, message.group, self._settle, self._extend)
        self._open.add(delivery)
        if self._match is not None:
            try:
                wanted = bool(self._match(event))
            except Exception as error:  # noqa: BLE001 -- a filter may fail in any way
                text = f"the filter failed on event {event.id}: {error!r}"
                self.fail(InvalidFilter(text))
                return
            if not wanted:
                delivery.finish(Outcome.ACK)
                if not self._draining:
                    self._grant()
                return
        self._queue.append((delivery, monotonic()))
        self._arrived.set()

    def revoke(self, frame: Revoked) -> None:
        """What lies unread is not delivered, and what is in hand settles nothing: at its offset
        there may be another record by now.
        """
        place, offsets = (frame.topic, frame.partition), {frame.offset, *(frame.offsets or ())}
        if frame.group != self.frame.group:
            return
        lost = {d for d in self._open if (d.topic, d.partition) == place and d.offset in offsets}
        for delivery in lost:
            delivery.outcome = Outcome.NACK
        self._open -= lost
        self._queue = deque(waiting for waiting in self._queue if waiting[0] not in lost)
        if not self._draining:
            self._grant()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._arrived.set()

    def interrupt(self) -> None:
        """The connection is lost: the broker has given what was in hand to others."""
        self._give_up()
        if self._later is not None:
            self._later.cancel()

    def resume(self) -> None:
        """There is a new connection: ask for the same again."""
        if self._draining or self._error is not None or self._asked is not None:
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

    def _settle(
        self, delivery: Delivery, outcome: Outcome, delay_s: float | None, reason: str
    ) -> None:
        self._open.discard(delivery)
        place = (delivery.topic, delivery.partition, delivery.group)
        if outcome is Outcome.ACK:
            is_waited_for = delivery.record.event.key is not None
            self._bus.link.ack(place, delivery.offset, None if is_waited_for else self._linger_s)
            return
        self._bus.link.tell(
            Nack(
                topic=delivery.topic,
                partition=delivery.partition,
                group=delivery.group,
                offset=delivery.offset,
                delay_s=delay_s,
                reason=reason[:1000] or None,
                dead=outcome is Outcome.TERM,
            )
        )

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
