"""Many small files of a table become few, now and then, for a stream adds them batch by batch.

One commit takes the small files away and adds what holds their rows. It says that no data changed
and leaves the transactions of batches as they are: killed before it nothing is different, and
after it everything is done. The old files stay for a while, for queries that still read them.
"""

from __future__ import annotations

import time
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from trunkline.spark.lake.table import KEEP_HOURS, NewFile, file_path, open_parquet, text_of

if TYPE_CHECKING:
    from trunkline.spark.lake import Lake
    from trunkline.spark.lake.storage import Storage

SMALL_BYTES: Final = 32 * 1024 * 1024
LARGE_BYTES: Final = 4 * SMALL_BYTES
MANY: Final = 16
_PARTITION = "partition."


def optimize(lake: Lake, table: str, *, many: int = MANY, small_bytes: int = SMALL_BYTES) -> int:
    """Merge runs of at least ``many`` neighbours that are small. Returns how many files went."""
    from deltalake import DeltaTable
    from deltalake.transaction import AddAction, RemoveAction

    where = lake.storage.delta(table)
    delta = DeltaTable(**where)
    by = tuple(delta.metadata().partition_columns)
    actions: list[Any] = []
    now = time.time_ns() // 1_000_000
    for run in _runs(pa.table(delta.get_add_actions(flatten=True)).to_pylist(), small_bytes):
        if len(run) >= many:
            actions.append(AddAction(**_merge(lake, table, by, run) | {"data_change": False}))
            values = _values(run[0], by)
            actions += [RemoveAction(file_path(one), False, now, None, values) for one in run]
    if not actions:
        return 0
    delta.create_write_transaction(actions, "append", delta.schema(), partition_by=list(by))
    delta = DeltaTable(**where)
    lake.storage.sync(f"{table}/_delta_log/{delta.version():020}.json")
    delta.vacuum(KEEP_HOURS, dry_run=False, enforce_retention_duration=False)
    return sum(isinstance(one, RemoveAction) for one in actions)


def _runs(files: list[dict[str, Any]], small_bytes: int) -> list[list[dict[str, Any]]]:
    """Small files that follow on one another in one place, so that of a file that has offsets of
    one partition it stays true that it has all those between its first and its last.
    """

    def where(file: dict[str, Any]) -> list[str]:
        named = [name for name in file if name.startswith(_PARTITION)]
        return [str(file.get(n)) for n in (*sorted(named), "min.partition", "max.partition")]

    def turn(file: dict[str, Any]) -> tuple[int, int]:
        return file.get("min.offset") or 0, file["modification_time"]

    runs: list[list[dict[str, Any]]] = []
    for _, group in groupby(sorted(files, key=where), where):
        size = LARGE_BYTES
        for file in sorted(group, key=turn):
            if size >= LARGE_BYTES:
                runs.append([])
                size = 0
            if file["size_bytes"] < small_bytes:
                runs[-1].append(file)
                size += file["size_bytes"]
            else:
                size = LARGE_BYTES
    return runs


def _merge(
    lake: Lake, table: str, by: tuple[str, ...], run: list[dict[str, Any]]
) -> dict[str, Any]:
    """One file with the rows of several, as the arguments of an add action."""
    paths = [f"{table}/{file_path(one)}" for one in run]
    shape = pa.unify_schemas([_schema(lake.storage, path) for path in paths])
    merged = NewFile(lake.storage, table, _values(run[0], by), by)
    for path in paths:
        with open_parquet(lake.storage, path) as file:
            for batch in file.iter_batches():
                merged.write(_fitted(batch, shape))
    return merged.close()


def _schema(storage: Storage, path: str) -> pa.Schema:
    with open_parquet(storage, path) as file:
        return file.schema_arrow


def _fitted(batch: pa.RecordBatch, shape: pa.Schema) -> pa.RecordBatch:
    """The columns of ``shape``; a file that was written before a column was added lacks it."""
    columns = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in shape
    ]
    return pa.RecordBatch.from_arrays(columns, schema=shape)


def _values(file: dict[str, Any], by: tuple[str, ...]) -> dict[str, str | None]:
    return {name: text_of(file[f"{_PARTITION}{name}"]) for name in by}
