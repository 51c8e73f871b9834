"""The annotation of a handler decides what it is called with."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import pydantic
import pytest

import trunkline
from trunkline import Bus, Delivery, InvalidEvent, InvalidOption
from trunkline.codec import to_plain
from trunkline.delivery.arguments import reader
from trunkline.guard.redaction import Redactor

if TYPE_CHECKING:
    from trunkline import Event
    from trunkline.event import Event as Elsewhere

AT = datetime(2026, 5, 4, 12, tzinfo=UTC)


class Line(msgspec.Struct):
    sku: str
    count: int = 1


class Order(msgspec.Struct):
    id: int
    at: datetime
    lines: list[Line] = []


@dataclass
class Address:
    street: str
    zip: int


class Parcel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    weight: float = pydantic.Field(gt=0, alias="weight_kg")
    at: datetime
    to: Address


class Loose(TypedDict):
    id: int


ORDER = Order(1, AT, [Line("a", 2)])
PARCEL = Parcel(weight_kg=1.5, at=AT, to=Address("Main", 12345))


async def handled(payload: Any, handler: Any) -> list[str]:
    """Publish one payload, handle it, and return the errors of its dead letters."""
    async with trunkline.connect("memory:") as bus:
        bus.on("orders", group="g")(handler)
        await bus.publish("orders", payload)
        assert await bus.drain(10)
        return [one.error async for one in bus.dead_letters("orders").letters()]


got: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_was_got() -> None:
    got.clear()


async def plain(order: Order) -> None:
    got.append(order)


async def of_delivery(delivery: Delivery[Order]) -> None:
    got.append(delivery.payload)
    assert await delivery.ack()


async def beside(order: Order, delivery: Delivery) -> None:
    got.append(order)
    assert delivery.attempt == 1


async def beside_typed(event: Any, delivery: Delivery[Order]) -> None:
    assert delivery.event.payload == event.payload
    got.append(delivery.payload)


def in_a_thread(order: Order) -> None:
    got.append(order)


class Callback:
    async def __call__(self, order: Order) -> None:
        got.append(order)

    async def method(self, order: Order) -> None:
        got.append(order)


async def with_more(where: list[Any], order: Order) -> None:
    where.append(order)


@pytest.mark.parametrize(
    "handler",
    [
        plain,
        of_delivery,
        beside,
        beside_typed,
        in_a_thread,
        Callback(),
        Callback().method,
        partial(with_more, got),
    ],
    ids=lambda one: getattr(one, "__name__", type(one).__name__),
)
async def test_a_payload_comes_as_the_type_that_the_handler_names(handler: Any) -> None:
    assert await handled(ORDER, handler) == []
    assert got == [ORDER]


async def test_an_event_of_a_type_has_a_payload_of_it() -> None:

    async def handler(event: Event[Order]) -> None:
        got.append((event.topic, event.payload))

    assert await handled(ORDER, handler) == []
    assert got == [("orders", ORDER)]


async def test_a_type_that_a_function_defines_is_found() -> None:
    class Local(msgspec.Struct):
        id: int

    async def handler(one: Local) -> None:
        got.append(one)

    assert await handled({"id": 3}, handler) == []
    assert got == [Local(3)]


@pytest.mark.parametrize(
    "value", [ORDER, Address("Main", 12345), PARCEL, {"id": 1}, [ORDER], {"a": PARCEL}, 5, None]
)
async def test_what_is_published_as_a_type_is_read_as_the_type(value: Any) -> None:
    kinds: dict[Any, Any] = {
        list: list[Order],
        dict: Loose if value == {"id": 1} else dict[str, Parcel],
    }
    kind = kinds.get(type(value), type(value))

    async def handler(one: Any) -> None:
        got.append(one)

    handler.__annotations__["one"] = kind
    assert await handled(value, handler) == []
    assert got == [value]


@pytest.mark.parametrize(
    ("kind", "payload", "why"),
    [
        (Order, {"id": "x", "at": "2026-05-04T12:00:00Z"}, 'id must be a whole number, not "x"'),
        (Order, {"id": 1}, "at is missing"),
        (
            Order,
            {"id": 1, "at": "2026-05-04T12:00:00Z", "lines": [{"sku": "a"}, {"sku": 5}]},
            "lines[1].sku must be text, not 5",
        ),
        (Address, {"street": "Main", "zip": None}, "zip must be a whole number, not null"),
        (
            Parcel,
            {"weight_kg": -1, "at": "2026-05-04T12:00:00Z", "to": {"street": "Main", "zip": "x"}},
            "weight_kg: Input should be greater than 0; to.zip: Input should be a valid integer",
        ),
        (int, "x", "it must be a whole number"),
    ],
)
async def test_a_payload_that_does_not_fit_is_rejected_with_the_path_of_the_field(
    kind: Any, payload: Any, why: str
) -> None:
    async def handler(one: Any) -> None:
        got.append(one)

    handler.__annotations__["one"] = kind
    (error,) = await handled(payload, handler)
    assert error.startswith(f"the payload is not {kind.__name__}: ")
    assert why in error
    assert got == []


async def test_a_letter_keeps_the_payload_as_it_was_published() -> None:
    """A type may leave fields out. The letter has them."""

    async def handler(order: Order) -> None:
        raise trunkline.Reject("no")

    async with trunkline.connect("memory:") as bus:
        bus.on("orders", group="g")(handler)
        await bus.publish("orders", {**to_plain(ORDER), "more": 1})
        await bus.drain(10)
        (letter,) = [one async for one in bus.dead_letters("orders").letters()]
    assert letter.event.payload["more"] == 1


async def test_a_name_for_the_type_checker_alone_is_an_event() -> None:
    async def handler(event: Event) -> None:
        got.append(event.payload)

    assert await handled(1, handler) == []
    assert got == [1]


async def test_an_annotation_that_cannot_be_read_is_refused_where_the_handler_is_registered(
    memory: Bus,
) -> None:
    async def handler(one: Elsewhere[Order]) -> None: ...

    with pytest.raises(InvalidOption, match="'Elsewhere' is not defined"):
        memory.on("orders", group="g")(handler)


@pytest.mark.parametrize("kind", [object(), Callback, Order | Line, "Missing"])
def test_a_type_that_is_no_data_is_refused(kind: Any, memory: Bus) -> None:
    async def handler(one: Any) -> None: ...

    handler.__annotations__["one"] = kind
    with pytest.raises(InvalidOption):
        memory.on("orders", group="g")(handler)


def test_swapped_arguments_are_refused(memory: Bus) -> None:

    async def by_type(one: Delivery, two: Event) -> None: ...

    async def by_name(delivery, event): ...  # type: ignore[no-untyped-def]

    async def two_types(one: Order, two: Delivery[Line]) -> None: ...

    for handler in (by_type, by_name, two_types):
        with pytest.raises(InvalidOption):
            memory.on("orders", group="g")(handler)  # type: ignore[type-var]


@pytest.fixture
async def memory() -> Bus:
    return trunkline.connect("memory:")


async def test_what_is_no_data_is_refused_with_a_hint(memory: Bus) -> None:
    with pytest.raises(InvalidEvent, match="a dataclass or a pydantic model"):
        await memory.publish("orders", Callback())


class Seen:
    def __init__(self) -> None:
        self.payloads: list[Any] = []

    async def publish(self, events: list[Event], call_next: Any) -> Any:
        self.payloads += [event.payload for event in events]
        return await call_next(events)


async def test_middleware_sees_what_json_has() -> None:
    seen = Seen()
    async with trunkline.connect("memory:", middleware=[seen]) as bus:
        await bus.publish("orders", PARCEL)
        await bus.publish_many("orders", [ORDER])
    assert seen.payloads == [to_plain(PARCEL), to_plain(ORDER)]


async def test_a_model_inside_of_a_payload_is_redacted() -> None:
    class Person(pydantic.BaseModel):
        mail: str

    person = Person(mail="ada@example.com")
    async with trunkline.connect("memory:", middleware=[Redactor()]) as bus:
        await bus.publish("people", {"who": person})
        await bus.publish("people", person)
        found = await bus.read("people")
    assert all("ada@" not in str(record.event.payload) for record in found)


def test_a_reader_names_generic_types_in_full() -> None:
    with pytest.raises(trunkline.Reject, match=r"the payload is not list\[int\]"):
        reader(list[int])(["x"])
