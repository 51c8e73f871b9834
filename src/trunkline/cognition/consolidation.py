"""Consolidation: from episodes to memories, in four passes and a recall check.

1. ``dedupe``: episodes that say the same become one candidate; a memory that says it already is
   reinforced.
2. ``merge``: candidates and memories of one subject whose contents agree become one; a candidate
   that contradicts a memory supersedes it, or waits for review where its confidence is low.
3. ``promote``: a candidate of enough confidence becomes an active memory, any other goes to
   ``memory.review``.
4. ``forget``: a memory whose strength (confidence * decay of its age) is too low is forgotten, with
   a tombstone.

The run then recalls: what was remembered is still found, and what was forgotten is not. Each run is
an event on ``memory.runs`` that says per pass how many were kept, changed and forgotten, and why. A
run over the same episodes changes nothing: ids follow from the contents.

The dead-letter tools review ``memory.review``: ``trunkline dlq ls memory.review`` shows what waits,
``redrive`` accepts a memory, ``drop`` refuses it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec

from trunkline.bus import Bus, Delivery
from trunkline.cognition.memory import (
    EPISODES,
    FACTS,
    REVIEW,
    RUNS,
    Episode,
    Memory,
    MemorySource,
    MemoryView,
    Opened,
    Secret,
    define_topics,
    memory_id,
    to_event,
)
from trunkline.cognition.options import MemoryOptions
from trunkline.cognition.salience import decayed
from trunkline.errors import Erased, Reject
from trunkline.event import BANDS, Event, Record

logger = logging.getLogger(__name__)

REVIEWER: Final = "reviewer"
RUN_TYPE: Final = "memory.consolidated"
_READ = 1000


class PassReport(msgspec.Struct):
    """What one pass did."""

    name: str
    kept: int = 0
    changed: int = 0
    forgotten: int = 0
    reasons: list[str] = []

    def note(self, reason: str) -> None:
        if len(self.reasons) < 100:  # a run is one event
            self.reasons.append(reason)


class ConsolidationRun(msgspec.Struct, kw_only=True):
    """The payload of ``memory.runs``."""

    first: int  # offsets of episodes
    last: int
    at: datetime
    trigger: str
    passes: list[PassReport]
    recalled: int = 0
    missing: list[str] = []
    remembered: list[str] = []  # that should have been forgotten

    @property
    def ok(self) -> bool:
        return not (self.missing or self.remembered)


class RecallQuestion(NamedTuple):
    """``content`` must be recalled for the subject; with ``absent`` it must not."""

    subject: str
    content: Any
    space: str | None = None
    absent: bool = False


class Consolidator:
    def __init__(
        self,
        bus: Bus,
        options: MemoryOptions | None = None,
        *,
        questions: Callable[[], Sequence[RecallQuestion]] | None = None,
        opened: Opened | None = None,
        secret: Secret | None = None,
    ) -> None:
        """``opened`` opens a sealed event, such as ``vault.open``. ``secret`` is what ids of the
        memories of a space and a subject are made with, such as ``vault.secret``.
        """
        self.options = options or MemoryOptions()
        self.view = MemoryView(bus, opened)
        self._opened: Opened = opened or (lambda event: event)
        self._secret: Secret = secret or (lambda _space, _subject: b"")
        self._bus = bus
        self._questions = questions
        self._one = asyncio.Lock()

    def review(self) -> None:
        """Let this process take part in the review: it sets aside what needs a look and promotes
        what was accepted.
        """

        @self._bus.on(REVIEW, group=REVIEWER)
        async def look(event: Event, delivery: Delivery) -> None:
            if not await self._is_accepted(delivery):
                confidence = event.payload["confidence"]
                raise Reject(f"review: {event.payload['state']}, confidence {confidence:.2f}")
            memory = msgspec.convert(event.payload, Memory)
            now = self._bus.clock.now()
            await self.view.refresh()
            for old in self.view.recall(memory.subject, memory.space):
                if old.id != memory.id and contradicts(old.content, memory.content):
                    await self._publish(_ended(old, "superseded", memory.valid_at, now))
                    memory = msgspec.structs.replace(memory, supersedes=old.id)
            confidence = max(memory.confidence, self.options.promote_from)
            await self._publish(
                msgspec.structs.replace(memory, state="active", confidence=confidence)
            )

    async def _is_accepted(self, delivery: Delivery) -> bool:
        """Whether the letter of a record was redriven. One that was dropped is refused for good,
        also when a seek brings its record back.
        """
        desk = self._bus.dead_letters(REVIEW)
        async for letter in desk.letters(group=delivery.group, closed=True):
            is_its = letter.origin == delivery.offset and letter.partition == delivery.partition
            if is_its and not letter.open and not letter.dropped:
                return True
        return False

    async def run(self, trigger: str = "asked") -> ConsolidationRun:
        """Consolidate what was written since the last run."""
        async with self._one:
            await define_topics(self._bus)
            await self.view.refresh()
            first = await self._begin()
            episodes, last, erased = await self._episodes(first)
            run = ConsolidationRun(
                first=first, last=last, at=self._bus.clock.now(), trigger=trigger, passes=[]
            )
            before = {one.id: one for one in self.view if one.is_live}
            candidates = await self._dedupe(run, episodes, erased)
            candidates = await self._merge(run, candidates)
            await self._promote(run, candidates)
            forgotten = await self._forget(run)
            await self._recall(run, before, forgotten)
            await self._bus.publish(
                RUNS, msgspec.to_builtins(run), type=RUN_TYPE, key="consolidation"
            )
            if not run.ok:
                logger.error("recall after consolidation: %s missing", ", ".join(run.missing))
            return run

    async def waiting(self) -> int:
        """How many episodes no run has seen."""
        await define_topics(self._bus)
        _, end = await self._bus.bounds(EPISODES)
        return max(0, end - await self._begin())

    async def _begin(self) -> int:
        """The first episode that no run has seen."""
        _, end = await self._bus.bounds(RUNS)
        for record in reversed(await self._bus.read(RUNS, max(1, end - 1)) if end > 1 else []):
            return int(self._opened(record.event).payload["last"]) + 1
        return 1

    async def _episodes(self, first: int) -> tuple[list[tuple[Record, Episode]], int, int]:
        """The episodes from ``first`` on, the offset of the last, and how many were erased."""
        found: list[tuple[Record, Episode]] = []
        start, last, erased = max(first, (await self._bus.bounds(EPISODES)).first), first - 1, 0
        while records := await self._bus.read(EPISODES, start, _READ):
            for one in records:
                try:
                    opened = self._opened(one.event)
                except Erased:
                    erased += 1
                    continue
                found.append((one, msgspec.convert(opened.payload, Episode)))
            last = records[-1].offset
            start = last + 1
        return found, last, erased

    async def _dedupe(
        self, run: ConsolidationRun, episodes: list[tuple[Record, Episode]], erased: int
    ) -> list[Memory]:
        log = PassReport("dedupe", forgotten=erased, reasons=[])
        run.passes.append(log)
        if erased:
            log.note(f"{erased} episodes were erased")
        found: dict[str, Memory] = {}
        for record, episode in episodes:
            event = record.event
            source = MemorySource(EPISODES, record.partition, record.offset)
            id_ = self._id(event.space, episode.subject, episode.content)
            if id_ in found:
                log.changed += 1
                log.note(f"episode {record.offset} repeats {id_}")
                again = self._reinforced(found[id_], (source,), episode.confidence)
                found[id_] = _guarded(again, event.band, event.caps)
                continue
            found[id_] = Memory(
                id=id_,
                subject=episode.subject,
                content=episode.content,
                sources=(source,),
                confidence=episode.confidence,
                state="active",
                valid_at=episode.valid_at,
                created_at=run.at,
                space=event.space,
                band=event.band,
                caps=event.caps,
            )
        fresh: list[Memory] = []
        for id_, memory in found.items():
            have = self.view.get(id_)
            if have is None or not have.is_live:
                fresh.append(memory)
                log.kept += 1
            elif set(memory.sources) - set(have.sources):
                log.changed += 1
                log.note(f"{id_} is reinforced")
                new = tuple(sorted(set(memory.sources) - set(have.sources)))
                again = self._reinforced(have, new, memory.confidence)
                await self._publish(_guarded(again, memory.band, memory.caps))
        return fresh

    def _reinforced(
        self, memory: Memory, new: tuple[MemorySource, ...], confidence: float
    ) -> Memory:
        step = self.options.reinforce * len(new)
        return msgspec.structs.replace(
            memory,
            sources=tuple(sorted({*memory.sources, *new})),
            confidence=round(min(1.0, max(memory.confidence, confidence) + step), 6),
        )

    async def _merge(self, run: ConsolidationRun, candidates: list[Memory]) -> list[Memory]:
        log = PassReport("merge", reasons=[])
        run.passes.append(log)
        merged: list[Memory] = []
        for one in sorted(candidates, key=lambda memory: memory.valid_at):
            memory = one
            at = next((n for n, old in enumerate(merged) if joins(old, memory)), None)
            if at is not None:
                log.changed += 1
                log.note(f"{memory.id} joins {merged[at].id}")
                merged[at] = self._joined(merged[at], memory)
                continue
            for old in self.view.recall(memory.subject, memory.space):
                if joins(old, memory):
                    log.changed += 1
                    log.note(f"{memory.id} joins {old.id}")
                    memory = self._joined(old, memory)
                elif contradicts(old.content, memory.content) and not self._is_sure(memory):
                    log.changed += 1
                    log.note(f"{memory.id} contradicts {old.id} and is not sure")
                    memory = msgspec.structs.replace(memory, state="conflict_pending")
                elif not contradicts(old.content, memory.content):
                    continue
                if memory.state == "active":
                    memory = msgspec.structs.replace(memory, supersedes=old.id)
            log.kept += 1
            merged.append(memory)
        return merged

    def _joined(self, old: Memory, new: Memory) -> Memory:
        content = {**old.content, **new.content}
        joined = self._reinforced(old, new.sources, new.confidence)
        return msgspec.structs.replace(
            _guarded(joined, new.band, new.caps),
            id=self._id(old.space, old.subject, content),
            content=content,
            valid_at=new.valid_at,
            created_at=new.created_at,
        )

    def _id(self, space: str | None, subject: str, content: Any) -> str:
        return memory_id(space, subject, content, self._secret(space or "", subject))

    def _is_sure(self, memory: Memory) -> bool:
        return memory.confidence >= self.options.promote_from

    async def _promote(self, run: ConsolidationRun, candidates: list[Memory]) -> None:
        log = PassReport("promote", reasons=[])
        run.passes.append(log)
        for memory in candidates:
            if not self._is_sure(memory) or memory.state == "conflict_pending":
                log.kept += 1
                log.note(f"{memory.id} waits for review, confidence {memory.confidence:.2f}")
                event = to_event(memory, run.at, REVIEW)
                event = msgspec.structs.replace(event, idem_key=memory.id)
                await self._bus.publish(event)
                continue
            for old in self.view.recall(memory.subject, memory.space):
                if old.id != memory.id and (
                    old.id == memory.supersedes or contradicts(old.content, memory.content)
                ):
                    log.note(f"{memory.id} supersedes {old.id}")
                    await self._publish(_ended(old, "superseded", memory.valid_at, run.at))
            log.changed += 1
            await self._publish(memory)

    async def _forget(self, run: ConsolidationRun) -> list[Memory]:
        log = PassReport("forget", reasons=[])
        run.passes.append(log)
        gone: list[Memory] = []
        for memory in self.view:
            since = memory.expired_at or max(memory.created_at, memory.valid_at)
            age_s = (run.at - since).total_seconds()
            strength = memory.confidence * decayed(
                age_s, self.options.half_life_s, self.options.decay
            )
            if strength >= self.options.forget_below:
                log.kept += 1
                continue
            log.forgotten += 1
            log.note(f"{memory.id} has strength {strength:.3f}")
            gone.append(memory)
            await self._bus.publish(FACTS, None, key=memory.id, type="MEMORY", space=memory.space)
        await self.view.refresh()
        return gone

    async def _recall(
        self, run: ConsolidationRun, before: dict[str, Memory], gone: list[Memory]
    ) -> None:
        """What was live is still recalled, unless this run ended it; what was forgotten is not."""
        await self.view.refresh()
        lost = {one.id for one in gone}
        for id_, memory in before.items():
            now = self.view.get(id_)
            if now is not None and now.state == "superseded":
                continue
            found = any(one.id == id_ for one in self.view.recall(memory.subject, memory.space))
            run.recalled += found
            if id_ in lost and found:
                run.remembered.append(id_)
            elif id_ not in lost and not found:
                run.missing.append(id_)
        for question in self._questions() if self._questions else ():
            contents = [one.content for one in self.view.recall(question.subject, question.space)]
            run.recalled += question.content in contents
            if question.absent and question.content in contents:
                run.remembered.append(question.subject)
            elif not question.absent and question.content not in contents:
                run.missing.append(question.subject)

    async def revoke(self, id_: str) -> bool:
        """Take one memory back, and leave its neighbours alone."""
        await self.view.refresh()
        memory = self.view.get(id_)
        if memory is None or not memory.is_live:
            return False
        now = self._bus.clock.now()
        await self._publish(_ended(memory, "revoked", now, now))
        return True

    async def _publish(self, memory: Memory) -> None:
        await self._bus.publish(to_event(memory, self._bus.clock.now()))
        await self.view.read_on()


def contradicts(old: Any, new: Any) -> bool:
    """Objects contradict where a field has two values; any other contents where they differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        return any(old[name] != new[name] for name in old.keys() & new.keys())
    return bool(old != new)


def joins(old: Memory, new: Memory) -> bool:
    """Whether two memories of one subject tell of different fields of it."""
    return (
        old.place == new.place
        and isinstance(old.content, dict)
        and isinstance(new.content, dict)
        and not contradicts(old.content, new.content)
    )


def _guarded(memory: Memory, band: str, caps: tuple[str, ...]) -> Memory:
    """A memory demands what each of its sources demands."""
    return msgspec.structs.replace(
        memory,
        band=max(memory.band, band, key=BANDS.index),
        caps=tuple(sorted({*memory.caps, *caps})),
    )


def _ended(memory: Memory, state: Any, invalid_at: datetime, now: datetime) -> Memory:
    return msgspec.structs.replace(memory, state=state, invalid_at=invalid_at, expired_at=now)
