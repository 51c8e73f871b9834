"""The story of one event, from the files: nothing needs to run.

A story is a list of steps in the order they happened, as far as their times are known: the publish,
the deliveries of each group with their members, the decisions of gates, denials and other audit
records, deferrals, dead letters, redrives, and the events that were caused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from trunkline.delivery.deadletters import read_letter
from trunkline.errors import NotFound, StorageError
from trunkline.event import Record
from trunkline.log import atomic
from trunkline.log.line import Damaged, parse_object
from trunkline.names import ATTENTION, AUDIT, DEAD_SUFFIX, DEFERRED_PREFIX, is_dead, is_handle
from trunkline.units import write_time

LAKE_GROUP: Final = "pipeline.lake"
_READ = 1000


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """``at`` is None where the files do not tell the time. Then ``near`` is the time of a step next
    to it, by which it finds its place in the story.
    """

    what: str
    text: str
    at: datetime | None = None
    group: str = ""
    facts: dict[str, Any] = {}
    near: datetime | None = None


class Story(msgspec.Struct, frozen=True):
    """``offset`` is 0 for an event that was never appended."""

    id: str
    topic: str
    partition: int
    offset: int
    steps: list[Step]


def tell(bus: Any, path: str, id_: str) -> Story:
    """The story of the event ``id_`` on a bus without asyncio, whose folder is ``path``."""
    topics = bus.topics()
    mine: Record | None = None
    about: list[Record] = []
    copy = f"{id_}@"  # with the group: the id of a copy that a gate deferred
    for topic, options in topics.items():
        for partition in range(options.partitions):
            for record in _records(bus, topic, partition):
                cause = record.event.cause or ""
                if record.event.id == id_ and mine is None:
                    mine = record
                elif cause == id_ or cause.startswith(copy):
                    about.append(record)
    copies = [r for r in about if r.topic.startswith(DEFERRED_PREFIX) and not is_dead(r.topic)]
    steps = [] if mine is None else [_published(mine)]
    for record in [*([] if mine is None else [mine]), *copies]:
        steps += _journal_steps(path, record)
    letters = _letters(bus, about)
    steps += [_consequence(record, letters) for record in about]
    if AUDIT in topics:
        steps += _audited(bus, id_, [*([] if mine is None else [mine]), *copies])
    if not steps:
        raise NotFound(
            f"there is no event {id_}", hint="retention removes events; trunkline grep finds ids"
        )
    if mine is None:  # a gate dropped it, or it was denied
        steps.insert(0, Step("not published", "it was never appended to its topic"))
    untimed = [one for one in steps[1:] if _place(one) is None]
    timed = [one for one in steps[1:] if _place(one) is not None]
    ordered = [steps[0], *sorted(timed, key=lambda one: str(_place(one))), *untimed]
    if mine is None:
        return Story(id_, str(ordered[1].facts.get("topic", "")), 0, 0, ordered)
    return Story(id_, mine.topic, mine.partition, mine.offset, ordered)


def _records(bus: Any, topic: str, partition: int) -> Iterator[Record]:
    start = None
    while records := bus.read(topic, start, _READ, partition=partition):
        yield from records
        start = records[-1].offset + 1


def _published(record: Record) -> Step:
    event = record.event
    place = f"{record.topic}/{record.partition}@{record.offset}"
    facts: dict[str, Any] = {"topic": record.topic, "offset": record.offset}
    for name in ("type", "actor", "space", "key", "cause", "trace", "priority", "band"):
        if (value := getattr(event, name)) not in (None, "normal", "GREEN"):
            facts[name] = value
    who = f" by {event.actor}" if event.actor else ""
    why = f", caused by {event.cause}" if event.cause else ""
    return Step("published", f"published to {place}{who}{why}", event.ts, facts=facts)


def _letters(bus: Any, about: list[Record]) -> dict[tuple[str, int], str]:
    """What became of each dead letter of the event, by the letter's topic and offset."""
    return {
        (topic, one.offset): "open" if one.open else "dropped" if one.dropped else "redriven"
        for topic in {record.topic for record in about if is_dead(record.topic)}
        for one in bus.dead_letters(topic.removesuffix(DEAD_SUFFIX)).letters(closed=True)
    }


