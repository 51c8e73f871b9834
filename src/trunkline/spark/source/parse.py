"""From the bytes of whole lines to Arrow: DuckDB for much, msgspec for little.

Both give the same columns. DuckDB is two to three times faster on a megabyte and slower on ten
lines, because it has to be asked. ``value`` is the stored text of the payload, byte for byte, and
NULL where the payload is null. ``appended_at`` is the time in the commit that ends the record's
batch; the commit may lie behind the bytes that are read, so the caller tells it (``next_at``).
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from typing import IO, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from trunkline.errors import Corrupt
from trunkline.event import Event
from trunkline.spark.source.columns import COLUMNS, CORRUPT, arrow_schema, parse_sql, true_name

SMALL = 2 * 1024 * 1024
_ROWS = 16_384  # more do not fit the cache
_OPEN_FILES = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"


_PAYLOAD: Final = b'},"payload":'
_COMMIT: Final = re.compile(rb',"commit":\{"count":\d+,"durable":\d+,"at":(\d+)\}\Z')
_COMMIT_MAX: Final = 96  # bytes
_CRC: Final = 18  # bytes of ,"crc":"…"}
FROM_LINE: Final = frozenset({"value", "appended_at"})


class CommitTime(msgspec.Struct, gc=False):
    """When a batch was written, in microseconds since 1970."""

    at: int


class Row(msgspec.Struct, gc=False):
    offset: int
    meta: Event
    payload: msgspec.Raw
    commit: CommitTime | None = None


decode_rows = msgspec.json.Decoder(Row).decode_lines


def parse_lines(
    data: bytes | memoryview,
    longest: int,
    topic: str,
    partition: int,
    names: tuple[str, ...],
    *,
    bulk: bool,
    next_at: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """The records in ``data``: whole lines of at most ``longest`` bytes, checked before."""
    if bulk and _duckdb() is not None:
        with _scratch_file() as file:
            file.write(data)
            found = stored_columns(data, names, next_at)
            yield from _parsed(file.fileno(), longest, topic, partition, names, found)
    else:
        yield rows_batch(decode_rows(data), topic, partition, names, next_at)


def can_parse_files() -> bool:
    return _duckdb() is not None


def parse_file(
    fd: int, longest: int, topic: str, partition: int, names: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    """The records of an open file: whole lines of at most ``longest`` bytes, checked before."""
    found: dict[str, pa.Array] = {}
    if any(true_name(name) in FROM_LINE for name in names):
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
            found = stored_columns(data, names, None)
    yield from _parsed(fd, longest, topic, partition, names, found)


def _parsed(
    fd: int,
    longest: int,
    topic: str,
    partition: int,
    names: tuple[str, ...],
    stored: dict[str, pa.Array],
) -> Iterator[pa.RecordBatch]:
    """DuckDB takes memory for two lines of ``longest`` bytes, which costs time."""
    wanted = tuple(n for n in names if n != CORRUPT)
    query = parse_sql(wanted, f"{_OPEN_FILES}/{fd}", max(longest, 1024))
    at = 0
    for batch in _duckdb().sql(query).to_arrow_reader(_ROWS):
        found = dict(zip(batch.schema.names, batch.columns, strict=True))
        found |= {name: column.slice(at, batch.num_rows) for name, column in stored.items()}
        yield _shaped(batch.num_rows, found, topic, partition, names)
        at += batch.num_rows
    if any(len(column) != at for column in stored.values()):
        raise Corrupt(f"a file of {topic}/{partition} has lines of another form", position=0)


def stored_columns(
    data: bytes | memoryview | mmap.mmap, names: tuple[str, ...], next_at: int | None
) -> dict[str, pa.Array]:
    """The columns that are taken from the lines themselves. The lines are records, in order; a
    seal may follow them.
    """
    wanted = {true_name(name): name for name in names if true_name(name) in FROM_LINE}
    if not wanted:
        return {}
    values: list[bytes | None] = []
    times: list[int | None] = []
    for line in bytes(data).split(b"\n"):
        start = line.find(_PAYLOAD)
        if start < 0:  # the seal, or the nothing behind the last line
            continue
        end = len(line) - _CRC
        time = None
        if line.find(b',"commit":{', max(start, end - _COMMIT_MAX), end) >= 0:
            commit = _COMMIT.search(line[max(start, end - _COMMIT_MAX) : end])
            if commit is not None:
                time = int(commit[1])
                end -= len(commit[0])
        value = line[start + len(_PAYLOAD) : end]
        values.append(None if value == b"null" else value)
        times.append(time)
    found = {}
    if "value" in wanted:
        found[wanted["value"]] = pa.array(values, pa.binary()).cast(pa.string())
    if "appended_at" in wanted:
        found[wanted["appended_at"]] = _times(times, next_at)
    return found


def _times(times: list[int | None], next_at: int | None) -> pa.Array:
    """Each record's time is that of the next commit."""
    filled: list[int | None] = [None] * len(times)
    for index in range(len(times) - 1, -1, -1):
        next_at = times[index] if times[index] is not None else next_at
        filled[index] = next_at
    return pa.array(filled, pa.int64()).cast(pa.timestamp("us", tz="UTC"))


def commit_time(line: bytes) -> int | None:
    """The time of the commit that a line carries, in microseconds since 1970."""
    commit = _COMMIT.search(line[:-_CRC])
    return int(commit[1]) if commit is not None else None


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
    rows: list[Row],
    topic: str,
    partition: int,
    names: tuple[str, ...],
    next_at: int | None = None,
) -> pa.RecordBatch:
    """Records that were read one by one."""
    found: dict[str, pa.Array] = {}
    schema = arrow_schema(names)
    for name in names:
        column = COLUMNS.get(true_name(name))
        if true_name(name) == "appended_at":
            found[name] = _times([row.commit.at if row.commit else None for row in rows], next_at)
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
