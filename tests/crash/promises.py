"""What a process told others before it died, and whether a folder keeps it.

A scene reports each promise when it is made, as one line of JSON. ``broken`` then opens what is left
of the folder the way any next process would and names every promise that does not hold: it reads,
appends, closes and reads again, because a store that only looks right until the next write is not.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from trunkline.dead import read_letter
from trunkline.errors import NotFound, TrunklineError
from trunkline.event import Event, Record, encode_event
from trunkline.group import Group
from trunkline.log import upkeep
from trunkline.log.folder import Folder, GroupKey
from trunkline.options import Limits, StoreOptions
from trunkline.topics import is_dead

Say = Callable[..., None]
BASE = datetime(2030, 1, 1, tzinfo=UTC)
OPTIONS = StoreOptions(
    reserve_bytes=0, index_bytes=1024, snapshot_bytes=1024, lock_timeout_s=5.0, poll_s=0.01
)
_LIMITS = Limits()


class StillClock:
    """A clock that moves when it is told to, so that two runs leave the same bytes."""

    boot = "one"

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        return BASE + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Any:
        raise NotImplementedError


def event(topic: str, number: int, **fields: Any) -> Event:
    return Event(
        topic=topic,
        id=f"e{number}",
        ts=BASE + timedelta(seconds=number),
        payload=fields.pop("payload", number),
        **fields,
    )


def publish(folder: Folder, say: Say, topic: str, *numbers: int, **fields: Any) -> None:
    """Append one batch and promise it. The numbers name the events: none is used twice."""
    events = [event(topic, number, **fields) for number in numbers]
    bodies = [encode_event(one, _LIMITS) for one in events]
    say("try", topic, numbers)
    placed = folder.append(topic, 0, bodies, events)
    durable = folder.topic(topic).durability == "fsync"
    say("ack" if durable else "written", topic, list(zip(placed.offsets(), numbers, strict=True)))


class Promises:
    """The promises made in one run, up to its end."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.acked: dict[str, dict[int, int]] = defaultdict(dict)
        self.tried: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        self.settled: dict[GroupKey, set[int]] = defaultdict(set)
        self.meant: dict[GroupKey, set[int]] = defaultdict(set)
        self.before: dict[str, int] = defaultdict(lambda: 1)
        self.compacted: set[str] = set()
        self.removed: set[str] = set()
        self.ended = False
        for line in lines:
            kind, *rest = json.loads(line)
            getattr(self, "_" + kind)(*rest)

    def _try(self, topic: str, numbers: list[int]) -> None:
        self.tried[topic].append(tuple(numbers))

    def _ack(self, topic: str, placed: list[tuple[int, int]]) -> None:
        self.acked[topic].update((offset, number) for offset, number in placed)

    def _written(self, topic: str, placed: list[tuple[int, int]]) -> None:
        """In the log, and durable at the latest when its segment is sealed."""

    def _means(self, topic: str, group: str, offsets: list[int]) -> None:
        """It is about to settle these because they were handled."""
        self.meant[GroupKey(topic, 0, group)].update(offsets)

    def _settled(self, topic: str, group: str, offsets: list[int]) -> None:
        self.settled[GroupKey(topic, 0, group)].update(offsets)

    def _trims(self, topic: str, before: int) -> None:
        self.before[topic] = max(self.before[topic], before)

    def _compacts(self, topic: str) -> None:
        self.compacted.add(topic)

    def _removes(self, topic: str) -> None:
        self.removed.add(topic)

    def _end(self) -> None:
        self.ended = True


def records_of(folder: Folder, topic: str) -> list[Record]:
    """All of a topic, in small steps so that every seam between segments is crossed."""
    first, end = folder.bounds(topic, 0)
    found: list[Record] = []
    while first < end:
        part = folder.read(topic, 0, first, 2)
        if not part:
            break
        found += part
        first = part[-1].offset + 1
    return found


def broken(root: str, promises: Promises) -> list[str]:
    """Every promise that the folder does not keep, in words."""
    problems: list[str] = []
    try:
        before = _look(root, promises, problems)
        _go_on(root, before)
        after = _look(root, promises, problems)
        for topic, seen in before.items():
            want = {**seen, max(seen, default=0) + 1: -1} if topic in _AGAIN else seen
            if promises.removed or topic not in after:
                continue
            if {o: v for o, v in after[topic].items() if v != -1} != seen:
                problems.append(f"{topic}: {want} became {after[topic]} by one more append")
    except (TrunklineError, OSError, ValueError) as error:
        problems.append(f"{type(error).__name__}: {error}")
    return problems


