"""Middleware: what wraps publishing and handling.

A middleware is any object with one or both of::

    async def publish(self, events, call_next): return await call_next(events)
    async def handle(self, delivery, call_next): return await call_next(delivery)

``publish`` gets the events of one call and gives back their receipts. ``handle`` surrounds a
handler: what it raises decides over the delivery just as if the handler had raised it. The first
middleware given is the outermost. One that depends on its place also has ``placed(outer)``: it is
called with the middleware outside of it, and raises ``InvalidOption`` where the order is wrong.

To be told what becomes of records that no handler sees, give it the methods of
``trunkline.delivery.observers`` too, or those alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from trunkline.bus import Delivery
from trunkline.delivery import observers
from trunkline.errors import InvalidOption
from trunkline.event import Event, Receipt

PublishNext = Callable[[list[Event]], Awaitable[list[Receipt]]]
HandleNext = Callable[[Delivery], Awaitable[Any]]
_METHODS = ("publish", "handle", *observers.METHODS)


def check(middleware: Sequence[object]) -> None:
    """Refuse an object that wraps and observes nothing: one of its methods is misspelt."""
    if not isinstance(middleware, Sequence):
        raise InvalidOption(f"middleware is a list, not {middleware!r}", name="middleware")
    for one in middleware:
        if isinstance(one, type) or not any(hasattr(one, name) for name in _METHODS):
            raise InvalidOption(
                f"not a middleware: {one!r}",
                hint="an object with a method publish, handle or both, not its class",
            )


def check_places(middleware: Sequence[object]) -> None:
    """Ask each middleware that depends on its place."""
    for at, one in enumerate(middleware):
        if (placed := getattr(one, "placed", None)) is not None:
            placed(middleware[:at])


def compose(middleware: Sequence[object], side: str, last: Callable[[Any], Any]) -> Any:
    """``last`` wrapped in the ``side`` ("publish" or "handle") of each middleware that has it."""
    chain = last
    for one in reversed(middleware):
        layer = getattr(one, side, None)
        if layer is not None:
            chain = partial(layer, call_next=chain)
    return chain
