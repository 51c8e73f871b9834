"""Why and when a pump runs its next round."""

from __future__ import annotations

import asyncio
from collections import deque

from trunkline.clock import Clock, Handle

# Reasons to run a round, as bits: a round looks at them for every record, and a Flag is slow.
RECORDS = 1  # the log may have grown
ROOM = 2  # an inbox has room
OUTCOMES = 4  # deliveries were finished
GROUP = 8  # another member, or an operator, may have changed the group
DUE = 16  # a lease runs out or a record is due
TOLD = OUTCOMES | GROUP | DUE  # more than the log may have changed

_NEVER = float("inf")
_ACK_S = 0.005
_LOOK_S = 10.0  # the wall clock may be set meanwhile
LATE_S = 0.2
LATE_TURNS = 3  # of the loop: in each of them sockets are read


class Wakes:
    """The reasons that have come up since the last round, and the timers that bring one up."""

    def __init__(self, clock: Clock) -> None:
        self.why = GROUP
        self._clock = clock
        self._event = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._alarm: Handle | None = None
        self._alarm_at = _NEVER

    def add(self, why: int) -> None:
        self.why |= why
        self._event.set()

    def take(self) -> int:
        """The reasons so far. They are gone from here."""
        why, self.why = self.why, 0
        self._event.clear()
        return why

    def add_soon(self) -> None:
        """Acks wait a moment for each other. Real time, whatever the clock: nothing is due."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_ACK_S, self._linger_ended)

    def _linger_ended(self) -> None:
        self._timer = None
        self.add(OUTCOMES)

    async def wait(self, delay_s: float | None) -> None:
        """Until there is a reason, or until ``delay_s`` is over."""
        if delay_s is not None:
            now = self._clock.monotonic()
            at = now + min(delay_s, _LOOK_S)
            if at < self._alarm_at:  # most often the next deadline is later than the last one
                self._cancel_alarm()
                self._alarm_at = at
                self._alarm = self._clock.call_later(at - now, self._ring_alarm)
        await self._event.wait()

    def _ring_alarm(self) -> None:
        """An alarm that is late tells of a process that stood still. What came meanwhile, an ack
        perhaps, is read from the sockets before a lease runs out.
        """
        late_s, self._alarm_at = self._clock.monotonic() - self._alarm_at, _NEVER
        if late_s > LATE_S:
            self._after(LATE_TURNS)
        else:
            self.add(DUE)

    def _after(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._after, turns - 1)
        else:
            self.add(DUE)

    def _cancel_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._cancel_alarm()


class Turns:
    """Lets pumps with a long backlog take turns, one in each turn of the loop. Together they hold
    up the loop no longer than one of them does, and a pump without a backlog goes first.
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
