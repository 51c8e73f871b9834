"""Which payloads a topic takes: JSON Schemas with versions, kept on the bus itself.

The topic ``system.schemas`` holds one record per version, so every process that opens the bus has
the same registry. A new version must be compatible with the last one, as its topic asks:

*backward* what was valid stays valid · *forward* what is valid now was valid before · *full* both ·
*none* anything goes. The check is on the shape that JSON Schemas of events have (types, required
members, members, enumerations, items); what it cannot judge it refuses, and says so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

import msgspec

from trunkline.bus import Bus
from trunkline.check import load_extra
from trunkline.errors import Conflict, InvalidEvent, InvalidOption, NotFound
from trunkline.event import Event
from trunkline.names import check_topic
from trunkline.patterns.topic_table import TopicTable

TOPIC: Final = "system.schemas"
Compatibility = Literal["backward", "forward", "full", "none"]
_NOTES: Final = frozenset({"title", "description", "default", "examples", "$comment"})
_KEYWORDS: Final = _NOTES | frozenset(
    {"type", "properties", "required", "additionalProperties", "enum", "const", "items"}
)
# What these mean depends on the members that others name.
_ENTANGLED: Final = frozenset({"patternProperties", "unevaluatedProperties", "unevaluatedItems"})
_REFERENCES: Final = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_DEFINITIONS: Final = ("#/$defs/", "#/definitions/")  # which must not change
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


class Schema(msgspec.Struct, frozen=True):
    """One version for one topic. ``removed`` lifts the rule again."""

    topic: str
    version: int
    schema: dict[str, Any] | bool
    compatibility: Compatibility = "backward"
    removed: bool = False


class Registry:
    def __init__(self, bus: Bus) -> None:
        self._table = TopicTable(bus, TOPIC, Schema, self._take)
        self._versions: dict[str, list[Schema]] = {}
        self._validators: dict[str, Any] = {}
        self._adding = asyncio.Lock()

    async def refresh(self) -> None:
        await self._table.refresh()

    def _take(self, schema: Schema) -> None:
        self._versions.setdefault(schema.topic, []).append(schema)
        self._validators.pop(schema.topic, None)
        if not schema.removed:
            self._validators[schema.topic] = _validator(schema.schema)

    def topics(self) -> list[str]:
        return sorted(self._validators)

    def versions(self, topic: str) -> list[Schema]:
        return list(self._versions.get(check_topic(topic), ()))

    def current(self, topic: str) -> Schema:
        found = self._versions.get(check_topic(topic))
        if not found or found[-1].removed:
            raise NotFound(f"there is no schema for {topic}", topic=topic)
        return found[-1]

    async def add(
        self, topic: str, schema: dict[str, Any] | bool, compatibility: Compatibility | None = None
    ) -> Schema:
        """Give a topic its next version. The same schema again is the version there is."""
        async with self._adding:  # of two at once, the second is compared with the first
            made = await self.check_new(topic, schema, compatibility)
            if made not in self._versions.get(topic, ()):
                await self._table.put(topic, made, type="schema", compact=False)
                await self.refresh()
            return made

    async def check_new(
        self, topic: str, schema: dict[str, Any] | bool, compatibility: Compatibility | None = None
    ) -> Schema:
        """The version that ``add`` would give the topic; the same errors, and no change."""
        check_topic(topic)
        if compatibility not in (None, *get_args(Compatibility)):
            raise InvalidOption("compatibility is backward, forward, full or none")
        _validator(schema)
        await self.refresh()
        before = self._versions.get(topic, [])
        last = before[-1] if before and not before[-1].removed else None
        rule = compatibility or (last.compatibility if last else "backward")
        if last is not None:
            if _same(last.schema, schema) and last.compatibility == rule:
                return last
            check_compatible(last.schema, schema, rule)
        return Schema(topic, len(before) + 1, schema, rule)

    async def remove(self, topic: str) -> None:
        """From now on the topic takes anything; the versions stay on record."""
        last = self.current(topic)
        gone = Schema(topic, last.version + 1, True, last.compatibility, removed=True)
        await self._table.put(topic, gone, type="schema", compact=False)
        await self.refresh()

    def check(self, topic: str, events: Sequence[Event]) -> None:
        """``InvalidEvent`` with the failing path unless every payload fits the topic's schema."""
        validator = self._validators.get(topic)
        if validator is None:
            return
        for event in events:
            payload = msgspec.to_builtins(event.payload)
            try:
                problem = next(iter(validator.iter_errors(payload)), None)
            except ValueError as error:  # nested too deep for it
                said = f"the payload cannot be held against the schema of {topic}: {error}"
                raise InvalidEvent(said, field="payload") from error
            if problem is not None:
                path = "/" + "/".join(map(str, problem.instance_path))
                raise InvalidEvent(
                    f"the payload does not fit the schema of {topic}: {_said(problem)}",
                    code="schema",
                    path=path,
                    hint=f"at {path}",
                )


