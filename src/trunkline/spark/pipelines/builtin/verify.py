"""Every byte checked: checksums, seals and gaps, segment by segment, in parallel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trunkline.errors import TrunklineError
from trunkline.folder import Folder
from trunkline.folder.upkeep import verify
from trunkline.options import StoreOptions
from trunkline.spark.pipelines.declare import table
from trunkline.spark.source.catalogs import is_remote, open_remote

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

FOUND = "topic string, partition int, path string, position bigint, problem string, severe boolean"


@table(
    "verify",
    about="checksums, seals and gaps of every segment; no row means that all is well",
    source="segments",
    chart=("topic", "rows"),
)
def transform(df: DataFrame) -> DataFrame:
    """``df`` has a row per segment: root, token, topic, partition, segment; a partition that has
    none has a row as well.
    """
    return df.mapInArrow(_verify, FOUND)


def _verify(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    kinds = [pa.string(), pa.int32(), pa.string(), pa.int64(), pa.string(), pa.bool_()]
    names = ["topic", "partition", "path", "position", "problem", "severe"]
    for batch in batches:
        work: dict[tuple[str, str, str, int], set[int]] = {}
        for row in batch.to_pylist():
            where = (row["root"], row["token"], row["topic"], row["partition"])
            work.setdefault(where, set()).add(row["segment"])
        for (root, token, topic, partition), segments in work.items():
            if is_remote(root):
                found = list(_read_all(root, token, topic, partition))
            else:
                found = _verify_files(root, topic, partition, segments)
            rows = [(topic, partition, *finding) for finding in found]
            columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[]] * 6
            yield pa.RecordBatch.from_arrays(
                [pa.array(c, k) for c, k in zip(columns, kinds, strict=True)], names=names
            )


def _verify_files(root: str, topic: str, partition: int, segments: set[int]) -> list[Any]:
    folder = Folder(root, StoreOptions(create=False, reserve_bytes=0))
    try:
        return list(verify(folder, topic, partition, only=segments))
    finally:
        folder.close()


def _read_all(root: str, token: str, topic: str, partition: int) -> Iterator[tuple[Any, ...]]:
    """A server's log shows no files: every record of it is read, and is in its place."""
    log = open_remote(root, token)
    where = f"{topic}/{partition}"
    at = 0
    try:
        head = log.head(topic, partition)
        at = head.start
        for rows in log.rows(topic, partition, head.start, head.next):
            for row in rows:
                if row.offset < at:
                    yield where, row.offset, f"offset {row.offset} comes again", True
                at = row.offset + 1
    except TrunklineError as error:
        yield where, at, str(error), True
    finally:
        log.close()
