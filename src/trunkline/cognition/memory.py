"""Memories: facts with their sources and their four times, and a view of the newest of each.

A memory is a record of ``memory.facts`` whose key is the memory's id: the newest record of a key is
the memory's state. ``valid_at`` and ``invalid_at`` are about the world, ``created_at`` and
``expired_at`` about this system. A contradiction expires a memory and never deletes it. A forgotten
memory ends in a tombstone, and compaction removes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from trunkline.bus import Bus
from trunkline.errors import Erased
from trunkline.event import Event

EPISODES: Final = "memory.episodes"
FACTS: Final = "memory.facts"
REVIEW: Final = "memory.review"
RUNS: Final = "memory.runs"
Opened = Callable[[Event], Event]
Secret = Callable[[str, str], bytes]
State = Literal["active", "conflict_pending", "superseded", "revoked"]
_READ = 1000


class MemorySource(msgspec.Struct, frozen=True, order=True):
    """The record that a memory was made from."""

    topic: str
    partition: int
    offset: int


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """The payload of ``memory.episodes``: one redacted input, kept as it is."""

    subject: str
    content: Any
    confidence: float
    valid_at: datetime
    encoded: MemorySource  # the HIPPO_ENCODE event


class Memory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The payload of ``memory.facts``."""

    id: str
    subject: str
    content: Any
    sources: tuple[MemorySource, ...]
    confidence: float
    state: State
    valid_at: datetime
    created_at: datetime
    space: str | None = None
    invalid_at: datetime | None = None
    expired_at: datetime | None = None
    supersedes: str | None = None
    band: str = "GREEN"
    caps: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[str, str]:
        return (self.space or "", self.subject)

    @property
    def is_live(self) -> bool:
        return self.state == "active"


def memory_id(space: str | None, subject: str, content: Any, secret: bytes = b"") -> str:
    """The same fact about the same subject has the same id, in every run. An id is not sealed: with
    a ``secret`` nobody else can try contents against it.
    """
    text = msgspec.json.encode([space or "", subject, content], order="sorted")
    return "mem-" + hashlib.blake2b(text, digest_size=16, key=secret).hexdigest()


async def define_topics(bus: Bus) -> None:
    """Make the topics of the memory, unless they exist."""
    have = await bus.topics()
    wanted: dict[str, dict[str, Any]] = {
        EPISODES: {"dedup_window_s": 7 * 86_400.0},
        FACTS: {"compact": True},
        REVIEW: {"dedup_window_s": 7 * 86_400.0},
        RUNS: {},
    }
    for topic, options in wanted.items():
        if topic not in have:
            await bus.define(topic, **options)


def to_event(memory: Memory, now: datetime, topic: str = FACTS) -> Event:
    return Event(
        topic=topic,
        type="MEMORY",
        ts=now,
        key=memory.id,
        space=memory.space,
        subject=memory.subject,
        band=memory.band,  # type: ignore[arg-type]
        caps=memory.caps,
        payload=msgspec.to_builtins(memory),
    )


class MemoryView:
    """The newest state of each memory, read from the log and kept up to date by ``refresh``.
    ``opened`` opens a sealed event, such as ``vault.open``: a read passes no middleware. A memory
    whose key was shredded is gone.
    """

    def __init__(self, bus: Bus, opened: Opened | None = None) -> None:
        self._bus = bus
        self._opened = opened or (lambda event: event)
        self._next: int | None = None
        self._found: dict[str, Memory] = {}
        self._sealed: dict[str, Event] = {}  # the events of memories that were sealed

    async def refresh(self) -> None:
        """Take up what was written since, and let go of what was erased."""
        for event in list(self._sealed.values()):
            self._take(event)
        await self.read_on()

    async def read_on(self) -> None:
        """Take up what was written since."""
        while records := await self._bus.read(FACTS, self._next, _READ):
            for record in records:
                self._take(record.event)
            self._next = records[-1].offset + 1

    def _take(self, event: Event) -> None:
        if event.key is None:
            return
        try:
            opened = self._opened(event)
        except Erased:
            opened = msgspec.structs.replace(event, payload=None)
        self._sealed.pop(event.key, None)
        if opened.payload is None:  # a tombstone
            self._found.pop(event.key, None)
            return
        self._found[event.key] = msgspec.convert(opened.payload, Memory)
        if opened is not event:
            self._sealed[event.key] = event

    def __iter__(self) -> Iterator[Memory]:
        return iter(list(self._found.values()))

    def get(self, id_: str) -> Memory | None:
        return self._found.get(id_)

    def recall(self, subject: str, space: str | None = None) -> list[Memory]:
        """The active memories of a subject, the surest and newest first."""
        found = [one for one in self if one.place == (space or "", subject) and one.is_live]
        return sorted(found, key=lambda one: (one.confidence, one.valid_at), reverse=True)
