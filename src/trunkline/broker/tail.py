"""A topic as server-sent events: what is there, then what comes, with a word when nothing does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

import msgspec

from trunkline.broker.http import Ask
from trunkline.broker.places import begin_anew, mark
from trunkline.errors import TrunklineError
from trunkline.frames import envelope_of
from trunkline.options import TopicOptions
from trunkline.store import watch

_QUIET_S = 15.0


async def follow(
    ask: Ask, topic: str, places: dict[int, int], wanted: Any, limit: int
) -> AsyncIterator[bytes]:
    hub, store = ask.hub, ask.hub.bus.store
    rung = asyncio.Event()

    def ring(_topic: str | None) -> None:
        rung.set()

    store.bell.listen(ring, topic)
    watch(store)
    sent, said, quiet_s = 0, monotonic(), min(_QUIET_S, hub.options.rights_s * 3)
    yield b": following\n"
    try:
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
                places[record.partition] = record.offset + 1
                if wanted is None or wanted(record.event):
                    data = msgspec.json.encode(envelope_of(record))
                    yield b"id: %b\ndata: %b\n\n" % (mark(places).encode(), data)
                    sent, said = sent + 1, monotonic()
                    if sent == limit:
                        return
            await asyncio.sleep(0)  # nothing of this waits if nobody takes it, or it is not wanted
            if not found and not await begin_anew(store, topic, places):
                try:
                    async with asyncio.timeout(said + quiet_s - monotonic()):  # it may ring often
                        await rung.wait()
                except TimeoutError:
                    said = monotonic()
                    yield b": still here\n"  # an empty line would end an event, for some readers
    except TrunklineError as error:
        yield b"event: error\ndata: %b\n\n" % msgspec.json.encode({"message": error.message})
    finally:
        store.bell.ignore(ring)
