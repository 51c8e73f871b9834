"""Delta tables without a line of Java: executors write Parquet, one commit makes it a version.

A commit carries the transaction ``(app, version)``, so a batch that is tried again finds itself
done. A table only grows or is replaced; files that a crash left behind belong to no version and do
no harm.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from trunkline.errors import InvalidOption, NotFound

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVENTS = "events"


class Lake:
    """A folder of Delta tables."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path.removeprefix("file:"))

    def place(self, table: str) -> str:
        return os.path.join(self.path, table)

    def has(self, table: str) -> bool:
        return os.path.isdir(os.path.join(self.place(table), "_delta_log"))

    def tables(self) -> list[str]:
        names = sorted(os.listdir(self.path)) if os.path.isdir(self.path) else []
        return [name for name in names if self.has(name)]

    def read(self, spark: SparkSession, table: str) -> DataFrame:
        """The table's newest version."""
        if not self.has(table):
            raise NotFound(
                f"the lake has no table {table}", hint=f"tables: {', '.join(self.tables())}"
            )
        delta = _delta().DeltaTable(self.place(table))
        files = delta.file_uris()
        if not files:
            from pyspark.sql.pandas.types import from_arrow_schema

            return spark.createDataFrame(
                [], from_arrow_schema(pa.schema(delta.schema().to_arrow()))
            )
        return spark.read.option("basePath", self.place(table)).parquet(*files)

    def version(self, table: str, app: str) -> int:
        """The last version that ``app`` wrote; -1 if there is none."""
        if not self.has(table):
            return -1
        found = _delta().DeltaTable(self.place(table)).transaction_version(app)
        return -1 if found is None else int(found)

    def replace(self, table: str, df: DataFrame, *, app: str, version: int) -> int:
        """Put ``df`` in the place of the table, once for each version. Returns its rows."""
        rows = df.toArrow()
        if self.version(table, app) < version:
            self._write(table, rows, "overwrite", app, version)
        return int(rows.num_rows)

    def append(self, table: str, df: DataFrame, *, app: str, version: int) -> int:
        """Add ``df`` to the table, once for each version. Returns its rows."""
        if self.version(table, app) >= version:
            return 0
        rows = df.toArrow()
        self._write(table, rows, "append", app, version)
        return int(rows.num_rows)

    def _write(self, table: str, rows: pa.Table, mode: str, app: str, version: int) -> None:
        delta = _delta()
        os.makedirs(self.place(table), exist_ok=True)
        done = delta.Transaction(app, version)
        delta.write_deltalake(
            self.place(table),
            rows,
            mode=mode,
            schema_mode="overwrite" if mode == "overwrite" else None,
            commit_properties=delta.CommitProperties(app_transactions=[done]),
        )


class LakeFile(NamedTuple):
    """A file of the table of events: offsets ``first`` to ``last`` of one partition."""

    path: str
    topic: str
    partition: int
    first: int
    last: int


def event_files(lake: str) -> list[LakeFile]:
    """The files of the table of events, by what they hold."""
    place = os.path.join(lake, EVENTS)
    if not os.path.isdir(os.path.join(place, "_delta_log")):
        return []
    actions = pa.table(_delta().DeltaTable(place).get_add_actions(flatten=True)).to_pylist()
    return [
        LakeFile(
            os.path.join(place, one["path"]),
            one["partition.topic"],
            one["min.partition"],
            one["min.offset"],
            one["max.offset"],
        )
        for one in actions
    ]


@dataclass
class Written(WriterCommitMessage):
    """The files that a task wrote, each as the arguments of an add action."""

    files: list[dict[str, Any]]
    query: str


class DeltaSource(DataSource):
    """``format("trunkline_lake")``: a sink for a Delta table, option ``path``."""

    @classmethod
    def name(cls) -> str:
        return "trunkline_lake"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        if overwrite:
            raise InvalidOption("this sink adds to a table", hint="use mode append")
        return DeltaBatchSink(self.options, schema)

    def streamWriter(  # noqa: N802
        self,
        schema: StructType,
        overwrite: bool,  # noqa: ARG002
    ) -> DataSourceStreamArrowWriter:
        return DeltaStreamSink(self.options, schema)


