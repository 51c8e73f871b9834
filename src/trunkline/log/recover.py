"""After a crash: where does the log end, and is what lies behind it a torn tail or damage?

A line that does not fit is a **torn tail** only if nothing says that it was durable once: neither
the head, nor the commit of any later line, nor a later segment. Then it was never acknowledged and
is cut. Everything else is **damage**, and damage is never cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from msgspec.structs import replace

from trunkline.log.head import Head
from trunkline.log.line import Damaged, Line, parse
from trunkline.log.segment import Segment

READ_BYTES = 256 * 1024


class Damage(NamedTuple):
    """``segment`` is None where the whole file is missing."""

    segment: Segment | None
    number: int
    position: int
    why: str


class Survey(NamedTuple):
    """``head`` is the true end. ``cuts`` are the segments that are longer than what counts, with
    the length to keep; ``open`` are those behind which the log went on without sealing them.
    """

    head: Head
    cuts: list[tuple[Segment, int]]
    open: list[tuple[Segment, Head]]
    damage: Damage | None
    lost: bool = False


def survey(segments: Sequence[Segment], head: Head | None) -> Survey:
    """Look at the files; change nothing. ``head`` is what the head file says, if anything."""
    usable = [s for s in segments if not s.bad]
    lost = finished = False
    if head is not None:
        here = next((s for s in usable if s.number == head.segment), None)
        if here is None:
            gone = _gone(segments, head)
            if gone is not None:
                return Survey(head, [], [], gone)
            lost = head.end > 0 and all(s.number != head.segment for s in segments)
        elif here.seal is not None:
            finished = True  # the head is late: since then it was sealed, and perhaps rewritten
        elif here.size() < head.durable:
            why = f"it ends at byte {here.size()}, and was durable up to {head.durable}"
            return Survey(head, [], [], Damage(here, here.number, here.size(), why))
        else:
            lost = not is_whole(here, head)
    if head is None or lost or finished:
        state, rest = _from_seals(usable, head)
    else:
        state, rest = head, [s for s in usable if s.number >= head.segment]
    found = _walk(state, rest, head)
    if lost and head is not None:
        fresh = replace(found.head, epoch=head.epoch, start=head.start, boot=head.boot)
        if fresh.next < head.next:
            reused = min(fresh.next, head.reused or fresh.next)
            fresh = replace(fresh, epoch=head.epoch + 1, reused=reused, since=fresh.next)
        found = found._replace(head=fresh, lost=True)
    if found.damage is None:
        found = found._replace(head=_behind_bad(segments, found.head))
    return found


def _behind_bad(segments: Sequence[Segment], state: Head) -> Head:
    """The state behind every file that was set aside: the process may have died right after it."""
    for segment in segments:
        if segment.bad and segment.number >= state.segment:
            state = _beyond(segment, replace(state, end=0), segment.size())
            state = _begin(state, segment.number + 1)
    return state


def _begin(state: Head, number: int) -> Head:
    """``state`` at the beginning of a segment."""
    return replace(state, segment=number, end=0, durable=0, sum=0, records=0, ts=0, indexed=0)


def is_whole(segment: Segment, head: Head) -> bool:
    """Whether the segment holds what the head speaks of. What was not synced may be gone after a
    power cut, or be other bytes, so there the checksum decides.
    """
    if segment.size() < head.end:
        return False
    if head.durable == head.end:
        return True
    sum_ = position = 0
    while position < head.end:
        chunk = segment.read(position, min(READ_BYTES, head.end - position))
        sum_ = crc32(chunk, sum_)
        position += len(chunk)
    return sum_ == head.sum


def _gone(segments: Sequence[Segment], head: Head) -> Damage | None:
    """The head speaks of a segment that is not there, though it or a later one once was."""
    if any(s.number == head.segment for s in segments):  # set aside
        return None
    if not (head.durable or any(s.number > head.segment for s in segments)):
        return None
    return Damage(None, head.segment, 0, f"segment {head.segment} is gone")


def _kept(head: Head) -> Head:
    """What only the head knows."""
    return Head(
        epoch=head.epoch, start=head.start, reused=head.reused, since=head.since, boot=head.boot
    )


def _from_seals(segments: list[Segment], head: Head | None) -> tuple[Head, list[Segment]]:
    """The state at the end of the last sealed segment, and the segments after it."""
    base = Head() if head is None else _kept(head)
    if segments and segments[0].first and not head:
        base = replace(base, start=segments[0].first, next=segments[0].first)
    for at in range(len(segments) - 1, -1, -1):
        seal = segments[at].seal
        if seal is not None:
            start = base.start
            following = replace(base, segment=segments[at].number + 1, next=seal.last + 1)
            return replace(following, start=start), segments[at + 1 :]
    first = segments[0].number if segments else 1
    return replace(base, segment=first), segments


def _walk(state: Head, segments: list[Segment], head: Head | None) -> Survey:
    cuts: list[tuple[Segment, int]] = []
    unsealed: list[tuple[Segment, Head]] = []
    for at, segment in enumerate(segments):
        if segment.number != state.segment:
            state = _begin(state, segment.number)
        upper = next((s.first for s in segments[at + 1 :] if s.first is not None), None)
        durable = head.durable if head and head.segment == segment.number else 0
        end, damage = _scan(segment, state, upper, durable)
        if damage is not None:
            return Survey(end, cuts, unsealed, damage)
        sealed = segment.seal is not None
        if not sealed and segment.size() > end.end:
            cuts.append((segment, end.end))
        if sealed:
            end = _begin(end, segment.number + 1)
        elif at + 1 < len(segments):
            unsealed.append((segment, end))
        state = end
    return Survey(state, cuts, unsealed, None)


def _scan(
    segment: Segment, state: Head, upper: int | None, durable: int
) -> tuple[Head, Damage | None]:
    """Follow whole batches from ``state`` on. ``upper`` is where the next segment begins."""
    size = segment.size()
    good = state
    batch: list[Line] = []
    sum_, expected, trouble = state.sum, state.next, None
    for position, text in segment.lines(state.end, size):
        try:
            line = parse(text)
        except Damaged as error:
            trouble = (position, str(error))
            break
        if line.seal is not None:
            good = replace(good, end=size, durable=size)
            break
        if upper is not None and line.offset >= upper and not batch:
            break
        if line.offset != expected:
            trouble = (position, f"offset {line.offset} stands where {expected} belongs")
            break
        expected += 1
        sum_ = crc32(b"\n", crc32(text, sum_))
        batch.append(line)
        if line.commit is not None:
            end = position + len(text) + 1
            latest = max(int(x.meta.ts.timestamp() * 1_000_000) for x in batch if x.meta)
            good = replace(
                good,
                next=expected,
                end=end,
                durable=end,
                sum=sum_,
                records=good.records + len(batch),
                ts=max(good.ts, latest),
            )
            batch = []
    if trouble is None and good.end < min(durable, size):
        trouble = (good.end, "a batch lacks its end")
    if upper is not None and good.next < upper:
        one = upper - 1 == good.next
        missing = f"offset {good.next} is" if one else f"offsets {good.next} to {upper - 1} are"
        position, why = trouble or (good.end, f"{missing} missing")
        return good, Damage(segment, segment.number, position, why)
    if trouble is not None and (trouble[0] < durable or _was_durable(segment, trouble[0], size)):
        return _beyond(segment, good, size), Damage(segment, segment.number, *trouble)
    return good, None


def _was_durable(segment: Segment, position: int, size: int) -> bool:
    """Whether a line behind ``position`` says that those bytes were durable."""
    for place, text in segment.lines(position, size):
        if place > position:
            try:
                line = parse(text)
            except Damaged:
                continue
            if line.seal is not None or (line.commit and line.commit.durable > position):
                return True
    return False


def _beyond(segment: Segment, good: Head, size: int) -> Head:
    """The state with ``next`` behind every line that can be read, so that no offset is reused."""
    last = good.next - 1
    for _, text in segment.lines(good.end, size):
        try:
            last = max(last, parse(text).offset)
        except Damaged:
            continue
    return replace(good, next=last + 1)
