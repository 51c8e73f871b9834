"""Dead letters: how a record that ran out of tries is written down, and what is done about it.

A dead letter is a record of the topic ``<topic>.DLQ``: the original event, with headers that say
where it came from, which group gave it up, and why. The group ``desk`` of that topic keeps the
books: a letter it has settled was redriven or dropped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable
from datetime import datetime
from typing import Protocol, TypeVar

import msgspec

from trunkline.check import check_count
from trunkline.clock import Clock
from trunkline.errors import Corrupt, InvalidName, InvalidOption, NotFound, OutOfRange
from trunkline.event import LETTER_MARK, Bounds, Event, Record, new_id
from trunkline.filters import Filter, to_filter
from trunkline.group import Group
from trunkline.names import DEAD_SUFFIX, GroupKey, dead_topic, is_dead, is_own
from trunkline.options import LONGEST_S, GroupOptions
from trunkline.store.bell import Bell

T = TypeVar("T")

DESK = "desk"
_ERROR_BYTES = 1000
_NAMED = 20  # in one message
_PREFIX = "dlq-"
_TOGETHER = 200  # letters that are redriven in one step
_GAP = 8  # offsets between two records that are still read together
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
    dropped: bool = False  # closed by a drop, and not by a redrive
    traceback: str = ""  # the end of it, if a handler raised


TRACEBACK = "\nTraceback (most recent call last):\n"
"""In the reason of a nack: what follows is the traceback. The letter keeps it apart."""


def write_letter(
    record: Record, group: str, attempts: int, reason: str, error: str, at: datetime
) -> Event:
    """The event to append to the dead letter topic."""
    told, _, trace = error.partition(TRACEBACK)
    text = told.encode("utf-8", "replace")[:_ERROR_BYTES].decode("utf-8", "ignore")
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
    if trace:  # its end says most
        last = trace.rstrip().encode("utf-8", "replace")[-_ERROR_BYTES:]
        headers["dlq-traceback"] = last.decode("utf-8", "ignore")
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
    """None if the record is not a dead letter, of any publisher."""
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
            traceback=headers.get("dlq-traceback", ""),
        )
    except (KeyError, ValueError):
        return None


def keeps_books(key: GroupKey) -> bool:
    """Whether the group is a desk: nobody consumes by it, and its lag is the open letters."""
    return key.group == DESK and is_dead(key.topic)


def is_hidden(key: GroupKey) -> bool:
    """Whether lists and figures leave a group out: a desk, or a group that is one process's own."""
    return keeps_books(key) or is_own(key.group)


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


class DeskStore(Protocol):
    """What a desk needs of a store. One that only reads refuses ``change``."""

    @property
    def bell(self) -> Bell: ...

    async def bounds(self, topic: str, partition: int) -> Bounds: ...

    async def read(self, topic: str, partition: int, start: int, limit: int) -> list[Record]: ...

    async def groups(self) -> list[GroupKey]: ...

    async def update(self, key: GroupKey, step: Callable[[Group], T]) -> T:
        """Run ``step`` on a group. A store that only reads keeps nothing of what it does."""

    async def change(self, key: GroupKey, verb: Callable[[Group], T]) -> T: ...