_AGAIN: frozenset[str] = frozenset()


def _look(root: str, promises: Promises, problems: list[str]) -> dict[str, dict[int, int]]:
    folder = Folder(root, OPTIONS, StillClock())
    seen: dict[str, dict[int, int]] = {}
    try:
        for topic in folder.topics():
            if topic in promises.removed:
                continue
            # What a reader is shown before anybody repairs anything must stay.
            shown = _values(records_of(folder, topic))
            with folder.writer(topic, 0)._mutex:
                pass
            folder.writer(topic, 0).begin()
            folder.writer(topic, 0).end()
            records = records_of(folder, topic)
            seen[topic] = _values(records)
            lost = {o: v for o, v in shown.items() if seen[topic].get(o) != v}
            if lost:
                problems.append(f"{topic}: readers saw {lost}, then it was gone")
            problems += _check_topic(topic, records, seen[topic], folder, promises)
        for topic, acked in promises.acked.items():
            if topic not in seen and topic not in promises.removed and acked:
                problems.append(f"{topic}: is gone with {acked}")
        for key in set(promises.settled) | set(folder.groups()):
            if key.topic not in promises.removed:
                problems += _check_group(key, folder, promises)
    finally:
        folder.close()
    return seen


def _values(records: list[Record]) -> dict[int, int]:
    return {record.offset: int(record.event.id[1:]) for record in records}


def _check_topic(
    topic: str, records: list[Record], seen: dict[int, int], folder: Folder, promises: Promises
) -> Iterable[str]:
    offsets = [record.offset for record in records]
    head = folder.head(topic, 0)
    whole = topic not in promises.compacted
    if offsets != sorted(set(offsets)):
        yield f"{topic}: offsets out of order: {offsets}"
    if whole and offsets != list(range(head.start, head.next)):
        yield f"{topic}: {offsets} is not all of {head.start} to {head.next - 1}"
    if len(set(seen.values())) != len(seen) and not is_dead(topic):
        yield f"{topic}: a value has two offsets: {seen}"
    if head.start > promises.before[topic]:
        yield f"{topic}: begins at {head.start}, nothing was trimmed behind {promises.before[topic]}"
    latest = {record.event.key: record.offset for record in records}
    for offset, number in promises.acked[topic].items():
        if offset in seen and seen[offset] != number:
            yield f"{topic}: {offset} is {seen[offset]}, acknowledged was {number}"
        if offset not in seen and offset >= promises.before[topic]:
            if whole or max(latest.values(), default=0) < offset:
                yield f"{topic}: {offset} is lost"
    for batch in promises.tried[topic]:
        have = [number in seen.values() for number in batch]
        if whole and any(have) and not all(have) and head.start == 1:
            yield f"{topic}: half of the batch {batch} is there"
    yield from (
        f"{found.path} at {found.position}: {found.problem}"
        for found in upkeep.verify(folder, topic, 0)
        if found.severe
    )


def _check_group(key: GroupKey, folder: Folder, promises: Promises) -> Iterable[str]:
    try:
        group: Group = folder.group(key)
    except NotFound:
        if promises.settled[key]:
            yield f"{key}: is gone"
        return
    missing = sorted(o for o in promises.settled[key] if not group.is_settled(o))
    if missing:
        yield f"{key}: {missing} were settled, now the floor is {group.floor}"
    _, end = folder.bounds(key.topic, 0)
    if group.last_settled >= end:
        yield f"{key}: settled {group.last_settled}, the log ends before {end}"
    letters = set()
    if not is_dead(key.topic):
        with suppress(NotFound):
            found = (read_letter(record) for record in records_of(folder, key.topic + ".DLQ"))
            letters = {letter.origin for letter in found if letter is not None}
    settled = {o for o in range(1, end) if group.is_settled(o)}
    for offset in settled - promises.meant[key] - letters:
        if offset >= promises.before[key.topic]:
            yield f"{key}: {offset} is settled, but neither handled nor a dead letter"


def _go_on(root: str, seen: dict[str, dict[int, int]]) -> None:
    """One more record in every topic."""
    folder = Folder(root, OPTIONS, StillClock())
    try:
        for topic in seen:
            one = event(topic, -1)
            folder.append(topic, 0, [encode_event(one, _LIMITS)], [one])
    finally:
        folder.close()
