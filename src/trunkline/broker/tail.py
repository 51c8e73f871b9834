"""A topic as server-sent events: what is there, then what comes, with a word when nothing does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from time import monotonic
from typing import Any

import msgspec

from trunkline.broker.cursors import begin_anew, mark
from trunkline.broker.http import Ask
from trunkline.broker.spelling import event_row
from trunkline.errors import TrunklineError
from trunkline.filters.work import Share
from trunkline.options import TopicOptions
from trunkline.store import Store

_QUIET_S = 15.0


@contextlib.contextmanager
def listening(store: Store, topic: str) -> Iterator[asyncio.Event]:
    """An event that is set when the topic may have more; the task that waits for it clears it."""
    rung = asyncio.Event()

    def ring(_topic: str | None) -> None:
        rung.set()

    store.bell.listen(ring, topic)
    store.watch()
    try:
        yield rung
    finally:
        store.bell.ignore(ring)


async def follow(
    ask: Ask, topic: str, places: dict[int, int], wanted: Any, limit: int
) -> AsyncIterator[bytes]:
    hub, store = ask.hub, ask.hub.bus.store
    share = Share()
    sent, said, quiet_s = 0, monotonic(), min(_QUIET_S, hub.options.rights_s * 3)
    yield b": following\n"
    try:
        with listening(store, topic) as rung:
            while hub.is_open:
                if hub.rights.current(ask.who) is None or not hub.allows(ask.who, "read", topic):
                    yield b'event: error\ndata: {"code":"denied"}\n\n'
                    return
                rung.clear()
                if ask.query("partition") is None:  # there may be more of them by now
                    options = (await hub.bus.topics()).get(topic, TopicOptions())
                    for number in range(options.partitions):
                        places.setdefault(number, 1)
                found = [
                    record
                    for number, at in places.items()
                    for record in await store.read(topic, number, at, 100)
                ]
                for record in found:
                    if share.is_spent():  # others have their turn
                        await asyncio.sleep(0)
                    places[record.partition] = record.offset + 1
                    if (wanted is None or wanted(record.event)) and hub.may_read(ask.who, record):
                        data = msgspec.json.encode(event_row(record))
                        yield b"id: %b\ndata: %b\n\n" % (mark(places).encode(), data)
                        sent, said = sent + 1, monotonic()
                        if sent == limit:
                            return
                # Nothing of this waits if nobody takes it, or it is not wanted.
                await asyncio.sleep(0)
                if not found and not await begin_anew(store, topic, places):
                    try:  # it may ring often
                        async with asyncio.timeout(said + quiet_s - monotonic()):
                            await rung.wait()
                    except TimeoutError:
                        said = monotonic()
                        # An empty line would end an event, for some readers.
                        yield b": still here\n"
    except TrunklineError as error:
        yield b"event: error\ndata: %b\n\n" % msgspec.json.encode({"message": error.message})
