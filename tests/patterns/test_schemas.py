from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import trunkline
from trunkline.broker.server import Broker
from trunkline.bus.remote import RemoteBus
from trunkline.errors import Conflict, Denied, InvalidEvent, InvalidOption, NotFound
from trunkline.event import Event
from trunkline.options import BrokerOptions
from trunkline.patterns.schemas import Compatibility, Registry, Schema, SchemaGate, check_compatible

ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "note": {"type": "string"}},
    "required": ["id"],
    "additionalProperties": False,
}


def with_(**changes: Any) -> dict[str, Any]:
    return {**ORDER, **changes}


@pytest.fixture
async def bus() -> AsyncIterator[Any]:
    async with trunkline.connect("memory:") as bus:
        yield bus


async def test_a_payload_that_does_not_fit_is_refused_with_its_path(bus: Any) -> None:
    registry = Registry(bus)
    await registry.add("orders", {"type": "object", "properties": {"a": {"items": ORDER}}})
    registry.check("orders", [Event(topic="orders", payload={"a": [{"id": 1}]})])
    registry.check("refunds", [Event(topic="refunds", payload="anything")])
    with pytest.raises(InvalidEvent) as caught:
        registry.check("orders", [Event(topic="orders", payload={"a": [{"id": 1}, {"id": "x"}]})])
    assert (caught.value.path, caught.value.code) == ("/a/1/id", "schema")


async def test_a_payload_that_is_nested_too_deep_is_refused(bus: Any) -> None:
    registry = Registry(bus)
    await registry.add("orders", {"type": "object"})
    payload: list[Any] = []
    for _ in range(300):
        payload = [payload]
    with pytest.raises(InvalidEvent, match="Recursion limit"):
        registry.check("orders", [Event(topic="orders", payload=payload)])


async def test_versions_are_kept_and_the_same_again_is_none(bus: Any) -> None:
    registry = Registry(bus)
    first = await registry.add("orders", ORDER)
    assert (await registry.add("orders", ORDER)) == first
    wider = with_(properties={**ORDER["properties"], "tag": {"type": "string"}})
    assert (await registry.add("orders", wider)).version == 2
    assert [schema.version for schema in registry.versions("orders")] == [1, 2]
    await registry.remove("orders")
    with pytest.raises(NotFound):
        registry.current("orders")
    assert registry.topics() == []


async def test_every_process_has_the_same_registry(tmp_path: Path) -> None:
    async with trunkline.connect(f"file:{tmp_path}") as bus:
        await Registry(bus).add("orders", ORDER, "full")
    async with trunkline.connect(f"file:{tmp_path}") as bus:
        registry = Registry(bus)
        await registry.refresh()
        assert registry.current("orders").compatibility == "full"


async def test_a_rule_that_there_is_not_is_refused_and_nothing_is_written(bus: Any) -> None:
    registry = Registry(bus)
    await registry.add("orders", ORDER)
    with pytest.raises(InvalidOption, match="backward, forward, full or none"):
        await registry.add("orders", {"type": "object"}, "sideways")  # type: ignore[arg-type]
    assert len(await bus.read("system.schemas")) == 1


async def test_behind_a_broker_the_registry_is_read_and_not_written() -> None:
    async with Broker(BrokerOptions(url="memory:", port=0)) as broker, RemoteBus(broker.url) as bus:
        registry = Registry(bus)
        await broker.hub.registry.add("orders", ORDER)
        await registry.refresh()
        with pytest.raises(InvalidEvent, match="does not fit"):
            registry.check("orders", [Event(topic="orders", payload={})])
        with pytest.raises(Denied):
            await registry.add("orders", {"type": "object"})


async def test_the_gate_guards_a_bus_without_a_broker(bus: Any) -> None:
    registry = Registry(bus)
    await registry.add("orders", ORDER)
    bus.use(SchemaGate(registry))
    await bus.publish("orders", {"id": 1})
    with pytest.raises(InvalidEvent, match="does not fit"):
        await bus.publish("orders", {})


@pytest.mark.parametrize(
    "schema", [{"type": "no"}, {"$ref": "http://x/y"}, {"pattern": "("}, {"required": 7}], ids=str
)
async def test_what_is_no_schema_is_refused(bus: Any, schema: Any) -> None:
    with pytest.raises(InvalidOption):
        await Registry(bus).add("orders", schema)


