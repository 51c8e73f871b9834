"""Delta tables without a line of Java: executors write Parquet, one commit makes it a version.

A commit carries the transaction ``(app, version)``, so a batch that is tried again finds itself
done. The files and the commit are on the device before ``write`` returns. Files that a crash left
behind belong to no version and do no harm; ``vacuum`` removes them.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trunkline.errors import NotFound, load_extra
from trunkline.log import atomic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

EVENTS = "events"
WHOLE: Final = "*"  # every row of a table is replaced
_VACUUM_EVERY = 50  # versions
_GROUP_BYTES = 16 * 1024 * 1024  # of Arrow in a row group: each costs a reader a start
_KEEP_HOURS = 1  # of what is no longer in the table, for those who still read it
_NULL = "__HIVE_DEFAULT_PARTITION__"


class Lake:
    """A folder of Delta tables."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path.removeprefix("file:"))

    def place(self, table: str) -> str:
        return os.path.join(self.path, table)

    def has(self, table: str) -> bool:
        return _has_versions(self.place(table))

    def tables(self) -> list[str]:
        names = sorted(os.listdir(self.path)) if os.path.isdir(self.path) else []
        return [name for name in names if self.has(name)]

    def read(
        self, spark: SparkSession, table: str, *, live: str = "", whole: bool = False
    ) -> DataFrame:
        """The table's newest version; only the rows whose column ``live`` is true, if that is
        named. Columns whose name begins with ``_`` are for the next batch, and shown if ``whole``.
        """
        from pyspark.sql.types import StructType

        delta = self._table(table)
        schema = StructType.fromJson(json.loads(delta.schema().to_json()))
        files = [path for path, values in _files(delta) if not live or values.get(live) == "true"]
        if not files:
            df = spark.createDataFrame([], schema)
        else:
            paths = [os.path.join(self.place(table), path) for path in files]
            reader = spark.read.schema(schema).option("basePath", self.place(table))
            df = reader.parquet(*paths)
        hidden = [] if whole else [name for name in schema.names if name.startswith("_")]
        return df.drop(*hidden) if hidden else df

    def rows(self, table: str) -> int:
        """How many rows the table has, by what its commits say."""
        if not self.has(table):
            return 0
        actions = pa.table(self._table(table).get_add_actions(flatten=True))
        return int(pc.sum(actions["num_records"]).as_py() or 0)

    def version(self, table: str, app: str) -> int:
        """The last version that ``app`` wrote; -1 if there is none."""
        if not self.has(table):
            return -1
        found = self._table(table).transaction_version(app)
        return -1 if found is None else int(found)

    def write(
        self,
        table: str,
        df: DataFrame,
        *,
        app: str,
        version: int,
        by: Sequence[str] = (),
        apart: Sequence[str] = (),
        replacing: str = "",
    ) -> None:
        """Add the rows, once for each version, in one commit. ``replacing`` takes others away in
        the same commit: all (``WHOLE``), or those whose column of that name is true.

        ``by`` are the columns that the table is partitioned by; ``apart`` those whose values are
        kept in files of their own.
        """
        if self.version(table, app) >= version:
            return
        by = (*by, *([replacing] if replacing not in ("", WHOLE) else []))
        place = self.place(table)
        atomic.make_dir(place)
        written = df.mapInArrow(_writing(place, tuple(by), tuple(apart)), "file string").collect()
        files = [json.loads(row.file) for row in written]
        self._commit(table, df.schema, files, by, replacing, (app, version))

    def _commit(
        self,
        table: str,
        schema: StructType,
        files: list[dict[str, Any]],
        by: Sequence[str],
        replacing: str,
        transaction: tuple[str, int],
    ) -> None:
        from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

        delta, place = _delta(), self.place(table)
        shape = delta.Schema.from_json(_loose(schema))
        done = delta.CommitProperties(app_transactions=[delta.Transaction(*transaction)])
        actions: list[Any] = [AddAction(**file) for file in files]
        newest = 0
        if not self.has(table):
            create_table_with_add_actions(
                place, shape, actions, "append", list(by), commit_properties=done
            )
        else:
            have = self._table(table)
            if replacing not in ("", WHOLE):
                now = time.time_ns() // 1_000_000
                actions += [
                    RemoveAction(path, True, now, None, values)
                    for path, values in _files(have)
                    if values[replacing] == "true"
                ]
            have.create_write_transaction(
                actions,
                "overwrite" if replacing == WHOLE else "append",
                shape,
                partition_by=list(by),
                commit_properties=done,
            )
            newest = self._table(table).version()
        _sync(os.path.join(place, "_delta_log", f"{newest:020}.json"))
        if replacing and newest % _VACUUM_EVERY == _VACUUM_EVERY - 1:
            self._table(table).vacuum(_KEEP_HOURS, dry_run=False, enforce_retention_duration=False)

    def _table(self, table: str) -> Any:
        if not self.has(table):
            raise NotFound(
                f"the lake has no table {table}", hint=f"tables: {', '.join(self.tables())}"
            )
        return _delta().DeltaTable(self.place(table))


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
    if not _has_versions(place):
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


