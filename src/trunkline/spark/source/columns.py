"""The columns of the table that the log is: their names, types, and where each is in a record.

Kafka's names come first, so that a query written for Kafka reads the same; then the fields of the
event under their own names. The other names of a field may be asked for by ``.schema(...)``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

import pyarrow as pa

from trunkline.errors import InvalidOption
from trunkline.fields import BY_NAME, FIELDS

CORRUPT: Final = "_corrupt_record"


class Column(NamedTuple):
    """``sql`` finds it in a parsed line, ``get`` in a ``Row``; None: the same for all rows, or
    found in the line itself.
    """

    ddl: str
    sql: str | None
    get: Callable[[Any], Any] | None


# How Spark, and DuckDB in the field of ``meta``, see each kind of field.
_DDL: Final = {
    **dict.fromkeys(("name", "text", "word", "json"), "string"),
    "time": "timestamp",
    "seconds": "double",
    "texts": "array<string>",
    "map": "map<string,string>",
}
_DUCKDB: Final = {
    "string": "VARCHAR",
    "timestamp": "TIMESTAMPTZ",
    "double": "DOUBLE",
    "array<string>": "VARCHAR[]",
    "map<string,string>": "MAP(VARCHAR, VARCHAR)",
}
# What a field that is not set holds.
_UNSET: Final = {
    "priority": "'normal'",
    "band": "'GREEN'",
    "caps": "[]::VARCHAR[]",
    "headers": "MAP {}::MAP(VARCHAR, VARCHAR)",
}


def _column(name: str) -> Column:
    """A field of the event that lies in ``meta``."""
    field = BY_NAME[name]
    sql = f"meta.{field.stored}"
    if name in _UNSET:
        sql = f"coalesce({sql}, {_UNSET[name]})"
    return Column(_DDL[field.kind], sql, attrgetter(f"meta.{name}"))


# The order is that of the table's schema.
_LATER: Final = (
    *("type", "space", "id", "actor", "subject", "idem_key", "trace"),
    *("ttl_s", "priority", "not_before", "band", "caps", "cause", "headers"),
)
COLUMNS: Final[dict[str, Column]] = {
    "key": _column("key"),
    "value": Column("string", None, attrgetter("payload")),  # the stored text
    "topic": Column("string", None, None),
    "partition": Column("int", None, None),
    "offset": Column("bigint", '"offset"', attrgetter("offset")),
    "timestamp": _column("ts"),
    "timestampType": Column("int", None, None),
    **{name: _column(name) for name in _LATER},
    "appended_at": Column("timestamp", None, None),  # when the log wrote the record's batch
}
OTHER_NAMES: Final = {
    other: field.column
    for field in FIELDS
    for other in (field.name, field.stored)
    if other != field.column
}
_ARROW: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "array<string>": pa.list_(pa.string()),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
}
# How DuckDB reads the fields of ``meta``, of which it is asked for those that are needed.
_STORED: Final = {
    field.stored: _DUCKDB[_DDL[field.kind]]
    for field in FIELDS
    if field.name not in ("topic", "payload")
}


def table_ddl(*, headers: bool, corrupt: bool) -> str:
    """The schema of the table as Spark writes it."""
    shown = [name for name in COLUMNS if name != "headers" or headers]
    words = [f"`{name}` {COLUMNS[name].ddl}" for name in shown]
    return ", ".join([*words, f"{CORRUPT} string"] if corrupt else words)


def true_name(name: str) -> str:
    """The column that ``name`` is another name of, or is itself."""
    return OTHER_NAMES.get(name, name)


def check_columns(wanted: dict[str, str]) -> list[str]:
    """The names of a ``.schema(...)``, each ``{name: type}`` one that the table has."""
    for name, kind in wanted.items():
        if name == CORRUPT:
            continue
        column = COLUMNS.get(true_name(name))
        if column is None:
            raise InvalidOption(
                f"the log has no column {name!r}",
                hint=f"known: {', '.join([*COLUMNS, *OTHER_NAMES])}; fields of the payload are "
                "read from value, for example by from_json",
            )
        if kind != column.ddl:
            raise InvalidOption(f"column {name} is {column.ddl}, not {kind}")
    return list(wanted)


@cache
def arrow_schema(names: tuple[str, ...]) -> pa.Schema:
    """Just what Spark expects: it takes no other text or time type."""
    kinds = {name: _ARROW[c.ddl] for name, c in COLUMNS.items()} | {CORRUPT: pa.string()}
    return pa.schema([(name, kinds[true_name(name)]) for name in names])


def parse_sql(names: tuple[str, ...], path: str, longest: int) -> str:
    """The query that reads the columns ``names`` out of a file whose lines are at most ``longest``
    bytes. The seal of a segment is no record.
    """
    columns = {name: COLUMNS[true_name(name)].sql for name in names}
    used = " ".join(sql for sql in columns.values() if sql)
    stored = {"offset": "BIGINT"}
    meta = [f"{name} {kind}" for name, kind in _STORED.items() if f"meta.{name}" in used]
    if meta:
        stored["meta"] = f"STRUCT({', '.join(meta)})"
    shape = ", ".join(f"\"{name}\": '{kind}'" for name, kind in stored.items())
    shown = [f'{sql} AS "{name}"' for name, sql in columns.items() if sql]
    return (
        f"SELECT {', '.join(shown or ['1'])} FROM read_json('{path}', columns = {{{shape}}}, "
        "format = 'newline_delimited', auto_detect = false, compression = 'none', "
        f'maximum_object_size = {longest}) WHERE "offset" IS NOT NULL'
    )
