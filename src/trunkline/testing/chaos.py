"""What may happen to any handler in production, made to happen in a test.

A bus delivers at least once, in the order that its group asks for and no other. A handler that is
right under ``Chaos`` does not depend on more than that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal

import msgspec

from trunkline.bus import Delivery
from trunkline.bus.local import LocalBus
from trunkline.bus.subscription import LocalSubscription
from trunkline.delivery.inbox import DeliveryInbox, DeliverySource
from trunkline.errors import Retry
from trunkline.event import Event
from trunkline.group import Group
from trunkline.middleware import HandleNext, PublishNext
from trunkline.names import GroupKey

Point = Literal["append", "ack", "commit"]
Place = tuple[str, int, int, str]

_handling: ContextVar[Place | None] = ContextVar("handling", default=None)


class Chaos(msgspec.Struct, frozen=True):
    """What is to happen."""

    duplicate: bool = False  # each event is handled twice
    shuffle: int | None = None  # deliveries come in an order that this seed draws
    crash: Point | None = None  # the process dies there, once for each event


class SimulatedCrash(BaseException):
    """The process ends here. Not an ``Exception``: no handler survives its own death."""


class ChaosBus(LocalBus):
    """A bus that is not kind to its handlers. Handlers begin as soon as they are given."""

    def __init__(self, *args: Any, chaos: Chaos = Chaos(), **options: Any) -> None:
        super().__init__(*args, **options)
        self.chaos = chaos
        self._dice = random.Random(chaos.shuffle)
        self._floors: dict[GroupKey, int] = {}
        if chaos.crash in ("append", "ack"):
            self.use(_Crash(chaos.crash))
        if chaos.duplicate:
            self.use(_Duplicate())
        self._started = True

    def subscribe(self, topic: str, **options: Any) -> LocalSubscription:
        subscription = super().subscribe(topic, **options)
        if self.chaos.shuffle is None:
            return subscription
        subscription.inbox = _ShuffledInbox(subscription.inbox, self._dice)
        return subscription

    async def drain(self, timeout_s: float | None = None) -> bool:
        """As ever; but a crash before the commit takes back what groups settled since the last
        drain, and they handle it again.
        """
        done = await super().drain(timeout_s)
        if done and self.chaos.crash == "commit":
            for key in list(self._pumps):
                await self.store.update(key, _back_to(self._floors.get(key, 0)))
                self.store.bell.ring(key.topic)
            done = await super().drain(timeout_s)
            for key in list(self._pumps):
                self._floors[key] = await self.store.update(key, lambda group: group.floor)
        return done


def _back_to(floor: int) -> Callable[[Group], None]:
    def step(group: Group) -> None:
        if group.floor > floor:
            group.seek(floor)

    return step


class _ShuffledInbox(DeliveryInbox):
    """Hands out its deliveries in any order. The pump gives it only records that the group's
    ordering lets be handled at the same time, so any order of them is allowed.
    """

    __slots__ = ("_dice",)

    def __init__(self, plain: DeliveryInbox, dice: random.Random) -> None:
        super().__init__(plain.limit, plain._ask, plain.late)
        self.ahead = self.limit  # deliveries that are here together can change places
        self._dice = dice

    def put(self, source: DeliverySource, delivery: Delivery, now: float) -> None:
        super().put(source, delivery, now)
        if queue := self._queue:
            place = self._dice.randrange(len(queue))
            queue[place], queue[-1] = queue[-1], queue[place]


def _place(delivery: Delivery) -> Place:
    return delivery.topic, delivery.partition, delivery.offset, delivery.group


def _detached(delivery: Delivery, attempt: int) -> Delivery:
    """The same record in the hands of a process whose word does not count."""
    lease = msgspec.structs.replace(delivery.lease, attempt=attempt)
    return Delivery(delivery.record, lease, delivery.group, lambda *_: None, lambda _: None)


class _Duplicate:
    """Each event is handled a second time when the first went well."""

    async def handle(self, delivery: Delivery, call_next: HandleNext) -> Any:
        await call_next(_detached(delivery, delivery.attempt))
        return await call_next(delivery)


class _Crash:
    """Once for each event: what the handler did is done, but nobody got to know."""

    def __init__(self, point: Point) -> None:
        self._point = point
        self._crashed: set[Place] = set()

    async def handle(self, delivery: Delivery, call_next: HandleNext) -> Any:
        place = _place(delivery)
        if place in self._crashed:
            return await call_next(delivery)
        if self._point == "ack":
            await call_next(_detached(delivery, delivery.attempt))
            self._crashed.add(place)
            raise Retry(0.0, "the process died before its ack")
        token = _handling.set(place)
        try:
            return await call_next(delivery)
        except BaseException:
            if place in self._crashed:
                raise Retry(0.0, "the process died after it had published") from None
            raise
        finally:
            _handling.reset(token)

    async def publish(self, events: list[Event], call_next: PublishNext) -> Any:
        receipts = await call_next(events)
        place = _handling.get()
        if self._point == "append" and place is not None and place not in self._crashed:
            self._crashed.add(place)
            raise SimulatedCrash
        return receipts
