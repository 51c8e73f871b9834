"""What topics promise: the JSON Schemas on the bus, and how a topic treats what is too old.

A schema gives the payload of its topic a type. Executors check payloads with what the driver read
once per batch: first by the schema, then whether each value fits its type. What does not fit is
told with its reason; no value becomes NULL because it did not fit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from trunkline import units
from trunkline.folder import Folder
from trunkline.options import StoreOptions
from trunkline.spark.source.catalogs import is_remote, open_remote
from trunkline.spark.source.options import token_of

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMAS: Final = "system.schemas"
_INT64: Final = 1 << 63
_BITS: Final = {"bigint": 64, "int": 32, "smallint": 16, "tinyint": 8}
_LARGEST: Final = {"double": sys.float_info.max, "float": 3.4028234663852886e38}
_DEPTH: Final = 16


class Contracts(msgspec.Struct, frozen=True):
    """``schemas`` by topic; ``keep_expired`` are the topics that deliver what is too old."""

    schemas: dict[str, Any] = {}
    keep_expired: frozenset[str] = frozenset()


class _Version(msgspec.Struct):
    topic: str
    schema: Any
    removed: bool = False


def read_contracts(bus: str) -> Contracts:
    """The schemas and rules of a bus."""
    if is_remote(bus):
        return _remote_contracts(bus)
    folder = Folder(bus, StoreOptions(create=False, reserve_bytes=0))
    try:
        schemas = _schemas(_payloads(folder))
        kept = {name for name, o in folder.topics().items() if o.ttl_policy == "deliver"}
        return Contracts(schemas, frozenset(kept))
    finally:
        folder.close()


def _payloads(folder: Folder) -> Iterator[Any]:
    reader = folder.reader(SCHEMAS, 0)
    start, _ = reader.bounds()
    while records := reader.read(start):
        start = records[-1].offset + 1
        yield from (record.event.payload for record in records)


def _remote_contracts(url: str) -> Contracts:
    log = open_remote(url, token_of({}))
    try:
        payloads: list[Any] = []
        if SCHEMAS in log.topics():
            head = log.head(SCHEMAS, 0)
            for rows in log.rows(SCHEMAS, 0, head.start, head.next):
                payloads += [msgspec.json.decode(row.payload) for row in rows]
        with log.open_bus() as bus:
            kept = {name for name, o in bus.topics().items() if o.ttl_policy == "deliver"}
        return Contracts(_schemas(iter(payloads)), frozenset(kept))
    finally:
        log.close()


def _schemas(payloads: Iterator[Any]) -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    for payload in payloads:
        try:
            version = msgspec.convert(payload, _Version)
        except msgspec.ValidationError:
            continue
        schemas.pop(version.topic, None)
        if not version.removed:
            schemas[version.topic] = version.schema
    return schemas


# -- the type of a payload -----------------------------------------------------------------------


class Kind(msgspec.Struct, frozen=True):
    """A type: of one value, of an array (``of``), or of an object (``members``: the name in the
    payload, the name in the table, and the type).
    """

    name: Literal[
        "bigint", "int", "smallint", "tinyint", "double", "float", "boolean", "string", "timestamp",
        "date", "json", "array", "struct",
    ]  # fmt: skip
    of: Kind | None = None
    members: tuple[tuple[str, str, Kind], ...] = ()

    @property
    def ddl(self) -> str:
        if self.name == "array":
            assert self.of is not None
            return f"array<{self.of.ddl}>"
        if self.name == "struct":
            inner = (f"`{shown.replace('`', '``')}`: {k.ddl}" for _, shown, k in self.members)
            return f"struct<{', '.join(inner)}>"
        return "string" if self.name == "json" else self.name

    def arrow(self) -> pa.DataType:
        import pyarrow as pa

        if self.name == "array":
            assert self.of is not None
            return pa.list_(self.of.arrow())
        if self.name == "struct":
            return pa.struct([(shown, kind.arrow()) for _, shown, kind in self.members])
        return {
            "bigint": pa.int64(), "int": pa.int32(), "smallint": pa.int16(), "tinyint": pa.int8(),
            "double": pa.float64(), "float": pa.float32(), "boolean": pa.bool_(),
            "timestamp": pa.timestamp("us", tz="UTC"), "date": pa.date32(),
        }.get(self.name, pa.string())  # fmt: skip


def typed(schema: Any) -> Kind | None:
    """The type of a payload of this schema; None if it is no object with members. A member that
    has no single type is JSON text. Names that differ only by case get a number.
    """
    kind = _kind(schema, 0)
    return kind if kind.name == "struct" else None


def _kind(schema: Any, depth: int) -> Kind:
    name = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(name, list):
        names = [one for one in name if one != "null"]
        name = names[0] if len(names) == 1 else None
    if name == "string":
        return Kind("timestamp" if schema.get("format") == "date-time" else "string")
    if name == "array" and isinstance(schema.get("items"), dict) and depth < _DEPTH:
        return Kind("array", of=_kind(schema["items"], depth + 1))
    members = schema.get("properties") if isinstance(schema, dict) else None
    if name in ("object", None) and isinstance(members, dict) and members and depth < _DEPTH:
        taken: set[str] = set()
        found = []
        for member, inner in members.items():
            found.append((member, _free(member, taken), _kind(inner, depth + 1)))
        return Kind("struct", members=tuple(found))
    plain: Any = {"integer": "bigint", "number": "double", "boolean": "boolean"}.get(str(name))
    return Kind(plain or "json")


def _free(name: str, taken: set[str]) -> str:
    """A name that no other member has, whatever the case of its letters."""
    number, found = 1, name
    while found.lower() in taken:
        number += 1
        found = f"{name}_{number}"
    taken.add(found.lower())
    return found


class MisfitError(Exception):
    """A value that its type cannot hold."""


def fitted(value: Any, kind: Kind, path: str = "") -> Any:
    """A value of a payload as its type has it; ``MisfitError`` says what does not fit."""
    if value is None:
        return None
    if kind.name == "json":
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if kind.name == "struct" and isinstance(value, dict):
        return {
            shown: fitted(value.get(name), inner, f"{path}/{name}")
            for name, shown, inner in kind.members
        }
    if kind.name == "array" and isinstance(value, list):
        assert kind.of is not None
        return [fitted(one, kind.of, f"{path}/{at}") for at, one in enumerate(value)]
    if kind.name == "timestamp" and isinstance(value, str):
        return _moment(value, path)
    if kind.name == "date" and isinstance(value, str):
        return _day(value, path)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if kind.name in _LARGEST:
            if abs(value) <= _LARGEST[kind.name]:
                return float(value)
            raise MisfitError(f"{_short(value)} does not fit into a {kind.name} at {path or '/'}")
        if kind.name in _BITS and (isinstance(value, int) or value.is_integer()):
            bits = _BITS[kind.name]
            if -(1 << bits - 1) <= value < 1 << bits - 1:
                return int(value)
            raise MisfitError(f"{_short(value)} does not fit into {bits} bits at {path or '/'}")
    if (kind.name, type(value)) in (("boolean", bool), ("string", str)):
        return value
    raise MisfitError(f"{_short(value)} is no {kind.name} at {path or '/'}")


def _short(value: Any) -> str:
    """A value as JSON, cut where it is long."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    text = json.dumps(whole, ensure_ascii=False, separators=(",", ":"))
    return text if len(text) <= 60 else text[:60] + "…"


