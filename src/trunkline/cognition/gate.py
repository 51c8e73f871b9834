"""The attention gate: admit, defer, boost or drop each event by its salience.

::

    gate = AttentionGate(bus)

    @gate.on("workspace", group="arbiter", workers=4)
    async def arbitrate(event): ...

With ``stands="delivery"`` the gate stands before a group. An admitted event enters the group's
workspace, which holds a bounded number of events; over that budget the line goes by rank. A
deferred record is copied to ``attention.deferred.<group>`` and comes back after ``defer_s``, or
earlier when the load falls. A dropped record stays in the log; its decision says where.

With ``stands="ingest"`` the gate stands before the append. A deferred event is appended with a
delay, a boosted one with a higher priority. A dropped event is kept whole in its decision, and its
receipt is the receipt of that decision.

The gate fails open: an event that cannot be judged, or whose decision cannot be written, is
admitted. A gate before a group gives up the order of a key for the records it defers.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import msgspec

from trunkline.bus import Bus, Delivery, H
from trunkline.cognition.decision import Action, By, Decision, DecisionLog, Thresholds
from trunkline.cognition.options import GateOptions
from trunkline.cognition.salience import SalienceScorer, Scene, Score, Scorer, to_score
from trunkline.cognition.workspace import Workspace
from trunkline.delivery.worker import adapt, check_handler
from trunkline.errors import Conflict, InvalidOption, Retry, TrunklineError
from trunkline.event import PRIORITIES, RANK, Event, Receipt, Record
from trunkline.middleware import PublishNext
from trunkline.names import DEFERRED_PREFIX, SYSTEM_PREFIX, check_topic, is_dead, matches

logger = logging.getLogger(__name__)

_KEPT_S = 7 * 86_400.0
Opened = Callable[[Event], Event]
_SAID = "attention-deferred"  # the header by which a deferred record says where it came from


class _Origin(msgspec.Struct, frozen=True):
    """Where a deferred record came from, and what was decided about it."""

    topic: str
    partition: int
    offset: int
    id: str
    cause: str | None
    at: datetime  # of the deferral
    due: datetime
    salience: float


class _Verdict(NamedTuple):
    action: Action
    by: By
    score: Score
    reason: str


class _Restored:
    """A delivery of a deferred record, as the handler would have seen the first one."""

    def __init__(self, delivery: Delivery, record: Record) -> None:
        self._delivery = delivery
        self.record = record
        self.event = record.event
        self.topic = record.event.topic
        self.partition = record.partition
        self.offset = record.offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._delivery, name)


class AttentionGate:
    def __init__(
        self,
        bus: Bus,
        options: GateOptions | None = None,
        *,
        scorer: Scorer | None = None,
        topics: str = ">",
        opened: Opened | None = None,
    ) -> None:
        """``topics`` is a pattern: before the append, the gate judges these topics alone.
        ``opened`` opens a sealed event for the scorer, such as ``vault.open``: a gate before the
        append stands behind a vault, so that what it drops is kept sealed.
        """
        self.options = options or GateOptions()
        self.thresholds = Thresholds.of(self.options)
        self.counts: Counter[tuple[str, str]] = Counter()  # by group and action
        self._bus = bus
        self._scorer = scorer or SalienceScorer()
        self._opened: Opened = opened or (lambda event: event)
        self.log = DecisionLog(bus)
        if self.options.stands == "ingest":
            bus.use(_Ingest(self, topics))
        bus.at_close(self.log.flush)

    def on(self, topic: str, *, group: str, workers: int = 1, **options: Any) -> Callable[[H], H]:
        """Make a function the handler of a group, behind the gate. ``options`` are those of
        ``bus.on``. ``workers`` is the budget in events, unless the gate has one.
        """
        if self.options.stands == "ingest":
            return self._bus.on(topic, group=group, workers=workers, **options)
        check_topic(DEFERRED_PREFIX + group)
        wide = (self.options.items or workers) + self.options.waiting + self.options.deciders
        options.setdefault("max_inflight", max(100, wide))

        def register(handler: H) -> H:
            check_handler(handler)
            door = _Door(self, group, workers, adapt(handler))
            self._bus.on(topic, group=group, workers=wide, **options)(door.arrive)
            back = {k: v for k, v in options.items() if k in ("policy",)}
            parked = self.options.items or workers
            deferred = DEFERRED_PREFIX + group
            self._bus.on(deferred, group=group, workers=parked, **back)(door.come_back)
            return handler

        return register

    async def judge(self, event: Event, load: float = 0.0, group: str = "") -> _Verdict:
        """What the thresholds say about an event. Never raises: it fails open."""
        try:
            found = self._scorer(self._opened(event), Scene(self._bus.clock.now(), load, group))
            score = to_score(await found if inspect.isawaitable(found) else found)
        except Exception as error:  # noqa: BLE001 -- a scorer may fail in any way
            # Without the text: it may quote the payload.
            logger.warning("the scorer failed on event %s: %s", event.id, type(error).__name__)
            why = f"the scorer failed: {type(error).__name__}"
            return _Verdict(Action.ADMIT, By.FAIL_OPEN, Score(self.thresholds.admit_from), why)
        reason = self.thresholds.reason(score.salience)
        reason = f"{reason}, {score.reason}" if score.reason else reason
        action = self.thresholds.action(score.salience)
        return _Verdict(action, By.THRESHOLD, score, reason)

    def decision(self, about: Event, verdict: _Verdict, **more: Any) -> Decision:
        decision = Decision(
            action=verdict.action,
            by=verdict.by,
            salience=verdict.score.salience,
            reason=verdict.reason,
            thresholds=self.thresholds,
            features=dict(verdict.score.features),
            stands=self.options.stands,
            id=about.id,
            key=about.key,
            space=about.space,
            band=about.band,
            caps=about.caps,
            **({"topic": about.topic} | more),
        )
        self.counts[decision.group, decision.action.value] += 1
        return decision

    async def flush(self) -> None:
        """Wait until the decisions so far are written."""
        await self.log.flush()

    def register(self, registry: Any = None) -> None:
        """Show decisions to Prometheus: ``trunkline_attention_decisions_total``."""
        from prometheus_client import REGISTRY

        (registry or REGISTRY).register(_DecisionCounts(self))


class _DecisionCounts:
    """A collector for ``prometheus_client``."""

    def __init__(self, gate: AttentionGate) -> None:
        self._gate = gate

    def collect(self) -> list[Any]:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(
            "trunkline_attention_decisions", "Decisions of the gate", labels=["group", "action"]
        )
        for (group, action), count in list(self._gate.counts.items()):
            family.add_metric([group, action], count)
        return [family]


class _Door:
    """The gate of one group."""

    def __init__(
        self,
        gate: AttentionGate,
        group: str,
        workers: int,
        handle: Callable[[Any], Awaitable[Any]],
    ) -> None:
        options = gate.options
        self._gate = gate
        self._group = group
        self._handle = handle
        self._space = Workspace(options.items or workers, options.bytes, options.waiting)
        self._is_defined = False
        self._asleep: set[asyncio.Future[str]] = set()
        self._ending: WeakSet[asyncio.Task[Any]] = WeakSet()  # the workers that were told to end
        gate._bus.at_stop(self.stop)
        self._fell_at: datetime | None = None  # the load, below ``return_below``
        self._space.watch(self._left)

    async def arrive(self, event: Event, delivery: Delivery) -> Any:
        """Judge a record of the group's topic, and act on it."""
        self._begin()
        size = _size(event) if self._gate.options.bytes else 0
        verdict = await self._gate.judge(event, self._space.load, self._group)
        if delivery.attempt > 1:
            reason = f"attempt {delivery.attempt} of a record that was judged before"
            verdict = verdict._replace(action=Action.ADMIT, by=By.RETRY, reason=reason)
        if verdict.action is Action.DROP:
            if await self._gate.log.keep(self._decision(delivery, verdict)) is not None:
                return None
            verdict = _opened(verdict, "the decision to drop it could not be written")
        elif verdict.action is Action.DEFER:
            if (failure := await self._defer(delivery, verdict)) == "":
                return None
            verdict = _opened(verdict, failure)
        may_turn = verdict.by is By.THRESHOLD
        if not await self._space.enter(verdict.score.salience, size, may_turn=may_turn):
            failure = await self._defer(delivery, self._turned_away(verdict))
            if failure == "":
                return None
            if self._space.is_closed:
                raise Retry(0.0, failure)
            verdict = _opened(verdict, failure)
            if not await self._space.enter(verdict.score.salience, size, may_turn=False):
                raise Retry(0.0, "the process ends")
        return await self._work(size, delivery, delivery, verdict)

    def _turned_away(self, verdict: _Verdict) -> _Verdict:
        if self._space.is_closed:
            return verdict._replace(
                action=Action.DEFER, by=By.STOP, reason="the process ends before there is room"
            )
        reason = f"over budget: {self._space.waiting} events in line rank higher"
        return verdict._replace(action=Action.DEFER, by=By.BUDGET, reason=reason)

    async def come_back(self, event: Event, delivery: Delivery) -> Any:
        """A deferred record waits for its time or for the load to fall, then for room."""
        self._begin()
        try:
            origin = msgspec.json.decode(event.headers[_SAID], type=_Origin)
        except (KeyError, msgspec.DecodeError) as error:
            raise InvalidOption(f"not a deferred record: {error}") from None
        why = await self._wait(origin) if delivery.attempt == 1 else "an earlier attempt failed"
        record = Record(_unparked(event, origin), origin.partition, origin.offset)
        size = _size(event) if self._gate.options.bytes else 0
        rank = max(origin.salience, self._gate.thresholds.admit_from)
        if not await self._space.enter(rank, size, may_turn=False):
            await self._gate._bus.publish(event)
            return None  # the process ends, and the next one has the record with all its attempts
        verdict = _Verdict(Action.ADMIT, By.RETURN, Score(origin.salience), why)
        return await self._work(size, _Restored(delivery, record), delivery, verdict)

    async def _work(self, size: int, shown: Any, delivery: Delivery, verdict: _Verdict) -> Any:
        try:
            self._gate.log.tell(self._decision(shown, verdict, attempt=delivery.attempt))
            return await self._handle(shown)
        finally:
            self._space.leave(size)

    def _decision(self, delivery: Any, verdict: _Verdict, attempt: int = 0) -> Decision:
        return self._gate.decision(
            delivery.event,
            verdict,
            partition=delivery.partition,
            offset=delivery.offset,
            group=self._group,
            attempt=attempt or delivery.attempt,
            defers=1 if verdict.by is By.RETURN else 0,
        )

    async def _defer(self, delivery: Delivery, verdict: _Verdict) -> str:
        """Copy the record to the deferred ones; empty, or why that failed."""
        gate, event = self._gate, delivery.event
        now = gate._bus.clock.now()
        origin = _Origin(
            event.topic,
            delivery.partition,
            delivery.offset,
            event.id,
            event.cause,
            now,
            now + timedelta(seconds=gate.options.defer_s),
            verdict.score.salience,
        )
        try:
            await self._define()
            await gate._bus.publish(_parked(event, origin, DEFERRED_PREFIX + self._group))
        except (TrunklineError, OSError) as error:
            return f"it could not be deferred: {error}"[:500]
        await gate.log.keep(self._decision(delivery, verdict))
        return ""

    async def _define(self) -> None:
        """Keep deferred records for a week after they are settled, unless the topic exists."""
        if not self._is_defined:
            self._is_defined = True
            topic = DEFERRED_PREFIX + self._group
            if topic not in await self._gate._bus.topics():
                with contextlib.suppress(Conflict):  # another process was first
                    await self._gate._bus.define(topic, retention_age_s=_KEPT_S)

    async def _wait(self, origin: _Origin) -> str:
        clock = self._gate._bus.clock
        left_s = (origin.due - clock.now()).total_seconds()
        if left_s <= 0:
            return "its time came"
        woken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def fell() -> None:
            if not woken.done() and self._has_fallen_since(origin.at):
                woken.set_result("the load fell")

        def due() -> None:
            if not woken.done():
                woken.set_result("its time came")

        if self._space.is_closed:
            return "the process ends"
        fell()
        timer = clock.call_later(left_s, due)
        self._space.watch(fell)
        self._asleep.add(woken)
        try:
            return await woken
        finally:
            self._asleep.discard(woken)
            timer.cancel()
            self._space.ignore(fell)

    def _begin(self) -> None:
        """A worker that is newer than the last stop opens the door again."""
        if self._space.is_closed and asyncio.current_task() not in self._ending:
            self._space.open()

    def stop(self) -> None:
        """The process ends: what waits for room or for its time is deferred once more."""
        self._ending = WeakSet(asyncio.all_tasks())
        self._space.close()
        for woken in self._asleep:
            if not woken.done():
                woken.set_result("the process ends")

    def _left(self) -> None:
        if self._space.load < self._gate.options.return_below:
            self._fell_at = self._gate._bus.clock.now()

    def _has_fallen_since(self, at: datetime) -> bool:
        """Whether an event left the workspace since then, and there is room now."""
        return self._fell_at is not None and self._fell_at >= at and self._space.has_room


