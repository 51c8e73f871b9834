"""Delta tables without a line of Java: executors write Parquet, one commit makes it a version.

Writing has two steps. ``stage`` writes the files, which belong to no version yet. ``commit`` makes
them a version, with the transaction ``(app, version)``, so that a batch that is tried again finds
itself done. A batch stages all its tables before it commits the first: a transform that fails
leaves every table as it was. The names of staged files carry their ``app``, and ``sweep`` removes
those that a crash left behind: the files of an app that no commit names.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trunkline.check import load_extra
from trunkline.errors import NotFound
from trunkline.spark.lake.schema import added, loose
from trunkline.spark.lake.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVENTS = "events"
WHOLE: Final = "*"  # every row of a table is replaced
BUCKET: Final = "_bucket"  # the column of a table that is merged bucket by bucket
KEEP_HOURS: Final = 1  # of files no longer in the table, for queries that read them
_VACUUM_EVERY = 50  # versions
_GROUP_BYTES = 16 * 1024 * 1024  # of Arrow in a row group: each costs a reader a start
_NULL = "__HIVE_DEFAULT_PARTITION__"
_SPECIAL = re.compile(r"""[\x00-\x1f\x7f"#%'*/:=?\\{\[\]^]""")  # in a folder's name, as Hive has it
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ROW = "_row"  # the number of a row while a batch is split
_STATISTICS = ("partition", "offset", "timestamp")
Values = dict[str, str | None]


@dataclass(frozen=True, slots=True)
class Replacing:
    """The rows that a commit takes away: those of the files whose partition value is one of
    ``values``; all rows if ``column`` is ``WHOLE``; none if it is empty.
    """

    column: str = ""
    values: frozenset[str] = frozenset()

    def has(self, values: Values) -> bool:
        return self.column == WHOLE or (bool(self.column) and values[self.column] in self.values)


NOTHING: Final = Replacing()
EVERYTHING: Final = Replacing(WHOLE)


@dataclass(frozen=True, slots=True)
class StagedFiles:
    """Files of a table that belong to no version yet."""

    table: str
    schema: dict[str, Any]
    files: list[dict[str, Any]]
    partition_by: tuple[str, ...]

    @property
    def rows(self) -> int:
        return sum(json.loads(file["stats"])["numRecords"] for file in self.files)


