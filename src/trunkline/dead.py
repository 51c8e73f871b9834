"""Dead letters: how a record that ran out of tries is written down, and what is done about it.

A dead letter is a record of the topic ``<topic>.DLQ``: the original event, with headers that say
where it came from, which group gave it up, and why. The group ``desk`` of that topic keeps the
books: a letter it has settled was redriven or dropped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable
from datetime import datetime

import msgspec

from trunkline.clock import Clock
from trunkline.errors import (
    LONGEST_S,
    Corrupt,
    InvalidName,
    InvalidOption,
    NotFound,
    OutOfRange,
    check_count,
)
from trunkline.event import LETTER_MARK, Event, Record, new_id
from trunkline.filters import Filter, to_filter
from trunkline.group import Group
from trunkline.options import GroupOptions
from trunkline.store import GroupKey, Store
from trunkline.topics import DEAD_SUFFIX, dead_topic, is_dead

DESK = "desk"
_ERROR_BYTES = 1000
_NAMED = 20  # in one message
_PREFIX = "dlq-"
MEANWHILE = "redriven or dropped meanwhile"


class Letter(msgspec.Struct, frozen=True):
    """An open or closed dead letter."""

    offset: int  # in the dead letter topic
    topic: str
    partition: int
    origin: int  # the offset it had in ``topic``
    group: str
    attempts: int
    reason: str  # retries, rejected or expired
    error: str
    at: str
    event: Event
    redrives: int = 0  # how often this record was redriven before
    open: bool = True


def write_letter(
    record: Record, group: str, attempts: int, reason: str, error: str, at: datetime
) -> Event:
    """The event to append to the dead letter topic."""
    text = error.encode("utf-8", "replace")[:_ERROR_BYTES].decode("utf-8", "ignore")
    headers = {k: v for k, v in record.event.headers.items() if not k.startswith(_PREFIX)}
    headers |= {
        "dlq-topic": record.topic,
        "dlq-partition": str(record.partition),
        "dlq-offset": str(record.offset),
        "dlq-group": group,
        "dlq-attempts": str(attempts),
        LETTER_MARK: reason,
        "dlq-error": text,
        "dlq-at": at.isoformat(),
        "dlq-id": record.event.id,
        "dlq-ts": record.event.ts.isoformat(),
    }
    return msgspec.structs.replace(
        record.event,
        id=new_id(),
        ts=at,
        topic=dead_topic(record.topic),
        headers=headers,
        cause=record.event.id,
        idem_key=None,
        ttl_s=None,
        not_before=None,
    )


def read_letter(record: Record) -> Letter | None:
    """None if the record is not a dead letter, whoever put it there."""
    headers = record.event.headers
    try:
        return Letter(
            offset=record.offset,
            topic=headers["dlq-topic"],
            partition=int(headers["dlq-partition"]),
            origin=int(headers["dlq-offset"]),
            group=headers["dlq-group"],
            attempts=int(headers["dlq-attempts"]),
            reason=headers[LETTER_MARK],
            error=headers["dlq-error"],
            at=headers["dlq-at"],
            event=record.event,
        )
    except (KeyError, ValueError):
        return None


def keeps_books(key: GroupKey) -> bool:
    """Whether the group is a desk: nobody consumes by it, and its lag is the open letters."""
    return key.group == DESK and is_dead(key.topic)


def check_member(topic: str, group: str) -> None:
    """Nobody consumes as the desk: what it settles is a letter redriven or dropped."""
    if group == DESK and is_dead(topic):
        raise InvalidName(
            f"the group {DESK} of {topic} keeps the books of the dead letters",
            name=group,
            hint="take another name to read letters; trunkline dlq closes them",
        )


def check_open(topic: str, offsets: Collection[int] | None, found: Iterable[Letter]) -> None:
    """``NotFound`` if there are no open letters at some of the offsets that are asked for: either
    something is done about all of them, or about none.
    """
    missing = sorted(set(offsets or ()) - {letter.offset for letter in found})
    if missing:
        names = " ".join(map(str, missing[:_NAMED])) + (" …" if len(missing) > _NAMED else "")
        raise NotFound(f"no open letter {names} of {topic}", topic=topic, offsets=missing)


def check_choice(offsets: object, rate: object = None, max_redrives: int = 0) -> None:
    """Refuse what a desk cannot go by before it closes anything."""
    if offsets is not None and not (
        isinstance(offsets, set | frozenset | list | tuple | range)
        and all(isinstance(offset, int) for offset in offsets)
    ):
        raise InvalidOption(f"offsets are a set of numbers, not {offsets!r}", name="offsets")
    if not (rate is None or (isinstance(rate, int | float) and 0 <= rate < LONGEST_S)):
        raise InvalidOption(f"rate is letters per second, not {rate!r}", name="rate")
    check_count("max_redrives", max_redrives)


class Redrive(msgspec.Struct, frozen=True):
    """What became of one letter. ``refused`` says why nothing was done, if nothing was."""

    letter: Letter
    refused: str = ""


class Desk:
    """The dead letters of one topic."""

    def __init__(self, store: Store, topic: str, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.topic = topic.removesuffix(DEAD_SUFFIX) if is_dead(topic) else topic
        self._dlq = dead_topic(self.topic)
        self._key = GroupKey(self._dlq, 0, DESK)
        self._copies: dict[int, list[int]] = {}  # of an open letter: further ones for its record

    async def letters(
        self, *, group: str | None = None, closed: bool = False
    ) -> AsyncIterator[Letter]:
        """The letters in order. One that was written twice, because a process died between writing
        it and settling its record, is one letter.
        """
        first, end = await self._store.bounds(self._dlq, 0)
        if first == end:
            return
        desk = await self._store.update(self._key, _defined)
        redrives: dict[tuple[int, int, str, str | None], int] = {}
        seen: dict[tuple[int, int, str, str | None], int] = {}
        self._copies = {}
        while first < end:
            records = await self._store.read(self._dlq, 0, first, 500)
            if not records:
                break
            first = records[-1].offset + 1
            for record in records:
                letter = read_letter(record)
                if letter is None or letter.topic != self.topic:
                    continue
                # With its id: where a topic was made anew, an offset is another record's.
                place = (letter.partition, letter.origin, letter.group, letter.event.cause)
                is_open = not desk.is_settled(letter.offset)
                if is_open and place in seen:
                    self._copies.setdefault(seen[place], []).append(letter.offset)
                    continue
                count = redrives.get(place, 0)
                if is_open:
                    seen[place] = letter.offset
                else:
                    redrives[place] = count + 1
                if group is not None and letter.group != group:
                    continue
                if is_open or closed:
                    yield msgspec.structs.replace(letter, redrives=count, open=is_open)

    async def letter(self, offset: int) -> Letter:
        async for letter in self.letters(closed=True):
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
        skip_closed: bool = False,
    ) -> AsyncIterator[Redrive]:
        """Give each record back to the one group that gave it up, with all its tries before it.

        ``where`` is that of ``subscribe``, ``rate`` is letters per second. A record that was
        redriven ``max_redrives`` times already is left alone: it would only come back. So is one
        that the log holds no more. ``offsets`` are open letters, or ``skip_closed`` says that they
        need not be.
        """
        check_choice(offsets, rate, max_redrives)
        groups = set(await self._store.groups())
        pause_s = 0.0  # before the next one
        async for letter in self._chosen(group, offsets, to_filter(where), skip_closed):
            if pause_s:
                await self._clock.sleep(pause_s)
                pause_s = 0.0
            if letter.redrives >= max_redrives:
                often = "once" if letter.redrives == 1 else f"{letter.redrives} times"
                yield Redrive(letter, f"redriven {often} already")
                continue
            key = GroupKey(letter.topic, letter.partition, letter.group)
            refused = f"the group {letter.group} is gone" if key not in groups else ""
            refused = refused or await self._missing(letter)
            if await self._is_closed(letter):
                refused = MEANWHILE
            if not (refused or dry_run):
                refused = await self._give_back(letter, key)
                pause_s = 1 / rate if rate and not refused else 0.0
            yield Redrive(letter, refused)

    async def drop(
        self,
        *,
        group: str | None = None,
        offsets: set[int] | None = None,
        where: str | Filter | None = None,
        dry_run: bool = False,
        skip_closed: bool = False,
    ) -> AsyncIterator[Letter]:
        """Close letters without giving their records back."""
        check_choice(offsets)
        async for letter in self._chosen(group, offsets, to_filter(where), skip_closed):
            if await self._is_closed(letter):
                continue
            if not dry_run:
                await self._close(letter)
            yield letter

    async def _chosen(
        self,
        group: str | None,
        offsets: set[int] | None,
        wanted: Filter | None,
        skip_closed: bool,
    ) -> AsyncIterator[Letter]:
        found = [
            letter
            async for letter in self.letters(group=group)
            if offsets is None or letter.offset in offsets
        ]
        if not skip_closed:
            check_open(self.topic, offsets, found)
        for letter in [letter for letter in found if wanted is None or wanted(letter.event)]:
            yield letter

    async def _missing(self, letter: Letter) -> str:
        """Why its record cannot be delivered again: retention or compaction removed it, or the
        topic is a new one, in which the offset is another record's.
        """
        try:
            found = await self._store.read(letter.topic, letter.partition, letter.origin, 1)
        except OutOfRange:
            found = []
        except Corrupt as error:
            return f"its record cannot be read: {error.message}"
        there = [(record.offset, record.event.id) for record in found]
        return "" if there == [(letter.origin, letter.event.cause)] else "its record was removed"

    async def _give_back(self, letter: Letter, key: GroupKey) -> str:
        def back(group: Group) -> str:
            if not group.created:  # it was removed meanwhile
                return f"the group {letter.group} is gone"
            if group.redrive([letter.origin]) or letter.origin in group.again:
                return ""
            return (
                "its record is still being given up"  # the letter is written before that is noted
            )

        if refused := await self._store.update(key, back):
            return refused
        await self._close(letter)
        self._store.bell.ring(letter.topic)
        return ""

    async def _is_closed(self, letter: Letter) -> bool:
        """By somebody else since it was found: with a rate that may be long ago."""
        return await self._store.update(self._key, lambda desk: desk.is_settled(letter.offset))

    async def _close(self, letter: Letter) -> None:
        mine = [letter.offset, *self._copies.get(letter.offset, ())]
        await self._store.update(self._key, lambda desk: desk.settle(mine))


def _defined(group: Group) -> Group:
    if not group.created:
        group.define(GroupOptions(ordering="none"), 0)
    return group