class SchemaGate:
    """The registry as a middleware, for a bus without a broker."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def publish(self, events: list[Event], call_next: Any) -> Any:
        for event in events:
            self._registry.check(event.topic, (event,))
        return await call_next(events)


_DEMANDS: Final = {
    "required": "{} is missing",
    "type": "it must be {}",
    "const": "it must be {}",
    "enum": "it must be one of {}",
    "additionalProperties": "there is no {}",
    "format": "it must be a {}",
    "falseSchema": "nothing is allowed here",
}


def _said(problem: Any) -> str:
    """What the schema asks for, without what the payload holds, which may be secret or huge."""
    name, value = problem.kind.name, getattr(problem.kind, "value", None)
    options = value if isinstance(value, list) else [value]
    plain = all(isinstance(one, str | int | float | None) for one in options)
    if not plain or (value is None and name not in _DEMANDS):
        return f"it does not meet {name}"
    said = ", ".join(one if isinstance(one, str) else json.dumps(one) for one in options)
    return _short(_DEMANDS.get(name, f"it does not meet {name} {{}}").format(said))


def _short(text: str) -> str:
    return text if len(text) <= 300 else text[:300] + "…"


def _validator(schema: dict[str, Any] | bool) -> Any:
    jsonschema_rs = load_extra("jsonschema_rs", "schemas")
    try:
        # Without backtracking: a pattern comes from outside and must not hold up the loop.
        linear = jsonschema_rs.RegexOptions()
        return jsonschema_rs.validator_for(schema, retriever=_refuse, pattern_options=linear)
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        raise InvalidOption(f"not a JSON Schema{_where(error)}", name="schema") from error


def _where(error: Any) -> str:
    kind = getattr(error, "kind", None)
    if kind is None or kind.name == "$ref":
        return f": {_short(str(error).partition(chr(10))[0])}"
    return f" at /{'/'.join(map(str, error.instance_path))}: {_said(error)}"


def _refuse(uri: str) -> Any:
    raise ValueError(f"a schema refers to nothing outside of itself: {uri}")


# -- compatibility ---------------------------------------------------------------------------------


def check_compatible(old: Any, new: Any, rule: Compatibility) -> None:
    """``Conflict`` that names the first place where ``new`` breaks the rule."""
    if rule == "none" or _same(old, new):
        return
    for schema in (old, new):
        _refuse_far(schema, "")
    if _dialect(old) != _dialect(new):
        raise _broken("/$schema", "a change of $schema cannot be judged")
    old, new = _bare(old), _bare(new)
    if rule in ("backward", "full"):
        _narrower(old, new, "", "what was valid is no longer")
    if rule in ("forward", "full"):
        _narrower(new, old, "", "what is valid now was not before")


def _dialect(schema: Any) -> str:
    found = schema.get("$schema", _DIALECT) if isinstance(schema, dict) else _DIALECT
    return str(found).removesuffix("#")


def _bare(schema: Any) -> Any:
    """Without what the whole is called, which says nothing of what it takes."""
    if not isinstance(schema, dict):
        return schema
    return {word: value for word, value in schema.items() if word not in ("$schema", "$id")}


def _refuse_far(schema: Any, path: str, is_judged: bool = True) -> None:
    """Refuse a reference that would mean something else if its target changed, where that is not
    seen: each place is compared with itself alone.
    """
    if isinstance(schema, list):
        for index, one in enumerate(schema):
            _refuse_far(one, f"{path}/{index}", is_judged)
    if not isinstance(schema, dict):
        return
    beside = _ENTANGLED.isdisjoint(schema)
    for word, value in schema.items():
        here = f"{path}/{word}"
        if word in _REFERENCES and isinstance(value, str):
            if not value.startswith(_DEFINITIONS) and not (is_judged and beside and word == "$ref"):
                raise _broken(here, f"a change beside a reference to {value} cannot be judged")
        elif word == "properties" and isinstance(value, dict):
            for name, one in value.items():
                _refuse_far(one, f"{here}/{name}", is_judged)
        elif word not in _NOTES | {"enum", "const"}:
            _refuse_far(value, here, is_judged and word in ("items", "additionalProperties"))


def _narrower(inner: Any, outer: Any, path: str, why: str, depth: int = 0) -> None:
    """Raise unless everything that ``inner`` takes is taken by ``outer``."""
    if outer is True or outer == {} or inner is False or _same(inner, outer):
        return
    if depth > 64:
        raise _broken(path, "nested too deep to compare")
    if not isinstance(inner, dict) or not isinstance(outer, dict):
        raise _broken(path, why)
    unknown = sorted((inner.keys() | outer.keys()) - _KEYWORDS)
    if any(not _same(inner.get(word), outer.get(word)) for word in unknown):
        raise _broken(path, f"a change of {', '.join(unknown)} cannot be judged")
    if not _ENTANGLED.isdisjoint(unknown):
        raise _broken(path, f"a change beside {', '.join(unknown)} cannot be judged")
    _narrower_values(inner, outer, path, why)
    _narrower_members(inner, outer, path, why, depth)
    if "items" in outer:
        _narrower(inner.get("items", True), outer["items"], f"{path}/items", why, depth + 1)


def _narrower_values(inner: dict[str, Any], outer: dict[str, Any], path: str, why: str) -> None:
    mine, allowed = _choices(inner), _choices(outer)
    narrow = _types(inner) if mine is None else {_type_of(value) for value in mine}
    wide = _types(outer)
    if wide is not None and (narrow is None or not all(_is_one_of(t, wide) for t in narrow)):
        raise _broken(f"{path}/type", why)
    if allowed is not None and (
        mine is None or not set(map(_spelt, mine)) <= set(map(_spelt, allowed))
    ):
        raise _broken(f"{path}/enum", why)


def _narrower_members(
    inner: dict[str, Any], outer: dict[str, Any], path: str, why: str, depth: int
) -> None:
    missing = set(outer.get("required", ())) - set(inner.get("required", ()))
    if missing:
        raise _broken(f"{path}/required/{min(missing)}", why)
    mine, theirs = inner.get("properties", {}), outer.get("properties", {})
    inner_rest = inner.get("additionalProperties", True)
    outer_rest = outer.get("additionalProperties", True)
    for name in sorted(mine.keys() | theirs.keys()):
        # A member that one side does not name is what that side says of all the others.
        _narrower(
            mine.get(name, inner_rest),
            theirs.get(name, outer_rest),
            f"{path}/properties/{name}",
            why,
            depth + 1,
        )
    _narrower(inner_rest, outer_rest, f"{path}/additionalProperties", why, depth + 1)


def _types(schema: dict[str, Any]) -> set[str] | None:
    found = schema.get("type")
    return None if found is None else {found} if isinstance(found, str) else set(found)


def _is_one_of(kind: str, types: set[str]) -> bool:
    return kind in types or (kind == "integer" and "number" in types)


def _type_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return _TYPES[type(value)]


_TYPES: Final = {
    bool: "boolean",
    int: "integer",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def _choices(schema: dict[str, Any]) -> list[Any] | None:
    """The only values that it takes; None if it does not name them."""
    found: list[Any] | None = schema.get("enum")
    if "const" in schema:
        only = schema["const"]
        found = [only] if found is None else [value for value in found if _same(value, only)]
    types = _types(schema)
    if found is None or types is None:
        return found
    return [value for value in found if _is_one_of(_type_of(value), types)]


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON, where 1 is not true, and is 1.0."""
    return _spelt(one) == _spelt(other)


def _spelt(value: Any) -> str:
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    """With numbers that have no fraction written without one."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(one) for one in value]
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    return value


def _broken(path: str, why: str) -> Conflict:
    return Conflict(
        f"the schema is not compatible at {path or '/'}: {why}",
        path=path or "/",
        hint="keep what was there, or choose another compatibility",
    )
