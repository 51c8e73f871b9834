"""What one connection publishes: together what comes together, and in the order it came in."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from msgspec import UNSET

from trunkline.access import Action, Principal
from trunkline.batcher import Batcher
from trunkline.broker.hub import Hub
from trunkline.errors import Conflict, Invalid, InvalidEvent, TrunklineError
from trunkline.event import Event, Receipt
from trunkline.wire.envelope import event_of
from trunkline.wire.frames import Corr, Frame, Publish, Published, published


class Sender(Protocol):
    """The session, as its publisher sees it."""

    hub: Hub
    who: Principal
    batch: bool

    def require(self, action: Action, topic: str) -> None: ...

    def tell(self, frame: Frame) -> None: ...

    def fail(self, error: TrunklineError, corr: Corr | None = None, **fields: Any) -> None: ...

    def let_go_on(self) -> None: ...


class Turn:
    """A lock that is given in the order of the requests. A task that gave it away can have it back
    before the next one begins.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._back: deque[asyncio.Future[None]] = deque()  # tasks that had it, and want it back
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False

    async def take(self, *, first: bool = False) -> None:
        if self._is_taken or self._back or (self._waiting and not first):
            turn = self._loop.create_future()
            (self._back if first else self._waiting).append(turn)
            await turn
        self._is_taken = True

    def give(self) -> None:
        self._is_taken = False
        if self._waiting or self._back:
            self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        while (waiting := self._back or self._waiting) and not self._is_taken:
            turn = waiting.popleft()
            if not turn.done():  # else it was cancelled
                self._is_taken = True
                turn.set_result(None)


_beside = attrgetter("key", "headers", "payload", "payload_sha256")
_NOTHING = (None, None, UNSET, None)


def _refuse_beside(frame: Publish) -> None:
    """A whole event has these itself; what stands beside it must not look as if it had counted."""
    event = frame.event
    if _beside(frame) != _NOTHING or (
        event is not None and (frame.events is not None or frame.topic not in ("", event.topic))
    ):
        raise InvalidEvent("other members stand beside a whole event", field="event")


class _Singles(NamedTuple):
    """Events of one frame that are answered one by one."""

    topic: str
    again: bool
    events: list[Event]
    corrs: Sequence[Corr | None]


class Publisher:
    def __init__(self, session: Sender) -> None:
        self.underway = 0
        self._session = session
        self._hub = session.hub
        self._loop = asyncio.get_running_loop()
        self._waiting: Batcher[_Singles] = Batcher(self._begin)
        self._turn = Turn()
        self._is_over = False

    def drop(self) -> None:
        """Publish nothing that is not on its way yet."""
        self._is_over = True
        self.underway -= sum(len(singles.events) for singles in self._waiting.clear())

    def take(self, frame: Publish) -> None:
        events, corrs = frame.events, frame.corrs
        if corrs is not None and len(corrs) != (count := len(events or ())):
            raise InvalidEvent(f"{len(corrs)} corrs for {count} events", field="corrs")
        if (whole := frame.event) is not None or events is not None:
            _refuse_beside(frame)
        if events is None:
            event = whole or event_of(frame, self._hub.clock.now())
            self._take_singles(event.topic, [event], [frame.corr], frame.again)
        elif corrs is None:
            self._take_batch(frame, events)
        else:
            self._take_singles(frame.topic or events[0].topic, events, corrs, frame.again)

    def _take_singles(
        self, topic: str, events: list[Event], corrs: Sequence[Corr | None], again: bool
    ) -> None:
        """Each of them for itself, together with what else comes in this turn of the loop."""
        self._session.require("publish", topic)
        self._waiting.add(_Singles(topic, again, events, corrs))
        self.underway += len(events)

    def _take_batch(self, frame: Publish, events: list[Event]) -> None:
        if not events:
            raise InvalidEvent("a batch holds at least one event", field="events")
        topic = frame.topic or events[0].topic
        self._session.require("publish", topic)
        self._waiting.flush()  # what was said before this comes before it
        self.underway += len(events)
        self._hub.spawn(self._publish_batch(frame, topic, events))

    def _begin(self, waiting: list[_Singles], _size: int) -> None:
        """Publish the events of each topic together. A topic's repeated events end the batch of
        those before them, and the other way round: the order of a topic stays.
        """
        open_: dict[str, tuple[bool, list[Event], list[Corr | None]]] = {}
        for topic, again, events, corrs in waiting:
            if topic in open_ and open_[topic][0] != again:
                self._spawn(topic, *open_.pop(topic))
            batch = open_.setdefault(topic, (again, [], []))
            batch[1].extend(events)
            batch[2].extend(corrs)
        for topic, found in open_.items():
            self._spawn(topic, *found)

    def _spawn(
        self, topic: str, again: bool, events: list[Event], corrs: list[Corr | None]
    ) -> None:
        self._hub.spawn(self._publish_singles(topic, events, corrs, again))

    async def _publish_singles(
        self, topic: str, events: list[Event], corrs: list[Corr | None], again: bool
    ) -> None:
        """What came after them waits while they are sent again, or apart from each other."""
        turn, has_turn = self._turn, again
        await turn.take()
        if not has_turn:
            turn.give()
        try:
            if not await self._publish_together(topic, events, corrs, again):
                if not has_turn:
                    await turn.take(first=True)
                    has_turn = True
                await self._publish_apart(topic, events, corrs, again)
        finally:
            if has_turn:
                turn.give()
            self._end(len(events))

    async def _publish_together(
        self, topic: str, events: list[Event], corrs: list[Corr | None], again: bool
    ) -> bool:
        """Whether they are answered: not if one of several is bad, and none was kept."""
        if self._is_over:
            return True
        try:
            receipts = await self._hub.publish(self._session.who, topic, events, again=again)
        except TrunklineError as error:
            if isinstance(error, Invalid | Conflict) and len(events) > 1:
                return False
            for corr in corrs:
                self._session.fail(error, corr, topic=topic)
        else:
            self._answer(topic, receipts, corrs)
        return True

    async def _publish_apart(
        self, topic: str, events: list[Event], corrs: list[Corr | None], again: bool
    ) -> None:
        """One of them is bad: let the others not suffer from it, nor wait for each other."""
        for half in (slice(len(events) // 2), slice(len(events) // 2, None)):
            part = (topic, events[half], corrs[half], again)
            if not await self._publish_together(*part):
                await self._publish_apart(*part)

    def _answer(self, topic: str, receipts: list[Receipt], corrs: list[Corr | None]) -> None:
        tell = self._session.tell
        if self._session.batch and len(corrs) > 1 and None not in corrs:
            told = published(receipts, None, corrs)
            if told.receipts is None:
                tell(told)
                return
        for receipt, corr in zip(receipts, corrs, strict=True):
            tell(
                Published(
                    corr=corr,
                    topic=topic,
                    partition=receipt.partition,
                    offset=receipt.offset,
                    id=receipt.id,
                    duplicate=receipt.duplicate,
                    durability=receipt.durability,
                )
            )

    async def _publish_batch(self, frame: Publish, topic: str, events: list[Event]) -> None:
        again, turn = frame.again, self._turn
        await turn.take()
        if not again:
            turn.give()
        try:
            if not self._is_over:
                receipts = await self._hub.publish(self._session.who, topic, events, again=again)
                self._session.tell(published(receipts, frame.corr))
        except TrunklineError as error:
            self._session.fail(error, frame.corr, topic=topic)
        finally:
            if again:
                turn.give()
            self._end(len(events))

    def _end(self, count: int) -> None:
        self.underway -= count
        self._session.let_go_on()