@pytest.mark.parametrize(
    ("schema", "payload", "said"),
    [
        ({"required": ["n"]}, {}, "n is missing (at /)"),
        ({"properties": {"n": {"type": "integer"}}}, {"n": "secret"}, "it must be integer (at /n)"),
        ({"items": {"enum": ["a", 2]}}, ["a", 3], "it must be one of a, 2 (at /1)"),
        ({"const": None}, 1, "it must be null (at /)"),
        ({"properties": {}, "additionalProperties": False}, {"b": 1}, "there is no b (at /)"),
        ({"minimum": 3}, 1, "it does not meet minimum 3 (at /)"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 1, "it does not meet anyOf (at /)"),
        ({"uniqueItems": True}, [1, 1], "it does not meet uniqueItems (at /)"),
        (False, 1, "nothing is allowed here (at /)"),
    ],
    ids=str,
)
async def test_what_the_schema_asks_for_is_told_and_not_what_the_payload_holds(
    bus: Any, schema: Any, payload: Any, said: str
) -> None:
    registry = Registry(bus)
    await registry.add("t", schema)
    with pytest.raises(InvalidEvent) as caught:
        registry.check("t", [Event(topic="t", payload=payload)])
    assert str(caught.value) == f"the payload does not fit the schema of t: {said}"


async def test_where_a_schema_is_none_is_told_on_one_line(bus: Any) -> None:
    schema = {"properties": {"a": {"type": 7}}}
    with pytest.raises(InvalidOption) as caught:
        await Registry(bus).add("t", schema)
    assert str(caught.value) == ("not a JSON Schema at /properties/a/type: it does not meet anyOf")


async def test_a_hostile_pattern_costs_no_time(bus: Any) -> None:
    registry = Registry(bus)
    await registry.add("t", {"type": "string", "pattern": "^(a+)+$"})
    with pytest.raises(InvalidEvent):
        registry.check("t", [Event(topic="t", payload="a" * 50 + "!")])


PROPERTIES = ORDER["properties"]
CHANGES: list[tuple[str, Any, bool, bool]] = [
    ("nothing", ORDER, True, True),
    ("anything goes", True, True, False),
    ("an optional member more", with_(properties={**PROPERTIES, "t": {}}), True, False),
    ("a member less", with_(properties={"id": PROPERTIES["id"]}), False, True),
    ("a required member more", with_(required=["id", "note"]), False, True),
    ("a required member less", with_(required=[]), True, False),
    ("a wider type", with_(properties={**PROPERTIES, "id": {"type": "number"}}), True, False),
    ("another type", with_(properties={**PROPERTIES, "id": {"type": "string"}}), False, False),
    (
        "two types",
        with_(properties={**PROPERTIES, "id": {"type": ["integer", "null"]}}),
        True,
        False,
    ),
    ("an open object", with_(additionalProperties=True), True, False),
    (
        "a choice",
        with_(properties={**PROPERTIES, "note": {"enum": ["a"], "type": "string"}}),
        False,
        True,
    ),
    ("what cannot be judged", with_(minProperties=1), False, False),
]


@pytest.mark.parametrize(
    ("new", "backward", "forward"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES]
)
def test_compatibility(new: Any, backward: bool, forward: bool) -> None:
    rules: dict[Compatibility, bool] = {
        "backward": backward,
        "forward": forward,
        "full": backward and forward,
        "none": True,
    }
    for rule, allowed in rules.items():
        try:
            check_compatible(ORDER, new, rule)
            got = True
        except Conflict as error:
            got = False
            assert error.path.startswith("/")  # noqa: PT017
        assert got is allowed, rule


async def test_an_incompatible_version_is_a_conflict_and_not_kept(bus: Any) -> None:
    registry = Registry(bus)
    await registry.add("orders", ORDER)
    with pytest.raises(Conflict, match="/required/note"):
        await registry.add("orders", with_(required=["id", "note"]))
    assert len(registry.versions("orders")) == 1


