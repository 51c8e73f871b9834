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

CORRUPT: Final = "_corrupt_record"


class Column(NamedTuple):
    """``sql`` finds it in a parsed line, ``get`` in a ``Row``; None: the same for all."""

    ddl: str
    sql: str | None
    get: Callable[[Any], Any] | None


def _text(field: str, stored: str = "", default: str | None = None) -> Column:
    sql = f"meta.{stored or field}"
    if default is not None:
        sql = f"coalesce({sql}, '{default}')"
    return Column("string", sql, attrgetter(f"meta.{field}"))


def _time(field: str) -> Column:
    return Column("timestamp", f"meta.{field}", attrgetter(f"meta.{field}"))


COLUMNS: Final[dict[str, Column]] = {
    "key": _text("key"),
    "value": Column("string", "payload::VARCHAR", attrgetter("payload")),
    "topic": Column("string", None, None),
    "partition": Column("int", None, None),
    "offset": Column("bigint", '"offset"', attrgetter("offset")),
    "timestamp": _time("ts"),
    "timestampType": Column("int", None, None),
    "type": _text("type"),
    "space": _text("space", "space_id"),
    "id": _text("id", "event_id"),
    "actor": _text("actor"),
    "subject": _text("subject"),
    "idem_key": _text("idem_key"),
    "trace": _text("trace", "trace_id"),
    "ttl_s": Column("double", "meta.ttl_sec", attrgetter("meta.ttl_s")),
    "priority": _text("priority", default="normal"),
    "not_before": _time("not_before"),
    "band": _text("band", default="GREEN"),
    "caps": Column("array<string>", "coalesce(meta.caps, []::VARCHAR[])", attrgetter("meta.caps")),
    "cause": _text("cause"),
    "headers": Column(
        "map<string,string>",
        "coalesce(meta.headers, MAP {}::MAP(VARCHAR, VARCHAR))",
        attrgetter("meta.headers"),
    ),
}
OTHER_NAMES: Final = {
    "ts": "timestamp",
    "payload": "value",
    "space_id": "space",
    "event_id": "id",
    "trace_id": "trace",
    "ttl_sec": "ttl_s",
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
    **dict.fromkeys(
        ("event_id", "type", "space_id", "actor", "subject", "key", "idem_key", "trace_id"),
        "VARCHAR",
    ),
    **dict.fromkeys(("priority", "band", "cause"), "VARCHAR"),
    **dict.fromkeys(("ts", "not_before"), "TIMESTAMPTZ"),
    "ttl_sec": "DOUBLE",
    "caps": "VARCHAR[]",
    "headers": "MAP(VARCHAR, VARCHAR)",
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
    if "payload" in used:
        stored["payload"] = "JSON"
    shape = ", ".join(f"\"{name}\": '{kind}'" for name, kind in stored.items())
    shown = [f'{sql} AS "{name}"' for name, sql in columns.items() if sql]
    return (
        f"SELECT {', '.join(shown or ['1'])} FROM read_json('{path}', columns = {{{shape}}}, "
        "format = 'newline_delimited', auto_detect = false, compression = 'none', "
        f'maximum_object_size = {longest}) WHERE "offset" IS NOT NULL'
    )
