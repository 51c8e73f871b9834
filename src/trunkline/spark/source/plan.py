"""Dividing work: which offsets go into one micro-batch, and which of them into one task.

Pure arithmetic over offsets and bytes; nothing here reads a record.
"""

from __future__ import annotations

import os

from trunkline.log.extents import Extent, bytes_between, cut_by_bytes
from trunkline.spark.source.catalogs import Catalog
from trunkline.spark.source.offsets import Place
from trunkline.spark.source.scan import OffsetRange

TASK_BYTES_MIN = 1024 * 1024


def cores() -> int:
    return os.cpu_count() or 2


def admit_rows(start: Place, end: Place, rows: int) -> Place:
    """At most ``rows`` records, each partition in proportion to what it has waiting, and at least
    one from each that has any, so that none starves.
    """
    waiting = {
        (topic, partition): offset - start[topic][partition]
        for topic, partitions in end.items()
        for partition, offset in partitions.items()
    }
    total = sum(waiting.values())
    if total <= rows:
        return end
    place: Place = {}
    left = rows
    for (topic, partition), lag in sorted(waiting.items(), key=lambda pair: pair[1]):
        share = min(lag, max(1, lag * rows // total), left) if lag else 0
        left -= share
        place.setdefault(topic, {})[partition] = start[topic][partition] + share
    # In the order of ``end``: Spark compares offsets as text.
    return {t: {p: place[t][p] for p in partitions} for t, partitions in end.items()}


def admit_bytes(catalog: Catalog, start: Place, end: Place, budget: int) -> Place:
    """About ``budget`` bytes of records in all, at least one record."""
    sizes: dict[tuple[str, str], int] = {}
    known: dict[tuple[str, str], list[Extent]] = {}
    for topic, partitions in end.items():
        for partition, offset in partitions.items():
            key = (topic, partition)
            low = start[topic][partition]
            known[key] = catalog.extents(topic, int(partition), low)
            sizes[key] = _size(known[key], low, offset)
    total = sum(sizes.values())
    if total <= budget:
        return end
    place: Place = {}
    for (topic, partition), size in sizes.items():
        low, high = start[topic][partition], end[topic][partition]
        share = budget * size // total
        cut = cut_by_bytes(known[topic, partition], low, high, share) if high > low else high
        place.setdefault(topic, {})[partition] = cut
    return place


def divide(
    catalog: Catalog, spans: list[OffsetRange], tasks: int, *, exact: bool
) -> list[list[OffsetRange]]:
    """The spans in about ``tasks`` parts of about equal bytes, in order. Less than a megabyte is
    not worth a task of its own unless that many were asked for (``exact``).
    """
    pieces: list[tuple[OffsetRange, int]] = []
    for span in spans:
        covered = span.start
        for extent in catalog.extents(span.topic, span.partition, span.start):
            low, high = max(span.start, extent.first), min(span.end, extent.after)
            if low < high:
                # What lies before in no file belongs to this piece: reading it says so.
                piece = OffsetRange(span.topic, span.partition, covered, high)
                pieces.append((piece, bytes_between(extent, low, high)))
                covered = high
        if covered < span.end:
            pieces.append((OffsetRange(span.topic, span.partition, covered, span.end), 1))
    total = sum(size for _, size in pieces)
    target = max(1, -(-total // max(1, tasks)))
    if not exact:
        target = max(target, TASK_BYTES_MIN)
    return _fill(catalog, pieces, target, -(-total // target))


def _fill(
    catalog: Catalog, pieces: list[tuple[OffsetRange, int]], target: int, count: int
) -> list[list[OffsetRange]]:
    """A segment is cut only where no edge of one is near: a whole file is read the fastest."""
    parts: list[list[OffsetRange]] = [[]]
    room = target
    near = target // 8
    for piece, size in pieces:
        # Full enough, and further from the target with this piece than without.
        if parts[-1] and room <= near and size > 2 * room and len(parts) < count:
            parts.append([])
            room += target
        span, left = piece, size
        while left > room + near and span.end - span.start > 1:
            extents = catalog.extents(span.topic, span.partition, span.start)
            cut = cut_by_bytes(extents, span.start, span.end, max(1, room))
            if cut >= span.end:
                break
            parts[-1].append(OffsetRange(span.topic, span.partition, span.start, cut))
            parts.append([])
            span = OffsetRange(span.topic, span.partition, cut, span.end)
            left, room = max(1, left - room), target
        parts[-1].append(span)
        room -= left
    return [part for part in parts if part]


def _size(extents: list[Extent], start: int, end: int) -> int:
    return sum(
        bytes_between(extent, max(start, extent.first), min(end, extent.after))
        for extent in extents
        if max(start, extent.first) < min(end, extent.after)
    )
