"""Short stories of a folder, each told with its promises. A proof interrupts them anywhere.

A scene may have a first part, ``before``, that is never interrupted: it makes the folder in which
the scene plays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from trunkline.bus.local import LocalBus
from trunkline.errors import StorageError
from trunkline.folder import Folder, upkeep
from trunkline.group import Group, Lease
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, TopicOptions
from trunkline.store.file import FileStore

from .promises import OPTIONS, Promises, Say, StillClock, broken, event, publish, records_of

T = TypeVar("T")
TOPIC = "t"
GROUP = "g"
KEY = GroupKey(TOPIC, 0, GROUP)


class Scene(NamedTuple):
    play: Callable[[str, Say], None]
    before: Callable[[str, Say], None] | None = None
    broken: Callable[[str, Promises], list[str]] = broken


def open_folder(root: str) -> Folder:
    return Folder(root, OPTIONS, StillClock())


def single(root: str, say: Say) -> None:
    folder = open_folder(root)
    publish(folder, say, TOPIC, 1)
    publish(folder, say, TOPIC, 2, 3, 4)
    publish(folder, say, TOPIC, 5)
    folder.close()


def small_segments(root: str, say: Say) -> None:
    folder = open_folder(root)
    folder.define(TOPIC, TopicOptions(segment_records=2))
    for number in range(1, 6):
        publish(folder, say, TOPIC, number, key=f"k{number % 2}")
    folder.close()


def roll(root: str, say: Say) -> None:
    folder = open_folder(root)
    publish(folder, say, TOPIC, 11)
    publish(folder, say, TOPIC, 12, 13)
    publish(folder, say, TOPIC, 14)
    folder.close()


def torn(root: str, say: Say) -> None:
    """A writer was cut off in the middle of a batch."""
    small_segments(root, say)
    with open(os.path.join(root, "wal", "t.00000003.jsonl"), "ab") as file:
        file.write(b'{"offset":6,"meta":{"event_id":"e6"},"payl')


def headless(root: str, say: Say) -> None:
    small_segments(root, say)
    os.unlink(os.path.join(root, "wal", "t.head"))


def take(folder: Folder, count: int) -> list[Lease]:
    """What a pump does: read ahead, then lease."""
    records = records_of(folder, TOPIC)

    def step(group: Group) -> list[Lease]:
        for record in records:
            group.offer(record.offset)
        return group.take(folder.join(), now=0.0, wall=0.0, limit=count).leases

    return folder.step(KEY, step)


def settle(folder: Folder, say: Say, *offsets: int) -> None:
    say("means", TOPIC, GROUP, offsets)
    folder.step(KEY, lambda group: group.settle(offsets))
    say("settled", TOPIC, GROUP, offsets)


def grouped(root: str, say: Say) -> None:
    folder = open_folder(root)
    publish(folder, say, TOPIC, *range(1, 9))
    folder.step(KEY, lambda group: group.define(GroupOptions(ordering="none"), 0))
    folder.close()


def commit(root: str, say: Say) -> None:
    folder = open_folder(root)
    first, second, third = take(folder, 3)
    settle(folder, say, first.offset)
    settle(folder, say, third.offset)
    folder.step(KEY, lambda group: group.fail(second, now=0.0, delay_s=0.0))
    folder.sync_groups()
    folder.step(KEY, lambda group: group.give_back(take_more(group)))
    settle(folder, say, second.offset)
    folder.close()


def take_more(group: Group) -> list[Lease]:
    return list(group.leases.values())


def renewed(root: str, say: Say) -> None:
    """Enough steps for two new generations of the journal."""
    folder = open_folder(root)
    leases = take(folder, 8)
    for lease in leases[:6]:
        for now in range(3):
            folder.step(KEY, lambda g, x=lease, t=now: g.extend(x, now=float(t)))  # type: ignore[misc]
        settle(folder, say, lease.offset)
    folder.close()


def dead(root: str, say: Say) -> None:
    """One record is rejected and one runs out of tries, on a real bus."""

    async def run() -> None:
        store = FileStore(root, StillClock(), reserve_bytes=0, inline_commit_s=10.0)
        store.watch = lambda: None  # type: ignore[method-assign] # there is nobody else to see
        bus = LocalBus(store, clock=store.folder.clock, draw=lambda: 0.0)
        policy = GroupOptions(max_retries=0, ordering="none")
        say("try", TOPIC, [1, 2, 3], None, False)
        receipts = await bus.publish_many(TOPIC, [event(TOPIC, n) for n in (1, 2, 3)])
        say("ack", TOPIC, [(r.offset, n) for n, r in enumerate(receipts, 1)])
        async with bus.subscribe(TOPIC, group=GROUP, policy=policy) as deliveries:
            async for one in deliveries:
                if one.offset == 1:
                    await one.term("no")
                elif one.offset == 2:
                    await one.nack()
                else:
                    say("means", TOPIC, GROUP, [3])
                    await one.ack()
                    break
            while await bus.store.update(KEY, lambda group: group.lag(4)):
                await asyncio.sleep(0.001)
            say("settled", TOPIC, GROUP, [1, 2, 3])
        await bus.close()

    asyncio.run(run())


def stored(root: str, say: Say) -> None:
    """Publishers side by side, committed by the loop and then by threads."""

    async def one(store: FileStore, *numbers: int) -> None:
        say("try", TOPIC, numbers, None, False)
        receipts = await store.append(TOPIC, [event(TOPIC, number) for number in numbers])
        say("ack", TOPIC, [(r.offset, n) for r, n in zip(receipts, numbers, strict=True)])

    async def run() -> None:
        store = FileStore(root, StillClock(), reserve_bytes=0, inline_commit_s=0.0)
        await one(store, 1)
        await asyncio.gather(one(store, 2), one(store, 3, 4), one(store, 5))
        await one(store, 6, 7)
        await store.close()

    asyncio.run(run())


def keyed(root: str, say: Say) -> None:
    """Segments of two with values that later ones replace, and a tombstone."""
    folder = open_folder(root)
    folder.define(TOPIC, TopicOptions(segment_records=2))
    for number in range(1, 8):
        publish(folder, say, TOPIC, number, key=f"k{number % 3}")
    publish(folder, say, TOPIC, 8, key="k1", payload=None)
    publish(folder, say, TOPIC, 9, key="k0")
    publish(folder, say, TOPIC, 10, key="k9")
    folder.close()


def compact(root: str, say: Say) -> None:
    folder = open_folder(root)
    say("compacts", TOPIC)
    upkeep.compact(folder, TOPIC, 0)
    publish(folder, say, TOPIC, 11, key="k2")
    folder.close()


def trim(root: str, say: Say) -> None:
    folder = open_folder(root)
    say("trims", TOPIC, 4)
    upkeep.trim(folder, TOPIC, 0, 4)
    publish(folder, say, TOPIC, 11)
    folder.define(TOPIC, TopicOptions(segment_records=2, retention_records=2))
    say("trims", TOPIC, 10)
    upkeep.retain(folder, TOPIC, 0)
    say("trims", TOPIC, 12)
    upkeep.trim(folder, TOPIC, 0, 12)
    publish(folder, say, TOPIC, 12)
    folder.close()


def pack(root: str, say: Say) -> None:
    folder = open_folder(root)
    upkeep.pack_segments(folder, TOPIC, 0)
    publish(folder, say, TOPIC, 11, key="k0")
    say("compacts", TOPIC)
    upkeep.compact(folder, TOPIC, 0)
    say("trims", TOPIC, 6)
    upkeep.trim(folder, TOPIC, 0, 6)
    folder.close()


def remove(root: str, say: Say) -> None:
    folder = open_folder(root)
    folder.define("other", TopicOptions(partitions=1, segment_records=7))
    publish(folder, say, "other", 20)
    say("removes", TOPIC)
    folder.remove_topic(TOPIC)
    publish(folder, say, "other", 21)
    folder.close()


def failing(root: str, say: Say) -> None:
    """Publish and settle on a disk that fails once, and go on."""
    folder = _persist(lambda: open_folder(root))
    _persist(lambda: folder.define(TOPIC, TopicOptions(segment_records=3)))
    for number in range(1, 9):
        numbers = (number, number + 100) if number % 3 == 0 else (number,)
        try:
            publish(folder, say, TOPIC, *numbers)
        except StorageError:
            say("failed", TOPIC, numbers)
    policy = GroupOptions(ordering="none")
    _persist(lambda: folder.step(KEY, lambda group: group.define(policy, 0)))
    for lease in _persist(lambda: take(folder, 4)):
        with contextlib.suppress(StorageError):
            say("means", TOPIC, GROUP, [lease.offset])
            folder.step(KEY, lambda group, o=lease.offset: group.settle([o]))  # type: ignore[misc]
            folder.sync_groups()
            say("settled", TOPIC, GROUP, [lease.offset])
    with contextlib.suppress(StorageError):
        folder.close()


def _persist(action: Callable[[], T]) -> T:
    try:
        return action()
    except StorageError:
        return action()


SCENES = {
    "publish": Scene(single),
    "rollover": Scene(small_segments),
    "recovery": Scene(roll, torn),
    "recovery without a head": Scene(roll, headless),
    "commit": Scene(commit, grouped),
    "new journal": Scene(renewed, grouped),
    "dead letter": Scene(dead),
    "store": Scene(stored),
    "compaction": Scene(compact, keyed),
    "trim": Scene(trim, keyed),
    "compression": Scene(pack, keyed),
    "remove": Scene(remove, grouped),
}
