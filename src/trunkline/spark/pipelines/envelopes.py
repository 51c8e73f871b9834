"""Envelopes in the place of a payload, and what their members are called here.

A producer that wrote its own envelope as the payload of an event meant what is inside of it. An
envelope is known by the members it always has, so that a payload that only looks a little like one
stays as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Dialect(NamedTuple):
    """``known`` is true for its envelopes; ``fields`` say where each column is in them."""

    known: str
    fields: dict[str, str]


# Every member of every envelope; a payload is kept as the text it was.
SHAPE: Final = """
    event_id STRING, ts STRING, topic STRING, scope STRING, actor STRING, ttl_s DOUBLE,
    idempotency_key STRING, source STRING, type STRING, priority STRING, `timestamp` STRING,
    `dedup-key` STRING, subject STRING, data STRING, metadata STRUCT<stream: STRING,
    consumer: STRING, timestamp: STRING, numDelivered: BIGINT>, id STRING, key STRING,
    headers MAP<STRING, STRING>, payload_sha256 STRING, partition INT, payload STRING,
    meta STRUCT<topic: STRING, type: STRING, space_id: STRING, event_id: STRING, ts: STRING,
    actor: STRING, trace_id: STRING, idem_key: STRING, ttl_sec: DOUBLE, key: STRING, band: STRING,
    priority: STRING, cause: STRING>
"""
DIALECTS: Final[dict[str, Dialect]] = {
    # One line of an NDJSON file.
    "line": Dialect(
        "e.event_id IS NOT NULL AND e.scope IS NOT NULL AND e.actor IS NOT NULL"
        " AND e.idempotency_key IS NOT NULL AND e.topic IS NOT NULL",
        {
            "id": "e.event_id",
            "timestamp": "try_to_timestamp(e.ts)",
            "type": "e.topic",
            "actor": "e.actor",
            "subject": "e.scope",
            "key": "e.scope",
            "idem_key": "e.idempotency_key",
            "ttl_s": "nullif(e.ttl_s, 0)",
        },
    ),
    # One file of a spool.
    "file": Dialect(
        "e.source IS NOT NULL AND e.type IS NOT NULL AND e.priority IS NOT NULL"
        " AND e.`timestamp` IS NOT NULL",
        {
            "timestamp": "try_to_timestamp(e.`timestamp`)",
            "type": "e.type",
            "actor": "e.source",
            "priority": "e.priority",
            # The default key names a kind of event, not one of them.
            "idem_key": "nullif(e.`dedup-key`, concat(e.source, ':', e.type))",
        },
    ),
    # A message of a stream, as its consumer saw it.
    "message": Dialect(
        "e.subject IS NOT NULL AND e.data IS NOT NULL AND e.metadata.stream IS NOT NULL",
        {
            "timestamp": "try_to_timestamp(e.metadata.timestamp)",
            "type": "e.subject",
            "subject": "e.subject",
            "idem_key": "element_at(e.headers, 'Nats-Msg-Id')",
        },
    ),
    # A broker's envelope.
    "envelope": Dialect(
        "e.id IS NOT NULL AND e.ts RLIKE '^[0-9]{12,14}$' AND e.topic IS NOT NULL"
        " AND (e.partition IS NOT NULL OR e.headers IS NOT NULL)",
        {
            "id": "e.id",
            "timestamp": "timestamp_millis(CAST(e.ts AS BIGINT))",
            "type": "element_at(e.headers, 'type')",
            "actor": "element_at(e.headers, 'agent_id')",
            "space": "element_at(e.headers, 'space')",
            "key": "e.key",
            "idem_key": "element_at(e.headers, 'idem_key')",
            "trace": "element_at(e.headers, 'trace')",
        },
    ),
    # A cognitive event: meta and payload.
    "meta": Dialect(
        "e.meta.topic IS NOT NULL AND e.meta.type IS NOT NULL AND e.meta.event_id IS NOT NULL",
        {
            "id": "e.meta.event_id",
            "timestamp": "try_to_timestamp(e.meta.ts)",
            "type": "e.meta.type",
            "space": "e.meta.space_id",
            "actor": "e.meta.actor",
            "trace": "e.meta.trace_id",
            "idem_key": "e.meta.idem_key",
            "ttl_s": "e.meta.ttl_sec",
            "key": "e.meta.key",
            "band": "e.meta.band",
            "priority": "e.meta.priority",
            "cause": "e.meta.cause",
        },
    ),
}


def normalise(df: DataFrame) -> DataFrame:
    """Take the envelopes off. ``dialect`` says which it was, ``own`` that there was none."""
    from pyspark.sql import functions as f

    # Only what can be an envelope is parsed once more.
    likely = "value LIKE '{%' AND (value LIKE '%\"payload\"%' OR value LIKE '%\"metadata\"%')"
    opened = df.withColumn("e", f.expr(f"IF({likely}, from_json(value, '{_flat(SHAPE)}'), NULL)"))
    whens = " ".join(f"WHEN {d.known} THEN '{name}'" for name, d in DIALECTS.items())
    named = opened.withColumn(
        "dialect", f.expr(f"CASE WHEN e IS NULL THEN 'own' {whens} ELSE 'own' END")
    )
    fields: dict[str, list[str]] = {}
    for name, dialect in DIALECTS.items():
        for column, sql in dialect.fields.items():
            fields.setdefault(column, []).append(f"WHEN '{name}' THEN {sql}")
    inside = {
        column: f.expr(f"coalesce(CASE dialect {' '.join(cases)} END, `{column}`)")
        for column, cases in fields.items()
        if column in df.columns
    }
    inside["value"] = f.expr(
        "CASE WHEN dialect = 'own' THEN value WHEN dialect = 'message' THEN e.data"
        " ELSE e.payload END"
    )
    return named.withColumns(inside).drop("e")


def _flat(text: str) -> str:
    return " ".join(text.split())