NUMBER: dict[str, Any] = {"enum": [1, 0]}
NAMED: dict[str, Any] = {"patternProperties": {"^x": {}}, "additionalProperties": False}
SEALED: dict[str, Any] = {"properties": {"a": {}, "b": {}}, "unevaluatedProperties": False}

MIRROR: dict[str, Any] = {
    "properties": {"a": {"type": "integer"}, "b": {"not": {"$ref": "#/properties/a"}}}
}
BASED: dict[str, Any] = {
    "properties": {
        "a": {"properties": {"x": {}, "y": {}}},
        "b": {"$ref": "#/properties/a", "unevaluatedProperties": False},
    }
}
DRAFT_4: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-04/schema#",
    "properties": {"a": {"$ref": "#/definitions/x", "type": "string"}},
    "definitions": {"x": {}},
}
NAMES: dict[str, Any] = {
    "properties": {"a": {"$id": "here", "type": "integer"}, "b": {"$ref": "here"}}
}


def refer_to(schema: dict[str, Any], target: Any) -> dict[str, Any]:
    """The same with another ``a``, to which ``b`` refers."""
    return {"properties": {**schema["properties"], "a": target}}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (NUMBER, {"enum": [True, False]}),
        ({"const": 1}, {"const": True}),
        ({"enum": [1]}, {"const": 1, "enum": [2]}),
        ({"enum": [0, 1.0], "const": 1}, {"enum": [0, 1.0], "const": 1, "type": "boolean"}),
        (NAMED, {**NAMED, "properties": {"x1": {"type": "string"}}}),
        (SEALED, {**SEALED, "properties": {"a": {}}}),
        (MIRROR, refer_to(MIRROR, {"type": "number"})),
        (BASED, refer_to(BASED, {"properties": {"x": {}}})),
        (DRAFT_4, {**DRAFT_4, "$schema": "http://json-schema.org/draft-07/schema#"}),
        ({"$defs": {"a": NUMBER}, "$ref": "#/$defs/a"}, {"$defs": {"a": {}}, "$ref": "#/$defs/a"}),
        (NAMES, {"properties": {**NAMES["properties"], "a": {"type": "integer"}}}),
    ],
    ids=str,
)
def test_what_was_valid_and_is_not_is_never_compatible(old: Any, new: Any) -> None:
    with pytest.raises(Conflict):
        check_compatible(old, new, "backward")


TREE: dict[str, Any] = {"properties": {"below": {"items": {"$ref": "#"}}}}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"enum": ["a"]}, {"type": "string", "enum": ["a", "b"]}),
        ({"const": 1}, {"type": "number"}),
        ({"enum": [1, [2.0]]}, {"enum": [1.0, [2]]}),
        ({"type": ["string", "null"], "enum": ["a", 1]}, {"type": "string"}),
        (TREE, {"properties": {**TREE["properties"], "name": {}}}),
        ({**ORDER, "$id": "v1"}, {**ORDER, "$id": "v2", "title": "Order"}),
        (ORDER, {**ORDER, "$schema": "https://json-schema.org/draft/2020-12/schema#"}),
        ({"items": [ORDER]}, {"items": [ORDER], "title": "Pairs"}),
    ],
    ids=str,
)
def test_what_takes_as_much_as_before_is_compatible(old: Any, new: Any) -> None:
    check_compatible(old, new, "backward")


def test_long_lists_of_choices_are_compared_quickly() -> None:
    check_compatible({"enum": [*range(20_000)]}, {"enum": [*range(20_001)]}, "backward")


async def test_true_is_another_schema_than_one(bus: Any) -> None:
    registry = Registry(bus)
    await registry.add("t", {"const": 1}, "none")
    assert (await registry.add("t", {"const": True}, "none")).version == 2


async def test_of_two_at_once_the_second_is_compared_with_the_first(tmp_path: Path) -> None:
    async with trunkline.connect(f"file:{tmp_path}") as bus:
        registry = Registry(bus)
        await registry.add("orders", ORDER)
        news = [with_(properties={**ORDER["properties"], name: {}}) for name in ("a", "b")]
        found = await asyncio.gather(
            *(registry.add("orders", new) for new in news), return_exceptions=True
        )
        assert [type(one) for one in found] == [Schema, Conflict]
        assert [one.version for one in registry.versions("orders")] == [1, 2]