def _consequence(record: Record, letters: dict[tuple[str, int], str]) -> Step:
    """An event whose cause is ours."""
    event, payload = record.event, record.event.payload
    if record.topic == ATTENTION and isinstance(payload, dict):
        group = str(payload.get("group", ""))
        before = f"before group {group}" if group else "before the append"
        text = f"{payload.get('action')} {before}: {payload.get('reason')}"
        return Step("attention", text, event.ts, group, payload)
    if record.topic.startswith(DEFERRED_PREFIX) and not is_dead(record.topic):
        group = record.topic.removeprefix(DEFERRED_PREFIX)
        text = f"deferred for group {group} as {record.topic}@{record.offset}"
        return Step("deferred", text, event.ts, group)
    if is_dead(record.topic) and (letter := read_letter(record)) is not None:
        text = (
            f"dead letter {letter.offset} of group {letter.group}, attempts {letter.attempts}, "
            f"{letter.reason}: {letter.error}"
        )
        facts = {"letter": letter.offset, "attempts": letter.attempts, "error": letter.error}
        if (state := letters.get((record.topic, letter.offset))) is not None:
            text += f" (now {state})"
            facts["state"] = state
        return Step("dead letter", text, event.ts, letter.group, facts)
    text = f"caused {event.type or 'an event'} {event.id} on {record.topic}@{record.offset}"
    return Step("caused", text, event.ts, facts={"id": event.id, "topic": record.topic})


def _audited(bus: Any, id_: str, mine: list[Record]) -> list[Step]:
    steps = []
    places = {(one.topic, one.partition, one.offset) for one in mine}
    for record in _records(bus, AUDIT, 0):
        told = record.event.payload
        if not isinstance(told, dict):
            continue
        where = (told.get("topic"), told.get("partition"), told.get("offset"))
        if told.get("id") != id_ and where not in places:
            continue
        what = str(told.get("what", "audit"))
        if what in ("publish", "dlq"):
            continue  # the log itself tells more
        shown = ", ".join(
            f"{name} {value}"
            for name, value in told.items()
            if name not in ("what", "topic", "partition", "offset", "id")
        )
        text = f"audit: {what}" + (f" ({shown})" if shown else "")
        steps.append(Step(what, text, record.event.ts, str(told.get("group", "")), told))
    return steps


class _Clock:
    """Turns monotonic times of a journal into wall times, by its last anchor."""

    def __init__(self) -> None:
        self._mono, self._wall = 0.0, 0.0

    def anchor(self, line: dict[str, Any]) -> None:
        self._mono, self._wall = float(line.get("mono", 0)), float(line.get("wall", 0))

    def wall(self, mono: float) -> datetime | None:
        if not self._wall:
            return None
        return datetime.fromtimestamp(self._wall + mono - self._mono, UTC)


def _journal_steps(path: str, mine: Record) -> Iterable[Step]:
    """What the journals of the groups tell about one record. A journal that was replaced by a
    snapshot tells less: then the snapshot says how the record stands.
    """
    folder = os.path.join(path, "offsets")
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if name.endswith(".journal"):
            lines = list(_lines(os.path.join(folder, name)))
            head = lines[0] if lines else {}
            if (head.get("topic"), head.get("partition")) == (mine.topic, mine.partition):
                snapshot = next(_lines(os.path.join(folder, name[:-8] + ".json")), {})
                group = str(head.get("group", ""))
                yield from _in_order(_group_steps(group, lines, snapshot, mine.offset), mine)


