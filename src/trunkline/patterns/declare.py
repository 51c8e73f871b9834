"""Topics and consumers declared where they are written, and brought to life on any bus later.

::

    app = Declarations()

    @app.topic("orders", partitions=4)
    class Order(msgspec.Struct):            # optional: the shape of its payloads
        id: int

    @app.consumer("orders", group="billing")
    async def bill(event): ...

    async with trunkline.connect(url) as bus:
        await app.apply(bus)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from trunkline.bus import Bus
from trunkline.errors import Conflict
from trunkline.names import check_group, check_pattern, check_topic
from trunkline.options import TopicOptions, make

C = TypeVar("C")


class Declarations:
    """A list of topics and consumers; declaring does nothing else."""

    def __init__(self) -> None:
        self.topics: dict[str, dict[str, Any]] = {}
        self.shapes: dict[str, Any] = {}
        self.consumers: list[tuple[str, dict[str, Any], Callable[..., Any]]] = []

    def topic(self, name: str, **options: Any) -> Callable[[C], C]:
        """Declare a topic; as a decorator also the type of its payloads."""
        check_topic(name)
        make(TopicOptions, options)
        if name in self.topics and self.topics[name] != options:
            raise Conflict(f"{name} is declared twice, in different ways", topic=name)
        self.topics[name] = options

        def shape(kind: C) -> C:
            self.shapes[name] = kind
            return kind

        return shape

    def consumer(self, topic: str, *, group: str, **options: Any) -> Callable[[C], C]:
        """Declare the handler of a group. It acks by returning, as with ``bus.on``."""
        check_pattern(topic)
        check_group(group)

        def register(handler: C) -> C:
            self.consumers.append((topic, {"group": group, **options}, handler))  # type: ignore[arg-type]
            return handler

        return register

    async def apply(self, bus: Bus, registry: Any = None) -> None:
        """Define the topics and register the consumers; with a schema registry the shapes too."""
        for name, options in self.topics.items():
            await bus.define(name, **options)
        if registry is not None:
            import msgspec

            for name, kind in self.shapes.items():
                await registry.add(name, msgspec.json.schema(kind))
        for topic, options, handler in self.consumers:
            bus.on(topic, **options)(handler)
