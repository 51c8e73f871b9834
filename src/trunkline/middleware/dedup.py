"""Handle an event once: what was handled lately is acked without calling the handler.

Goes by ``idem_key``, or by the event's id where it has none, for each group by itself. It remembers
in this process's memory, so it spares a handler most repeats; it does not replace one that is
idempotent. What is remembered was handled to its end, so a failure is tried again as ever.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

from trunkline.bus import Delivery, Outcome
from trunkline.errors import InvalidOption
from trunkline.middleware import HandleNext

Key = tuple[str, str, str]


class Dedup:
    """``size`` is how many events are remembered; the one that was met longest ago goes first."""

    def __init__(self, size: int = 10_000) -> None:
        if size < 1:
            raise InvalidOption("size is at least 1", name="size", value=size)
        self._size = size
        self._done: OrderedDict[Key, bool] = OrderedDict()
        self._busy: dict[Key, Future[None]] = {}

    async def handle(self, delivery: Delivery, call_next: HandleNext) -> Any:
        event = delivery.event
        key = (delivery.topic, delivery.group, event.idem_key or event.id)
        mine: Future[None] = Future()
        while (busy := self._busy.setdefault(key, mine)) is not mine:
            # In whichever loop: a script may have several. It may fail, and then this is handled.
            await asyncio.shield(asyncio.wrap_future(busy))
        try:
            if self._done.pop(key, False):
                self._done[key] = True
                return None
            result = await call_next(delivery)
            if delivery.outcome in (None, Outcome.ACK):
                self._done[key] = True
                if len(self._done) > self._size:
                    self._done.popitem(last=False)
            return result
        finally:
            del self._busy[key]
            mine.set_result(None)