class Lake:
    """Delta tables side by side, in a folder or an object store."""

    def __init__(self, path: str) -> None:
        self.storage = Storage.of(path)
        self.path = self.storage.root

    def place(self, table: str) -> str:
        return self.storage.url(table)

    def has(self, table: str) -> bool:
        if self.storage.is_local:
            return _has_versions(self.place(table))
        return bool(_delta().DeltaTable.is_deltatable(**self.storage.delta(table)))

    def tables(self) -> list[str]:
        if self.storage.is_local:
            names = sorted(os.listdir(self.path)) if os.path.isdir(self.path) else []
            return [name for name in names if self.has(name)]
        marks = (path.partition("/_delta_log/") for path in self.storage.files(""))
        return sorted({name for name, mark, _ in marks if mark and "/" not in name})

    def read(
        self,
        spark: SparkSession,
        table: str,
        *,
        only: Callable[[Values], bool] | None = None,
        files: Sequence[str] | Mapping[str, Values] | None = None,
        whole: bool = False,
        version: int | None = None,
    ) -> DataFrame:
        """The table's newest version, or another; only the files whose partition values ``only``
        wants, or ``files``. Files that no version names any more come with their partition values.
        Columns whose name begins with ``_`` are for the next batch, and shown if ``whole``.
        """
        from pyspark.sql.types import StructType

        delta = self._table(table, version)
        schema = StructType.fromJson(json.loads(delta.schema().to_json()))
        found = _files(delta)
        if files is not None:
            known = files if isinstance(files, Mapping) else dict(found)
            found = [(path, known[path]) for path in files]
        found = [(path, values) for path, values in found if only is None or only(values)]
        if not found:
            df = spark.createDataFrame([], schema)
        elif self.storage.is_local:
            paths = [os.path.join(self.place(table), path) for path, _ in found]
            reader = spark.read.schema(schema).option("basePath", self.place(table))
            df = reader.parquet(*paths)
        else:
            work = [(f"{table}/{path}", json.dumps(values)) for path, values in found]
            tasks = spark.createDataFrame(work, "path string, `values` string")
            tasks = tasks.repartition(min(len(work), spark.sparkContext.defaultParallelism))
            shape = pa.schema(delta.schema().to_arrow())
            df = tasks.mapInArrow(_reading(self.storage, shape.serialize().to_pybytes()), schema)
        hidden = [] if whole else [name for name in schema.names if name.startswith("_")]
        return df.drop(*hidden) if hidden else df

    def files_between(self, table: str, column: str, low: int, high: int) -> list[str]:
        """The files that may have rows from one time to another, in microseconds since 1970, by
        what their commits say.
        """
        least, most = f"min.{column}", f"max.{column}"
        return [
            file_path(one)
            for one in _actions(self._table(table), ("path", least, most), flatten=True)
            if one.get(least) is None
            or one.get(most) is None
            or (_micros(one[least]) <= high and _micros(one[most]) >= low)
        ]

    def rows(self, table: str, **where: str) -> int:
        """How many rows the table has, by what its commits say; ``where`` names values of columns
        that it is partitioned by.
        """
        if not self.has(table):
            return 0
        actions = pa.table(self._table(table).get_add_actions(flatten=True))
        for name, value in where.items():
            actions = actions.filter(pc.equal(actions[f"partition.{name}"], value))
        return int(pc.sum(actions["num_records"]).as_py() or 0)

    def version(self, table: str, app: str) -> int:
        """The last version that ``app`` wrote; -1 if there is none."""
        if not self.has(table):
            return -1
        found = self._table(table).transaction_version(app)
        return -1 if found is None else int(found)

    def newest(self, table: str) -> int:
        """The number of the table's newest Delta version; -1 if there is no table."""
        return int(self._table(table).version()) if self.has(table) else -1

    def has_version(self, table: str, version: int) -> bool:
        """Whether a version of the table can still be read."""
        from deltalake.exceptions import DeltaError

        newest = self._table(table)
        if newest.version() == version:
            return True
        try:
            old = self._table(table, version)
        except (DeltaError, FileNotFoundError):  # its commits are gone, or there was none
            return False
        gone = dict(_files(old)).keys() - dict(_files(newest)).keys()
        return all(self.storage.has(f"{table}/{path}") for path in gone)

    def added_since(self, table: str, version: int, until: int) -> dict[str, Values] | None:
        """The files whose rows came after one Delta version, up to another, with their partition
        values. A file that OPTIMIZE merged since counts as long as it is there. None if rows were
        taken away since, or the versions or files are not known any more.
        """
        found: dict[str, Values] = {}
        for number in range(version + 1, until + 1):
            data = self.storage.read(f"{table}/_delta_log/{number:020}.json")
            if data is None:
                return None
            for line in data.splitlines():
                action = json.loads(line)
                if action.get("remove", {}).get("dataChange"):
                    return None
                if action.get("add", {}).get("dataChange"):
                    found[unquote(action["add"]["path"])] = action["add"]["partitionValues"]
        merged = found.keys() - dict(_files(self._table(table))).keys()
        return found if all(self.storage.has(f"{table}/{path}") for path in merged) else None

    def write(
        self,
        table: str,
        df: DataFrame,
        *,
        app: str,
        version: int,
        partition_by: Sequence[str] = (),
        split_files_by: Sequence[str] = (),
        replacing: Replacing = NOTHING,
        maker: str = "",
    ) -> None:
        """Add the rows, once for each version, in one commit."""
        if self.version(table, app) < version:
            staged = self.stage(
                table,
                df,
                app=app,
                version=version,
                partition_by=partition_by,
                split_files_by=split_files_by,
                maker=maker,
            )
            self.commit(staged, app=app, version=version, replacing=replacing)

    def stage(
        self,
        table: str,
        df: DataFrame,
        *,
        app: str,
        version: int,
        partition_by: Sequence[str] = (),
        split_files_by: Sequence[str] = (),
        maker: str = "",
    ) -> StagedFiles:
        """Write the rows to files that belong to no version yet. The values of ``split_files_by``
        are kept in files of their own. ``Conflict`` if a column is of another type than before; it
        names the pipeline that makes the table anew, ``maker``.
        """
        schema = loose(df.schema)
        if self.has(table):
            added(table, json.loads(self._table(table).schema().to_json()), schema, maker)
        by = tuple(partition_by)
        write = _writing(self.storage, table, by, tuple(split_files_by), _mark(app, version))
        written = df.mapInArrow(write, "file string").collect()
        return StagedFiles(table, schema, [json.loads(row.file) for row in written], by)

    def commit(
        self, staged: StagedFiles, *, app: str, version: int, replacing: Replacing = NOTHING
    ) -> list[str]:
        """Make staged files a version of their table, once. Returns the columns that are new."""
        if self.version(staged.table, app) >= version:
            return []
        from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

        delta = _delta()
        table, by = staged.table, list(staged.partition_by)
        shape = delta.Schema.from_json(json.dumps(staged.schema))
        done = delta.CommitProperties(app_transactions=[delta.Transaction(app, version)])
        actions: list[Any] = [AddAction(**file) for file in staged.files]
        new: list[str] = []
        if not self.has(table):
            where = self.storage.delta(table)
            create_table_with_add_actions(
                **where, schema=shape, add_actions=actions, mode="append", partition_by=by,
                commit_properties=done,
            )  # fmt: skip
        else:
            have = self._table(table)
            more = added(table, json.loads(have.schema().to_json()), staged.schema)
            if more:
                fields = delta.Schema.from_json(json.dumps({"type": "struct", "fields": more}))
                have.alter.add_columns(fields.fields)
                have = self._table(table)
                new = [one["name"] for one in more]
            if replacing.column:
                now = time.time_ns() // 1_000_000
                actions += [
                    RemoveAction(path, True, now, None, values)
                    for path, values in _files(have)
                    if replacing.has(values)
                ]
            have.create_write_transaction(
                actions, "append", have.schema(), partition_by=by, commit_properties=done
            )
        newest = self._table(table).version()
        self.storage.sync(f"{table}/_delta_log/{newest:020}.json")
        if replacing.column and newest % _VACUUM_EVERY == _VACUUM_EVERY - 1:
            self._table(table).vacuum(KEEP_HOURS, dry_run=False, enforce_retention_duration=False)
        return new

    def swap(self, table: str, shadow: str, *, app: str, version: int, column: str = "") -> None:
        """Replace a table by the rows of ``shadow``, in one commit; with ``column`` only the rows
        of the partition values that the shadow has. Once for each version.
        """
        if not self.has(shadow):
            return
        if self.version(table, app) < version:
            self.sweep(app, [table])  # the copies of a swap that was killed
            delta = self._table(shadow)
            files = []
            for one in pa.table(delta.get_add_actions(flatten=False)).to_pylist():
                name = f"{_mark(app, version)}-{uuid.uuid4().hex}.parquet"
                path = os.path.join(os.path.dirname(file_path(one)), name)
                self.storage.copy(f"{shadow}/{file_path(one)}", f"{table}/{path}")
                low, high = one.get("min") or {}, one.get("max") or {}
                files.append(
                    _action(path, one["size_bytes"], _values(one), one["num_records"], low, high)
                )
            by = tuple(delta.metadata().partition_columns)
            shape = json.loads(delta.schema().to_json())
            staged = StagedFiles(table, shape, files, by)
            if column:
                values = frozenset(str(file["partition_values"][column]) for file in files)
                self.commit(staged, app=app, version=version, replacing=Replacing(column, values))
            else:
                self._overwrite(staged, app, version)
        self.drop(shadow)

    def _overwrite(self, staged: StagedFiles, app: str, version: int) -> None:
        """Every row and the schema of a table become those of the staged files."""
        from deltalake.transaction import AddAction

        if not self.has(staged.table):
            self.commit(staged, app=app, version=version)
            return
        delta = _delta()
        done = delta.CommitProperties(app_transactions=[delta.Transaction(app, version)])
        self._table(staged.table).create_write_transaction(
            [AddAction(**file) for file in staged.files],
            "overwrite",
            delta.Schema.from_json(json.dumps(staged.schema)),
            partition_by=list(staged.partition_by),
            commit_properties=done,
        )
        newest = self.newest(staged.table)
        self.storage.sync(f"{staged.table}/_delta_log/{newest:020}.json")

    def drop(self, table: str) -> None:
        self.storage.remove_folder(table)

    def sweep(self, app: str, tables: Iterable[str] | None = None) -> int:
        """Remove the files of ``app`` that no commit names: a batch staged them and died, or a task
        did that was tried again. Call it while no batch of ``app`` is at work. Looks at ``tables``,
        else at every folder of the lake, for a table may have died before its first commit. Returns
        how many files went.
        """
        mark = f"{_app_mark(app)}-"
        names = self.storage.folders("") if tables is None else tables
        gone = 0
        for table in names:
            paths = [p for p in self.storage.files(table) if p.rpartition("/")[2].startswith(mark)]
            if paths and self.has(table):
                known = {f"{table}/{path}" for path, _ in _files(self._table(table))}
                paths = [path for path in paths if path not in known]
            if paths:
                named = self._commits(table)
                paths = [p for p in paths if p.rpartition("/")[2].encode() not in named]
            self.storage.remove(paths)
            gone += len(paths)
        return gone

    def _commits(self, table: str) -> bytes:
        """The text of every commit of a table. A file that a commit took away is named there, and
        stays for a while, for queries that still read it.
        """
        logs = [
            path for path in self.storage.files(f"{table}/_delta_log") if path.endswith(".json")
        ]
        return b"".join(self.storage.read(path) or b"" for path in logs)

    def _table(self, table: str, version: int | None = None) -> Any:
        if not self.has(table):
            raise NotFound(
                f"the lake has no table {table}", hint=f"tables: {', '.join(self.tables())}"
            )
        return _delta().DeltaTable(**self.storage.delta(table), version=version)


