"""Going on after damage: every record that is intact comes back, and what is lost is written down.

A file that is damaged is written anew with the lines that can be read; one that is gone is made
with none. The seal of either names the offsets that are lost, so that readers pass over those.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from trunkline.errors import Corrupt
from trunkline.folder import Folder
from trunkline.folder.rewrite import rewrite
from trunkline.folder.verify import verify_segment
from trunkline.log import atomic, layout
from trunkline.log.head import Head
from trunkline.log.line import Damaged, Line, Seal, parse
from trunkline.log.segment import Segment


class Salvaged(NamedTuple):
    """A segment that was mended: ``kept`` records are back, the ``lost`` ranges are not, and the
    damaged file is at ``path``, unless it was gone.
    """

    name: str
    path: str | None
    kept: int
    lost: list[tuple[int, int]]


def salvage(folder: Folder, topic: str, partition: int) -> list[Salvaged]:
    """Mend what is damaged or gone. The damaged files are kept in ``quarantine/``."""
    writer = folder.writer(topic, partition)
    try:
        head = writer.begin()
    except Corrupt:  # the last file was damaged, and is set aside by now
        head = writer.begin()
    try:
        if any(s.number == head.segment and not _is_sound(s, head) for s in writer.segments()):
            head = writer.roll(head)
        stem = layout.log_stem(topic, partition)
        return list(_mend(folder, stem, writer.segments(), head))
    finally:
        writer.end()
        folder.forget(topic, partition)


def _mend(folder: Folder, stem: str, segments: list[Segment], head: Head) -> Iterator[Salvaged]:
    """Go through the files; ``low`` is the first offset that those before do not account for."""
    low, number = head.start, 0
    for at, segment in enumerate(segments):
        if segment.number >= head.segment:
            break
        later = segments[at + 1 :]
        sound = _is_sound(segment, head, later, low)
        if sound and number == segment.number - 1:  # what lacks before it can be in no other file
            sound = (segment.first or low) <= low
        lines = [] if sound else list(_readable(segment))
        seal = segment.seal if sound else next((x.seal for x, _ in lines if x and x.seal), None)
        first = segment.first if sound else seal.first if seal else None
        high = seal.last if seal else _first(later, head) - 1
        if first is not None and low < first and number < segment.number - 1:
            yield _fill(folder, stem, segment.number - 1, low, first - 1)
            low = first
        if not sound:
            yield _rebuild(folder, segment, lines, seal, low, high)
        low, number = max(low, high + 1), segment.number
    high = _first([s for s in segments if s.number == head.segment], head) - 1
    if low <= high and number < head.segment - 1:
        yield _fill(folder, stem, number + 1, low, high)


def _is_sound(
    segment: Segment, head: Head, later: list[Segment] | None = None, first: int | None = None
) -> bool:
    if segment.bad:
        return False
    try:
        found, _ = verify_segment(segment, head, "", later or [], first)
    except (Corrupt, Damaged):
        return False
    return not any(finding.severe for finding in found)


def _first(segments: list[Segment], head: Head) -> int:
    """Where these begin, as far as they can be read. Their first lines may be compacted away, so
    that is for the seals to say.
    """
    for segment in segments:
        lines = [line for line, _ in _readable(segment) if line is not None]
        seals = [line.seal.first for line in lines if line.seal is not None]
        if lines:
            return (seals or [lines[0].offset])[0]
    return head.next


def _readable(segment: Segment) -> Iterator[tuple[Line | None, bytes]]:
    """Each line that can be read, and ``(None, …)`` where something cannot."""
    for piece in segment.pieces():
        if piece is None:
            yield None, b""
            continue
        *lines, rest = piece.split(b"\n")
        for text in [*lines, rest] if rest else lines:
            try:
                yield parse(text), text
            except Damaged:
                yield None, text


def _fill(folder: Folder, stem: str, number: int, low: int, high: int) -> Salvaged:
    """Make a file that is gone, with no records."""
    segment = Segment(folder.path, stem, number)
    rewrite(segment, [], Seal(0, low, high, "", 0, holes=True, lost=((low, high),)))
    return Salvaged(os.path.basename(segment.path), None, 0, [(low, high)])


def _rebuild(
    folder: Folder,
    segment: Segment,
    lines: list[tuple[Line | None, bytes]],
    seal: Seal | None,
    low: int,
    high: int,
) -> Salvaged:
    good: list[tuple[Line, bytes]] = []
    lost: list[tuple[int, int]] = []
    # Between two good lines something is lost if a line there is damaged, or if no offset may be
    # missing; where a log was compacted, missing offsets alone mean nothing, unless lines are.
    whole = all(line is not None for line, _ in lines)
    few = seal is not None and sum(x is not None and x.seal is None for x, _ in lines) < seal.count
    dense = seal is None or not (seal.holes or seal.lost) or (whole and few)
    last, hurt = low - 1, False
    for line, text in lines:
        if line is None:
            hurt = True
        elif line.seal is None and last < line.offset <= high:
            if line.offset > last + 1 and (hurt or dense):
                lost.append((last + 1, line.offset - 1))
            last, hurt = line.offset, False
            good.append((line, text))
    if last < high and (hurt or dense):
        lost.append((last + 1, high))
    place = os.path.join(folder.path, "quarantine")
    atomic.make_dir(place)
    kept = os.path.join(place, os.path.basename(segment.path))
    atomic.replace_file(kept, atomic.read_file(segment.path))
    mended = Segment.at(segment.path.removesuffix(".corrupt"), segment)
    rewrite(mended, good, Seal(len(good), low, high, "", 0, holes=True, lost=tuple(lost)))
    if segment.bad:
        atomic.remove_files([segment.path])
    return Salvaged(os.path.basename(segment.path), kept, len(good), lost)
