"""The first plug: where records and groups live.

A store numbers and keeps records, and keeps groups. It knows nothing of subscribers. What it does
not promise is in its ``features``; a bell rings when something may have changed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast

from msgspec.structs import replace

from trunkline.clock import Clock
from trunkline.errors import Conflict, InvalidOption, Raced, TrunklineError
from trunkline.event import Bounds, Event, Receipt, Record
from trunkline.features import Features
from trunkline.group import Group
from trunkline.group.members import MemberInfo
from trunkline.names import GroupKey, is_dead, partition_for
from trunkline.options import (
    Limits,
    MongoOptions,
    Options,
    StoreOptions,
    TopicOptions,
    merged,
)
from trunkline.store.bell import Bell

DEAD_BYTES = 64 * 1024

T = TypeVar("T")

__all__ = [
    "Bell",
    "Bounds",
    "Features",
    "GroupKey",
    "InHand",
    "Room",
    "Store",
    "append_parts",
    "check_url",
    "lag_of",
    "limits_of",
    "open_store",
    "options_for",
    "pick_partition",
]


AWAY: Final = 0
"""An offset that no record has. Its mark says that clients of the process have records in hand,
too, and that nobody marks those.
"""


class InHand(Protocol):
    """Marks of the records of one group that handlers of this process have in hand. They outlive
    the process: when it is killed, the marked records count as a try, the others do not.
    """

    def begin(self, offset: int) -> None: ...

    def begin_all(self, offsets: list[int]) -> None: ...

    def end(self, offset: int) -> None: ...

    def end_all(self, offsets: list[int]) -> None: ...


class Room(NamedTuple):
    """Whether the last write found no room, how much room is left where that is known, and why
    nothing can be written at all.
    """

    full: bool = False
    free_bytes: int | None = None
    problem: str = ""


class Store(Protocol):
    """Subclass it and write the methods without a body; ``docs/stores.md`` tells how.

    Every method may raise ``StorageError``; names are checked before anything is written. A caller
    may cancel any method: then nothing or all of it happened.
    """

    features: Features
    bell: Bell
    member: str  # this opening of the store, to the other members of a group
    clock: Clock  # the time of leases, retries and dedup windows, the same for all members
    limits: Limits  # how large one event may be; dead letters: ``limits_of``

    def append(self, topic: str, events: Sequence[Event]) -> Awaitable[list[Receipt]]:
        """Number and keep the events; returns once they are as durable as the topic asks for.

        Events of one partition are kept all or none. Where only some partitions kept theirs, the
        error has ``receipts``: one for each event in order, None for each that was not kept. A
        topic that is not defined is made with default options. An event whose ``idem_key`` was
        seen within the topic's window is not kept again: its receipt names the first one and says
        so. ``features`` says how large a batch may be; a larger one is ``InvalidEvent``.
        """

    async def read(self, topic: str, partition: int, start: int, limit: int) -> list[Record]:
        """Up to ``limit`` records from offset ``start`` on; at least one if there is one.
        ``OutOfRange`` if ``start`` was trimmed.
        """

    async def bounds(self, topic: str, partition: int) -> Bounds:
        """The first offset there is, and the one that comes next."""

    async def seek(self, topic: str, partition: int, when: datetime) -> int:
        """The offset of the first record at or after ``when``; the next offset if none is."""

    async def trim(self, topic: str, partition: int, before: int) -> Bounds:
        """Remove records below ``before``, settled or not."""

    def group(self, key: GroupKey) -> AbstractAsyncContextManager[Group]:
        """One transaction: ``async with store.group(key) as group:``.

        On entry the group is caught up with every commit of the other members, and leases of
        members that are gone are free. On leaving, all changes of the body are committed: every
        other member sees them. Or an error is raised, and the group is as it was before; the next
        entry may then give another ``Group``.

        The body does not await and changes nothing but the group, because it may be for nothing:
        a store that compares and sets raises ``Raced`` on leaving if another member committed
        meanwhile. The caller then enters again; ``change`` does so.
        """

    async def change(self, key: GroupKey, verb: Callable[[Group], T]) -> T:
        """Run ``verb`` on the group in a transaction, again for as long as other members are
        first, and return its result.
        """
        while True:
            try:
                async with self.group(key) as group:
                    return verb(group)
            except Raced:
                from asyncio import sleep  # short commands do without asyncio

                await sleep(0)

    def in_hand(self, key: GroupKey) -> InHand | None:  # noqa: ARG002 -- of the protocol
        """Where handlers of this process mark the records of a group that they have. ``None``: the
        store keeps no marks, and every lease of a member that is gone counts as a try.
        """
        return None

    def marked_by(self, key: GroupKey, member: str) -> Callable[[int], bool] | None:  # noqa: ARG002
        """Whether handlers of a member, living or not, have an offset of a group in hand. ``None``:
        that is not known, and every lease of the member that runs out counts as a try.
        """
        return None

    told: Sequence[MemberInfo] = ()  # what this process is subscribed to

    def announce(self, told: Sequence[MemberInfo]) -> None:
        """Let other processes see what this one is subscribed to. A store that is not shared only
        remembers it.
        """
        self.told = told

    async def members(self) -> list[MemberInfo]:
        """What the living members are subscribed to, also those that hold no record."""
        return list(self.told)

    async def remove_group(self, key: GroupKey) -> None:
        """Remove the group; ``NotFound`` if there is none. Members that are at work for it begin
        it anew, with the policy that it had.
        """

    async def update(self, key: GroupKey, step: Callable[[Group], T] | None) -> T:
        """As ``change``, or as ``remove_group`` with ``None``; for callers that are not moved."""
        if step is None:
            await self.remove_group(key)
            return None  # type: ignore[return-value]
        return await self.change(key, step)

    async def groups(self) -> list[GroupKey]:
        """Every group there is."""

    async def topics(self) -> dict[str, TopicOptions]:
        """Every topic there is."""

    async def define(self, topic: str, options: TopicOptions | None) -> None:
        """Set a topic's options; ``None`` removes the topic, its records and its groups. When this
        returns no reader finds them any more; their space may be given back later.
        """

    async def edit(self, topic: str, values: dict[str, Any]) -> TopicOptions:
        """Change the named options of a topic and keep the others; make the topic if there is none.
        Returns all of its options. A store that can do so in one step overrides it: then two
        processes that edit a topic at the same time both count.
        """
        options = merged((await self.topics()).get(topic, TopicOptions()), values)
        await self.define(topic, options)
        return options

    async def compact(self, topic: str, partition: int) -> int:
        """Keep the latest record of each key now; returns how many records went. Only a store
        whose ``features`` say ``compact_on_request`` does so.
        """
        raise Conflict(
            f"{topic}/{partition}: this store does not compact on request", code="unsupported"
        )

    def room(self) -> Room:
        """The room for records. A store whose device is another machine's leaves this as it is."""
        return Room()

    def watch(self) -> None:
        """From now on let the bell tell what other processes do. Subscribers ask for it; a store
        that only publishes does without, and a store that is not shared has nothing to do.
        """

    async def idle(self) -> bool:
        """Wait until no call of this process to a remote place is under way; True if none was. A
        test with a ``ManualClock`` waits with it. A store whose calls are quick returns True.
        """
        return True

    async def close(self) -> None:
        """Make durable what is not yet, free the leases of this member, and let go. Idempotent."""


