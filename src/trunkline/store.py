"""The first plug: where records and groups live.

A store numbers and keeps records, and keeps groups. It knows nothing of subscribers. Ten methods,
and a bell that rings when something may have changed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, Protocol, TypeVar

import msgspec

from trunkline.errors import InvalidOption
from trunkline.event import Event, Receipt, Record
from trunkline.group import Group
from trunkline.log.folder import GroupKey
from trunkline.log.reader import Bounds
from trunkline.options import TopicOptions
from trunkline.topics import partition_for

T = TypeVar("T")

__all__ = [
    "Bell",
    "Bounds",
    "Features",
    "GroupKey",
    "Store",
    "check_url",
    "lag_of",
    "open_store",
    "pick_partition",
]


class Features(msgspec.Struct, frozen=True):
    """What a backend promises. What it does not promise it refuses; it never just differs."""

    persistent: bool = True  # survives close and reopen
    shared: bool = True  # several processes may have it open
    durability: str = "fsync"  # the strongest an acknowledgement can mean


class Bell:
    """Tells listeners that a topic, or anything (None), may have changed. Rings cost little and
    may be false; a missed one is made up for by polling.
    """

    def __init__(self) -> None:
        self._listeners: dict[Callable[[str | None], None], str | None] = {}
        self._groups: dict[Callable[[str | None], None], GroupKey] = {}

    def listen(
        self,
        listener: Callable[[str | None], None],
        topic: str | None = None,
        group: GroupKey | None = None,
    ) -> None:
        """Call ``listener`` for rings of ``topic``, or for all, and for what is told of a group."""
        self._listeners[listener] = topic
        if group is not None:
            self._groups[listener] = group

    def ignore(self, listener: Callable[[str | None], None]) -> None:
        self._listeners.pop(listener, None)
        self._groups.pop(listener, None)

    def ring(self, topic: str | None = None) -> bool:
        """Whether there was somebody to hear it."""
        heard = False
        for listener, wanted in list(self._listeners.items()):
            if wanted is None or topic is None or wanted == topic:
                listener(topic)
                heard = True
        return heard

    def tell(self, group: GroupKey) -> None:
        """Ring for who works for a group alone: there may be many, and others need not look."""
        for listener in [one for one, wanted in self._groups.items() if wanted == group]:
            listener(None)

    def remind(self, turn: int, turns: int) -> None:
        """Ring for no reason, for one share of the listeners a turn: all at once take long."""
        for listener in list(self._listeners)[turn % turns :: turns]:
            listener(None)


class Store(Protocol):
    """Every method may raise ``StorageError``; names are checked before anything is written."""

    features: Features
    bell: Bell
    member: str  # who this process is to the others of a group

    def append(self, topic: str, events: Sequence[Event]) -> Awaitable[list[Receipt]]:
        """Number and keep the events; returns once they are as durable as the topic asks for.

        Events of one partition are kept all or none. A topic that is not defined is made with
        default options. An event whose ``idem_key`` was seen within the topic's window is not kept
        again: its receipt names the first one and says so.
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

    async def update(self, key: GroupKey, step: Callable[[Group], T] | None) -> T:
        """Run ``step`` on the group as it stands, alone. What it changed is visible to every other
        member when this returns, and what members that are gone held was freed before.
        ``None`` removes the group.
        """

    async def groups(self) -> list[GroupKey]:
        """Every group there is."""

    async def topics(self) -> dict[str, TopicOptions]:
        """Every topic there is."""

    async def define(self, topic: str, options: TopicOptions | None) -> None:
        """Set a topic's options; ``None`` removes the topic, its records and its groups."""

    async def close(self) -> None:
        """Make durable what is not yet, and let go. Idempotent."""


def watch(store: Store) -> None:
    """Let the bell of a store tell at once what other processes do, if it has others."""
    begin = getattr(store, "watch", None)
    if begin is not None:
        begin()


async def lag_of(store: Store, key: GroupKey) -> int:
    """How many records of its partition a group has not settled."""
    first, end = await store.bounds(key.topic, key.partition)
    return await store.update(key, lambda group: group.lag(end, first))


def pick_partition(event: Event, partitions: int, turn: int) -> int:
    """By key; without one by idempotency key, so that a repeat meets the first; else in turn."""
    if partitions == 1:
        return 0
    key = event.key if event.key is not None else event.idem_key
    return turn % partitions if key is None else partition_for(key, partitions)


_SCHEMES = "memory: or file:<folder>; connect also takes ws:// and wss://, for a broker"


def check_url(url: object) -> str:
    if not isinstance(url, str):
        raise InvalidOption(f"not a bus: {url!r}", value=url, hint="for example file:.bus")
    return url


def open_store(url: str, **options: Any) -> Store:
    """``memory:`` or ``file:<folder>``. Options are those of ``StoreOptions``, and ``clock``."""
    scheme, _, place = check_url(url).partition(":")
    if scheme == "memory":
        from trunkline.stores.memory import MemoryStore

        return MemoryStore(**options)
    if scheme == "file":
        from trunkline.log.layout import folder_path
        from trunkline.stores.file import FileStore

        if not place:
            raise InvalidOption("file: needs a folder", value=url, hint="for example file:.bus")
        if "?" in place:
            raise InvalidOption(f"not a folder: {place}", hint="options are arguments of their own")
        return FileStore(folder_path(place), **options)
    raise InvalidOption(f"no store for {scheme!r}", value=url, hint=_SCHEMES)
