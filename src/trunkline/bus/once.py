"""Publish events that may be in the log already, each once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from trunkline.event import Event, Receipt
from trunkline.store import Store

_LOOK_BACK = 1000


async def publish_once(
    store: Store,
    publish: Callable[[str, Sequence[Event]], Awaitable[list[Receipt]]],
    topic: str,
    events: Sequence[Event],
) -> list[Receipt]:
    """Publish those of ``events`` whose id the log does not hold yet. Their own times say how far
    back to look.
    """
    wanted = {event.id for event in events}
    options = (await store.topics()).get(topic)
    earliest = min(event.ts for event in events)
    found: dict[str, Receipt] = {}
    for partition in range(options.partitions if options is not None else 0):
        # A writer that died may have left a batch of which it is not settled whether it counts. The
        # next one to lock the log settles that; nothing is below 0, so this does and no more.
        await store.trim(topic, partition, 0)
        start = await store.seek(topic, partition, earliest)
        while records := await store.read(topic, partition, start, _LOOK_BACK):
            start = records[-1].offset + 1
            for record in records:
                if (name := record.event.id) in wanted:
                    durability = options.durability if options is not None else ""
                    found[name] = Receipt(
                        topic, partition, record.offset, name, durability=durability
                    )
    rest = [event for event in events if event.id not in found]
    if rest:
        for event, receipt in zip(rest, await publish(topic, rest), strict=True):
            found[event.id] = receipt
    return [found[event.id] for event in events]
