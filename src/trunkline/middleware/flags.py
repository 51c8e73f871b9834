"""Feature flags: switch a middleware on and off while the bus runs.

::

    flags = Flags(bus)
    bus.use(flags.switch("redaction", redactor))
    await flags.set("redaction", False, by="ops", reason="slow")

A change is an event on ``system.flags``, whose key is the flag: every process that has the flag
follows within ``poll_s``, and a process that starts later begins with it. The change is told on
``system.bus.audit`` as well. ``counts`` says how often a call went through a middleware and how
often it went past it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from trunkline.bus import Bus, Delivery
from trunkline.errors import InvalidName, NotFound, TrunklineError
from trunkline.event import Event, Receipt
from trunkline.middleware import HandleNext, PublishNext, check
from trunkline.names import AUDIT, FLAGS, SYSTEM_PREFIX, check_topic
from trunkline.patterns.topic_table import TopicTable

logger = logging.getLogger(__name__)


class FlagChange(msgspec.Struct, frozen=True):
    """The payload of ``system.flags``."""

    flag: str
    on: bool
    by: str = ""
    reason: str = ""


def flag_events(change: FlagChange, now: datetime) -> list[Event]:
    """A change of a flag as it is published: the flag itself, and the audit."""
    payload = msgspec.to_builtins(change)
    return [
        Event(topic=FLAGS, type="flag", key=change.flag, ts=now, payload=payload),
        Event(topic=AUDIT, type="flag", ts=now, payload={"what": "flag", **payload}),
    ]


class Flags:
    def __init__(self, bus: Bus, *, poll_s: float = 1.0) -> None:
        self._bus = bus
        self._poll_s = poll_s
        self._on: dict[str, bool] = {}
        self._table = TopicTable(bus, FLAGS, FlagChange, self._take)
        self._task: asyncio.Task[None] | None = None
        self.counts: Counter[tuple[str, bool]] = Counter()  # calls, by flag and whether it was on
        bus.at_close(self.close)

    def switch(self, flag: str, middleware: object, *, on: bool = True) -> object:
        """The middleware behind a flag. ``on`` counts until the flag is first set."""
        check((middleware,))
        check_topic(flag)
        if flag in self._on:
            raise InvalidName(f"there is a flag {flag} already", name=flag)
        self._on[flag] = on
        return _Switch(self, flag, middleware)

    def is_on(self, flag: str) -> bool:
        try:
            return self._on[flag]
        except KeyError:
            known = ", ".join(sorted(self._on)) or "none"
            raise NotFound(f"there is no flag {flag}", hint=f"flags here: {known}") from None

    def states(self) -> dict[str, bool]:
        return dict(self._on)

    async def set(self, flag: str, on: bool, *, by: str = "", reason: str = "") -> None:
        """Switch a flag for every process. It holds here at once."""
        self.is_on(flag)
        if FLAGS not in await self._bus.topics():
            with contextlib.suppress(TrunklineError):
                await self._bus.define(FLAGS, compact=True)
        for event in flag_events(FlagChange(flag, on, by, reason), self._bus.clock.now()):
            await self._bus.publish(event)
        self._on[flag] = on
        logger.info("flag %s is %s: %s %s", flag, "on" if on else "off", by, reason)

    async def refresh(self) -> None:
        """Take over what other processes have set."""
        await self._table.refresh()

    def _take(self, change: FlagChange) -> None:
        if change.flag in self._on:
            self._on[change.flag] = change.on

    async def follow(self) -> None:
        """Begin to follow, once: with the first call through a switch."""
        if self._task is None:
            with contextlib.suppress(TrunklineError, OSError):
                await self.refresh()
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            await self._bus.clock.sleep(self._poll_s)
            try:
                await self.refresh()
            except (TrunklineError, OSError) as error:
                logger.warning("flags cannot be read: %s", error)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def register(self, registry: Any = None) -> None:
        """Show flags to Prometheus: ``trunkline_feature_enabled`` and
        ``trunkline_feature_calls_total``.
        """
        from prometheus_client import REGISTRY

        (registry or REGISTRY).register(_Collector(self))


class _Collector:
    def __init__(self, flags: Flags) -> None:
        self._flags = flags

    def collect(self) -> list[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        enabled = GaugeMetricFamily(
            "trunkline_feature_enabled", "1 while the middleware is on", labels=["feature"]
        )
        for flag, on in self._flags.states().items():
            enabled.add_metric([flag], float(on))
        calls = CounterMetricFamily(
            "trunkline_feature_calls", "Calls through or past it", labels=["feature", "enabled"]
        )
        for (flag, on), count in list(self._flags.counts.items()):
            calls.add_metric([flag, str(on).lower()], count)
        return [enabled, calls]


class _Switch:
    def __init__(self, flags: Flags, flag: str, middleware: object) -> None:
        self._flags = flags
        self._flag = flag
        self._publish = getattr(middleware, "publish", None)
        self._handle = getattr(middleware, "handle", None)
        self.stage = getattr(middleware, "stage", "")
        self._placed = getattr(middleware, "placed", None)

    def placed(self, outer: Sequence[object]) -> None:
        """A middleware behind a flag has the place that it would have without."""
        if self._placed is not None:
            self._placed(outer)

    async def publish(self, events: list[Event], call_next: PublishNext) -> list[Receipt]:
        if self._publish is None or events[0].topic in (FLAGS, AUDIT):
            return await call_next(events)
        if await self._is_on(events[0].topic):
            return await self._publish(events, call_next=call_next)  # type: ignore[no-any-return]
        return await call_next(events)

    async def handle(self, delivery: Delivery, call_next: HandleNext) -> Any:
        if self._handle is None or not await self._is_on(delivery.topic):
            return await call_next(delivery)
        return await self._handle(delivery, call_next=call_next)

    async def _is_on(self, topic: str) -> bool:
        await self._flags.follow()
        on = self._flags.is_on(self._flag)
        if not topic.startswith(SYSTEM_PREFIX):
            self._flags.counts[self._flag, on] += 1
        return on