class Desk:
    """The dead letters of one topic."""

    def __init__(self, store: DeskStore, topic: str, clock: Clock) -> None:
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
                dropped = not is_open and desk.is_dropped(letter.offset)
                if is_open and place in seen:
                    self._copies.setdefault(seen[place], []).append(letter.offset)
                    continue
                count = redrives.get(place, 0)
                if is_open:
                    seen[place] = letter.offset
                elif not dropped:
                    redrives[place] = count + 1
                if group is not None and letter.group != group:
                    continue
                if is_open or closed:
                    yield msgspec.structs.replace(
                        letter, redrives=count, open=is_open, dropped=dropped
                    )

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
        size = 1 if rate else _TOGETHER
        pause_s = 0.0  # before the next letter, where there is a rate
        waiting: list[Letter] = []
        chosen = [x async for x in self._chosen(group, offsets, to_filter(where), skip_closed)]
        for number, letter in enumerate(chosen, 1):
            waiting.append(letter)
            if len(waiting) < size and number < len(chosen):
                continue
            if pause_s:
                await self._clock.sleep(pause_s)
            done = await self._redrive(waiting, groups, max_redrives, dry_run)
            waiting = []
            given = not dry_run and any(not one.refused for one in done)
            pause_s = 1 / rate if rate and given else 0.0
            for one in done:
                yield one

    async def _redrive(
        self, letters: list[Letter], groups: set[GroupKey], max_redrives: int, dry_run: bool
    ) -> list[Redrive]:
        """Give back the records of several letters with one step of each group."""
        closed = await self._closed(letters)
        there = await self._there(letters)
        refused: dict[int, str] = {}
        for letter in letters:
            if letter.redrives >= max_redrives:
                often = "once" if letter.redrives == 1 else f"{letter.redrives} times"
                refused[letter.offset] = f"redriven {often} already"
            elif letter.offset in closed:
                refused[letter.offset] = MEANWHILE
            elif _key_of(letter) not in groups:
                refused[letter.offset] = f"the group {letter.group} is gone"
            elif why := there[letter.offset]:
                refused[letter.offset] = why
        if not dry_run:
            by_group: dict[GroupKey, list[Letter]] = {}
            for letter in letters:
                if letter.offset not in refused:
                    by_group.setdefault(_key_of(letter), []).append(letter)
            for key, mine in by_group.items():
                refused |= await self._give_back(mine, key)
        return [Redrive(letter, refused.get(letter.offset, "")) for letter in letters]

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
            if await self._closed([letter]):
                continue
            if not dry_run:
                await self._close([letter], dropped=True)
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

    async def _there(self, letters: list[Letter]) -> dict[int, str]:
        """Why the record of a letter cannot be delivered again, "" if it can, by the letter's
        offset: retention or compaction removed it, or the topic is a new one, in which the offset
        is another record's.
        """
        found: dict[int, str] = {}
        by_place: dict[tuple[str, int], list[Letter]] = {}
        for letter in letters:
            by_place.setdefault((letter.topic, letter.partition), []).append(letter)
        for (topic, partition), mine in by_place.items():
            origins = sorted({letter.origin for letter in mine})
            ids: dict[int, str] = {}
            trouble: dict[int, str] = {}
            for first, last in _stretches(origins):
                try:
                    records = await self._store.read(topic, partition, first, last - first + 1)
                    ids |= {record.offset: record.event.id for record in records}
                except OutOfRange:
                    continue
                except Corrupt as error:
                    why = f"its record cannot be read: {error.message}"
                    trouble |= {origin: why for origin in origins if first <= origin <= last}
            for letter in mine:
                is_there = ids.get(letter.origin) == letter.event.cause
                removed = "" if is_there else "its record was removed"
                found[letter.offset] = trouble.get(letter.origin, removed)
        return found

    async def _give_back(self, letters: list[Letter], key: GroupKey) -> dict[int, str]:
        """Why a letter was left alone, by its offset; the others are closed."""

        def back(group: Group) -> dict[int, str]:
            if not group.created:  # it was removed meanwhile
                return dict.fromkeys(
                    (letter.offset for letter in letters), f"the group {key.group} is gone"
                )
            redriven = set(group.redrive([letter.origin for letter in letters]))
            again = group.again
            # The letter is written before the group notes that the record was given up.
            return {
                letter.offset: "its record is still being given up"
                for letter in letters
                if letter.origin not in redriven and letter.origin not in again
            }

        refused = await self._store.change(key, back)
        await self._close([letter for letter in letters if letter.offset not in refused])
        self._store.bell.ring(key.topic)
        return refused

    async def _closed(self, letters: list[Letter]) -> set[int]:
        """Letters that somebody else closed since they were found: with a rate that may be long."""

        def look(desk: Group) -> set[int]:
            return {letter.offset for letter in letters if desk.is_settled(letter.offset)}

        return await self._store.update(self._key, look)

    async def _close(self, letters: list[Letter], *, dropped: bool = False) -> None:
        mine = [
            offset
            for letter in letters
            for offset in (letter.offset, *self._copies.get(letter.offset, ()))
        ]
        await self._store.change(self._key, lambda desk: desk.settle(mine, dropped=dropped))


def _key_of(letter: Letter) -> GroupKey:
    return GroupKey(letter.topic, letter.partition, letter.group)


def _stretches(offsets: list[int]) -> list[tuple[int, int]]:
    """Ranges that hold the sorted offsets and little else."""
    found: list[tuple[int, int]] = []
    for offset in offsets:
        if found and offset - found[-1][1] <= _GAP:
            found[-1] = (found[-1][0], offset)
        else:
            found.append((offset, offset))
    return found


def _defined(group: Group) -> Group:
    if not group.created:
        group.define(GroupOptions(ordering="none"), 0)
    return group
