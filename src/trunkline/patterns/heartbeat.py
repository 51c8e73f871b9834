"""Signs of life: a process says every few seconds that it is there, and a monitor notices
processes that have stopped saying so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import Any, Self

import msgspec

from trunkline.bus import Bus
from trunkline.check import check_span, check_text
from trunkline.clock import Clock
from trunkline.errors import TrunklineError
from trunkline.event import Event
from trunkline.names import check_topic

logger = logging.getLogger(__name__)

TOPIC = "heartbeat.received"
_KEPT_S = 86_400.0


class Beat(msgspec.Struct, frozen=True):
    """The processes that were there last, and when."""

    key: str
    name: str
    pid: int
    at: float  # seconds of the monitor's clock
    host: str = ""


class Heartbeat:
    """Publishes one event every ``every_s`` for as long as it is entered."""

    def __init__(self, bus: Bus, name: str, *, every_s: float = 3.0, topic: str = TOPIC) -> None:
        check_text("name", name)
        check_span(every_s, "every_s")
        self._bus = bus
        self._name = name
        self._every_s = every_s
        self._topic = check_topic(topic)
        self._task: asyncio.Task[None] | None = None

    async def beat(self) -> None:
        """One sign of life."""
        pid = os.getpid()
        now = self._bus.clock.now()
        payload = {
            "pid": pid,
            "name": self._name,
            "host": socket.gethostname(),
            "ts": round(now.timestamp() * 1000),
        }
        await self._bus.publish(self._topic, payload, key=f"proc:{self._name}:{pid}", type="beat")

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.beat()
            except TrunklineError as error:
                logger.warning("a heartbeat was not sent: %s", error)
            await self._bus.clock.sleep(self._every_s)


class Monitor:
    """Knows which processes are alive. ``lost`` and ``found`` are called as that changes."""

    def __init__(
        self,
        bus: Bus,
        *,
        group: str = "monitor",
        late_s: float = 10.0,
        topic: str = TOPIC,
        lost: Callable[[Beat], object] | None = None,
        found: Callable[[Beat], object] | None = None,
    ) -> None:
        check_span(late_s, "late_s")
        self._bus = bus
        self._clock: Clock = bus.clock
        self._group = group
        self._late_s = late_s
        self._topic = check_topic(topic)
        self._lost = lost
        self._found = found
        self._tasks: list[asyncio.Task[None]] = []
        self._late: set[str] = set()
        self._seen: dict[str, Beat] = {}

    def alive(self) -> list[Beat]:
        return [beat for key, beat in self._seen.items() if key not in self._late]

    def late(self) -> list[Beat]:
        return [self._seen[key] for key in self._late]

    async def __aenter__(self) -> Self:
        with contextlib.suppress(TrunklineError):
            if self._topic not in await self._bus.topics():
                await self._bus.define(self._topic, retention_age_s=_KEPT_S, retain_unsettled=False)
        stream = self._bus.subscribe(self._topic, group=self._group, start="latest")
        await stream.__aenter__()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._listen(stream)), loop.create_task(self._check())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, stream: Any) -> None:
        try:
            async for delivery in stream:
                self.note(delivery.event)
                await delivery.ack()
        except TrunklineError as error:
            logger.warning("signs of life are not heard any more: %s", error)
        finally:
            await stream.close()

    def note(self, event: Event) -> None:
        """Take in one sign of life."""
        payload = event.payload if isinstance(event.payload, dict) else {}
        key = event.key or f"proc:{payload.get('pid', 0)}"
        pid = payload.get("pid")
        beat = Beat(
            key,
            str(payload.get("name") or ""),
            pid if isinstance(pid, int) else 0,
            self._clock.monotonic(),
            str(payload.get("host") or ""),
        )
        fresh = key not in self._seen or key in self._late
        self._seen[key] = beat
        self._late.discard(key)
        if fresh:
            _tell(self._found, beat)

    async def _check(self) -> None:
        while True:
            await self._clock.sleep(self._late_s / 4)
            now = self._clock.monotonic()
            for key, beat in list(self._seen.items()):
                if key not in self._late and now - beat.at >= self._late_s:
                    self._late.add(key)
                    _tell(self._lost, beat)


def _tell(callback: Callable[[Beat], object] | None, beat: Beat) -> None:
    """What the caller's function does wrong must not end the watch."""
    try:
        if callback is not None:
            callback(beat)
    except Exception:
        logger.exception("%r failed for %s", callback, beat.key)
