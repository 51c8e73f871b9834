"""Sealed payloads in Spark: open the ``value`` column with a key ring.

The ring is opened where the rows are, by each task: its folder and its wrapping key must be there.
A payload whose key was shredded becomes null; a missing or wrong key ends the query.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from trunkline.crypto.keyring import KeyRing, open_payload
from trunkline.errors import Erased, InvalidOption

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NEEDED = ("value", "id", "topic", "space", "subject")
_SEALED = re.compile(r'"?eyJ[\w-]+\.\.[\w-]+\.[\w-]*\.[\w-]+"?')


def open_values(rows: DataFrame, ring: str, wrapping_key: str) -> DataFrame:
    """The rows with ``value`` opened. ``ring`` is the folder of a key ring, ``wrapping_key`` its
    source, as for ``KeyRing``. Rows that are not sealed stay as they are. Dead letters need the
    column ``headers`` (option ``includeHeaders``), which says which event they were.
    """
    if missing := [name for name in _NEEDED if name not in rows.columns]:
        raise InvalidOption(f"the rows have no column {', '.join(missing)}", name="rows")
    return rows.mapInArrow(partial(_opened, ring, wrapping_key), rows.schema)


def _opened(place: str, source: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    ring: KeyRing | None = None
    for batch in batches:
        at = batch.schema.get_field_index("value")
        names = batch.schema.names
        columns = [batch.column(name).to_pylist() for name in _NEEDED]
        all_headers = batch.column("headers").to_pylist() if "headers" in names else None
        values = []
        for row, (value, name, topic, space, subject) in enumerate(zip(*columns, strict=True)):
            if value is not None and _SEALED.fullmatch(value):
                ring = ring or KeyRing(place, source)
                headers = dict(all_headers[row] or ()) if all_headers is not None else {}
                value = _open(ring, value, name, topic, space, subject, headers)
            values.append(value)
        field = batch.schema.field(at)
        yield batch.set_column(at, field, pa.array(values, field.type))


def _open(
    ring: KeyRing,
    value: str,
    name: str,
    topic: str,
    space: str | None,
    subject: str | None,
    headers: dict[str, Any],
) -> str | None:
    text = msgspec.json.decode(value) if value.startswith('"') else value
    try:
        return open_payload(
            text,
            ring,
            id=headers.get("dlq-id", name),
            topic=headers.get("dlq-topic", topic),
            space=space or "",
            subject=subject or "",
        ).decode()
    except Erased:
        return None