async def lag_of(store: Store, key: GroupKey) -> int:
    """How many records of its partition are due and not settled by a group."""
    first, end = await store.bounds(key.topic, key.partition)
    wall = store.clock.now().timestamp()
    return await store.change(key, lambda group: group.lag(end, first, wall=wall))


def pick_partition(event: Event, partitions: int, turn: int) -> int:
    """By key; without one by idempotency key, so that a repeat meets the first; else in turn."""
    if partitions == 1:
        return 0
    key = event.key if event.key is not None else event.idem_key
    return turn % partitions if key is None else partition_for(key, partitions)


def limits_of(topic: str, limits: Limits) -> Limits:
    """How large an event of ``topic`` may be: a dead letter is its record and the reason."""
    if not is_dead(topic):
        return limits
    return replace(limits, record_bytes=limits.record_bytes + DEAD_BYTES)


async def append_parts(
    events: Sequence[Event],
    partitions: int,
    turn: int,
    append: Callable[[int, list[int]], Awaitable[list[Receipt]]],
) -> list[Receipt]:
    """Let ``append`` keep each partition's share of the events, given by their indexes. If some
    fail, the first error is raised with the receipts of the others.
    """
    import asyncio

    parts: dict[int, list[int]] = {}
    for index, event in enumerate(events):
        parts.setdefault(pick_partition(event, partitions, turn), []).append(index)
        turn += event.key is None
    results = await asyncio.gather(
        *(append(number, indexes) for number, indexes in parts.items()), return_exceptions=True
    )
    receipts: list[Receipt | None] = [None] * len(events)
    failed: BaseException | None = None
    for indexes, result in zip(parts.values(), results, strict=True):
        if isinstance(result, BaseException):
            failed = failed or result
            continue
        for index, receipt in zip(indexes, result, strict=True):
            receipts[index] = receipt
    if isinstance(failed, TrunklineError):
        # A copy: others whose events were in the same write were given the same error.
        fields = {**failed.fields, "receipts": receipts}
        raise type(failed)(failed.message, hint=failed.hint, **fields) from failed
    if failed is not None:
        raise failed
    return cast("list[Receipt]", receipts)


_SCHEMES = (
    "memory:, file:<folder> or mongodb://…; "
    "connect also takes ws://, wss:// (a broker), nats:// and nats+tls://"
)


def check_url(url: object) -> str:
    if not isinstance(url, str):
        raise InvalidOption(f"not a bus: {url!r}", value=url, hint="for example file:.bus")
    return url


_MONGO = ("mongodb", "mongodb+srv")


def options_for(url: str) -> type[Options]:
    """The options that the store at ``url`` takes."""
    return MongoOptions if check_url(url).partition(":")[0] in _MONGO else StoreOptions


def open_store(url: str, **options: Any) -> Store:
    """``memory:``, ``file:<folder>`` or ``mongodb://…``. Options are those of ``options_for``, and
    ``clock``.
    """
    scheme, _, place = check_url(url).partition(":")
    if scheme == "memory":
        from trunkline.store.memory import MemoryStore

        return MemoryStore(**options)
    if scheme == "file":
        from trunkline.log.layout import folder_path
        from trunkline.store.file import FileStore

        if not place:
            raise InvalidOption("file: needs a folder", value=url, hint="for example file:.bus")
        if "?" in place:
            raise InvalidOption(f"not a folder: {place}", hint="options are arguments of their own")
        return FileStore(folder_path(place), **options)
    if scheme in _MONGO:
        try:
            found: Store = import_module("trunkline.store.mongo").MongoStore(url, **options)
        except ModuleNotFoundError as error:
            raise InvalidOption(
                f"a store in MongoDB needs {error.name}", hint="pip install 'trunkline[mongo]'"
            ) from None
        return found
    raise InvalidOption(f"no store for {scheme!r}", value=url, hint=_SCHEMES)