def _moment(text: str, path: str) -> datetime:
    try:
        return units.read_time(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise MisfitError(f"{text[:60]!r} is no date-time at {path or '/'}") from None


def _day(text: str, path: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise MisfitError(f"{text[:60]!r} is no date at {path or '/'}") from None


# -- what tasks do -------------------------------------------------------------------------------

Task = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]


def checking(schemas: dict[str, Any]) -> Task:
    """Place and value of records in, and behind them what is wrong with the value."""

    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        rules = {topic: validator_of(schema) for topic, schema in schemas.items()}
        kinds = {topic: typed(schema) for topic, schema in schemas.items()}
        for batch in batches:
            topics, values = batch.column("topic").to_pylist(), batch.column("value").to_pylist()
            wrong = [
                _wrong(rules.get(t), kinds.get(t), v) for t, v in zip(topics, values, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, pa.array(wrong, pa.string())],
                names=[*batch.schema.names, "wrong"],
            )

    return check


def validator_of(schema: Any) -> Any:
    """What holds payloads against a schema; ``ValueError`` if it is none. A schema refers to
    nothing outside of itself, and its patterns are matched without backtracking.
    """
    import jsonschema_rs

    def refuse(uri: str) -> Any:
        raise ValueError(f"it refers to {uri}")

    linear = jsonschema_rs.RegexOptions()
    try:
        return jsonschema_rs.validator_for(schema, retriever=refuse, pattern_options=linear)
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        raise ValueError(str(error).partition("\n")[0][:200]) from None


def typing(kind: Kind) -> Task:
    """The last column, ``value``, becomes ``payload``, of its type."""

    def convert(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        shape = kind.arrow()
        for batch in batches:
            values = batch.column("value").to_pylist()
            made = [None if text is None else fitted(decoded(text), kind) for text in values]
            yield pa.RecordBatch.from_arrays(
                [*batch.columns[:-1], pa.array(made, shape)],
                names=[*batch.schema.names[:-1], "payload"],
            )

    return convert


# JSON that Python cannot hold: too deep, a number that is too large, half of a character.
UNREADABLE: Final = (msgspec.DecodeError, ValueError, RecursionError)


def unreadable(error: BaseException) -> str:
    return "it is nested too deep" if isinstance(error, RecursionError) else str(error)[:200]


def decoded(text: str) -> Any:
    """msgspec reads a whole number beyond 64 bits as one with a fraction; json does not."""
    found = msgspec.json.decode(text)
    return json.loads(text) if _has_large(found) else found


def _has_large(value: Any) -> bool:
    if isinstance(value, float):
        return abs(value) >= _INT64
    if isinstance(value, dict):
        return any(map(_has_large, value.values()))
    return isinstance(value, list) and any(map(_has_large, value))


def _wrong(rule: Any, kind: Kind | None, value: str | None) -> str | None:
    """What is wrong with a payload. A tombstone removes a key: no schema is about it."""
    if value is None:
        return None
    try:
        payload = decoded(value)
        problem = None if rule is None else next(iter(rule.iter_errors(payload)), None)
    except UNREADABLE as error:
        return f"the payload cannot be checked: {unreadable(error)}"
    if problem is not None:
        path = "/" + "/".join(map(str, problem.instance_path))
        return f"it does not fit the schema: {problem.message[:300]} at {path}"
    try:
        if kind is not None:
            fitted(payload, kind)
    except MisfitError as misfit:
        return f"it does not fit its type: {misfit}"
    return None
