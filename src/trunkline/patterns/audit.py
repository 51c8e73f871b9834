"""What a bus says about itself, on its own topics.

``system.metrics`` counts and gauges, at an interval · ``system.bus.audit`` decisions: published,
acked, nacked, delivered again, dead, denied · ``system.bus.dlq`` every dead letter of every topic.
What tells of a settled delivery says how long it waited to be delivered and how long it was held.

These events are told in passing: they never hold up what they tell about, and when the bus cannot
take them they are counted as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Sized
from datetime import datetime
from typing import Any, Final

import msgspec

from trunkline.bus import Delivery
from trunkline.bus.local import LocalBus
from trunkline.errors import InvalidEvent, Reject, TrunklineError
from trunkline.event import Event, Receipt, Record
from trunkline.middleware import HandleNext, PublishNext
from trunkline.names import AUDIT, SYSTEM_PREFIX, GroupKey
from trunkline.store.spans import Spans

logger = logging.getLogger(__name__)

METRICS: Final = "system.metrics"
DEAD: Final = "system.bus.dlq"
_WAITING_MAX = 10_000
_BATCH = 500
_SERIES_MAX = 1000
_PAUSE_S = 0.1
_END_S = 3.0
_METRICS_KEPT_S = 7 * 86_400.0
_AUDIT_KEPT_S = 30 * 86_400.0


class Counts:
    """What happened since the start."""

    def __init__(self) -> None:
        self.publishes = 0
        self.delivered = 0
        self.redelivered = 0
        self.acked = 0
        self.nacked = 0
        self.dead = 0
        self.denied = 0
        self.evicted = 0
        self.bad_frames = 0
        self.connected = 0
        self.lost = 0
        self.by_topic: dict[str, Counter[str]] = {}
        self.settled: Counter[tuple[str, str, str]] = Counter()  # by topic, group and outcome
        self.publish_s: dict[str, Spans] = {}  # by topic
        self.process_s: dict[tuple[str, str], Spans] = {}  # by topic and group
        self.dropped: set[tuple[str, ...]] = set()  # series that are too many to be kept

    def published(self, topic: str, count: int, took_s: float = 0.0) -> None:
        self.publishes += count
        self._of(topic)["published"] += count
        spans = self.publish_s.get(topic)
        if spans is None:
            if self._is_full(self.publish_s, (topic,)):
                return
            spans = self.publish_s[topic] = Spans()
        spans.add(took_s)

    def finished(
        self, topic: str, group: str, outcome: str, held_s: Collection[float | None]
    ) -> None:
        """Deliveries were settled. ``held_s`` says of each how long a consumer held it, if that is
        known.
        """
        if outcome == "ack":
            self.acked += len(held_s)
        else:
            self.nacked += len(held_s)
        key = (topic, group, outcome)
        if key not in self.settled and self._is_full(self.settled, key):
            return
        self.settled[key] += len(held_s)
        spans = self.process_s.get((topic, group))
        for seconds in held_s:
            if seconds is None:
                continue
            if spans is None:
                spans = self.process_s[topic, group] = Spans()
            spans.add(seconds)

    def _is_full(self, series: Sized, key: tuple[str, ...]) -> bool:
        """Names come from outside: bound them, and count what is left out."""
        if len(series) < _SERIES_MAX:
            return False
        if len(self.dropped) < _SERIES_MAX:
            self.dropped.add(key)
        return True

    def sent(self, topic: str, count: int, again: int) -> None:
        self.delivered += count
        self.redelivered += again
        self._of(topic)["delivered"] += count

    def _of(self, topic: str) -> Counter[str]:
        found = self.by_topic.get(topic)
        if found is None:
            if len(self.by_topic) >= _SERIES_MAX and topic != "other":
                return self._of("other")
            found = self.by_topic[topic] = Counter()
        return found

    def totals(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}


class System:
    def __init__(
        self, bus: LocalBus, counts: Counts, *, metrics_s: float = 10.0, audit: float = 0.0
    ) -> None:
        self._bus = bus
        self._counts = counts
        self._metrics_s = metrics_s
        self._share = audit
        self.quotes = True  # whether a dead letter is told with its payload
        self._waiting: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None
        self._measurer: asyncio.Task[None] | None = None
        self._gauges: Callable[[], dict[str, float]] = dict
        self._is_audit_defined = False

    async def start(self, gauges: Callable[[], dict[str, float]]) -> None:
        self._gauges = gauges
        if self._share:
            await self._define_audit()
        self._writer = asyncio.get_running_loop().create_task(self._write())
        self._begin_measuring()

    def _begin_measuring(self) -> None:
        if self._metrics_s:
            self._measurer = asyncio.get_running_loop().create_task(self._measure())

    async def configure(self, *, metrics_s: float, audit: float) -> None:
        """Take over other settings while it runs."""
        self._share = audit
        if metrics_s != self._metrics_s:
            await self._end(self._measurer)
            self._metrics_s, self._measurer = metrics_s, None
            self._begin_measuring()

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):  # the device may be full
            async with asyncio.timeout(_END_S):
                await self._writing.acquire()  # what is being written is not cut off
        await self._end(self._measurer)
        await self._end(self._writer)
        self._measurer = self._writer = None
        await self._flush()

    @staticmethod
    async def _end(task: asyncio.Task[None] | None) -> None:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def audit(self, what: str, **facts: Any) -> None:
        """Tell of a decision; of a share of them, by option."""
        if self._share and (self._share >= 1 or random.random() < self._share):
            told = {k: v for k, v in facts.items() if v not in (None, "")}
            self._tell(AUDIT, what, {"what": what, **told})

    def audit_denial(self, **facts: Any) -> None:
        """Tell of a denial by a policy, whatever the share of other decisions that is told. Of a
        record of the audit that nobody may read only the count is told: to tell of it would be the
        next such record.
        """
        if facts.get("topic") == AUDIT and facts.get("action") == "read":
            return
        told = {k: v for k, v in facts.items() if v not in (None, "")}
        self._tell(AUDIT, "denied", {"what": "denied", **told})

    def on_dead_letter(self, key: GroupKey, record: Record, reason: str, error: str) -> None:
        if key.topic.startswith(SYSTEM_PREFIX):
            return
        self._counts.dead += 1
        event = record.event
        facts = {
            "topic": key.topic,
            "partition": key.partition,
            "offset": record.offset,
            "group": key.group,
            "id": event.id,
            "reason": reason,
            "error": error[:1000],
        }
        told = {**facts, "key": event.key}
        if self.quotes:
            told["payload"] = event.payload
        self._tell(DEAD, reason, told, like=event)
        self.audit("dlq", **facts)

    def _tell(
        self, topic: str, type_: str, payload: dict[str, Any], like: Event | None = None
    ) -> None:
        """An event ``like`` another is guarded as that one is."""
        if len(self._waiting) >= _WAITING_MAX:
            self._counts.lost += 1
            return
        event = Event(topic=topic, type=type_, payload=payload, ts=self._bus.clock.now())
        if like is not None:
            event = msgspec.structs.replace(event, space=like.space, band=like.band, caps=like.caps)
        self._waiting.append(event)
        self._wake.set()

    async def _define(self, topic: str, kept_s: float) -> bool:
        """Make a system topic that does not grow without end. One that is there stays as it is."""
        try:
            if topic not in await self._bus.topics():
                await self._bus.define(topic, retention_age_s=kept_s, retain_unsettled=False)
        except (TrunklineError, OSError):
            return False
        return True

    async def _define_audit(self) -> None:
        """Before the first record of any caller: a policy's denials are told in any case."""
        if not self._is_audit_defined:
            self._is_audit_defined = await self._define(AUDIT, _AUDIT_KEPT_S)

    async def _measure(self) -> None:
        """Tell what changed since the last time, and nothing while nothing changes."""
        await self._define(METRICS, _METRICS_KEPT_S)
        before: dict[str, Any] = {}
        while True:
            await asyncio.sleep(self._metrics_s)
            now = self._figures(self._gauges)
            by_topic = {
                topic: found
                for topic, found in now["byTopic"].items()
                if found != before.get("byTopic", {}).get(topic)
            }
            if now != before:
                self._tell(METRICS, "metrics", {**now, "byTopic": by_topic})
            # To tell of it is to publish: that alone is no news the next time.
            before = now

    def _figures(self, gauges: Callable[[], dict[str, float]]) -> dict[str, Any]:
        counts = self._counts
        by_topic = {topic: dict(found) for topic, found in counts.by_topic.items()}
        shown = gauges()
        metrics: dict[str, float] = {
            f"trunkline_{name}_total": value for name, value in counts.totals().items()
        }
        metrics |= {f"trunkline_{name}": value for name, value in shown.items()}
        return {
            "counters": counts.totals(),
            "gauges": shown,
            "byTopic": by_topic,
            "metrics": metrics,  # the same by their names in Prometheus
        }

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(_PAUSE_S)  # what happens together is written together
            self._wake.clear()
            async with self._writing:
                await self._flush()

    async def _flush(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            topics: dict[str, list[Event]] = {}
            for event in batch:
                topics.setdefault(event.topic, []).append(event)
            for topic, events in topics.items():
                await self._keep(topic, events)

    async def _keep(self, topic: str, events: list[Event]) -> None:
        try:
            if topic == AUDIT:
                await self._define_audit()
            await self._bus.publish_many(topic, events)
        except Exception as error:  # noqa: BLE001 -- what is told later is no less worth telling
            if isinstance(error, InvalidEvent) and len(events) > 1:
                for event in events:  # one of them is bad: let the others not suffer from it
                    await self._keep(topic, [event])
            elif isinstance(error, InvalidEvent) and "payload" in events[0].payload:
                # The letter is as large as a record may be, and this tells of it besides.
                bare = {k: v for k, v in events[0].payload.items() if k != "payload"}
                await self._keep(topic, [msgspec.structs.replace(events[0], payload=bare)])
            else:
                self._counts.lost += len(events)
                logger.warning("system events were lost: %s", error)


class Audit:
    """Lets a bus in this process tell of its decisions, as a broker does: what is published, and
    what handlers made of it. ``connect(url, audit=1.0)`` adds it.
    """

    def __init__(self, bus: LocalBus, share: float) -> None:
        self._system = System(bus, Counts(), metrics_s=0.0, audit=share)
        self._clock = bus.clock
        self._is_writing = False
        bus.use(self)
        bus.at_close(self._system.close)

    async def publish(self, events: list[Event], call_next: PublishNext) -> list[Receipt]:
        receipts = await call_next(events)
        for one in receipts:
            await self._tell(
                "publish", topic=one.topic, partition=one.partition, offset=one.offset, id=one.id
            )
        return receipts

    async def handle(self, delivery: Delivery, call_next: HandleNext) -> Any:
        began, outcome = self._clock.monotonic(), "nack"
        try:
            result = await call_next(delivery)
            outcome = "ack" if delivery.outcome is None else delivery.outcome.value
            return result
        except Reject:
            outcome = "term"
            raise
        finally:
            held_s = self._clock.monotonic() - began
            await self._tell(outcome, **settled(delivery, held_s, self._clock.now()))

    async def _tell(self, what: str, **facts: Any) -> None:
        if not facts["topic"].startswith(SYSTEM_PREFIX):
            if not self._is_writing:
                self._is_writing = True
                await self._system.start(dict)
            self._system.audit(what, **facts)


def settled(delivery: Delivery, held_s: float, now: datetime) -> dict[str, Any]:
    """What an audit record tells of a delivery that is settled ``now``."""
    waited_s = (now - delivery.event.ts).total_seconds() - held_s
    return {
        "topic": delivery.topic,
        "partition": delivery.partition,
        "offset": delivery.offset,
        "group": delivery.group,
        "attempt": delivery.attempt,
        "waited_s": max(0.0, round(waited_s, 6)),
        "held_s": round(held_s, 6),
    }
