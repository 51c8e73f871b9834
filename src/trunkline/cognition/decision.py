"""Decisions of an attention gate: the value, the topic that holds them, and the writer.

Each decision is an event on ``system.attention``. Its ``cause`` is the id of the event it is about.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from enum import Enum
from typing import Any

import msgspec

from trunkline.bus import Bus
from trunkline.clock import Clock
from trunkline.cognition.options import GateOptions
from trunkline.errors import Conflict, InvalidEvent, TrunklineError
from trunkline.event import Band, Event, Receipt
from trunkline.names import ATTENTION

logger = logging.getLogger(__name__)

_KEPT_S = 30 * 86_400.0
_BATCH = 500


class Action(Enum):
    ADMIT = "admit"
    DEFER = "defer"
    BOOST = "boost"
    DROP = "drop"


class By(Enum):
    """The rule that decided."""

    THRESHOLD = "threshold"
    BUDGET = "budget"  # over budget, and others rank higher
    RETURN = "return"  # a deferred record came back
    STOP = "stop"  # the process ends while the event waits for room
    RETRY = "retry"  # a later attempt of a record that was judged before
    FAIL_OPEN = "fail_open"  # the scorer or the deferral failed


class Thresholds(msgspec.Struct, frozen=True):
    drop_below: float = 0.2
    admit_from: float = 0.6
    boost_from: float = 0.8

    @classmethod
    def of(cls, options: GateOptions) -> Thresholds:
        return cls(options.drop_below, options.admit_from, options.boost_from)

    def action(self, salience: float) -> Action:
        if salience < self.drop_below:
            return Action.DROP
        if salience < self.admit_from:
            return Action.DEFER
        return Action.ADMIT if salience < self.boost_from else Action.BOOST

    def reason(self, salience: float) -> str:
        match self.action(salience):
            case Action.DROP:
                return f"salience {salience:.3f} is below {self.drop_below:g}"
            case Action.DEFER:
                return f"salience {salience:.3f} is below {self.admit_from:g}"
            case Action.ADMIT:
                return f"salience {salience:.3f} reaches {self.admit_from:g}"
        return f"salience {salience:.3f} reaches {self.boost_from:g}"


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a gate did with one event, and why."""

    action: Action
    by: By
    salience: float
    reason: str
    thresholds: Thresholds
    features: dict[str, float] = {}
    stands: str = "delivery"
    topic: str
    id: str
    partition: int = 0
    offset: int = 0  # 0 before the append
    group: str = ""
    attempt: int = 1
    defers: int = 0  # how often the record was deferred before
    key: str | None = None
    space: str | None = None
    band: Band = "GREEN"
    caps: tuple[str, ...] = ()
    event: Any = None  # the whole event, where a gate before the append dropped it

    @property
    def is_first(self) -> bool:
        """Whether this is the judgement of an event that the gate had not judged before."""
        return self.attempt == 1 and self.defers == 0 and self.by is not By.RETURN


def to_event(decision: Decision, clock: Clock) -> Event:
    return Event(
        topic=ATTENTION,
        type=f"attention.{decision.action.value}",
        ts=clock.now(),
        key=decision.key,
        space=decision.space,
        band=decision.band,
        caps=decision.caps,
        cause=decision.id,
        payload=msgspec.to_builtins(decision),
    )


def read_decision(event: Event) -> Decision | None:
    """The decision in an event of ``system.attention``; None for any other event."""
    try:
        return msgspec.convert(event.payload, Decision)
    except msgspec.ValidationError:
        return None


class DecisionLog:
    """Writes decisions in batches. ``keep`` waits for its receipt, ``tell`` does not."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: list[tuple[Event, asyncio.Future[Receipt | None]]] = []
        self._task: asyncio.Task[None] | None = None
        self._is_defined = False
        self.lost = 0

    def tell(self, decision: Decision) -> asyncio.Future[Receipt | None]:
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((to_event(decision, self._bus.clock), done))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._write())
        return done

    async def keep(self, decision: Decision) -> Receipt | None:
        """The receipt of the decision; None where the bus could not take it."""
        return await self.tell(decision)

    async def _write(self) -> None:
        await self._define()
        await asyncio.sleep(0)  # decisions of one turn are written together
        while self._waiting:
            batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
            receipts = await self._publish([event for event, _ in batch])
            for (_, done), receipt in zip(batch, receipts, strict=True):
                if not done.done():
                    done.set_result(receipt)

    async def _publish(self, events: list[Event]) -> list[Receipt | None]:
        """The receipt of each decision; None for one that could not be written."""
        try:
            return [*await self._bus.publish_many(ATTENTION, events)]
        except InvalidEvent as error:
            if len(events) > 1:  # one of them is too large: the others are written without it
                return [one for event in events for one in await self._publish([event])]
            said: object = error
        except (TrunklineError, OSError) as error:
            said = error
        except Exception as error:  # noqa: BLE001 -- a middleware may fail in any way
            said = type(error).__name__
        self.lost += len(events)
        logger.warning("%d attention decisions were not written: %s", len(events), said)
        return [None] * len(events)

    async def _define(self) -> None:
        """Keep decisions for a month, unless the topic says otherwise already."""
        if self._is_defined:
            return
        self._is_defined = True
        bus = self._bus
        with contextlib.suppress(TrunklineError, OSError):
            if ATTENTION not in await bus.topics():
                with contextlib.suppress(Conflict):  # another process was first
                    await bus.define(ATTENTION, retention_age_s=_KEPT_S, retain_unsettled=False)

    async def flush(self) -> None:
        """Wait until every decision so far is written or counted as lost."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])
