"""Reading the old from the lake and the new from the log: no row twice, none missing.

For each partition the lake ends where its last file does; from there on the log is read. What the
log no longer has and the lake has not either is as lost as it is without a lake.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from trunkline.spark.lake.storage import Storage
from trunkline.spark.lake.table import open_parquet
from trunkline.spark.source.columns import CORRUPT, arrow_schema, true_name
from trunkline.spark.source.parse import keep_only
from trunkline.spark.source.scan import OffsetRange, ScanOptions

if TYPE_CHECKING:
    from trunkline.spark.lake import LakeFile


@dataclass(frozen=True, slots=True)
class LakePart:
    """The offsets ``start <= offset < end`` of one file."""

    storage: Storage
    path: str
    span: OffsetRange


def lake_first(files: Iterable[LakeFile], topic: str, partition: int) -> int | None:
    """The first offset of a partition that the lake has."""
    mine = _of(files, topic, partition)
    return mine[0].first if mine else None


def lake_seek(
    files: Iterable[LakeFile], topic: str, partition: int, when: datetime, before: int
) -> int | None:
    """The first offset below ``before`` whose record in the lake is of ``when`` or later."""
    for part in _of(files, topic, partition):
        if part.first >= before:
            break
        with open_parquet(part.storage, part.path) as file:
            column = file.schema_arrow.names.index("timestamp")
            for number in range(file.num_row_groups):
                about = file.metadata.row_group(number).column(column).statistics
                if about is not None and about.has_min_max and _aware(about.max) < when:
                    continue
                rows = file.read_row_group(number, ["offset", "timestamp"])
                at = pa.scalar(when, rows.column("timestamp").type)
                late = rows.filter(pc.greater_equal(rows.column("timestamp"), at))
                first = pc.min(late.column("offset")).as_py()
                if first is not None:
                    return int(first) if first < before else None
    return None


def _aware(when: datetime) -> datetime:
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def _of(files: Iterable[LakeFile], topic: str, partition: int) -> list[LakeFile]:
    mine = [file for file in files if (file.topic, file.partition) == (topic, partition)]
    return sorted(mine, key=lambda file: file.first)


def split_tiers(
    spans: list[OffsetRange], files: list[LakeFile]
) -> tuple[list[LakePart], list[OffsetRange]]:
    """What of the spans is in the lake, and what is left for the log."""
    parts: list[LakePart] = []
    rest: list[OffsetRange] = []
    for span in spans:
        mine = _of(files, span.topic, span.partition)
        edge = span.start
        for file in mine:
            low, high = max(span.start, file.first), min(span.end, file.last + 1)
            if low < high:
                part = OffsetRange(span.topic, span.partition, low, high)
                parts.append(LakePart(file.storage, file.path, part))
                edge = max(edge, high)
        late = bool(mine) and span.start < mine[0].first  # the lake began later than the log
        if late:
            end = min(mine[0].first, span.end)
            rest.append(OffsetRange(span.topic, span.partition, span.start, end))
        if edge < span.end and not (late and edge == span.start):
            rest.append(OffsetRange(span.topic, span.partition, edge, span.end))
    return parts, rest


def read_part(part: LakePart, options: ScanOptions) -> Iterator[pa.RecordBatch]:
    """The records of a part, in the columns that were asked for."""
    wanted = {true_name(name) for name in options.names} - {"topic", CORRUPT}
    extra = {"offset"} | ({"type"} if options.types else set())
    extra |= {"space"} if options.spaces else set()
    schema = arrow_schema(options.names)
    with open_parquet(part.storage, part.path) as file:
        have = set(file.schema_arrow.names)
        for batch in file.iter_batches(columns=sorted((wanted | extra) & have)):
            at = batch.column("offset")
            inside = pc.and_(pc.greater_equal(at, part.span.start), pc.less(at, part.span.end))
            batch = batch.filter(inside)
            if options.types:
                batch = keep_only(batch, "type", options.types)
            if options.spaces:
                batch = keep_only(batch, "space", options.spaces)
            if batch.num_rows:
                yield _shaped(batch, part.span.topic, schema)


def _shaped(batch: pa.RecordBatch, topic: str, schema: pa.Schema) -> pa.RecordBatch:
    columns = []
    for field in schema:
        name = true_name(field.name)
        if name in batch.schema.names:
            columns.append(batch.column(name).cast(field.type))
        else:
            same = topic if name == "topic" else None
            columns.append(pa.repeat(pa.scalar(same, field.type), batch.num_rows))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
