"""The write workflow: accept, redact, encode, keep the episode, and trigger consolidation.

::

    writer = WriteHandler(bus, redact=redactor.redact)
    await writer.write("alice", {"likes": "tea"}, space="home")

A write becomes three events. ``hippo`` has HIPPO_ENCODE with the redacted content,
``memory.episodes`` the episode that points to it, ``temporal`` WRITE_ACCEPTED with both places.
Each has an idempotency key made from the id of the write: a repeated write adds nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable
from datetime import datetime
from importlib.util import find_spec
from typing import Any

import msgspec

from trunkline.bus import Bus
from trunkline.clock import Handle
from trunkline.cognition.consolidation import Consolidator
from trunkline.cognition.events import TOPIC, CognitiveType
from trunkline.cognition.memory import EPISODES, Episode, MemorySource, define_topics
from trunkline.cognition.options import MemoryOptions
from trunkline.errors import InvalidEvent, Reject
from trunkline.event import Event, Receipt, new_id

logger = logging.getLogger(__name__)

Redact = Callable[[Event], Event | Awaitable[Event]]
Consolidate = Callable[[str], Awaitable[Any]]
_WINDOW_S = 7 * 86_400.0


class Written(msgspec.Struct, frozen=True):
    """The receipts of one write."""

    encoded: Receipt
    episode: Receipt
    accepted: Receipt


class SparkConsolidation:
    """Runs the pipeline ``consolidation`` in a process of its own, where Spark is installed."""

    def __init__(self, url: str, lake: str = ".lake", master: str = "local[*]") -> None:
        self._command = (sys.executable, "-m", "trunkline", "pipeline", "run", "consolidation")
        self._options = ("--url", url, "--lake", lake, "--master", master, "-q")
        self.code: int | None = None  # of the last run

    @staticmethod
    def is_installed() -> bool:
        return find_spec("pyspark") is not None

    async def __call__(self, trigger: str) -> int:
        process = await asyncio.create_subprocess_exec(
            *self._command, *self._options, stdin=asyncio.subprocess.DEVNULL
        )
        try:
            self.code = await process.wait()
        except asyncio.CancelledError:
            process.terminate()
            await process.wait()
            raise
        if self.code:
            logger.error("the pipeline consolidation ended with %d (%s)", self.code, trigger)
        return self.code


class WriteHandler:
    """``redact`` takes an event and returns the event to keep. ``spark`` runs besides the
    consolidation in this process, when that is triggered.
    """

    def __init__(
        self,
        bus: Bus,
        options: MemoryOptions | None = None,
        *,
        redact: Redact | None = None,
        consolidator: Consolidator | None = None,
        spark: Consolidate | None = None,
    ) -> None:
        self.options = options or MemoryOptions()
        self.consolidator = consolidator or Consolidator(bus, self.options)
        self.runs = 0
        self._bus = bus
        self._redact = redact
        self._spark = spark
        self._is_defined = False
        self._pending = 0  # writes since the last consolidation
        self._timers: dict[str, Handle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        bus.at_close(self.close)

    def on(self, topic: str, *, group: str, **options: Any) -> None:
        """Write each event of a topic: its payload has ``subject`` and ``content``."""
        self._bus.on(topic, group=group, **options)(self.handle)

    async def handle(self, event: Event) -> None:
        payload = event.payload
        if not isinstance(payload, dict) or not {"subject", "content"} <= payload.keys():
            raise Reject("a write has subject and content")
        more = {k: v for k, v in payload.items() if k in ("confidence", "valid_at")}
        if "valid_at" in more:
            more["valid_at"] = msgspec.convert(more["valid_at"], datetime)
        await self.write(
            payload["subject"],
            payload["content"],
            space=event.space,
            actor=event.actor,
            band=event.band,
            caps=event.caps,
            id=event.id,
            trace=event.trace,
            cause=event.id,
            **({"valid_at": event.ts} | more),
        )

    async def write(
        self,
        subject: str,
        content: Any,
        *,
        space: str | None,
        confidence: float | None = None,
        valid_at: datetime | None = None,
        id: str | None = None,
        **fields: Any,
    ) -> Written:
        """Keep one memory. ``fields`` are those of ``Event``; ``space`` is needed."""
        if not space:
            raise InvalidEvent("a write belongs to a space", field="space")
        if not isinstance(subject, str) or not subject:
            raise InvalidEvent("a write has a subject", field="subject")
        sure = self.options.confidence if confidence is None else confidence
        if isinstance(sure, bool) or not isinstance(sure, int | float) or not 0 <= sure <= 1:
            raise InvalidEvent(f"confidence is from 0 to 1, not {sure!r}", field="confidence")
        await self._define()
        id_, now = id or new_id(), self._bus.clock.now()
        event = Event(
            topic=TOPIC[CognitiveType.HIPPO_ENCODE],
            type=CognitiveType.HIPPO_ENCODE.value,
            ts=now,
            space=space,
            subject=subject,
            key=subject,
            payload={"subject": subject, "content": content},
            idem_key=f"{id_}:encode",
            **fields,
        )
        if self._redact is not None:
            found = self._redact(event)
            event = await found if inspect.isawaitable(found) else found
        kept = event.payload
        encoded = await self._bus.publish(event)
        episode = Episode(
            subject=kept["subject"],
            content=kept["content"],
            confidence=float(sure),
            valid_at=valid_at or now,
            encoded=MemorySource(encoded.topic, encoded.partition, encoded.offset),
        )
        said = {
            "ts": now,
            "space": space,
            "key": kept["subject"],
            "subject": kept["subject"],
            "actor": event.actor,
            "band": event.band,
            "caps": event.caps,
            "trace": event.trace,
            "cause": encoded.id,
        }
        stored = await self._bus.publish(
            Event(
                topic=EPISODES,
                type="EPISODE",
                payload=msgspec.to_builtins(episode),
                idem_key=f"{id_}:episode",
                **said,
            )
        )
        accepted = await self._bus.publish(
            Event(
                topic=TOPIC[CognitiveType.WRITE_ACCEPTED],
                type=CognitiveType.WRITE_ACCEPTED.value,
                payload={
                    "subject": kept["subject"],
                    "ts": msgspec.to_builtins(now),
                    "valid_at": msgspec.to_builtins(episode.valid_at),
                    "encoded": msgspec.to_builtins(episode.encoded),
                    "episode": [stored.topic, stored.partition, stored.offset],
                },
                idem_key=f"{id_}:accepted",
                **said,
            )
        )
        if not stored.duplicate:
            self._count()
        return Written(encoded, stored, accepted)

    async def resume(self) -> int:
        """Count the episodes that an earlier process left for consolidation. The first write does
        this, too.
        """
        await self._define()
        return self._pending

    async def _define(self) -> None:
        if not self._is_defined:
            await define_topics(self._bus)
            have = await self._bus.topics()
            for type_ in (CognitiveType.HIPPO_ENCODE, CognitiveType.WRITE_ACCEPTED):
                if TOPIC[type_] not in have:
                    await self._bus.define(TOPIC[type_], dedup_window_s=_WINDOW_S)
            self._is_defined = True
            if left := await self.consolidator.waiting():
                self._count(left)

    # -- the trigger ---------------------------------------------------------------------------

    def _count(self, writes: int = 1) -> None:
        self._pending += writes
        options, clock = self.options, self._bus.clock
        if options.after_writes is not None and self._pending >= options.after_writes:
            self._fire(f"{self._pending} writes")
            return
        if options.after_s is not None and "time" not in self._timers:
            self._timers["time"] = clock.call_later(
                options.after_s, lambda: self._fire(f"{options.after_s:g} s since the first write")
            )
        if options.idle_s is not None:
            if idle := self._timers.pop("idle", None):
                idle.cancel()
            self._timers["idle"] = clock.call_later(
                options.idle_s, lambda: self._fire(f"idle for {options.idle_s:g} s")
            )

    def _fire(self, trigger: str) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._pending = 0
        task = asyncio.get_running_loop().create_task(self._consolidate(trigger))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _consolidate(self, trigger: str) -> None:
        try:
            await self._bus.publish(
                TOPIC[CognitiveType.TRIGGER_FIRED],
                {"trigger": "consolidation", "reason": trigger},
                type=CognitiveType.TRIGGER_FIRED.value,
            )
            await self.consolidator.run(trigger)
            if self._spark is not None:
                await self._spark(trigger)
            self.runs += 1
        except Exception:  # the episodes are kept, and the next trigger takes them
            logger.exception("consolidation failed (%s)", trigger)

    async def settle(self) -> None:
        """Wait for the consolidations that were triggered."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        await self.settle()