def register(spark: SparkSession, path: str) -> list[str]:
    """Make each table of a lake a view: ``lake_clean`` for ``clean``. Returns the names of the
    views.
    """
    lake = Lake(path)
    names = []
    for table in lake.tables():
        names.append("lake_" + re.sub(r"\W", "_", table))
        lake.read(spark, table).createOrReplaceTempView(names[-1])
    return names


class LakeFile(NamedTuple):
    """A file of the table of events: offsets ``first`` to ``last`` of one partition."""

    storage: Storage
    path: str
    topic: str
    partition: int
    first: int
    last: int


def event_files(lake: str) -> list[LakeFile]:
    """The files of the table of events, by what they hold."""
    found = Lake(lake)
    if not found.has(EVENTS):
        return []
    return [one._replace(path=f"{EVENTS}/{one.path}") for one in row_bounds(found, EVENTS)]


def row_bounds(lake: Lake, table: str) -> list[LakeFile]:
    """The files of a table that is partitioned by topic: which offsets their rows lie between."""
    actions = pa.table(lake._table(table).get_add_actions(flatten=True)).to_pylist()
    return [
        LakeFile(
            lake.storage,
            file_path(one),
            one["partition.topic"],
            one["min.partition"],
            one["min.offset"],
            one["max.offset"],
        )
        for one in actions
    ]