def _lines(path: str) -> Iterator[dict[str, Any]]:
    try:
        data = atomic.read_file(path)
    except (FileNotFoundError, StorageError):  # a pipe in its place is what verify tells of
        return
    for line in data.split(b"\n"):
        with contextlib.suppress(Damaged):  # the last line may be half written
            yield parse_object(line)


def _group_steps(
    group: str, lines: list[dict[str, Any]], snapshot: dict[str, Any], offset: int
) -> list[Step]:
    clock, timeout_s, attempt, steps = _Clock(), 30.0, 0, []
    clock.anchor(lines[0].get("anchor", {}))
    if "generation" in lines[0] and lines[0]["generation"] > 1:
        attempt = dict(map(tuple, snapshot.get("attempts", ()))).get(offset, 0)
    settled = False
    holder = ""
    for line in lines[1:]:
        op = line.get("op")
        if op == "anchored":
            clock.anchor(line)
        elif op in ("created", "edited"):
            timeout_s = float(line.get("options", {}).get("ack_timeout_s", timeout_s))
            if op == "created" and line.get("floor", 0) >= offset:
                steps.append(Step("skipped", f"group {group} began behind it", None, group))
                settled = True
        elif op == "leased":
            if _has(line.get("offsets", ()), offset):
                attempt, holder = attempt + 1, str(line.get("by", ""))
                at = None  # a lease to a handle has a length of its own
                if not is_handle(holder):
                    at = clock.wall(float(line["until"]) - timeout_s)
                text = f"group {group}: delivered to member {holder}, attempt {attempt}"
                facts = {"member": holder, "attempt": attempt}
                steps.append(Step("delivered", text, at, group, facts))
        elif op == "failed":
            for again, due in line.get("again", ()):
                if again == offset:
                    text = f"group {group}: attempt {attempt} failed"
                    if (when := clock.wall(float(due))) is not None:
                        text += f", the next one not before {write_time(when)}"
                    steps.append(Step("failed", text, None, group, {"attempt": attempt}))
        elif op == "returned" and _has(line.get("offsets", ()), offset):
            attempt -= 1
            text = f"group {group}: given back unread by member {holder}"
            steps.append(Step("returned", text, None, group))
        elif op == "freed" and line.get("by") == holder and not settled:
            steps.append(Step("freed", f"group {group}: member {holder} ended", None, group))
            holder = ""
        elif op == "redriven" and _has(line.get("offsets", ()), offset):
            settled, attempt = False, 0
            steps.append(Step("redriven", f"group {group}: redriven", None, group))
        elif op == "settled" and _has(line.get("offsets", ()), offset) and not settled:
            settled = True
            if group == LAKE_GROUP:
                steps.append(Step("lake", "copied to the lake", None, group))
            else:
                steps.append(Step("settled", f"group {group}: settled", None, group))
        elif op == "sought":
            settled = line.get("floor", 0) >= offset
            steps.append(
                Step("sought", f"group {group}: moved to {line.get('floor')}", None, group)
            )
    if not steps:
        done = snapshot.get("committed", 0) >= offset or _has(snapshot.get("settled", ()), offset)
        if done and group == LAKE_GROUP:
            steps.append(Step("lake", "copied to the lake", None, group))
        else:
            text = f"group {group}: {'settled' if done else 'not delivered yet'}"
            steps.append(Step("settled" if done else "waiting", text, None, group))
    return steps


def _has(ranges: Iterable[Any], offset: int) -> bool:
    return any(first <= offset <= last for first, last in ranges)


def _place(step: Step) -> datetime | None:
    return step.at or step.near


def _in_order(steps: list[Step], mine: Record) -> Iterator[Step]:
    """Put a step without a time next to the one before it: a journal is in order. A redrive comes
    later than that, behind its dead letter: it stands before the delivery that follows.
    """
    near: datetime | None = mine.event.ts
    for number, step in enumerate(steps):
        near = step.at or near
        if step.what == "redriven":
            near = next((one.at for one in steps[number:] if one.at is not None), None)
        yield step if step.at else msgspec.structs.replace(step, near=near)
