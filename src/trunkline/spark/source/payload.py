"""``option("payloadSchema", …)``: a column ``payload``, of a type, beside the text in ``value``.

``registry`` takes the type from the JSON Schema of the topic, as ``clean`` does. Anything else is
the type itself, as Spark writes it. A payload that does not fit is bad, as a damaged record is:
option ``badRecords`` says whether it fails the query, is told in ``_corrupt_record``, or is not
shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import ArrayType, DataType, StructType

from trunkline.errors import InvalidEvent, InvalidOption
from trunkline.spark.source.columns import CORRUPT
from trunkline.spark.source.options import bus_of
from trunkline.spark.source.scan import BadRecords
from trunkline.spark.source.schemas import (
    UNREADABLE,
    Kind,
    MisfitError,
    decoded,
    fitted,
    read_contracts,
    typed,
    unreadable,
)

PAYLOAD: Final = "payload"
REGISTRY: Final = "registry"
_SIMPLE: Final = (
    "bigint", "int", "smallint", "tinyint", "double", "float", "boolean", "string", "timestamp",
    "date",
)  # fmt: skip


def payload_ddl(options: Mapping[str, str], asked: str) -> str:
    """The type of the column, as Spark writes it."""
    if asked.lower() == REGISTRY:
        return registered(options).ddl
    text = asked.strip()
    return text if re.match(r"(struct|array)\s*<", text, re.IGNORECASE) else f"struct<{text}>"


def registered(options: Mapping[str, str]) -> Kind:
    """The type that the bus's schema gives the one topic that is read."""
    given = {key.lower(): value for key, value in options.items()}
    topic = given.get("subscribe", "").strip()
    schemas = read_contracts(bus_of(given)).schemas
    kind = typed(schemas[topic]) if topic in schemas else None
    if kind is None:
        known = ", ".join(sorted(schemas)) or "none"
        raise InvalidOption(
            f"payloadSchema=registry: topic {topic or 'of several'} has no schema with properties",
            hint=f"subscribe to one topic that has a schema: {known}; or give the type itself",
        )
    return kind


def kind_of(found: DataType) -> Kind:
    """A type of Spark as one that payloads are read by."""
    if isinstance(found, StructType):
        members = tuple((one.name, one.name, kind_of(one.dataType)) for one in found.fields)
        return Kind("struct", members=members)
    if isinstance(found, ArrayType):
        return Kind("array", of=kind_of(found.elementType))
    name: Any = found.simpleString()
    if name not in _SIMPLE:
        raise InvalidOption(
            f"payloadSchema: {name} is no type of a payload",
            hint=f"{', '.join(_SIMPLE)}, array<…> and struct<…>",
        )
    return Kind(name)


@dataclass(frozen=True)
class PayloadColumn:
    """What becomes of batches of records: ``names`` are the columns that are shown."""

    kind: Kind
    names: tuple[str, ...]
    bad: BadRecords

    def add(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        shape = self.kind.arrow()
        for batch in batches:
            made: list[Any] = []
            wrong: list[str | None] = []
            for at, text in enumerate(batch.column("value").to_pylist()):
                value, problem = self._read(text)
                if problem is not None and self.bad == "fail":
                    raise self._misfit(batch, at, problem)
                made.append(value)
                wrong.append(problem)
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            columns[PAYLOAD] = pa.array(made, shape)
            if CORRUPT in columns and any(wrong):
                told = zip(columns[CORRUPT].to_pylist(), wrong, strict=True)
                columns[CORRUPT] = pa.array([old or new for old, new in told], pa.string())
            shown = pa.RecordBatch.from_arrays(
                [columns[name] for name in self.names], names=list(self.names)
            )
            if self.bad == "skip" and any(wrong):
                shown = shown.filter(pa.array([problem is None for problem in wrong]))
            if shown.num_rows:
                yield shown

    def _read(self, text: str | None) -> tuple[Any, str | None]:
        if text is None:
            return None, None
        try:
            return fitted(decoded(text), self.kind), None
        except MisfitError as misfit:
            return None, f"the payload does not fit its type: {misfit}"
        except UNREADABLE as error:
            return None, f"the payload cannot be read: {unreadable(error)}"

    def _misfit(self, batch: pa.RecordBatch, at: int, problem: str) -> InvalidEvent:
        names = batch.schema.names
        place = [str(batch.column(n)[at]) for n in ("topic", "partition", "offset") if n in names]
        return InvalidEvent(
            f"{'/'.join(place)}: {problem}",
            hint="badRecords=column tells such records apart, badRecords=skip leaves them out",
        )
