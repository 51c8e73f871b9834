"""From the bytes of whole lines to Arrow: DuckDB for much, msgspec for little.

Both give the same columns. DuckDB is two to three times faster on a megabyte and slower on ten
lines, because it has to be asked. The payload stays JSON text in both, and
is NULL where it is null.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import cache
from typing import IO, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from trunkline.event import Event
from trunkline.spark.columns import COLUMNS, CORRUPT, arrow_schema, parse_sql, true_name

SMALL = 2 * 1024 * 1024
_ROWS = 16_384  # more do not fit the cache
_OPEN_FILES = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"


class Row(msgspec.Struct, gc=False):
    offset: int
    meta: Event
    payload: msgspec.Raw


_decode_lines = msgspec.json.Decoder(Row).decode_lines


def parse_lines(
    data: bytes | memoryview,
    longest: int,
    topic: str,
    partition: int,
    names: tuple[str, ...],
    *,
    bulk: bool,
) -> Iterator[pa.RecordBatch]:
    """The records in ``data``: whole lines of at most ``longest`` bytes, checked before."""
    if bulk and _duckdb() is not None:
        with _scratch_file() as file:
            file.write(data)
            yield from parse_file(file.fileno(), longest, topic, partition, names)
    else:
        yield rows_batch(_decode_lines(data), topic, partition, names)


def can_parse_files() -> bool:
    return _duckdb() is not None


def parse_file(
    fd: int, longest: int, topic: str, partition: int, names: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    """The records of an open file: whole lines of at most ``longest`` bytes, checked before.
    DuckDB takes memory for two such lines, which costs time.
    """
    wanted = tuple(n for n in names if n != CORRUPT)
    query = parse_sql(wanted, f"{_OPEN_FILES}/{fd}", max(longest, 1024))
    for batch in _duckdb().sql(query).to_arrow_reader(_ROWS):
        found = dict(zip(batch.schema.names, batch.columns, strict=True))
        yield _shaped(batch.num_rows, found, topic, partition, names)


def _shaped(
    count: int, found: dict[str, pa.Array], topic: str, partition: int, names: tuple[str, ...]
) -> pa.RecordBatch:
    columns = []
    for field in arrow_schema(names):
        values = found.get(field.name)
        if values is None:
            same = {"topic": topic, "partition": partition, "timestampType": 0}
            columns.append(pa.repeat(pa.scalar(same.get(true_name(field.name)), field.type), count))
        elif values.type != field.type:
            columns.append(values.cast(field.type))
        else:
            columns.append(values)
    return pa.RecordBatch.from_arrays(columns, schema=arrow_schema(names))


def corrupt_row(
    topic: str, partition: int, offset: int | None, text: str, names: tuple[str, ...]
) -> pa.RecordBatch:
    """A row that stands for what could not be read."""
    have = {"topic": topic, "partition": partition, "offset": offset, CORRUPT: text}
    schema = arrow_schema(names)
    arrays = [pa.array([have.get(true_name(f.name))], f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def keep_only(batch: pa.RecordBatch, column: str, wanted: frozenset[str]) -> pa.RecordBatch:
    mask = pc.is_in(batch.column(column), value_set=pa.array(sorted(wanted), pa.string()))
    return batch.filter(mask)


def rows_batch(
    rows: list[Row], topic: str, partition: int, names: tuple[str, ...]
) -> pa.RecordBatch:
    """Records that were read one by one."""
    found: dict[str, pa.Array] = {}
    schema = arrow_schema(names)
    for name in names:
        column = COLUMNS.get(true_name(name))
        if column is None or column.get is None:
            continue
        kind = schema.field(name).type
        values: list[Any] = list(map(column.get, rows))
        if true_name(name) == "value":
            found[name] = pa.array(list(map(_text_of, values)), pa.binary()).cast(kind)
        elif true_name(name) == "headers":
            found[name] = pa.array([list(value.items()) for value in values], kind)
        else:
            found[name] = pa.array(values, kind)
    return _shaped(len(rows), found, topic, partition, names)


def _text_of(payload: msgspec.Raw) -> bytes | None:
    """None for a tombstone, as DuckDB and Kafka have it."""
    text = bytes(payload)
    return None if text == b"null" else text


def _scratch_file() -> IO[bytes]:
    """A file for DuckDB to read, since it reads lines from files half as fast again as from memory;
    in memory all the same where the system has such files.
    """
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("trunkline"), "wb", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


@cache
def _duckdb() -> Any:
    """This process's own DuckDB, None if it is not installed. One thread: Spark has the others."""
    try:
        import duckdb
    except ImportError:
        return None
    connection = duckdb.connect(config={"threads": 1, "memory_limit": "512MB"})
    connection.execute("SET TimeZone = 'UTC'")
    return connection
