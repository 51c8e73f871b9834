"""Middleware: what wraps publishing and handling.

A middleware is any object with one or both of::

    async def publish(self, events, call_next): return await call_next(events)
    async def handle(self, delivery, call_next): return await call_next(delivery)

``publish`` gets the events of one call and gives back their receipts. ``handle`` surrounds a
handler: what it raises decides over the delivery just as if the handler had raised it. The first
middleware given is the outermost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from trunkline.bus import Delivery
from trunkline.errors import InvalidOption
from trunkline.event import Event, Receipt

PublishNext = Callable[[list[Event]], Awaitable[list[Receipt]]]
HandleNext = Callable[[Delivery], Awaitable[Any]]


def check(middleware: Sequence[object]) -> None:
    """Refuse what would wrap nothing: a misspelt method is else never heard of."""
    if not isinstance(middleware, Sequence):
        raise InvalidOption(f"middleware is a list, not {middleware!r}", name="middleware")
    for one in middleware:
        if isinstance(one, type) or not (hasattr(one, "publish") or hasattr(one, "handle")):
            raise InvalidOption(
                f"not a middleware: {one!r}",
                hint="an object with a method publish, handle or both, not its class",
            )


def compose(middleware: Sequence[object], side: str, last: Callable[[Any], Any]) -> Any:
    """``last`` wrapped in the ``side`` ("publish" or "handle") of each middleware that has it."""
    chain = last
    for one in reversed(middleware):
        layer = getattr(one, side, None)
        if layer is not None:
            chain = partial(layer, call_next=chain)
    return chain
