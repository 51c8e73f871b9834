"""What topics promise: the JSON Schemas on the bus, and how a topic treats what is too old.

Executors check payloads with what the driver read once per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from trunkline.log.folder import Folder
from trunkline.options import StoreOptions

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMAS: Final = "system.schemas"
_TYPES: Final = {"string": "string", "integer": "bigint", "number": "double", "boolean": "boolean"}


class Contracts(msgspec.Struct, frozen=True):
    """``schemas`` by topic; ``keep_expired`` are the topics that deliver what is too old."""

    schemas: dict[str, Any] = {}
    keep_expired: frozenset[str] = frozenset()


class _Version(msgspec.Struct):
    topic: str
    schema: Any
    removed: bool = False


def read_contracts(bus: str) -> Contracts:
    folder = Folder(bus, StoreOptions(create=False, reserve_bytes=0))
    try:
        schemas: dict[str, Any] = {}
        reader = folder.reader(SCHEMAS, 0)
        start, _ = reader.bounds()
        while records := reader.read(start):
            start = records[-1].offset + 1
            for record in records:
                try:
                    version = msgspec.convert(record.event.payload, _Version)
                except msgspec.ValidationError:
                    continue
                schemas.pop(version.topic, None)
                if not version.removed:
                    schemas[version.topic] = version.schema
        kept = {name for name, o in folder.topics().items() if o.ttl_policy == "deliver"}
        return Contracts(schemas, frozenset(kept))
    finally:
        folder.close()


def checking(
    schemas: dict[str, Any], names: list[str]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What a task does: the columns ``names`` in, and behind them what is wrong with ``value``."""

    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import jsonschema_rs
        import pyarrow as pa

        linear = jsonschema_rs.RegexOptions()
        rules = {
            topic: jsonschema_rs.validator_for(schema, pattern_options=linear)
            for topic, schema in schemas.items()
        }
        for batch in batches:
            topics, values = batch.column("topic").to_pylist(), batch.column("value").to_pylist()
            wrong = [_wrong(rules.get(t), v) for t, v in zip(topics, values, strict=True)]
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, pa.array(wrong, pa.string())], names=[*names, "wrong"]
            )

    return check


def _wrong(rule: Any, value: str | None) -> str | None:
    if value is None and rule is None:
        return None
    try:
        payload = None if value is None else msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return "the payload is no JSON"
    problem = None if rule is None else next(iter(rule.iter_errors(payload)), None)
    if problem is None:
        return None
    path = "/" + "/".join(map(str, problem.instance_path))
    return f"it does not fit the schema: {problem.message[:300]} at {path}"


def typed(schema: Any) -> str | None:
    """The type that Spark gives to a payload of this schema; None if it is no object with members.
    What has no single type is a VARIANT.
    """
    members = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(members, dict) or not members:
        return None
    return ", ".join(f"`{name}` {_type(one)}" for name, one in members.items() if "`" not in name)


def _type(schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, list):
        kinds = [one for one in kind if one != "null"]
        kind = kinds[0] if len(kinds) == 1 else None
    if kind == "string" and schema.get("format") == "date-time":
        return "timestamp"
    if kind == "array" and isinstance(schema.get("items"), dict):
        return f"array<{_type(schema['items'])}>"
    if kind == "object" and isinstance(schema.get("properties"), dict) and schema["properties"]:
        inner = ", ".join(f"`{n}`: {_type(one)}" for n, one in schema["properties"].items())
        return f"struct<{inner}>"
    return _TYPES.get(str(kind), "variant")
