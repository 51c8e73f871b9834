"""What a process told others before it died, and whether a folder keeps it.

A scene reports each promise when it is made, as one line of JSON. ``broken`` then opens what is
left of the folder the way any next process would and names every promise that does not hold: it
reads, appends, closes and reads again, because a store may look right until the next write.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from trunkline.codec import encode_event
from trunkline.delivery.deadletters import read_letter
from trunkline.errors import TrunklineError
from trunkline.event import Event, Record
from trunkline.folder import Folder, upkeep
from trunkline.names import GroupKey, dead_topic, is_dead
from trunkline.options import Limits, StoreOptions

Say = Callable[..., None]
Values = dict[int, int]
BASE = datetime(2030, 1, 1, tzinfo=UTC)
OPTIONS = StoreOptions(
    reserve_bytes=0, index_bytes=1024, snapshot_bytes=1024, lock_timeout_s=5.0, poll_s=0.01
)
LIMITS = Limits()
PROBE = 0  # the number of the event by which a check goes on publishing


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
        return asyncio.get_running_loop().call_soon(callback)


def event(topic: str, number: int, **fields: Any) -> Event:
    fields.setdefault("payload", number)
    return Event(topic=topic, id=f"e{number}", ts=BASE + timedelta(seconds=number), **fields)


def append(folder: Folder, topic: str, numbers: Iterable[int], **fields: Any) -> Values:
    """Append one batch; the numbers name the events. Returns ``{offset: number}``."""
    events = [event(topic, number, **fields) for number in numbers]
    placed = folder.append(topic, 0, [encode_event(one, LIMITS) for one in events], events)
    return dict(zip(placed.offsets(), (int(one.id[1:]) for one in events), strict=True))


def publish(folder: Folder, say: Say, topic: str, *numbers: int, **fields: Any) -> None:
    """Append one batch and promise it. No number is used twice."""
    say("try", topic, numbers, fields.get("key"), "payload" in fields)
    placed = append(folder, topic, numbers, **fields)
    durable = folder.topic(topic).durability == "fsync"
    say("ack" if durable else "written", topic, list(placed.items()))


class Promises:
    """The promises made in one run, up to its end."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.acked: dict[str, Values] = defaultdict(dict)
        self.tried: dict[str, list[list[int]]] = defaultdict(list)
        self.keys: dict[int, str] = {}
        self.graves: set[int] = set()
        self.settled: dict[GroupKey, set[int]] = defaultdict(set)
        self.meant: dict[GroupKey, set[int]] = defaultdict(set)
        self.before: dict[str, int] = defaultdict(lambda: 1)
        self.failed: dict[str, set[int]] = defaultdict(set)
        self.compacted: set[str] = set()
        self.removed: set[str] = set()
        self._written: dict[str, Values] = defaultdict(dict)
        self.ended = False
        for line in lines:
            kind, *rest = json.loads(line)
            self._take(kind, *rest)

    def _take(self, kind: str, topic: str = "", *rest: Any) -> None:
        match kind:
            case "try":
                numbers, key, grave = rest
                self.tried[topic].append(numbers)
                self.keys |= dict.fromkeys(numbers, key) if key else {}
                self.graves |= set(numbers) if grave else set()
            case "ack":
                self.acked[topic] |= dict(rest[0])
            case "written":  # it is in the log, but not durable yet
                self._written[topic] |= dict(rest[0])
            case "sealed":  # everything below is durable
                written = self._written[topic]
                self.acked[topic] |= {o: v for o, v in written.items() if o < rest[0]}
            case "means":  # about to settle these because they were handled
                self.meant[GroupKey(topic, 0, rest[0])] |= set(rest[1])
            case "settled":
                self.settled[GroupKey(topic, 0, rest[0])] |= set(rest[1])
            case "failed":  # the publisher was told that none of these is in the log
                self.failed[topic] |= set(rest[0])
            case "trims":
                self.before[topic] = max(self.before[topic], rest[0])
            case "compacts":
                self.compacted.add(topic)
            case "removes":
                self.removed.add(topic)
            case "end":
                self.ended = True
            case _:
                raise ValueError(kind)


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


def values(records: list[Record]) -> Values:
    """``{offset: number}``; a dead letter has the number of its record's offset."""
    return {
        r.offset: int(r.event.headers.get("dlq-offset", r.event.id.removeprefix("e")))
        for r in records
    }


