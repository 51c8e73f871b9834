"""A policy in force: a file that is read again when it changes, and middleware that asks it.

``PolicyGuard`` asks before the append and before the handler. An event that may not be published
raises ``Denied``; a record that may not be handled becomes a dead letter at once. Each denial is an
event on ``system.bus.audit`` with the missing grant.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Final, Protocol

from trunkline.bus import Delivery
from trunkline.clock import Clock, SystemClock
from trunkline.errors import Denied, InvalidOption, TrunklineError
from trunkline.event import Event, Receipt
from trunkline.guard.config import read_toml
from trunkline.guard.order import GuardReject
from trunkline.guard.policy import Action, Policy, Question, Ruling
from trunkline.middleware import HandleNext, PublishNext
from trunkline.names import AUDIT

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the file
_Mark = tuple[int, int, int]


class PolicyFile:
    """The policy of a file, as the file is now. A file that cannot be read, or is wrong, changes
    nothing: the policy that was in force stays in force, and the error is logged once.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, clock: Clock | None = None, look_s: float = LOOK_S
    ) -> None:
        self.path = os.fspath(path)
        self.version = 0
        self._clock = clock or SystemClock()
        self._look_s = look_s
        self._looked = self._clock.monotonic()
        self._mark = self._stat()
        self._policy = self._load()

    @property
    def policy(self) -> Policy:
        """The policy that is in force; the file is looked at every ``look_s``."""
        now = self._clock.monotonic()
        if now - self._looked >= self._look_s:
            self._looked = now
            self.reload()
        return self._policy

    def reload(self) -> bool:
        """Look at the file now; whether another policy is in force."""
        mark = self._stat()
        if mark == self._mark:
            return False
        self._mark = mark
        try:
            self._policy = self._load()
        except (TrunklineError, OSError) as error:
            logger.error("the policy stays as it was: %s", error)
            return False
        self.version += 1
        logger.info("the policy was read again: %s", self.path)
        return True

    def _load(self) -> Policy:
        return Policy.parse(read_toml(self.path))

    def _stat(self) -> _Mark | None:
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


class Publishes(Protocol):
    clock: Clock

    async def publish(self, topic: Event, /) -> Receipt: ...


class PolicyGuard:
    """Middleware for the bus of one actor: ``bus.use(PolicyGuard(bus, "policy.toml", "anna"))``.
    The program names the actor, never an event.
    """

    stage: Final = "decide"

    def __init__(
        self,
        bus: Publishes,
        policy: Policy | PolicyFile | str | os.PathLike[str],
        actor: str,
        *,
        device: str = "",
    ) -> None:
        if not isinstance(actor, str) or not actor:
            raise InvalidOption("a policy guard needs the actor's name", name="actor")
        if isinstance(policy, str | os.PathLike):
            policy = PolicyFile(policy, clock=bus.clock)
        self._bus = bus
        self._policy = policy
        self._actor = actor
        self._device = device
        self._own: set[str] = set()  # ids of the denials that are being written

    @property
    def policy(self) -> Policy:
        return self._policy.policy if isinstance(self._policy, PolicyFile) else self._policy

    def decide(self, action: Action, event: Event) -> Ruling:
        """What the policy says of one event."""
        now = self._bus.clock.now()
        ask = Question(self._actor, action, event.topic, now, self._device, event)
        return self.policy.decide(ask)

    async def publish(self, events: list[Event], call_next: PublishNext) -> list[Receipt]:
        if len(events) == 1 and events[0].id in self._own:
            return await call_next(events)
        for event in events:
            decision = self.decide("publish", event)
            if not decision.allowed:
                await self._tell("publish", event, decision)
                raise Denied(
                    f"the policy does not allow it: {decision.missing}",
                    actor=self._actor,
                    action="publish",
                    topic=event.topic,
                    missing=decision.missing,
                )
        return await call_next(events)

    async def handle(self, delivery: Delivery, call_next: HandleNext) -> Any:
        decision = self.decide("read", delivery.event)
        if not decision.allowed:
            await self._tell("read", delivery.event, decision, group=delivery.group)
            raise GuardReject(f"the policy does not allow it: {decision.missing}")
        return await call_next(delivery)

    async def _tell(self, action: Action, event: Event, decision: Ruling, **facts: Any) -> None:
        payload = {
            "what": "denied",
            "agent": self._actor,
            "action": action,
            "topic": event.topic,
            "id": event.id,
            "missing": decision.missing,
            **({"rule": decision.rule} if decision.rule else {}),
            **facts,
        }
        told = Event(topic=AUDIT, type="denied", payload=payload, ts=self._bus.clock.now())
        self._own.add(told.id)
        try:
            await self._bus.publish(told)
        except (TrunklineError, OSError) as error:  # the denial itself stands
            logger.warning("a denial could not be told on %s: %s", AUDIT, error)
        finally:
            self._own.discard(told.id)
