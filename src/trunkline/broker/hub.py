"""What all connections share: the bus, rights, limits, counts, and the one way to publish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Coroutine, Sequence
from operator import attrgetter
from typing import Any, Protocol

import msgspec

from trunkline import access, schemas
from trunkline.access import Principal
from trunkline.broker import configs, rights
from trunkline.broker.configs import Configs
from trunkline.broker.limits import Bucket
from trunkline.broker.options import BrokerOptions
from trunkline.broker.rights import Rights
from trunkline.broker.sticky import Assignments
from trunkline.buses.local import LocalBus
from trunkline.errors import Closed, Denied, TrunklineError
from trunkline.event import Event, Receipt
from trunkline.options import GroupOptions
from trunkline.outbox import publish_once
from trunkline.schemas import Registry
from trunkline.store import watch
from trunkline.system import Counts, System

logger = logging.getLogger(__name__)

_headers = attrgetter("headers")

GOODBYE_S = 1.0  # for who takes nothing of what it is owed
PRINCIPAL = "auth_principal"  # the header that says who published; what a client puts there is lost
RESERVED = frozenset({rights.TOPIC, configs.TOPIC, schemas.TOPIC})  # each has its own commands


class Connection(Protocol):
    """A session, as the hub sees it."""

    @property
    def subscriptions(self) -> int: ...

    @property
    def inflight(self) -> int: ...

    def review(self) -> None: ...

    def hold_up(self) -> None: ...

    def succeed(self) -> None: ...

    def leave(self) -> None: ...


class Hub:
    def __init__(self, bus: LocalBus, options: BrokerOptions | None = None) -> None:
        self.bus = bus
        self.clock = bus.clock
        self.options = options or BrokerOptions()
        self.rights = Rights(bus, forced=self.options.auth)
        self.counts = Counts()
        self.system = System(
            bus, self.counts, metrics_s=self.options.metrics_s, audit=self.options.audit
        )
        self.registry = Registry(bus)
        self.configs = Configs(bus)
        self.sticky = Assignments()
        self.sessions: set[Connection] = set()
        self.clients: dict[tuple[str, str], Connection] = {}  # by agent and name: their last one
        self.is_open = False
        self.since = self.clock.now()
        self._buckets: dict[str, Bucket] = {}
        self._underway: dict[asyncio.Future[None], Sequence[Event]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._unread: set[object] = set()  # what could not be read the last time

    async def start(self) -> None:
        await self.rights.refresh()
        await self.registry.refresh()
        await self.configs.refresh()
        await self.system.start(self.gauges)
        self.is_open = True
        self.bus.store.bell.listen(self._heard, rights.TOPIC)
        watch(self.bus.store)
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        """Let go of every connection and finish what was begun; the bus stays open."""
        self.is_open = False
        for session in self.sessions:
            session.hold_up()  # or what floods this broker, and is refused, holds up its end
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self.bus.store.bell.ignore(self._heard)
        self.bus.store.bell.ring(None)  # those who follow a log look up, and see that this ends
        until = asyncio.get_running_loop().time() + (self.options.drain_s or math.inf)
        await self._finish(until)  # who published is told
        for session in list(self.sessions):
            session.leave()  # to give back what it held is among what is waited for
        await self._finish(max(until, asyncio.get_running_loop().time() + GOODBYE_S))
        await self.system.close()

    async def _finish(self, until: float) -> None:
        """Wait for what was begun."""
        if self._tasks:
            left_s = until - asyncio.get_running_loop().time()
            await asyncio.wait(self._tasks, timeout=None if left_s == math.inf else left_s)

    async def _keep(self) -> None:
        """Notice changed rights and schemas, and let those who lost theirs feel it: at times, and
        at once when a token was made or revoked.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.options.rights_s):
                    await self._changed.wait()
            self._changed.clear()
            await self._refresh()
            for review in (self.sticky.review, *(session.review for session in self.sessions)):
                try:
                    review()
                except Exception:  # nobody else would look, and the others have lost theirs, too
                    logger.exception("a connection could not be held to its rights")

    async def _refresh(self) -> None:
        """Each for itself: one that cannot be read, whatever the reason, does not keep a revoked
        token alive.
        """
        for what in (self.rights, self.registry, self.configs):
            try:
                changed = await what.refresh()
            except Exception as error:  # noqa: BLE001 -- nobody else would look again
                if what not in self._unread:  # and not once for each time
                    logger.warning("rights or schemas could not be read: %s", error)
                self._unread.add(what)
                continue
            self._unread.discard(what)
            if changed and what is self.configs:
                self.rights.version += 1

    def _heard(self, topic: str | None) -> None:
        if topic is not None:  # else it is no more than a reminder
            self._changed.set()

    def spawn(self, job: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something to its end, also when the connection that asked for it is gone."""
        task = asyncio.get_running_loop().create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def rate(self, who: Principal) -> float:
        """Seconds to wait, if this agent asks for too much."""
        limit = self.options.rate_frames_s
        if not limit:
            return 0.0
        now = self.clock.monotonic()
        bucket = self._buckets.get(who.agent)
        if bucket is None:
            bucket = self._buckets[who.agent] = Bucket(limit, now)
        return bucket.take(now)

    async def publish(
        self,
        who: Principal,
        topic: str,
        events: Sequence[Event],
        *,
        again: bool = False,
    ) -> list[Receipt]:
        """Publish events of one topic. Whether ``who`` may was asked before. Those that are sent
        ``again`` are kept if they were not kept before; that takes its time.
        """
        try:
            return await self._publish_checked(who, topic, events, again)
        except TrunklineError:
            raise
        except Exception as error:  # whoever waits for the answer gets one
            logger.exception("events for %s could not be published", topic)
            raise TrunklineError("internal error", code="internal") from error

    async def _publish_checked(
        self, who: Principal, topic: str, events: Sequence[Event], again: bool
    ) -> list[Receipt]:
        if not self.is_open:
            raise Closed("the broker is closing", hint="connect again")
        self.refuse_reserved(who, "publish", topic)
        if self.rights.is_on or any(map(_headers, events)):
            events = [self._stamped(event, who) for event in events]
        self.registry.check(topic, events)
        receipts = await self._publish(topic, events, again)
        self.counts.published(topic, len(receipts))
        if self.options.audit:
            for receipt in receipts:
                self.system.audit(
                    "publish", topic=topic, offset=receipt.offset, agent=who.agent, id=receipt.id
                )
        return receipts

    def _stamped(self, event: Event, who: Principal) -> Event:
        headers = {k: v for k, v in event.headers.items() if k != PRINCIPAL}
        if self.rights.is_on:
            headers[PRINCIPAL] = who.agent
        elif len(headers) == len(event.headers):
            return event
        return msgspec.structs.replace(event, headers=headers)

    def allows(self, who: Principal, action: access.Action, topic: str, group: str = "") -> bool:
        if not access.may(who, action, topic, group):
            return False
        return not self.rights.is_on or self.configs.may(who.agent, action, topic)

    def require(self, who: Principal, action: access.Action, topic: str, group: str = "") -> None:
        """``Denied``, in the same words whatever the reason, so that nothing can be learnt."""
        if not self.allows(who, action, topic, group):
            self.denied(who, action, topic, group)
            raise Denied("access denied", actor=who.agent, action=action, topic=topic)

    def refuse_reserved(self, who: Principal, action: access.Action, topic: str) -> None:
        """What the broker keeps for itself is written by its own commands, whoever asks."""
        if topic in RESERVED:
            self.denied(who, action, topic)
            raise Denied("access denied", actor=who.agent, action=action, topic=topic)

    async def _publish(self, topic: str, events: Sequence[Event], again: bool) -> list[Receipt]:
        """Those that are sent again may also be on their way to the log, from a connection that was
        lost, for the first time or again.
        """
        while again and (ahead := self._ahead(events)):
            await asyncio.wait(ahead)
        done = asyncio.get_running_loop().create_future()
        self._underway[done] = events
        publish = self.bus.publish_many
        try:
            if again:
                return await publish_once(self.bus.store, publish, topic, events)
            return await publish(topic, events)
        finally:
            del self._underway[done]
            done.set_result(None)

    def _ahead(self, events: Sequence[Event]) -> list[asyncio.Future[None]]:
        wanted = {event.id for event in events}
        return [
            done
            for done, others in self._underway.items()
            if any(event.id in wanted for event in others)
        ]

    def policy(self, topic: str) -> GroupOptions:
        """What a group that nobody has made yet gets."""
        return self.configs.policy(topic, self.options.ack_timeout_s)

    def denied(self, who: Principal, action: str, topic: str, group: str = "") -> None:
        self.counts.denied += 1
        self.system.audit("denied", agent=who.agent, action=action, topic=topic, group=group)

    def gauges(self) -> dict[str, float]:
        return {
            "connections": len(self.sessions),
            "subscriptions": sum(session.subscriptions for session in self.sessions),
            "inflight": sum(session.inflight for session in self.sessions),
        }
