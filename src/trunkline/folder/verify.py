"""Verification: every byte of a log is checked against its checksums and seals."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NamedTuple
from zlib import crc32

from trunkline.errors import Corrupt, TrunklineError
from trunkline.folder import Folder
from trunkline.folder.compaction import Progress
from trunkline.log import atomic, layout
from trunkline.log.head import Head
from trunkline.log.line import Damaged, Seal, is_intact, parse, parse_object
from trunkline.log.segment import Segment
from trunkline.names import GroupKey


class Finding(NamedTuple):
    """Something that is not as it should be. ``severe``: records are damaged or missing."""

    path: str
    position: int
    problem: str
    severe: bool = True


def verify(
    folder: Folder,
    topic: str,
    partition: int,
    progress: Progress | None = None,
    only: Collection[int] | None = None,
) -> Iterator[Finding]:
    """Check every byte: checksums, seals, and that no offset is missing. ``only`` names the
    segments to check, by number; the seals of the others say how these fit in between.
    """
    reader = folder.fresh_reader(topic, partition)
    try:
        head, segments = reader.head(), reader.files()
        while (now := reader.head()).segment != head.segment:  # it went on while they were listed
            head, segments = now, reader.files()
        expected: int | None = head.start
        for done, segment in enumerate(segments):
            name = os.path.relpath(segment.path, folder.path)
            if only is not None and segment.number not in only:
                sealed = None if segment.bad else segment.seal
                expected = sealed.last + 1 if sealed is not None else None
                continue
            if not atomic.is_plain(segment.index_path):
                yield Finding(os.path.relpath(segment.index_path, folder.path), 0, "no plain file")
            if segment.bad:
                yield Finding(name, 0, "set aside as damaged; 'trunkline doctor --salvage'")
                expected = None
                continue
            try:
                first = segment.first
            except (Damaged, TrunklineError) as error:
                yield Finding(name, 0, str(error))
                expected = None
                continue
            if first is not None and expected is not None and expected <= head.start:
                expected = min(first, head.start)  # what comes before may be purged in part
            if expected is not None and first is not None and first != expected:
                yield Finding(name, 0, f"it begins at offset {first}, not {expected}")
            try:
                later = segments[done + 1 :]
                findings, following = verify_segment(segment, head, name, later, expected)
            except Corrupt as error:
                findings = [Finding(name, error.position, error.message)]
                expected = following = None
            yield from findings
            expected = following if following is not None else expected
            segment.close()
            if progress is not None:
                progress(done + 1, len(segments))
        if not segments:
            expected = head.start
        elif only is not None and segments[-1].number not in only:
            return
        if expected is not None and max(expected, head.start) != head.next:
            yield Finding(f"{topic}/{partition}", 0, f"ends before {expected}, not {head.next}")
    finally:
        reader.close()


def verify_group(root: str, key: GroupKey) -> Iterator[Finding]:
    """Damage to the files of a group that can be read all the same: its snapshots and its journal
    stand in for each other. The group's lock is held.
    """
    stem = layout.group_stem(*key)
    reach: tuple[int, int] | None = None  # the generation and the position of the snapshot
    for ending in (".json", ".json.bak"):
        try:
            found = parse_object(atomic.read_file(os.path.join(root, stem + ending)).rstrip(b"\n"))
        except FileNotFoundError:
            continue
        except Damaged as error:
            yield Finding(stem + ending, 0, f"{error}; the group can be read without it", False)
            continue
        reach = reach or (found.get("generation", 1), found.get("position", 0))
    try:
        first, *lines = atomic.read_file(os.path.join(root, stem + ".journal")).split(b"\n")
    except FileNotFoundError:
        return
    told = "the checksum does not fit; the group's snapshot holds what was there"
    if not is_intact(first):
        if lines:  # else it was torn when it was begun
            yield Finding(stem + ".journal", 0, told, False)
    elif reach is not None and reach[0] == parse_object(first).get("generation"):
        position = len(first) + 1
        for line in lines:  # behind the snapshot the group itself reads them
            if position >= reach[1]:
                break
            if not is_intact(line):
                yield Finding(stem + ".journal", position, told, False)
            position += len(line) + 1


def _first(segment: Segment) -> int | None:
    """Where a segment begins; None if it is damaged, which its own check reports."""
    with suppress(Corrupt, Damaged):
        return None if segment.bad else segment.first
    return None


def verify_segment(
    segment: Segment, head: Head, name: str, later: list[Segment], first: int | None
) -> tuple[list[Finding], int | None]:
    """What is wrong with one of them, which should begin at ``first`` if that is known; and the
    offset behind it.
    """
    found: list[Finding] = []
    active = segment.number == head.segment
    end = head.end if active else segment.size()
    expected = None
    count = sum_ = 0
    seal: Seal | None = None
    upper = next((at for at in map(_first, later) if at is not None), None)
    holes = not active and segment.seal is not None and segment.holes
    if segment.packed and not segment.is_sound():
        found.append(Finding(name, 0, "its digest does not fit"))
    for position, text in segment.lines(0, end):
        try:
            line = parse(text)
        except Damaged as error:
            found.append(Finding(name, position, str(error)))
            expected = None
            sum_ = crc32(text + b"\n", sum_)
            continue
        if line.seal is not None:
            seal = line.seal
            if position + len(text) + 1 != end:
                found.append(Finding(name, position, "there is something behind the seal"))
            break
        if upper is not None and line.offset >= upper:
            break
        if (
            expected is not None
            and line.offset != expected
            and not (holes and line.offset > expected)
        ):
            problem = f"offset {line.offset} stands where {expected} belongs"
            found.append(Finding(name, position, problem))
        expected = line.offset + 1
        count += 1
        sum_ = crc32(text + b"\n", sum_)
    if seal is not None:
        if (seal.count, seal.sum) != (count, f"{sum_:08x}"):
            found.append(Finding(name, end, "the seal does not fit what is in front of it"))
        expected = seal.last + 1
    elif not active and later:
        # A sync failed and the log went on in the next file, if nothing is missing between them.
        following = head.next if upper is None else upper
        whole = (first if expected is None else expected) in (None, following)
        found.append(Finding(name, end, "it was never sealed", severe=not whole))
        expected = following
    elif active and f"{sum_:08x}" != f"{head.sum:08x}":
        found.append(Finding(name, 0, "its checksum is not the one the head holds"))
    return found, expected