class _Table:
    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        if not options.get("path"):
            raise InvalidOption("option 'path' is missing: the folder of the table")
        self.root = os.path.abspath(options["path"].removeprefix("file:"))
        self.by = tuple(n.strip() for n in options.get("partitionBy", "").split(",") if n.strip())
        self.apart = tuple(n for n in options.get("apart", "").split(",") if n)
        self.app = options.get("txnAppId", "")
        self.schema = schema

    def write(self, batches: Iterator[pa.RecordBatch]) -> Written:
        from pyspark import TaskContext

        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context else None
        writers: dict[tuple[Any, ...], _File] = {}
        split = (*self.by, *self.apart)
        for batch in batches:
            for key, rows in _groups(batch, split):
                if key not in writers:
                    writers[key] = _File(self.root, dict(zip(split, key, strict=True)), self.by)
                writers[key].write(rows)
        return Written([file.close() for file in writers.values()], query or "")

    def commit(self, messages: Sequence[WriterCommitMessage | None], version: int | None) -> None:
        from deltalake import Schema
        from deltalake.transaction import AddAction, create_table_with_add_actions
        from pyspark.sql.pandas.types import to_arrow_schema

        delta = _delta()
        written = [one for one in messages if isinstance(one, Written)]
        app = self.app or next((one.query for one in written if one.query), "")
        files = [AddAction(**file) for one in written for file in one.files]
        properties = None
        if version is not None and app:
            table = self.root if os.path.isdir(os.path.join(self.root, "_delta_log")) else None
            done = delta.DeltaTable(table).transaction_version(app) if table else None
            if done is not None and done >= version:
                return
            transaction = delta.Transaction(app, version)
            properties = delta.CommitProperties(app_transactions=[transaction])
        schema = Schema.from_arrow(to_arrow_schema(self.schema, timezone="UTC"))
        os.makedirs(self.root, exist_ok=True)
        if not os.path.isdir(os.path.join(self.root, "_delta_log")):
            create_table_with_add_actions(
                self.root,
                schema,
                files,
                mode="append",
                partition_by=list(self.by),
                commit_properties=properties,
            )
        elif files:
            delta.DeltaTable(self.root).create_write_transaction(
                files, "append", schema, partition_by=list(self.by), commit_properties=properties
            )


class DeltaBatchSink(DataSourceArrowWriter):
    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._table = _Table(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._table.write(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._table.commit(messages, None)


class DeltaStreamSink(DataSourceStreamArrowWriter):
    """Exactly once per query and batch."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._table = _Table(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._table.write(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._table.commit(messages, batchId)


class _File:
    """One Parquet file of one partition of the table, being written."""

    def __init__(self, root: str, values: dict[str, Any], by: tuple[str, ...]) -> None:
        self._values = {name: values[name] for name in by}
        folder = "/".join(f"{name}={value}" for name, value in self._values.items())
        self._name = os.path.join(folder, f"part-{uuid.uuid4().hex}.parquet")
        self._path = os.path.join(root, self._name)
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        self._writer: pq.ParquetWriter | None = None
        self._rows = 0
        self._low: dict[str, Any] = {}
        self._high: dict[str, Any] = {}

    def write(self, batch: pa.RecordBatch) -> None:
        for name in ("partition", "offset"):
            if name in batch.schema.names:
                found = pc.min_max(batch.column(name)).as_py()
                self._low[name] = min(found["min"], self._low.get(name, found["min"]))
                self._high[name] = max(found["max"], self._high.get(name, found["max"]))
        batch = batch.drop_columns(list(self._values))
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, batch.schema, compression="zstd")
        self._writer.write_batch(batch)
        self._rows += batch.num_rows

    def close(self) -> dict[str, Any]:
        assert self._writer is not None
        self._writer.close()
        stats = {"numRecords": self._rows, "minValues": self._low, "maxValues": self._high}
        return {
            "path": self._name,
            "size": os.path.getsize(self._path),
            "partition_values": {k: str(v) for k, v in self._values.items()},
            "modification_time": time.time_ns() // 1_000_000,
            "data_change": True,
            "stats": json.dumps(stats | {"nullCount": dict.fromkeys(self._low, 0)}),
        }


def _groups(
    batch: pa.RecordBatch, names: tuple[str, ...]
) -> Iterator[tuple[tuple[Any, ...], pa.RecordBatch]]:
    """The rows of each combination of the values of ``names``."""
    if not names:
        yield (), batch
        return
    keys = pa.table({name: batch.column(name) for name in names}).group_by(list(names))
    combinations = keys.aggregate([]).to_pylist()
    for values in combinations:
        if len(combinations) == 1:
            yield tuple(values[name] for name in names), batch
            return
        mask = None
        for name in names:
            same = pc.equal(batch.column(name), pa.scalar(values[name], batch.column(name).type))
            mask = same if mask is None else pc.and_(mask, same)
        yield tuple(values[name] for name in names), batch.filter(mask)


def _delta() -> Any:
    try:
        import deltalake
    except ImportError:
        raise NotFound(
            "deltalake is not installed", hint="pip install 'trunkline[spark]'"
        ) from None
    return deltalake
