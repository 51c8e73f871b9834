"""A writer that is killed with -9 at a chosen command; it tells every acknowledgement.

``KILL_AT`` is ``command.started:n`` or ``command.succeeded:n``: before the n-th such command is
sent, or after its answer came and before anybody was told.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from pymongo import monitoring

from trunkline.event import Event
from trunkline.store.mongo import MongoStore


class Killer(monitoring.CommandListener):
    def __init__(self, spec: str) -> None:
        where, _, number = spec.partition(":")
        self._command, _, self._moment = where.partition(".")
        self._left = int(number)

    def started(self, event: Any) -> None:
        self._look(event.command_name, "started", event.command.get(event.command_name))

    def succeeded(self, event: Any) -> None:
        self._look(event.command_name, "succeeded", "log")

    def failed(self, event: Any) -> None:
        self._look(event.command_name, "succeeded", "log")

    def _look(self, command: str, moment: str, collection: str | None) -> None:
        if moment == self._moment and self._command in ("any", command):
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


async def main(url: str, database: str, who: str, count: int, size: int) -> None:
    store = MongoStore(url, database=database)
    for batch in range(count):
        events = [
            Event(topic="orders", id=f"{who}-{batch}-{number}", payload=number)
            for number in range(size)
        ]
        receipts = await store.append("orders", events)
        print(who, batch, receipts[0].offset, flush=True)
    await store.close()


if __name__ == "__main__":
    if "KILL_AT" in os.environ:
        monitoring.register(Killer(os.environ["KILL_AT"]))
    where, name, writer, batches, events_each = sys.argv[1:]
    asyncio.run(main(where, name, writer, int(batches), int(events_each)))
