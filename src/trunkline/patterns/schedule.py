"""Handlers that are called by the time: every five minutes, or by a cron expression.

A firing is an event of the topic ``schedule.<name>``. Every process that runs the schedule tries to
publish it; the one with the same time is kept once. The handlers of all processes are one group of
that topic, so one of them gets it, with retries and dead letters as for any event.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, Protocol, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from trunkline.bus import Bus
from trunkline.check import check_span, load_extra
from trunkline.delivery.worker import awaited
from trunkline.errors import InvalidOption, TrunklineError
from trunkline.names import check_topic
from trunkline.units import read_duration

logger = logging.getLogger(__name__)

Missed = Literal["skip", "all"]
"""What becomes of periods in which no process ran: nothing, or each is fired late."""

PREFIX: Final = "schedule."
GROUP: Final = "schedule"
_LOOK_S: Final = 60.0  # the wall clock may be set
_TROUBLE_S: Final = 1.0
_CAUGHT_UP_MAX: Final = 1000  # firings; older ones are left out, and that is logged
_KEPT: Final = 10_000  # firings that were handled


class Tick(msgspec.Struct, frozen=True):
    """One firing of a schedule: the payload of its event."""

    name: str
    due: datetime


class FiringPlan(Protocol):
    def after(self, time: datetime) -> datetime:
        """The first firing after a time."""


class _Every:
    """Multiples of a period since 1970, so that all processes mean the same times."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s

    def after(self, time: datetime) -> datetime:
        count = int(time.timestamp() / self._period_s + 1e-9) + 1
        return datetime.fromtimestamp(count * self._period_s, UTC)


class _Cron:
    def __init__(self, expression: str, zone: str) -> None:
        self._cron = load_extra("cronsim", "cron")
        self._expression = expression
        try:
            self._zone = ZoneInfo(zone)
        except (ZoneInfoNotFoundError, ValueError) as error:
            hint = "the name of a time zone: UTC, Europe/Berlin"
            raise InvalidOption(f"no time zone: {zone!r}", name="tz", hint=hint) from error
        try:
            self.after(datetime.now(UTC))
        except (self._cron.CronSimError, StopIteration) as error:
            raise InvalidOption(
                f"not a cron expression: {expression!r}: {error or 'it never fires'}",
                name="period",
                hint="minute hour day month weekday: 0 3 * * 1-5",
            ) from error

    def after(self, time: datetime) -> datetime:
        found: datetime = next(self._cron.CronSim(self._expression, time.astimezone(self._zone)))
        return found.astimezone(UTC)


def plan_of(period: str | float | timedelta, zone: str = "UTC") -> FiringPlan:
    """A plan from a number of seconds, a duration such as ``5m``, or a cron expression."""
    if isinstance(period, str) and len(period.split()) >= 5:
        return _Cron(period, zone)
    seconds: Any = period
    if isinstance(period, timedelta):
        seconds = period.total_seconds()
    elif isinstance(period, str):
        seconds = _duration(period)
        if seconds is None:
            raise InvalidOption(
                f"not a period: {period!r}",
                name="period",
                hint="90s, 5m, 2h, 1d, or a cron expression: 0 3 * * *",
            )
    check_span(seconds, "period")
    if seconds < 1:
        raise InvalidOption("a period is one second or longer", name="period")
    return _Every(float(seconds))


class Timetable:
    """Publishes the firings of one plan, for as long as ``run`` runs."""

    def __init__(self, bus: Bus, name: str, plan: FiringPlan, missed: Missed) -> None:
        if missed not in get_args(Missed):
            raise InvalidOption(f"missed={missed!r}", name="missed", hint="skip or all")
        self._bus = bus
        self.name = name
        self.topic = check_topic(PREFIX + name)
        self._plan = plan
        self._missed = missed

    async def run(self) -> None:
        clock = self._bus.clock
        after: datetime | None = None
        trouble = ""
        while True:
            try:
                if after is None:
                    after = await self._begin()
                due = self._plan.after(after)
                wait_s = (due - clock.now()).total_seconds()
                if wait_s > 0:
                    await clock.sleep(min(wait_s, _LOOK_S))
                    continue
                after = await self._fire(due)
                trouble = ""
            except TrunklineError as error:
                if str(error) != trouble:  # it is tried again soon, and may last
                    logger.warning("the schedule %s waits: %s", self.name, error)
                trouble = str(error)
                await clock.sleep(_TROUBLE_S)

    async def _begin(self) -> datetime:
        """After which time it fires: now, or the last firing if missed ones are caught up."""
        if self.topic not in await self._bus.topics():
            await self._bus.define(self.topic, retention_records=_KEPT, retain_unsettled=False)
        now = self._bus.clock.now()
        last = await self._last() if self._missed == "all" else None
        return now if last is None else min(last, now)

    async def _last(self) -> datetime | None:
        """When it fired last, in whichever process."""
        first, end = await self._bus.bounds(self.topic)
        found = await self._bus.read(self.topic, end - 1, 1) if end > first else []
        return msgspec.convert(found[0].event.payload, Tick).due if found else None

    async def _fire(self, due: datetime) -> datetime:
        """Publish the firings that are due, or the last of them. Returns the last one's time."""
        now = self._bus.clock.now()
        times = [due]
        while (later := self._plan.after(times[-1])) <= now:
            if self._missed == "skip":
                times.clear()
            times.append(later)
        if len(times) > _CAUGHT_UP_MAX:
            said = "the schedule %s leaves out %d firings that are older"
            logger.warning(said, self.name, len(times) - _CAUGHT_UP_MAX)
            times = times[-_CAUGHT_UP_MAX:]
        last = await self._last()  # another process may have been quicker
        for time in times:
            if last is None or time > last:
                key = f"{self.name}@{time.isoformat()}"
                tick = Tick(self.name, time)
                await self._bus.publish(self.topic, tick, key=self.name, idem_key=key, type="tick")
        return times[-1]


def handler_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function without arguments as a handler; any other is one already."""
    if inspect.signature(function).parameters:
        return function
    call = awaited(function)

    async def fire(_event: Any) -> Any:
        return await call()

    fire.__qualname__ = getattr(function, "__qualname__", "schedule")
    return fire


def _duration(text: str) -> float | None:
    try:
        return read_duration(text)
    except ValueError:
        return None
