"""What a table's schema may become: columns are added, no column changes its type."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from trunkline.errors import Conflict

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Field = dict[str, Any]


def loose(schema: StructType) -> Field:
    """The schema as Delta has it, every column nullable: what a query knows never to be null
    differs from one version to the next.
    """
    shape: Field = json.loads(schema.json())
    _loosen(shape)
    return shape


def _loosen(kind: Any) -> None:
    if not isinstance(kind, dict):
        return
    for field in kind.get("fields", ()):
        field |= {"nullable": True, "metadata": {}}
        _loosen(field["type"])
    for inner, nullable in (("elementType", "containsNull"), ("valueType", "valueContainsNull")):
        if inner in kind:
            kind[nullable] = True
            _loosen(kind[inner])


def added(table: str, have: Field, want: Field, maker: str = "") -> list[Field]:
    """The top-level columns that ``want`` has more of than ``have``, whole structs where a member
    is new. ``Conflict`` if a column is of another type; ``maker`` is the pipeline to rebuild.
    """
    try:
        return [new for new in (_change(have, field, "") for field in want["fields"]) if new]
    except _ChangedError as change:
        raise Conflict(
            f"table {table}: column {change}",
            hint=f"trunkline pipeline run {maker or table} --rebuild",
            name=table,
        ) from None


class _ChangedError(Exception):
    """A column that is of another type."""


def _change(have: Field, field: Field, path: str) -> Field | None:
    known = {one["name"]: one for one in have["fields"]}
    before = known.get(field["name"])
    if before is None:
        return field
    name = f"{path}{field['name']}"
    old, new = before["type"], field["type"]
    if _is(old, "struct") and _is(new, "struct"):
        more = [_change(old, member, f"{name}.") for member in new["fields"]]
        return field if any(more) else None
    if _is(old, "array") and _is(new, "array"):
        inner = {"fields": [{"name": "element", "type": old["elementType"]}]}
        if _change(inner, {"name": "element", "type": new["elementType"]}, f"{name}."):
            raise _ChangedError(f"{name} was {_word(old)} and is {_word(new)}")
        return None
    if _plain(old) != _plain(new):
        raise _ChangedError(f"{name} was {_word(old)} and is {_word(new)}")
    return None


def _is(kind: Any, name: str) -> bool:
    return isinstance(kind, dict) and kind.get("type") == name


def _plain(kind: Any) -> str:
    return json.dumps(kind, sort_keys=True)


def _word(kind: Any) -> str:
    if isinstance(kind, dict):
        return str(kind.get("type"))
    return {"long": "bigint", "integer": "int"}.get(kind, str(kind))
