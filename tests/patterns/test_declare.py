from __future__ import annotations

from typing import Any

import msgspec
import pytest

import trunkline
from trunkline.errors import Conflict, InvalidEvent, InvalidName, InvalidOption
from trunkline.event import Event
from trunkline.patterns.declare import Declarations
from trunkline.patterns.schemas import Registry, SchemaGate


async def test_what_is_declared_comes_to_life() -> None:
    app = Declarations()
    seen: list[Any] = []

    @app.topic("orders", partitions=3)
    class Order(msgspec.Struct):
        id: int

    @app.consumer("orders", group="billing")
    async def bill(event: Event) -> None:
        seen.append(msgspec.convert(event.payload, Order).id)

    async with trunkline.connect("memory:") as bus:
        registry = Registry(bus)
        await app.apply(bus, registry)
        bus.use(SchemaGate(registry))
        await bus.publish("orders", {"id": 1})
        with pytest.raises(InvalidEvent):
            await bus.publish("orders", {"id": "one"})
        await bus.drain(10)
        assert (await bus.topics())["orders"].partitions == 3
    assert seen == [1]


def test_what_is_wrong_is_told_at_once() -> None:
    app = Declarations()
    with pytest.raises(InvalidName):
        app.topic("a/b")
    with pytest.raises(InvalidOption):
        app.topic("a", partitions=0)
    with pytest.raises(InvalidName):
        app.consumer("a", group="_g")
    app.topic("a", partitions=2)
    app.topic("a", partitions=2)
    with pytest.raises(Conflict):
        app.topic("a", partitions=3)
