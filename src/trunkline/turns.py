"""Who goes first when many have long to go."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Lets pumps that have long to go take turns, one in each turn of the loop: together they hold
    it up no longer than one of them does, and who keeps up with the log goes first.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._pass_on)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._pass_on)
                return
        self._taken = False
