"""The dead letters of a topic on NATS.

Letters are the records of ``<topic>.DLQ``. The offsets of closed letters are a document. A redriven
record goes to a stream of its own, to the one group that gave it up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from trunkline.bus.nats.connection import NatsLink
from trunkline.bus.nats.consumers import Consumers
from trunkline.bus.nats.records import GivenBack, fetch, read
from trunkline.bus.nats.topics import News, Topics
from trunkline.bus.nats.window import Window
from trunkline.clock import Clock
from trunkline.delivery.deadletters import (
    MEANWHILE,
    Letter,
    Redrive,
    check_choice,
    check_open,
    read_letter,
)
from trunkline.errors import NotFound, TrunklineError
from trunkline.filters import Filter, to_filter
from trunkline.names import DEAD_SUFFIX, dead_topic, is_dead
from trunkline.ranges import Ranges
from trunkline.store import Bounds

_Place = tuple[int, int, str, str | None]


class _Home(Protocol):
    """The bus, as its desk sees it."""

    link: NatsLink
    catalog: Topics
    consumers: Consumers
    window: Window
    clock: Clock

    async def begin(self) -> None: ...

    async def bounds(self, topic: str, partition: int = 0) -> Bounds: ...


class NatsDesk:
    def __init__(self, bus: _Home, topic: str) -> None:
        self._bus = bus
        self.topic = topic.removesuffix(DEAD_SUFFIX) if is_dead(topic) else topic
        self._dlq = dead_topic(self.topic)
        self._note = f"closed.{self._dlq}"
        self._drops = f"dropped.{self._dlq}"
        self._copies: dict[int, list[int]] = {}  # of an open letter: further ones for its record

    async def letters(
        self, *, group: str | None = None, closed: bool = False
    ) -> AsyncIterator[Letter]:
        """The letters in order. A letter that was written twice, because a process died between
        writing it and settling its record, is one letter.
        """
        for letter in await self._all():
            if (group is None or letter.group == group) and (letter.open or closed):
                yield letter

    async def _all(self) -> list[Letter]:
        bus = self._bus
        await bus.begin()
        if self._dlq not in await bus.catalog.load():
            return []
        first, end = await bus.bounds(self._dlq)
        settled, drops = await self._closed(), await self._closed(self._drops)
        redrives: dict[_Place, int] = {}
        seen: dict[_Place, int] = {}
        self._copies = {}
        found: list[Letter] = []
        while first < end:
            records = await read(bus.link, self._dlq, 0, first, end - first)
            if not records:
                break
            first = records[-1].offset + 1
            for record in records:
                letter = read_letter(record)
                if letter is None or letter.topic != self.topic:
                    continue
                place = (letter.partition, letter.origin, letter.group, letter.event.cause)
                is_open = letter.offset not in settled
                dropped = not is_open and letter.offset in drops
                if is_open and place in seen:
                    self._copies.setdefault(seen[place], []).append(letter.offset)
                    continue
                count = redrives.get(place, 0)
                if is_open:
                    seen[place] = letter.offset
                elif not dropped:
                    redrives[place] = count + 1
                found.append(
                    msgspec.structs.replace(letter, redrives=count, open=is_open, dropped=dropped)
                )
        return found

    async def letter(self, offset: int) -> Letter:
        for letter in await self._all():
            if letter.offset == offset:
                return letter
        raise NotFound(f"there is no dead letter {offset} of {self.topic}", offset=offset)

    async def redrive(
        self,
        *,
        group: str | None = None,
        offsets: set[int] | None = None,
        where: str | Filter | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        max_redrives: int = 3,
    ) -> AsyncIterator[Redrive]:
        check_choice(offsets, rate, max_redrives)
        pause_s = 0.0
        for letter in await self._chosen(group, offsets, to_filter(where)):
            if pause_s:
                await self._bus.clock.sleep(pause_s)
                pause_s = 0.0
            refused = await self._refused(letter, max_redrives)
            if not (refused or dry_run):
                refused = await self._give_back(letter)
                pause_s = 1 / rate if rate and not refused else 0.0
            yield Redrive(letter, refused)

    async def drop(
        self,
        *,
        group: str | None = None,
        offsets: set[int] | None = None,
        where: str | Filter | None = None,
        dry_run: bool = False,
    ) -> AsyncIterator[Letter]:
        """Close letters without giving their records back."""
        check_choice(offsets)
        for letter in await self._chosen(group, offsets, to_filter(where)):
            if letter.offset in await self._closed():
                continue
            if not dry_run:
                await self._close(letter, self._drops)  # first: a closed letter is told as redriven
                await self._close(letter)
            yield letter

    async def _chosen(
        self, group: str | None, offsets: set[int] | None, wanted: Filter | None
    ) -> list[Letter]:
        found = [
            letter
            async for letter in self.letters(group=group)
            if offsets is None or letter.offset in offsets
        ]
        check_open(self.topic, offsets, found)
        return [letter for letter in found if wanted is None or wanted(letter.event)]

    async def _refused(self, letter: Letter, max_redrives: int) -> str:
        """Why a letter cannot be redriven."""
        if letter.redrives >= max_redrives:
            often = "once" if letter.redrives == 1 else f"{letter.redrives} times"
            return f"redriven {often} already"
        if letter.group not in await self._bus.consumers.policies(letter.topic):
            return f"the group {letter.group} is gone"
        try:
            record = await fetch(self._bus.link, letter.topic, letter.partition, letter.origin)
        except NotFound:
            return "its record was removed"
        except TrunklineError as error:
            return f"its record cannot be read: {error.message}"
        if record.event.id != letter.event.cause:
            return "its record was removed"
        return MEANWHILE if letter.offset in await self._closed() else ""

    async def _give_back(self, letter: Letter) -> str:
        bus = self._bus
        policies = await bus.consumers.policies(letter.topic)
        await bus.consumers.make_again(letter.topic, letter.group, policies[letter.group])
        body = GivenBack(letter.partition, letter.origin, letter.redrives + 1)
        subject = bus.link.place.again_subject(letter.topic, letter.group)
        # The id names the letter: a redrive that is cut off and done again is one redrive. The
        # offset alone would name a letter of a topic that was removed, too.
        name = f"{self._dlq}:{letter.offset}:{letter.event.id}"
        await bus.window.send(subject, msgspec.json.encode(body), name)
        await self._close(letter)
        await bus.catalog.tell(News("again", letter.topic, letter.group))
        return ""

    async def _closed(self, note: str = "") -> Ranges:
        data, _ = await self._bus.catalog.notes.get(note or self._note)
        return Ranges(msgspec.json.decode(data) if data else ())

    async def _close(self, letter: Letter, note: str = "") -> None:
        mine = [letter.offset, *self._copies.get(letter.offset, ())]

        def step(data: bytes | None) -> tuple[bytes | None, None]:
            closed = Ranges(msgspec.json.decode(data) if data else ())
            for offset in mine:
                closed.add(offset, offset)
            return msgspec.json.encode(list(closed)), None

        await self._bus.catalog.notes.change(note or self._note, step)
