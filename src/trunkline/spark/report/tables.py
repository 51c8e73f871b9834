"""Reading the lake's tables without Spark: Delta says which files, DuckDB asks them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import unquote

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from pyspark.sql.variant_utils import VariantUtils

from trunkline.spark.lake import Lake

Row = dict[str, Any]
OLD_VERSIONS: Final = 100  # of a table, for what it was before
_STEPS_S: Final = (60, 300, 900, 3600, 10_800, 21_600, 86_400, 604_800, 2_592_000, 31_536_000)
_BARS: Final = 96  # of a drawing over time, at most
_TIMES: Final = ("timestamp", "time", "hour", "at", "day", "date", "start", "last_seen")


class Tables:
    """The newest version of each table of a lake. It is closed with its block."""

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self._database = duckdb.connect()
        self._database.execute("SET TimeZone = 'UTC'")
        self._found: dict[str, ds.Dataset | None] = {}

    @classmethod
    @contextmanager
    def open(cls, lake: Lake) -> Iterator[Tables]:
        tables = cls(lake)
        try:
            yield tables
        finally:
            tables._database.close()

    def dataset(self, table: str) -> ds.Dataset | None:
        """The files of a table; None if it has no rows, or is not there."""
        if table not in self._found:
            self._found[table] = _dataset(self.lake, table) if self.lake.has(table) else None
        return self._found[table]

    def columns(self, table: str) -> list[str]:
        """The columns that are shown: those that begin with ``_`` are for the next batch."""
        found = self.dataset(table)
        return [] if found is None else [n for n in found.schema.names if not n.startswith("_")]

    def kind(self, table: str, column: str) -> pa.DataType:
        found = self.dataset(table)
        assert found is not None
        return found.schema.field(column).type

    def has(self, table: str, *columns: str) -> bool:
        """Whether a table has rows, and these columns."""
        return self.dataset(table) is not None and set(columns) <= set(self.columns(table))

    def count(self, table: str) -> int:
        found = self.dataset(table)
        return 0 if found is None else int(found.count_rows())

    def ask(self, table: str, query: str, *values: Any) -> list[Row]:
        """The rows of a query over one table, which it names ``rows``."""
        found = self.dataset(table)
        if found is None:
            return []
        cursor = self._database.cursor()
        try:
            cursor.register("rows", found)
            answer = cursor.execute(query, list(values))
            names = [part[0] for part in answer.description]
            return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]
        finally:
            cursor.close()

    def newest(self, table: str, count: int) -> tuple[list[str], list[list[Any]]]:
        """Some rows, the newest first where the table has a time."""
        found = self.dataset(table)
        if found is None:
            return [], []
        columns = self.columns(table)
        when = time_column(self, table)
        if when is None:
            rows = found.head(count, columns=columns)
        else:
            times = found.to_table(columns=[when]).column(0)
            if len(times) > count:
                from pyarrow import compute as pc

                places = pc.select_k_unstable(
                    pa.table({"t": times}), count, sort_keys=[("t", "descending")]
                )
                rows = found.take(places, columns=columns)
            else:
                rows = found.to_table(columns=columns).sort_by([(when, "descending")])
        return columns, [[plain(value) for value in row.values()] for row in rows.to_pylist()]

    def versions(self, table: str) -> Iterator[tuple[int, ds.Dataset]]:
        """What the table was before: the time of each version in milliseconds, and its rows. A
        version whose files were removed since is left out.
        """
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        if not self.lake.has(table):
            return
        where = self.lake.storage.delta(table)
        files = self.lake.storage.filesystem()
        for commit in reversed(DeltaTable(**where).history(OLD_VERSIONS)):
            paths: list[str] = []
            with suppress(DeltaError, OSError):  # its log may have been cut since
                paths = _paths(table, DeltaTable(**where, version=commit["version"]))
            if paths and all(one.is_file for one in files.get_file_info(paths)):
                yield commit["timestamp"], _files(self.lake, table, paths)


def time_column(tables: Tables, table: str) -> str | None:
    """The column that says when a row happened."""
    names = [n for n in tables.columns(table) if pa.types.is_timestamp(tables.kind(table, n))]
    known = [name for name in _TIMES if name in names]
    return next(iter(known or names), None)


def time_step(low_ms: float, high_ms: float, least_s: int = 1) -> int:
    """How many milliseconds a bar over time spans, so that there are not too many."""
    span_s = max(0.0, high_ms - low_ms) / 1000
    fits = [step for step in _STEPS_S if step >= least_s and span_s / step <= _BARS]
    return int((fits or _STEPS_S[-1:])[0]) * 1000


def _dataset(lake: Lake, table: str) -> ds.Dataset | None:
    from deltalake import DeltaTable

    paths = _paths(table, DeltaTable(**lake.storage.delta(table)))
    return _files(lake, table, paths) if paths else None


def _paths(table: str, delta: Any) -> list[str]:
    actions = pa.table(delta.get_add_actions(flatten=True))
    return [f"{table}/{unquote(path)}" for path in actions["path"].to_pylist()]


def _files(lake: Lake, table: str, paths: Sequence[str]) -> ds.Dataset:
    files = lake.storage.filesystem()
    return ds.dataset(paths, filesystem=files, partitioning="hive", partition_base_dir=table)


def plain(value: Any) -> Any:
    """A value for people."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case datetime():
            return to_utc(value).strftime("%Y-%m-%d %H:%M:%S")
        case bytes():
            return f"{len(value)} bytes"
        case {"value": bytes(), "metadata": bytes()}:
            return VariantUtils.to_json(value["value"], value["metadata"])
        case dict():
            return ", ".join(f"{name}: {plain(part)}" for name, part in value.items())
        case list():
            return ", ".join(str(plain(part)) for part in value)
        case _:
            return value


def to_utc(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
