"""Questions and answers over any bus.

A question is an event whose header ``reply-to`` names a topic; the answer is an event there whose
``cause`` is the question's id; it has the space, subject, band and capabilities of the question.
Answers are ordinary durable events. A process that stopped waiting leaves nothing else behind, and
their topic forgets them by itself. The group of a process that was killed is removed by processes
that come later.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final, Self, TypeVar

from trunkline.bus import Bus, Delivery, GroupInfo
from trunkline.check import check_delay
from trunkline.delivery.worker import adapt
from trunkline.errors import Reject, TrunklineError
from trunkline.event import Event, new_id
from trunkline.names import check_topic

REPLY_TO: Final = "reply-to"
ERROR: Final = "error"
REPLIES: Final = "replies"
_KEPT_S: Final = 3600.0
_LEAVE_S: Final = 2.0
_PREFIX: Final = "replies-"
_OWN: Final = "[0-9a-f]{16}"  # what ``own_group`` adds

Opened = Callable[[Event], Event]
H = TypeVar("H", bound=Callable[..., Any])


class Refused(TrunklineError):
    """The other side answered that it will not."""


class Replies:
    """The answers on one topic that are for us. Enter it before you ask. ``opened`` opens a sealed
    answer, such as ``vault.open``: a stream passes no middleware.
    """

    def __init__(self, bus: Bus, topic: str = REPLIES, *, opened: Opened | None = None) -> None:
        self._bus = check_bus(bus, type(self).__name__)
        self.topic = check_topic(topic)
        self._opened: Opened = opened or (lambda event: event)
        self._group = own_group(_PREFIX)
        self._waiting: dict[str, asyncio.Future[Event]] = {}
        self._task: asyncio.Task[None] | None = None
        self._stream: Any = None

    async def __aenter__(self) -> Self:
        await define_short_lived(self._bus, self.topic)
        await forget_left(self._bus, self.topic, _PREFIX)
        # As good as the latest, and also right if the group has to be made a second time.
        start = self._bus.clock.now()
        self._stream = self._bus.subscribe(self.topic, group=self._group, start=start)
        await self._stream.__aenter__()
        self._task = asyncio.get_running_loop().create_task(self._listen())
        self._bus.at_close(self.__aexit__)  # a bus may be closed first
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self._stream.close()
        await forget_group(self._bus, self.topic, self._group)
        for future in self._waiting.values():
            future.cancel()

    def expect(self, id_: str) -> asyncio.Future[Event]:
        """The answer to the event with this id, once it is there."""
        future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._waiting[id_] = future
        future.add_done_callback(lambda _: self._waiting.pop(id_, None))
        return future

    async def _listen(self) -> None:
        try:
            async for delivery in self._stream:
                future = self._waiting.get(delivery.event.cause or "")
                if future is not None and not future.done():
                    self._answer(future, delivery.event)
                await delivery.ack()
        except TrunklineError as error:  # nothing more will come: let nobody wait for it
            for future in list(self._waiting.values()):
                if not future.done():
                    future.set_exception(error)

    def _answer(self, future: asyncio.Future[Event], event: Event) -> None:
        try:
            future.set_result(self._opened(event))
        except TrunklineError as error:  # a key is missing: the others still get their answers
            future.set_exception(error)


class Requests:
    """Ask, and wait for the answer. ``opened`` opens sealed answers: see ``Replies``."""

    def __init__(self, bus: Bus, replies: str = REPLIES, *, opened: Opened | None = None) -> None:
        self._bus = check_bus(bus, type(self).__name__)
        self._replies = Replies(bus, replies, opened=opened)

    async def __aenter__(self) -> Self:
        await self._replies.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._replies.__aexit__(*error)

    async def request(
        self,
        topic: str,
        payload: Any = None,
        *,
        timeout_s: float = 30.0,
        **fields: Any,
    ) -> Any:
        """The payload of the answer; ``Refused`` if it is a refusal, ``TimeoutError`` if there is
        none within ``timeout_s``, also while a broker is away. The question expires with the wait.
        """
        check_delay(timeout_s, "timeout_s")
        id_ = new_id()
        headers = {**fields.pop("headers", {}), REPLY_TO: self._replies.topic}
        answer = self._replies.expect(id_)
        try:
            fields.setdefault("ttl_s", timeout_s)
            async with asyncio.timeout(timeout_s):  # for the way there and back
                await self._bus.publish(topic, payload, id=id_, headers=headers, **fields)
                event = await answer
        except TimeoutError:
            raise TimeoutError(f"no answer on {topic} within {timeout_s:g} s") from None
        finally:
            answer.cancel()
        if ERROR in event.headers:
            raise Refused(event.headers[ERROR])
        return event.payload


def respond(bus: Bus, topic: str, *, group: str, **options: Any) -> Callable[[H], H]:
    """Make a function the one that answers: what it returns is the answer, what it rejects is
    refused; what it fails at is tried again, as with any handler.
    """

    check_bus(bus, "respond")

    def register(handler: H) -> H:
        call = adapt(handler)

        async def answer(event: Event, delivery: Delivery) -> Any:
            where = event.headers.get(REPLY_TO)
            try:
                result = await call(delivery)
            except Reject as signal:
                if where is None:
                    raise
                said = {ERROR: signal.reason[:1000]}
                await bus.publish(where, None, cause=event.id, headers=said, **guarded_as(event))
                return None
            if where is not None:
                await bus.publish(where, result, cause=event.id, type="reply", **guarded_as(event))
            return result

        bus.on(topic, group=group, **options)(answer)
        return handler

    return register


def guarded_as(question: Event) -> dict[str, Any]:
    """The fields by which an answer is guarded, sealed and erased like its question."""
    return {name: getattr(question, name) for name in ("space", "subject", "band", "caps")}


def check_bus(bus: Bus, name: str) -> Bus:
    """``TypeError`` for a bus without asyncio: its calls would never be awaited."""
    if not isinstance(bus, Bus):
        raise TypeError(
            f"{name} takes the bus of trunkline.connect, not {type(bus).__name__}; "
            "trunkline.patterns.sync has the same without asyncio"
        )
    return bus


async def define_short_lived(bus: Bus, topic: str, kept_s: float = _KEPT_S) -> None:
    """A topic whose records matter to the processes that wait now, and not for long."""
    with contextlib.suppress(TrunklineError):  # it may be there, or not ours to define
        if topic not in await bus.topics():
            await bus.define(topic, retention_age_s=kept_s, retain_unsettled=False)


def own_group(prefix: str) -> str:
    """A name for a group that only this process uses."""
    return prefix + secrets.token_hex(8)


async def forget_group(bus: Bus, topic: str, group: str) -> None:
    """Remove a group that only this process used. If the bus is away, a later process does."""
    with contextlib.suppress(TrunklineError, TimeoutError):
        async with asyncio.timeout(_LEAVE_S):
            if (await bus.health()).get("connected", True):
                await bus.forget(topic, group)


async def forget_left(bus: Bus, topic: str, prefix: str) -> None:
    """Remove the groups of a short-lived topic whose users were killed."""
    with contextlib.suppress(TrunklineError):
        for group in await left(bus, topic, prefix, bus.clock.now()):
            await bus.forget(topic, group)


async def left(bus: Bus, topic: str, prefix: str, now: datetime) -> list[str]:
    """The groups of a short-lived topic that no process uses any more. A process in use settles
    its records at once. These groups have not settled records that the log has already removed, and
    the records that the log still has are old too.
    """
    own = re.compile(re.escape(prefix) + _OWN)
    found = [one for one in await bus.groups(topic) if own.fullmatch(one.group)]
    return sorted({one.group for one in found if await _is_left(bus, one, now)})


async def _is_left(bus: Bus, one: GroupInfo, now: datetime) -> bool:
    first, _ = await bus.bounds(one.topic, one.partition)
    if one.leases or one.last_settled + 1 >= first:
        return False
    found = await bus.read(one.topic, first, 1, partition=one.partition)
    return not found or now - found[0].event.ts > timedelta(seconds=_KEPT_S)