def _has_versions(place: str) -> bool:
    """Whether there is a table: who died before its first commit may have left an empty folder."""
    try:
        with os.scandir(os.path.join(place, "_delta_log")) as found:
            return any(entry.name.endswith(".json") for entry in found)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _files(delta: Any) -> list[tuple[str, dict[str, str]]]:
    """Each file of a table, with the values it is partitioned by, as text."""
    found = []
    for one in pa.table(delta.get_add_actions(flatten=True)).to_pylist():
        values = {
            name.removeprefix("partition."): str(value).lower() if value is True else str(value)
            for name, value in one.items()
            if name.startswith("partition.")
        }
        found.append((one["path"], values))
    return found


def _loose(schema: StructType) -> str:
    """The schema as JSON, every column nullable: what a query knows never to be null differs from
    one version to the next.
    """
    shape = json.loads(schema.json())
    for field in shape["fields"]:
        field |= {"nullable": True, "metadata": {}}
    return json.dumps(shape)


def _sync(path: str) -> None:
    """A file that another library wrote, on the device with its name."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    atomic.sync_dir(os.path.dirname(path))


def _writing(
    place: str, by: tuple[str, ...], apart: tuple[str, ...]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What a task does: rows in, files out, each as the arguments of an add action."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        open_: dict[tuple[Any, ...], _File] = {}
        split = (*by, *apart)
        for batch in batches:
            for key, rows in _groups(batch, split):
                if key not in open_:
                    open_[key] = _File(place, dict(zip(split, key, strict=True)), by)
                open_[key].write(rows)
        made = [json.dumps(file.close()) for file in open_.values()]
        yield pa.RecordBatch.from_arrays([pa.array(made, pa.string())], names=["file"])

    return write


class _File:
    """One Parquet file of one partition of the table, being written."""

    def __init__(self, root: str, values: dict[str, Any], by: tuple[str, ...]) -> None:
        self._values = {name: _text(values[name]) for name in by}
        folder = "/".join(f"{n}={_NULL if v is None else v}" for n, v in self._values.items())
        self._name = os.path.join(folder, f"part-{uuid.uuid4().hex}.parquet")
        self._path = os.path.join(root, self._name)
        atomic.make_dir(os.path.dirname(self._path))
        self._writer: pq.ParquetWriter | None = None
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._rows = 0
        self._low: dict[str, Any] = {}
        self._high: dict[str, Any] = {}

    def write(self, batch: pa.RecordBatch) -> None:
        for name in ("partition", "offset"):
            if name in batch.schema.names and pa.types.is_integer(batch.schema.field(name).type):
                found = pc.min_max(batch.column(name)).as_py()
                if found["min"] is not None:
                    self._low[name] = min(found["min"], self._low.get(name, found["min"]))
                    self._high[name] = max(found["max"], self._high.get(name, found["max"]))
        batch = batch.drop_columns([name for name in self._values if name in batch.schema.names])
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, batch.schema, compression="zstd")
        self._held.append(batch)
        self._held_bytes += batch.nbytes
        self._rows += batch.num_rows
        if self._held_bytes >= _GROUP_BYTES:
            self._write_held()

    def _write_held(self) -> None:
        assert self._writer is not None
        self._writer.write_table(pa.Table.from_batches(self._held))
        self._held, self._held_bytes = [], 0

    def close(self) -> dict[str, Any]:
        assert self._writer is not None
        if self._held:
            self._write_held()
        self._writer.close()
        _sync(self._path)
        stats = {"numRecords": self._rows, "minValues": self._low, "maxValues": self._high}
        return {
            "path": self._name,
            "size": os.path.getsize(self._path),
            "partition_values": self._values,
            "modification_time": time.time_ns() // 1_000_000,
            "data_change": True,
            "stats": json.dumps(stats | {"nullCount": dict.fromkeys(self._low, 0)}),
        }


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _groups(
    batch: pa.RecordBatch, names: tuple[str, ...]
) -> Iterator[tuple[tuple[Any, ...], pa.RecordBatch]]:
    """The rows of each combination of the values of ``names``."""
    if not batch.num_rows:
        return
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
            column = batch.column(name)
            same = (
                pc.is_null(column)
                if values[name] is None
                else pc.fill_null(pc.equal(column, pa.scalar(values[name], column.type)), False)
            )
            mask = same if mask is None else pc.and_(mask, same)
        yield tuple(values[name] for name in names), batch.filter(mask)


def _delta() -> Any:
    return load_extra("deltalake", "spark")
