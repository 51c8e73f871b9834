"""What all connections share: the bus, rights, limits, counts, and the one way to publish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from operator import attrgetter
from typing import Any, Protocol

import msgspec

from trunkline import access
from trunkline.access import Principal
from trunkline.broker import tokens as rights
from trunkline.broker import topic_rules as configs
from trunkline.broker.group_looks import GroupLooks
from trunkline.broker.jobs import Jobs
from trunkline.broker.listing import Figures, show_groups, show_topics
from trunkline.broker.rate import Bucket
from trunkline.broker.snapshot import Gathered
from trunkline.broker.sticky import Assignments
from trunkline.broker.tickets import Tickets
from trunkline.broker.tokens import Rights
from trunkline.broker.topic_rules import Configs
from trunkline.bus.local import LocalBus
from trunkline.bus.once import publish_once
from trunkline.errors import Closed, Denied, InvalidFilter, TrunklineError
from trunkline.event import Event, Receipt, Record
from trunkline.filters.where import compile_where
from trunkline.guard.policy import Action, Question, Ruling
from trunkline.guard.policy_guard import PolicyFile
from trunkline.names import SYSTEM_PREFIX
from trunkline.options import BrokerOptions, GroupOptions
from trunkline.patterns import schemas
from trunkline.patterns.audit import Counts, System
from trunkline.patterns.schemas import Registry

logger = logging.getLogger(__name__)

_headers = attrgetter("headers")

GOODBYE_S = 1.0  # for who takes nothing of what it is owed
PRINCIPAL = "auth_principal"  # the header that names the publisher; a client's own is lost
SCOPES = "scopes"  # the header that names the roles of that agent, where tokens are asked for
_ACTIONS: dict[str, Action] = {
    "publish": "publish",
    "subscribe": "read",
    "read": "read",
    "admin": "admin",
}
RESERVED = frozenset({rights.TOPIC, configs.TOPIC, schemas.TOPIC})  # each has its own commands


Acl = Callable[[str, access.Action, Principal], bool]
"""Whether a principal may do something with a topic, in addition to tokens and lists."""


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
    def __init__(
        self, bus: LocalBus, options: BrokerOptions | None = None, acl: Acl | None = None
    ) -> None:
        self.bus = bus
        self.acl = acl
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
        self.tickets = Tickets(self.clock)
        self.creating = asyncio.Lock()  # held while a stream is made
        self.jobs = Jobs(self.clock)
        self.topics_shown = Gathered(lambda: show_topics(bus, self.configs), self.clock)
        looks = GroupLooks(bus)
        self.groups_shown = Gathered(lambda: show_groups(looks), self.clock)
        self.figures_shown = Gathered(Figures(bus, looks).text, self.clock)
        path = self.options.policy
        self._policy_file = None if path is None else PolicyFile(path, clock=self.clock)
        self.system.quotes = path is None  # else an agent that may read the letter reads it there
        self.sessions: set[Connection] = set()
        self.clients: dict[tuple[str, str], Connection] = {}  # by agent and name: their last one
        self.is_open = False
        self.ending = asyncio.Event()  # clients that wait for records over HTTP wait no longer
        self.since = self.clock.now()
        self._buckets: dict[str, Bucket] = {}
        self._underway: dict[asyncio.Future[None], Sequence[Event]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._unread: set[object] = set()  # what could not be read the last time
        self._parser: asyncio.Future[None] | None = None

    async def start(self) -> None:
        await self.rights.refresh()
        await self.registry.refresh()
        await self.configs.refresh()
        await self.system.start(self.gauges)
        self.is_open = True
        self.bus.store.bell.listen(self._heard, rights.TOPIC)
        self.bus.store.watch()
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def configure(self, options: BrokerOptions) -> None:
        """Take over changed settings while it runs."""
        if options.rate_frames_s != self.options.rate_frames_s:
            self._buckets.clear()
        self.options = options
        await self.system.configure(metrics_s=options.metrics_s, audit=options.audit)

    async def close(self) -> None:
        """Let go of every connection and finish what was begun; the bus stays open."""
        self.is_open = False
        self.ending.set()
        for session in self.sessions:
            session.hold_up()  # or what floods this broker, and is refused, holds up its end
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self.bus.store.bell.ignore(self._heard)
        await self.jobs.close()
        for shown in (self.topics_shown, self.groups_shown, self.figures_shown):
            await shown.close()
        self.bus.store.bell.ring(None)  # readers that follow a log wake, and see that this ends
        until = asyncio.get_running_loop().time() + (self.options.drain_s or math.inf)
        await self._finish(until)  # publishers get their answers
        for session in list(self.sessions):
            session.leave()  # to give back what it held is among what is waited for
        until = asyncio.get_running_loop().time() + (self.options.drain_s or math.inf)
        await self._finish(until + GOODBYE_S)
        await self.system.close()

    async def _finish(self, until: float) -> None:
        """Wait for the work that was begun, and for the work that it begins."""
        while self._tasks:
            left_s = until - asyncio.get_running_loop().time()
            if left_s <= 0:
                return
            await asyncio.wait(
                self._tasks,
                timeout=None if left_s == math.inf else left_s,
                return_when=asyncio.FIRST_COMPLETED,
            )

    async def _keep(self) -> None:
        """Look for changed rights and schemas, and end the subscriptions and connections that are
        no longer allowed. The hub looks every ``rights_s``, and at once when a token was made or
        revoked.
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
        if self._policy_file is not None and self._policy_file.reload():
            self.rights.version += 1
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

    async def load_conditions(self) -> None:
        """Be ready to read a ``where``. Its parser takes long to load, once, and in the loop nobody
        would be answered meanwhile; most brokers never need it.
        """
        if self._parser is None:
            self._parser = asyncio.ensure_future(asyncio.to_thread(_load_parser))
        await asyncio.shield(self._parser)

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
        except Exception as error:  # the caller that waits for the answer gets one
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
        self._require_events(who, events)
        self.registry.check(topic, events)
        began = self.clock.monotonic()
        receipts = await self._publish(topic, events, again)
        self.counts.published(topic, len(receipts), self.clock.monotonic() - began)
        if self.options.audit and not topic.startswith(SYSTEM_PREFIX):
            for receipt in receipts:
                self.system.audit(
                    "publish", topic=topic, offset=receipt.offset, agent=who.agent, id=receipt.id
                )
        return receipts

    def _stamped(self, event: Event, who: Principal) -> Event:
        headers = {k: v for k, v in event.headers.items() if k != PRINCIPAL}
        if self.rights.is_on:
            headers[PRINCIPAL] = who.agent
            headers.pop(SCOPES, None)
            if who.scopes:
                headers[SCOPES] = ",".join(who.scopes)
        elif len(headers) == len(event.headers):
            return event
        return msgspec.structs.replace(event, headers=headers)

    def allows(self, who: Principal, action: access.Action, topic: str, group: str = "") -> bool:
        if not access.may(who, action, topic, group):
            return False
        if self.rights.is_on and not self.configs.may(who, action, topic):
            return False
        if self.acl is not None and not self.acl(topic, action, who):
            return False
        return self._decide(who, _ACTIONS[action], topic).allowed

    def _decide(
        self, who: Principal, action: Action, topic: str, event: Event | None = None
    ) -> Ruling:
        """What the policy says; without one everything that a token grants is allowed. The device
        is the token, of which each device has its own.
        """
        if self._policy_file is None:
            return Ruling(True)
        ask = Question(who.agent, action, topic, self.clock.now(), who.token, event)
        return self._policy_file.policy.decide(ask)

    def _require_events(self, who: Principal, events: Sequence[Event]) -> None:
        if self._policy_file is None:
            return
        for event in events:
            decision = self._decide(who, "publish", event.topic, event)
            if not decision.allowed:
                self._deny(who, "publish", event, decision)
                raise Denied("access denied", actor=who.agent, action="publish", topic=event.topic)

    @property
    def reads_by_record(self) -> bool:
        """Whether a policy decides on each record."""
        return self._policy_file is not None

    def may_read(self, who: Principal, record: Record, group: str = "") -> bool:
        """Whether the policy lets ``who`` have this very record; a denial is told."""
        if self._policy_file is None:
            return True
        event = record.event
        decision = self._decide(who, "read", event.topic, event)
        if not decision.allowed:
            self._deny(who, "read", event, decision, group)
        return decision.allowed

    def _deny(
        self, who: Principal, action: Action, event: Event, decision: Ruling, group: str = ""
    ) -> None:
        self.counts.denied += 1
        self.system.audit_denial(
            agent=who.agent,
            action=action,
            topic=event.topic,
            group=group,
            id=event.id,
            missing=decision.missing,
            rule=decision.rule,
        )

    def require(self, who: Principal, action: access.Action, topic: str, group: str = "") -> None:
        """``Denied``, in the same words whatever the reason, so that nothing can be learnt."""
        if not self.allows(who, action, topic, group):
            on = f"{topic} as {group}" if group else topic
            self.denied(who, action, topic, group, missing=f"{action} on {on}")
            raise Denied("access denied", actor=who.agent, action=action, topic=topic)

    def refuse_reserved(self, who: Principal, action: access.Action, topic: str) -> None:
        """The broker's own topics are written by its own commands alone, whatever the rights."""
        if topic in RESERVED:
            self.denied(who, action, topic, missing=f"{topic} is the broker's own")
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

    def denied(
        self, who: Principal, action: str, topic: str, group: str = "", missing: str = ""
    ) -> None:
        """Count, audit and log a refusal, with the grant that would have been needed."""
        self.counts.denied += 1
        facts = {"agent": who.agent, "action": action, "topic": topic, "group": group}
        wanted = _ACTIONS.get(action)
        decision = self._decide(who, wanted, topic) if wanted and topic else Ruling(True)
        if decision.allowed:
            self.system.audit("denied", **facts, missing=missing)
        else:
            missing = decision.missing
            self.system.audit_denial(**facts, missing=missing, rule=decision.rule)
        logger.warning(
            "denied: %s may not %s (missing: %s)",
            who.agent or "a client without a name",
            f"{action} {topic}".rstrip(),
            missing or "a valid token",
            extra={**facts, "missing": missing},
        )

    def gauges(self) -> dict[str, float]:
        return {
            "connections": len(self.sessions),
            "subscriptions": sum(session.subscriptions for session in self.sessions),
            "inflight": sum(session.inflight for session in self.sessions),
        }


def _load_parser() -> None:
    with contextlib.suppress(InvalidFilter):  # not installed: a client that needs it is told
        compile_where("key = ''")