class _Ingest:
    """The gate before the append. Its budget holds for one window of time and one topic."""

    stage: Final = "keep"  # it keeps what it drops: see guard/order

    def __init__(self, gate: AttentionGate, topics: str) -> None:
        self._gate = gate
        self._topics = topics
        self._windows: dict[str, tuple[float, int, int]] = {}  # began, items, bytes

    async def publish(self, events: list[Event], call_next: PublishNext) -> list[Receipt]:
        topic = events[0].topic
        if (
            topic.startswith((SYSTEM_PREFIX, DEFERRED_PREFIX))
            or is_dead(topic)
            or not matches(self._topics, topic)
        ):
            return await call_next(events)
        gate, load = self._gate, self._load(topic)
        verdicts = [await gate.judge(event, load) for event in events]
        order = sorted(range(len(events)), key=lambda at: -verdicts[at].score.salience)
        for at in order:  # over budget, admission goes by rank
            verdicts[at] = self._within(topic, events[at], verdicts[at])
        receipts: list[Receipt | None] = [None] * len(events)
        for at, verdict in enumerate(verdicts):
            if verdict.action is Action.DROP:
                event = msgspec.to_builtins(events[at])
                receipts[at] = await gate.log.keep(gate.decision(events[at], verdict, event=event))
                if receipts[at] is None:
                    said = "the decision to drop it could not be written"
                    verdicts[at] = _opened(verdict, said)
        kept = [at for at, receipt in enumerate(receipts) if receipt is None]
        if kept:
            changed = [self._changed(events[at], verdicts[at]) for at in kept]
            for at, receipt in zip(kept, await call_next(changed), strict=True):
                receipts[at] = receipt
                place = {"partition": receipt.partition, "offset": receipt.offset}
                gate.log.tell(gate.decision(events[at], verdicts[at], **place))
        return [receipt for receipt in receipts if receipt is not None]

    def _window(self, topic: str) -> tuple[float, int, int]:
        now = self._gate._bus.clock.monotonic()
        window = self._windows.get(topic, (now, 0, 0))
        if now - window[0] >= self._gate.options.window_s:
            window = (now, 0, 0)
        self._windows[topic] = window
        return window

    def _load(self, topic: str) -> float:
        _, items, size = self._window(topic)
        options = self._gate.options
        shares = (
            items / options.items if options.items else 0.0,
            size / options.bytes if options.bytes else 0.0,
        )
        return min(1.0, max(shares))

    def _within(self, topic: str, event: Event, verdict: _Verdict) -> _Verdict:
        """The verdict, unless the budget of the window is used up. A boosted event passes."""
        if verdict.action in (Action.DROP, Action.DEFER):
            return verdict
        options = self._gate.options
        began, items, size = self._window(topic)
        more = _size(event) if options.bytes else 0
        over = (options.items is not None and items >= options.items) or (
            options.bytes is not None and items > 0 and size + more > options.bytes
        )
        if over and verdict.action is not Action.BOOST and verdict.by is By.THRESHOLD:
            why = f"over budget: {items} events, {size} bytes in this window"
            return verdict._replace(action=Action.DEFER, by=By.BUDGET, reason=why)
        self._windows[topic] = (began, items + 1, size + more)
        return verdict

    def _changed(self, event: Event, verdict: _Verdict) -> Event:
        if verdict.action is Action.BOOST:
            raised = PRIORITIES[max(0, RANK[event.priority] - 1)]
            return msgspec.structs.replace(event, priority=raised)
        if verdict.action is Action.DEFER:
            due = self._gate._bus.clock.now() + timedelta(seconds=self._gate.options.defer_s)
            due = max(due, event.not_before or due)
            return msgspec.structs.replace(event, not_before=due)
        return event


def _opened(verdict: _Verdict, why: str) -> _Verdict:
    logger.warning("the attention gate lets an event pass: %s", why)
    return verdict._replace(action=Action.ADMIT, by=By.FAIL_OPEN, reason=why)


def _size(event: Event) -> int:
    return len(msgspec.json.encode(event.payload))


def _parked(event: Event, origin: _Origin, topic: str) -> Event:
    """A copy of an event in another topic. Its id follows from the origin, so a repeated deferral
    is told from a new one.
    """
    said = msgspec.json.encode(origin).decode()
    return msgspec.structs.replace(
        event,
        topic=topic,
        id=f"{event.id}@{topic.removeprefix(DEFERRED_PREFIX)}"[:1000],
        cause=event.id,
        headers={**event.headers, _SAID: said},
        idem_key=None,
        not_before=None,
    )


def _unparked(event: Event, origin: _Origin) -> Event:
    headers = {name: value for name, value in event.headers.items() if name != _SAID}
    return msgspec.structs.replace(
        event, topic=origin.topic, id=origin.id, cause=origin.cause, headers=headers
    )


__all__ = ["AttentionGate"]