def open_parquet(storage: Storage, path: str) -> pq.ParquetFile:
    return pq.ParquetFile(storage.open_for_reading(path))


def _has_versions(place: str) -> bool:
    """Whether there is a table: a run that died before its first commit leaves an empty folder."""
    try:
        with os.scandir(os.path.join(place, "_delta_log")) as found:
            return any(entry.name.endswith(".json") for entry in found)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _files(delta: Any) -> list[tuple[str, Values]]:
    """Each file of a table, with the values it is partitioned by, as text."""
    names = ("path", "partition", "partition_values")
    return [(file_path(one), _values(one)) for one in _actions(delta, names)]


def _actions(delta: Any, names: Iterable[str], *, flatten: bool = False) -> list[dict[str, Any]]:
    """What a table's commits say of each file, of that what is called ``names``."""
    found = pa.table(delta.get_add_actions(flatten=flatten))
    rows: list[dict[str, Any]] = found.select(
        [name for name in names if name in found.schema.names]
    ).to_pylist()
    return rows


def file_path(action: dict[str, Any]) -> str:
    """The path of an action's file in its table. Delta writes it as a part of a URL."""
    return unquote(action["path"])


def _values(action: dict[str, Any]) -> Values:
    found = action.get("partition") or action.get("partition_values") or {}
    return {name: text_of(value) for name, value in found.items()}


