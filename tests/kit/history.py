"""Checks what clients of a broker wrote down against what the broker kept.

Each client writes a step when it has an answer, a record, or has worked on one. ``at`` is the time
of the step on the clock that all processes of a machine share. ``since`` is a time before the step
at which nothing waited in the client's socket: what the client then read was sent after it. So a
client that was stopped, and reads old frames when it goes on, is not taken for a fault.

A client here is one connection: a process that connects again has another name.

A broker answers an ack when it has it, and writes it to the group's journal right after that. So an
answered ack counts as settled unless the broker was killed within ``JOURNAL_S`` after the answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

Group = tuple[str, str]  # the group and its topic
Place = tuple[str, str, int]  # and the offset

LOST = "lost"
UNSETTLED = "never settled"
UNWORKED = "settled, but unworked"
ORDER = "order of a key"
DEAD = "dead without a failure"
AFTER_ACK = "delivered after a settled ack"
JOURNAL_S = 1.0
UNREAD_S = 5.0  # a record may be with a client that does not read it for as long as a lease
KINDS = (LOST, UNSETTLED, UNWORKED, ORDER, DEAD, AFTER_ACK)


class Accepted(NamedTuple):
    """The broker answered a publish."""

    topic: str
    offset: int
    name: str  # of the event


class Kept(NamedTuple):
    """A record of the log."""

    name: str
    key: str | None


class Step(NamedTuple):
    """``got`` a record, ``worked`` on it, or ``settled`` it: its ack was answered in its lease."""

    what: str
    at: float
    client: str
    group: str
    topic: str
    offset: int
    attempt: int = 1
    since: float = 0.0

    @property
    def place(self) -> Place:
        return self.group, self.topic, self.offset


class History(NamedTuple):
    accepted: list[Accepted]
    log: Mapping[tuple[str, int], Kept]
    steps: list[Step]
    floors: Mapping[Group, int]  # every offset up to this one is settled
    letters: Mapping[Place, int]  # the attempts of each dead letter
    strict: frozenset[str] = frozenset()  # groups in which a key waits for its record that failed
    kills: tuple[float, ...] = ()  # when the broker was killed
    ends: tuple[tuple[str, float], ...] = ()  # of a group's clients: killed, stopped or ended


class Violation(NamedTuple):
    kind: str
    place: tuple[str | int, ...]
    why: str


def check(history: History) -> list[Violation]:
    """Everything that broke a promise."""
    got, settled = _places(history, "got"), _places(history, "settled")
    return [
        *_lost(history),
        *_unworked(history, {step.place for step in history.steps if step.what == "worked"}),
        *_order(history, got),
        *_dead(history, got, settled),
        *_after_ack(history, got, settled),
    ]


def _places(history: History, what: str) -> Mapping[Place, list[Step]]:
    """The steps of this kind by their records, in the order of time."""
    found = defaultdict(list)
    for step in sorted(history.steps, key=lambda step: step.at):
        if step.what == what:
            found[step.place].append(step)
    return found


def _lost(history: History) -> Iterator[Violation]:
    for topic, offset, name in history.accepted:
        kept = history.log.get((topic, offset))
        if kept is None or kept.name != name:
            found = "nothing" if kept is None else kept.name
            yield Violation(LOST, (topic, offset), f"{name} was accepted, the log has {found}")


def _unworked(history: History, worked: set[Place]) -> Iterator[Violation]:
    for (group, topic), floor in history.floors.items():
        for at, offset in history.log:
            if at != topic:
                continue
            place = group, topic, offset
            if offset > floor:
                yield Violation(UNSETTLED, place, f"the group stands at {floor}")
            elif place not in worked and place not in history.letters:
                yield Violation(UNWORKED, place, f"the group stands at {floor}")


def _order(history: History, got: Mapping[Place, list[Step]]) -> Iterator[Violation]:
    """The first deliveries of a key come in the order of offsets; in a strict group all do."""
    lines: dict[tuple[str, str, str], list[Step]] = defaultdict(list)
    for (group, topic, offset), steps in got.items():
        kept = history.log.get((topic, offset))
        if kept is None or kept.key is None:
            continue
        first = steps if group in history.strict else [s for s in steps[:1] if s.attempt == 1]
        lines[group, topic, kept.key] += first
    for (_, _, key), steps in lines.items():
        yield from _line(history, key, sorted(steps, key=lambda step: step.at))


def _line(history: History, key: str, steps: Iterable[Step]) -> Iterator[Violation]:
    """``highest`` has the steps that reached a higher offset than all before them. A broker that is
    killed may have sent such a record on the word of an ack that was not in its journal.
    """
    highest: list[Step] = []
    for step in steps:
        passed = highest[bisect_right(highest, step.offset, key=lambda one: one.offset) :]
        certain = [one for one in passed if _is_after(step, one) and not _is_cut(history, one)]
        if certain:
            why = (
                f"{key}: {certain[0].client} had {certain[0].offset} before {step.client} had this"
            )
            yield Violation(ORDER, step.place, why)
        if not highest or step.offset > highest[-1].offset:
            highest.append(step)


def _is_after(step: Step, earlier: Step) -> bool:
    """One connection reads frames in the order in which they were sent; of two, only a frame that
    was sent after the other was read is certain to be the later one.
    """
    return step.client == earlier.client or step.since > earlier.at


def _dead(
    history: History, got: Mapping[Place, list[Step]], settled: Mapping[Place, list[Step]]
) -> Iterator[Violation]:
    """Each attempt of a dead letter needs a client that had the record and did not settle it. One
    that came to its end while the record was tried may have had it and not have written that down.
    """
    for place, attempts in history.letters.items():
        steps = got.get(place, [])
        done = Counter(step.client for step in settled.get(place, ()))
        failed = sum((Counter(step.client for step in steps) - done).values())
        if failed:
            first, last = steps[0].since - UNREAD_S, steps[-1].at + UNREAD_S
            ends = [at for group, at in history.ends if group == place[0] and first < at < last]
            failed += len(ends)
        if failed < attempts:
            yield Violation(DEAD, place, f"{attempts} attempts, {failed} failures")


def _after_ack(
    history: History, got: Mapping[Place, list[Step]], settled: Mapping[Place, list[Step]]
) -> Iterator[Violation]:
    for first, step in _again(got, settled):
        if not _is_cut(history, first):
            why = f"{first.client} settled it {step.since - first.at:.3f} s before {step.client}"
            yield Violation(AFTER_ACK, step.place, why)


def _again(
    got: Mapping[Place, list[Step]], settled: Mapping[Place, list[Step]]
) -> Iterator[tuple[Step, Step]]:
    """The last answered ack before each delivery of a record, and that delivery."""
    for place, acks in settled.items():
        for step in got.get(place, ()):
            before = [ack for ack in acks if ack.at < step.since]
            if before:
                yield before[-1], step


def _is_cut(history: History, step: Step) -> bool:
    """Whether the broker was killed before an ack of that time was in its journal for certain."""
    return any(step.at - 0.01 <= kill <= step.at + JOURNAL_S for kill in history.kills)


def table(history: History, found: Iterable[Violation]) -> str:
    """The counts of a run and of its violations, as text."""
    whats = Counter(step.what for step in history.steps)
    again = whats["got"] - len({step.place for step in history.steps if step.what == "got"})
    cut = sum(
        _is_cut(history, ack)
        for ack, _ in _again(_places(history, "got"), _places(history, "settled"))
    )
    rows = {
        "publishes accepted": len(history.accepted),
        "records in the log": len(history.log),
        "deliveries": whats["got"],
        "of them again": again,
        "worked": whats["worked"],
        "acks answered": whats["settled"],
        "of them taken back by a kill of the broker": cut,
        "connections": len({step.client for step in history.steps}),
        "dead letters": len(history.letters),
    }
    counts = Counter(one.kind for one in found)
    rows |= {f"violations: {kind}": counts[kind] for kind in KINDS}
    return "\n".join(f"{name:44} {count:>9,}" for name, count in rows.items())
