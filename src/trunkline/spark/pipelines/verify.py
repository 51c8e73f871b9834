"""Every byte checked: checksums, seals and gaps, segment by segment, in parallel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

FOUND = "topic string, partition int, path string, position bigint, problem string, severe boolean"


@pipeline(
    "verify",
    about="checksums, seals and gaps of every segment; no row means that all is well",
    source="segments",
    chart=("topic", "rows"),
)
def transform(df: DataFrame) -> DataFrame:
    """``df`` has a row per segment: root, topic, partition, segment; a partition that has none has
    a row as well.
    """
    return df.mapInArrow(_verify, FOUND)


def _verify(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    from trunkline.log.folder import Folder
    from trunkline.log.upkeep import verify
    from trunkline.options import StoreOptions

    kinds = [pa.string(), pa.int32(), pa.string(), pa.int64(), pa.string(), pa.bool_()]
    names = ["topic", "partition", "path", "position", "problem", "severe"]
    for batch in batches:
        work: dict[tuple[str, str, int], set[int]] = {}
        for row in batch.to_pylist():
            where = (row["root"], row["topic"], row["partition"])
            work.setdefault(where, set()).add(row["segment"])
        for (root, topic, partition), segments in work.items():
            folder = Folder(root, StoreOptions(create=False, reserve_bytes=0))
            try:
                found = list(verify(folder, topic, partition, only=segments))
            finally:
                folder.close()
            rows = [(topic, partition, *finding) for finding in found]
            columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[]] * 6
            yield pa.RecordBatch.from_arrays(
                [pa.array(c, k) for c, k in zip(columns, kinds, strict=True)], names=names
            )
