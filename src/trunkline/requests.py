"""Questions and answers over any bus.

A question is an event whose header ``reply-to`` names a topic; the answer is an event there whose
``cause`` is the question's id. Answers are ordinary durable events; nobody who stopped waiting
leaves anything behind but them, and their topic forgets them by itself. The group of one who was
killed is removed by those who come later.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final, Self, TypeVar

from trunkline.bus import Delivery
from trunkline.errors import Reject, TrunklineError, check_delay
from trunkline.event import Event, new_id
from trunkline.store import GroupKey, Store
from trunkline.topics import check_topic
from trunkline.worker import adapt

REPLY_TO: Final = "reply-to"
ERROR: Final = "error"
REPLIES: Final = "replies"
_KEPT_S: Final = 3600.0
_PREFIX: Final = "replies-"
_OWN: Final = "[0-9a-f]{16}"  # what ``own_group`` adds

H = TypeVar("H", bound=Callable[..., Any])


class Refused(TrunklineError):
    """The other side answered that it will not."""


class Replies:
    """The answers on one topic that are for us. Enter it before you ask."""

    def __init__(self, bus: Any, topic: str = REPLIES) -> None:
        self._bus = bus
        self.topic = check_topic(topic)
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
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
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
                    future.set_result(delivery.event)
                await delivery.ack()
        except TrunklineError as error:  # nothing more will come: let nobody wait for it
            for future in list(self._waiting.values()):
                if not future.done():
                    future.set_exception(error)


class Requests:
    """Ask, and wait for the answer."""

    def __init__(self, bus: Any, replies: str = REPLIES) -> None:
        self._bus = bus
        self._replies = Replies(bus, replies)

    async def __aenter__(self) -> Self:
        await self._replies.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._replies.__aexit__(*error)

    async def request(
        self, topic: str, payload: Any = None, *, timeout_s: float = 30.0, **fields: Any
    ) -> Any:
        """The payload of the answer; ``Refused`` if it is a refusal, ``TimeoutError`` if there is
        none in time. The question expires with the wait.
        """
        check_delay(timeout_s, "timeout_s")
        id_ = new_id()
        headers = {**fields.pop("headers", {}), REPLY_TO: self._replies.topic}
        answer = self._replies.expect(id_)
        try:
            fields.setdefault("ttl_s", timeout_s)
            await self._bus.publish(topic, payload, id=id_, headers=headers, **fields)
            async with asyncio.timeout(timeout_s):
                event = await answer
        except TimeoutError:
            raise TimeoutError(f"no answer on {topic} within {timeout_s:g} s") from None
        finally:
            answer.cancel()
        if ERROR in event.headers:
            raise Refused(event.headers[ERROR])
        return event.payload


def respond(bus: Any, topic: str, *, group: str, **options: Any) -> Callable[[H], H]:
    """Make a function the one that answers: what it returns is the answer, what it rejects is
    refused; what it fails at is tried again, as with any handler.
    """

    def register(handler: H) -> H:
        call = adapt(handler)

        async def answer(event: Event, delivery: Delivery) -> Any:
            where = event.headers.get(REPLY_TO)
            try:
                result = await call(delivery)
            except Reject as signal:
                if where is None:
                    raise
                await bus.publish(
                    where, None, cause=event.id, headers={ERROR: signal.reason[:1000]}
                )
                return None
            if where is not None:
                await bus.publish(where, result, cause=event.id, type="reply")
            return result

        bus.on(topic, group=group, **options)(answer)
        return handler

    return register


async def define_short_lived(bus: Any, topic: str, kept_s: float = _KEPT_S) -> None:
    """A topic whose records matter to those who wait now, and to nobody for long."""
    with contextlib.suppress(TrunklineError):  # it may be there, or not ours to define
        if topic not in await bus.topics():
            await bus.define(topic, retention_age_s=kept_s, retain_unsettled=False)


def own_group(prefix: str) -> str:
    """A name for a group that only this process uses."""
    return prefix + secrets.token_hex(8)


async def forget_group(bus: Any, topic: str, group: str) -> None:
    """Remove a group that only this process used."""
    with contextlib.suppress(TrunklineError):
        link = getattr(bus, "link", None)
        if link is not None:
            await link.call("forget", topic=topic, group=group)
            return
        for key in await bus.store.groups():
            if (key.topic, key.group) == (topic, group):
                await bus.store.update(key, None)


async def forget_left(bus: Any, topic: str, prefix: str) -> None:
    """Remove the groups of a short-lived topic whose users were killed."""
    with contextlib.suppress(TrunklineError):
        link = getattr(bus, "link", None)
        if link is not None:
            await link.call("forget_left", topic=topic, prefix=prefix)
            return
        for key in await left(bus.store, topic, prefix, bus.clock.now()):
            await bus.store.update(key, None)


async def left(store: Store, topic: str, prefix: str, now: datetime) -> list[GroupKey]:
    """Those of the groups that are nobody's any more: one who lives settles what comes at once. The
    log has forgotten records that these have not settled, and what it has of them is old, too.
    """
    own = re.compile(re.escape(prefix) + _OWN)
    keys = [k for k in await store.groups() if k.topic == topic and own.fullmatch(k.group)]
    gone = {key.group for key in keys if await _is_left(store, key, now)}
    return [key for key in keys if key.group in gone]


async def _is_left(store: Store, key: GroupKey, now: datetime) -> bool:
    first, _ = await store.bounds(key.topic, key.partition)
    last, is_held = await store.update(key, lambda group: (group.last_settled, bool(group.leases)))
    if is_held or last + 1 >= first:
        return False
    found = await store.read(key.topic, key.partition, first, 1)
    return not found or now - found[0].event.ts > timedelta(seconds=_KEPT_S)