def text_of(value: Any) -> str | None:
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _micros(at: datetime) -> int:
    return (at.replace(tzinfo=at.tzinfo or UTC) - _EPOCH) // timedelta(microseconds=1)


def _app_mark(app: str) -> str:
    return f"part-{crc32(app.encode()):08x}"


def _mark(app: str, version: int) -> str:
    """How the names of the files of a batch begin."""
    return f"{_app_mark(app)}-{version}"


def _writing(
    storage: Storage, table: str, by: tuple[str, ...], split_by: tuple[str, ...], mark: str
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What a task does: rows in, files out, each as the arguments of an add action."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        open_: dict[tuple[Any, ...], NewFile] = {}
        split = (*by, *split_by)
        for batch in batches:
            for key, rows in _groups(batch, split):
                if key not in open_:
                    values = dict(zip(split, key, strict=True))
                    open_[key] = NewFile(storage, table, values, by, mark)
                open_[key].write(rows)
        made = [json.dumps(file.close()) for file in open_.values()]
        yield pa.RecordBatch.from_arrays([pa.array(made, pa.string())], names=["file"])

    return write


def _reading(
    storage: Storage, schema: bytes
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What a task does: paths in, rows out, with the values of the path as columns."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        shape = pa.ipc.read_schema(pa.py_buffer(schema))
        for batch in batches:
            for work in batch.to_pylist():
                values = json.loads(work["values"])
                with open_parquet(storage, work["path"]) as file:
                    for rows in file.iter_batches():
                        yield _with_values(rows, shape, values)

    return read


def _with_values(rows: pa.RecordBatch, shape: pa.Schema, values: Values) -> pa.RecordBatch:
    columns = []
    for one in shape:
        if one.name in rows.schema.names:
            columns.append(rows.column(one.name).cast(one.type))
        else:
            value = pa.scalar(values.get(one.name), pa.string()).cast(one.type)
            columns.append(pa.repeat(value, rows.num_rows))
    return pa.RecordBatch.from_arrays(columns, schema=shape)


class NewFile:
    """One Parquet file of one partition of a table, being written."""

    def __init__(
        self,
        storage: Storage,
        table: str,
        values: dict[str, Any],
        by: tuple[str, ...],
        mark: str = "part",
    ) -> None:
        self._storage = storage
        self._values = {name: text_of(values[name]) for name in by}
        folder = "/".join(f"{name}={_folder(value)}" for name, value in self._values.items())
        name = f"{mark}-{uuid.uuid4().hex}.parquet"
        self._name = f"{folder}/{name}" if folder else name
        self._path = f"{table}/{self._name}"
        self._writer: pq.ParquetWriter | None = None
        self._file: Any = None
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._rows = 0
        self._low: dict[str, Any] = {}
        self._high: dict[str, Any] = {}

    def write(self, batch: pa.RecordBatch) -> None:
        for name in _STATISTICS:
            if name in batch.schema.names and _has_order(batch.schema.field(name).type):
                found = pc.min_max(batch.column(name)).as_py()
                if found["min"] is not None:
                    self._low[name] = min(found["min"], self._low.get(name, found["min"]))
                    self._high[name] = max(found["max"], self._high.get(name, found["max"]))
        batch = batch.drop_columns([name for name in self._values if name in batch.schema.names])
        batch = _nullable(batch)
        if self._writer is None:
            self._file = self._storage.open_new(self._path)
            self._writer = pq.ParquetWriter(self._file, batch.schema, compression="zstd")
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
        self._file.close()
        self._storage.sync(self._path)
        size = self._storage.size(self._path)
        return _action(self._name, size, self._values, self._rows, self._low, self._high)


def _folder(value: str | None) -> str:
    """A partition value as a folder's name. Delta knows no empty text there: it is NULL."""
    return _SPECIAL.sub(lambda one: f"%{ord(one[0]):02X}", value) if value else _NULL


def _nullable(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows; each member of a struct may be null. Spark says that it cannot, of a struct
    that can be null itself.
    """
    shape = pa.schema([pa.field(one.name, _loose(one.type)) for one in batch.schema])
    return batch if batch.schema.equals(shape) else batch.cast(shape)


def _loose(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        members = [kind.field(at) for at in range(kind.num_fields)]
        return pa.struct([pa.field(one.name, _loose(one.type)) for one in members])
    if pa.types.is_list(kind):
        return pa.list_(_loose(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, _loose(kind.item_type))
    return kind


def _has_order(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_timestamp(kind))


def _action(
    path: str, size: int, values: Values, rows: int, low: dict[str, Any], high: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of an add action."""
    lows = {name: _shown(value) for name, value in low.items() if value is not None}
    highs = {name: _shown(value) for name, value in high.items() if value is not None}
    stats = {"numRecords": rows, "minValues": lows, "maxValues": highs}
    return {
        "path": path,
        "size": size,
        "partition_values": values,
        "modification_time": time.time_ns() // 1_000_000,
        "data_change": True,
        "stats": json.dumps(stats | {"nullCount": dict.fromkeys(lows, 0)}),
    }


def _shown(value: Any) -> Any:
    """A value as Delta's statistics have it."""
    return value.strftime("%Y-%m-%dT%H:%M:%S.%fZ") if hasattr(value, "strftime") else value


def _groups(
    batch: pa.RecordBatch, names: tuple[str, ...]
) -> Iterator[tuple[tuple[Any, ...], pa.RecordBatch]]:
    """The rows of each combination of the values of ``names``."""
    if not batch.num_rows:
        return
    if not names:
        yield (), batch
        return
    keys = pa.table({name: batch.column(name) for name in names})
    rows = keys.append_column(_ROW, pa.array(range(batch.num_rows), pa.int32()))
    groups = rows.group_by(list(names), use_threads=False).aggregate([(_ROW, "list")])
    for at, values in enumerate(groups.select(list(names)).to_pylist()):
        key = tuple(values[name] for name in names)
        if groups.num_rows == 1:
            yield key, batch
        else:
            yield key, batch.take(groups.column(f"{_ROW}_list")[at].values)


def _delta() -> Any:
    return load_extra("deltalake", "spark")
