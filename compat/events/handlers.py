"""One handler behind middleware: ``before_handle``, the handler, ``after_handle``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from events.types import Ack, Event, Nack, is_nack


class HandlerPipeline:
    """``process_event`` returns ``Ack`` or ``Nack``, or raises an error of a hook or handler."""

    def __init__(self, handler: Callable[[Event], Any], middlewares: Sequence[object] = ()) -> None:
        self._handler = handler
        self._middlewares = list(middlewares)

    async def process_event(self, event: Event) -> Ack | Nack:
        for one in self._middlewares:
            await _call(getattr(one, "before_handle", None), event)
        result = await _call(self._handler, event)
        for one in reversed(self._middlewares):
            await _call(getattr(one, "after_handle", None), event)
        if is_nack(result):
            return result if isinstance(result, Nack) else Nack()
        return result if isinstance(result, Ack) else Ack()


async def _call(function: Callable[[Event], Any] | None, event: Event) -> Any:
    result = None if function is None else function(event)
    return await result if inspect.isawaitable(result) else result
