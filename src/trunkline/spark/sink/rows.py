"""Rows of a DataFrame as events: the sink's options, its columns, and the event of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from pyspark.sql.types import StructType

from trunkline.check import check_event
from trunkline.codec import decode_payload
from trunkline.errors import InvalidEvent, InvalidOption
from trunkline.event import Event
from trunkline.fields import FIELDS
from trunkline.names import check_topic
from trunkline.options import Limits
from trunkline.spark.source.columns import OTHER_NAMES

PIECE: Final = "spark-piece"  # headers that name what a batch wrote
ROW: Final = "spark-row"
_TYPES: Final = {
    "time": ("timestamp",),
    "json": ("string", "binary"),
    "seconds": ("double", "float", "int", "bigint"),
    "texts": ("array<string>",),
    "map": ("map<string,string>",),
}
_KINDS: Final = {
    **{field.column: _TYPES.get(field.kind, ("string",)) for field in FIELDS},
    "partition": ("int",),
}
_FIELDS: Final = {field.column: field.name for field in FIELDS if field.column != field.name}


class SinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    topic: str = ""
    text: bool = False
    app: str = ""
    version: int = -1


def read_sink_options(options: Mapping[str, str]) -> SinkOptions:
    given = {key.lower(): value for key, value in options.items()}
    topic = given.get("topic", "")
    if topic:
        check_topic(topic)
    form = given.get("valueformat", "json")
    if form not in ("json", "text"):
        raise InvalidOption(f"valueFormat={form!r}", hint="json or text")
    version = given.get("txnversion", "")
    if version and not (version.isdigit() and given.get("txnappid")):
        raise InvalidOption("txnVersion is a number and goes with txnAppId")
    return SinkOptions(
        topic=topic,
        text=form == "text",
        app=given.get("txnappid", ""),
        version=int(version) if version else -1,
    )


def make_event(row: dict[str, Any], options: SinkOptions) -> Event:
    """The event of a row; what the row does not say has the defaults of an event."""
    fields: dict[str, Any] = {}
    for name, value in row.items():
        if value is not None and name not in ("partition", "value"):
            fields[_FIELDS.get(name, name)] = value
    if options.topic:
        fields["topic"] = options.topic
    if not fields.get("topic"):
        raise InvalidOption("a row has no topic", hint="set option topic, or a column topic")
    if "headers" in fields:
        fields["headers"] = {
            k: v for k, v in dict(fields["headers"]).items() if k not in (PIECE, ROW)
        }
    if "caps" in fields:
        fields["caps"] = tuple(fields["caps"])
    value = row["value"]
    if options.text or value is None:
        fields["payload"] = value.decode() if isinstance(value, bytes) else value
    else:
        fields["payload"] = _payload(value)
    event = Event(**fields)
    check_event(event, Limits())
    return event


def _payload(value: str | bytes) -> Any:
    try:
        return decode_payload(value)
    except InvalidEvent as error:
        raise InvalidEvent(
            f"value is {str(value)[:60]!r}: {error.message}",
            hint="write to_json(struct(...)), or set option valueFormat=text",
        ) from None


def check_schema(schema: StructType, options: SinkOptions) -> list[str]:
    names = []
    for field in schema.fields:
        name = OTHER_NAMES.get(field.name, field.name)
        kinds = _KINDS.get(name)
        if kinds is None:
            raise InvalidOption(
                f"a record has no column {field.name!r}", hint=f"known: {', '.join(_KINDS)}"
            )
        if field.dataType.simpleString() not in kinds:
            raise InvalidOption(
                f"column {field.name} is {field.dataType.simpleString()}",
                hint=f"make it {' or '.join(kinds)}"
                + (", for example by to_json" if name == "value" else ""),
            )
        names.append(name)
    if "value" not in names:
        raise InvalidOption("there is no column value", hint="to_json(struct(...)) AS value")
    if "topic" not in names and not options.topic:
        raise InvalidOption("there is neither an option nor a column topic")
    return names