def broken(root: str, promises: Promises) -> list[str]:
    """Every promise that the folder does not keep, in words."""
    try:
        problems, before = _look(root, promises)
        _go_on(root, before)
        more, after = _look(root, promises)
        for topic, seen in before.items():
            now = {o: v for o, v in after[topic].items() if v != PROBE}
            if now != seen:
                more.append(f"{topic}: {seen} became {now} by one more append")
    except (TrunklineError, OSError, ValueError) as error:
        return [f"{type(error).__name__}: {error}"]
    return problems + more


def _look(root: str, promises: Promises) -> tuple[list[str], dict[str, Values]]:
    folder = Folder(root, OPTIONS, StillClock())
    problems: list[str] = []
    seen: dict[str, Values] = {}
    try:
        for topic in folder.topics():
            if topic in promises.removed:
                continue
            shown = values(records_of(folder, topic))
            folder.writer(topic, 0).begin()  # whoever writes next repairs what is left
            folder.writer(topic, 0).end()
            seen[topic] = values(records_of(folder, topic))
            lost = {o: v for o, v in shown.items() if seen[topic].get(o) != v}
            if lost:
                problems.append(f"{topic}: a reader saw {lost}, and then it was gone")
            problems += _check_topic(topic, seen[topic], folder, promises)
        for topic, acked in promises.acked.items():
            if topic not in seen and topic not in promises.removed and acked:
                problems.append(f"{topic}: is gone with {acked}")
        for key in {*promises.settled, *folder.groups()}:
            if key.topic not in promises.removed:
                problems += _check_group(key, folder, promises)
    finally:
        folder.close()
    return problems, seen


def _check_topic(topic: str, seen: Values, folder: Folder, promises: Promises) -> Iterator[str]:
    head = folder.head(topic, 0)
    offsets = list(seen)
    whole = topic not in promises.compacted
    if whole and offsets != list(range(head.start, head.next)):
        yield f"{topic}: {offsets} is not {head.start} to {head.next - 1}"
    if offsets != sorted(offsets):
        yield f"{topic}: out of order: {offsets}"
    if len({v for v in seen.values() if v}) < sum(map(bool, seen.values())) and not is_dead(topic):
        yield f"{topic}: a value has two offsets: {seen}"
    if head.start > promises.before[topic]:
        yield f"{topic}: begins at {head.start}, trimmed was below {promises.before[topic]}"
    acked = promises.acked[topic]
    for offset, number in acked.items():
        if offset in seen and seen[offset] != number:
            yield f"{topic}: {offset} is {seen[offset]}, acknowledged was {number}"
        gone = offset not in seen and offset >= promises.before[topic]
        if gone and (whole or not _superseded(offset, number, {**acked, **seen}, promises)):
            yield f"{topic}: {offset} is lost"
    for number in promises.failed[topic] & set(seen.values()):
        yield f"{topic}: {number} is there, though its publisher was told otherwise"
    for batch in promises.tried[topic]:
        have = [number in seen.values() for number in batch]
        if whole and any(have) and not all(have) and head.start == 1:
            yield f"{topic}: a part of the batch {batch} is there"
    for found in upkeep.verify(folder, topic, 0):
        if found.severe:
            yield f"{found.path} at {found.position}: {found.problem}"


def _superseded(offset: int, number: int, known: Values, promises: Promises) -> bool:
    key = promises.keys.get(number)
    later = any(o > offset and promises.keys.get(n) == key for o, n in known.items())
    return key is not None and (later or number in promises.graves)


def _check_group(key: GroupKey, folder: Folder, promises: Promises) -> Iterator[str]:
    wanted = promises.settled[key]
    if not folder.has_group(key):
        if wanted:
            yield f"{key}: is gone"
        return
    group = folder.group(key)
    missing = sorted(offset for offset in wanted if not group.is_settled(offset))
    if missing:
        yield f"{key}: {missing} were settled, now the floor is {group.floor}"
    end = folder.bounds(key.topic, 0).next
    if group.last_settled >= end:
        yield f"{key}: settled {group.last_settled}, the log ends before {end}"
    letters = {
        letter.origin
        for record in records_of(folder, dead_topic(key.topic))
        if (letter := read_letter(record)) is not None
    }
    for offset in range(promises.before[key.topic], end):
        if group.is_settled(offset) and offset not in promises.meant[key] | letters:
            yield f"{key}: {offset} is settled, but neither handled nor a dead letter"


def _go_on(root: str, seen: dict[str, Values]) -> None:
    """One more record in every topic."""
    folder = Folder(root, OPTIONS, StillClock())
    try:
        for topic in seen:
            append(folder, topic, [PROBE])
    finally:
        folder.close()
