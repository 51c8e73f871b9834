"""The fields of an event: their kinds, and their names at every door. One table for all doors.

The log, the checks, filters, envelopes, CloudEvents, the command line and Spark's columns take
their lists from here. ``Event`` and ``EventFields`` spell the same fields out for type checkers. A
test compares them with this table.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Kind = Literal["name", "text", "word", "time", "seconds", "texts", "map", "json"]


class Field(NamedTuple):
    """``name`` is the name in Python and in filters. The others are given where they differ, or
    where the door has the field at all.
    """

    name: str
    kind: Kind
    stored: str  # in the log and on the wire
    column: str  # in Spark
    envelope: str = ""  # the header of an envelope
    cloudevent: str = ""  # the attribute of a CloudEvent


def _field(
    name: str,
    kind: Kind,
    *,
    stored: str = "",
    column: str = "",
    envelope: str = "",
    cloudevent: str = "",
) -> Field:
    return Field(name, kind, stored or name, column or name, envelope, cloudevent)


# In the order of the encoded event.
FIELDS: Final = (
    _field("id", "name", stored="event_id", cloudevent="id"),
    _field("ts", "time", column="timestamp", cloudevent="time"),
    _field("topic", "name", cloudevent="topic"),
    _field("type", "text", envelope="type", cloudevent="type"),
    _field("space", "name", stored="space_id", envelope="space", cloudevent="space"),
    _field("actor", "text", envelope="agent_id", cloudevent="source"),
    _field("subject", "text", envelope="subject", cloudevent="subject"),
    _field("key", "text", cloudevent="partitionkey"),
    _field("idem_key", "text", envelope="idem_key", cloudevent="idemkey"),
    _field("trace", "text", stored="trace_id", envelope="traceparent", cloudevent="traceparent"),
    _field("ttl_s", "seconds", stored="ttl_sec", envelope="ttl_s", cloudevent="expirytime"),
    _field("priority", "word", envelope="priority", cloudevent="priority"),
    _field("not_before", "time", envelope="not_before", cloudevent="notbefore"),
    _field("band", "word", envelope="band", cloudevent="dataclassification"),
    _field("caps", "texts", envelope="caps", cloudevent="caps"),
    _field("cause", "text", envelope="cause", cloudevent="causationid"),
    _field("headers", "map", cloudevent="busheaders"),
    _field("payload", "json", column="value", cloudevent="data"),
)
BY_NAME: Final = {field.name: field for field in FIELDS}
# Free text, which is checked for its length alone.
TEXTS: Final = tuple(field.name for field in FIELDS if field.kind == "text")
# Fields that hold one text of any sort.
WORDS: Final = tuple(field for field in FIELDS if field.kind in ("name", "text", "word"))
