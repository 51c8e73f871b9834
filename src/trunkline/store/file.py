"""A store in a folder: the file store's front, over ``Committer``, ``Watcher`` and ``Folder``.

Appending is in ``committer``. Reading and group transactions are short and run where they are
called, except that waiting for another process's lock never holds up the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime
from enum import IntEnum
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from trunkline.clock import Clock
from trunkline.errors import Closed, LockTimeout, StorageError, TrunklineError
from trunkline.event import Bounds, Event, Receipt, Record
from trunkline.features import Features
from trunkline.folder import Folder, upkeep
from trunkline.group import Group
from trunkline.group.members import MemberInfo
from trunkline.names import GroupKey
from trunkline.options import StoreOptions, TopicOptions, make, merged
from trunkline.store import Bell, InHand, Room, Store
from trunkline.store.committer import Committer
from trunkline.store.watcher import Watcher

T = TypeVar("T")
P = ParamSpec("P")
logger = logging.getLogger(__name__)

_LOCK_S = 0.005  # between two looks at a group that another process has locked


class StoreLife(IntEnum):
    """In this order. A store that is only read stays NEW; subscribers make it WATCHING."""

    NEW = 0
    TENDING = 1  # upkeep runs in the background
    WATCHING = 2  # so do the watcher, and the sync of the journals
    CLOSED = 3


_NEW, _CLOSED = StoreLife.NEW, StoreLife.CLOSED


class _Transaction:
    """One transaction of a group. The folder's lock is held from entry to exit, so it never races.
    The body does not await: then nothing else of this process runs while the lock is held.
    """

    __slots__ = ("_inner", "_key", "_store")

    def __init__(self, store: FileStore, key: GroupKey) -> None:
        self._store = store
        self._key = key

    async def __aenter__(self) -> Group:
        self._inner, group = await self._store.lock(self._key)
        return group

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._inner.__exit__(kind, error, trace)
        except OSError as failed:
            raise self._store.folder.storage_error(failed) from failed
        self._store.tell_news(self._key)


class FileStore(Store):
    features = Features(compact_on_request=True)

    def __init__(self, path: str, clock: Clock | None = None, **options: Any) -> None:
        self.folder = Folder(path, make(StoreOptions, options), clock)
        self.member = self.folder.member
        self.options = self.folder.options
        self.bell = Bell()
        self.clock = self.folder.clock
        self.limits = self.options.limits
        self.committer = Committer(self.folder, self.bell)
        self._group_locks: dict[GroupKey, asyncio.Lock] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._tend_at = 0.0
        self._life = _NEW

    # -- records -------------------------------------------------------------------------------

    def append(self, topic: str, events: Sequence[Event]) -> Awaitable[list[Receipt]]:
        if self._life is _NEW:
            self._tend()
        elif self._life is _CLOSED:
            raise Closed("the bus is closed")
        return self.committer.append(topic, events)

    async def read(self, topic: str, partition: int, start: int, limit: int) -> list[Record]:
        return self._ask(self.folder.read, topic, partition, start, limit)

    async def bounds(self, topic: str, partition: int) -> Bounds:
        return self._ask(self.folder.bounds, topic, partition)

    async def seek(self, topic: str, partition: int, when: datetime) -> int:
        return self._ask(self.folder.seek, topic, partition, when)

    async def trim(self, topic: str, partition: int, before: int) -> Bounds:
        await asyncio.to_thread(self._ask, upkeep.trim, self.folder, topic, partition, before)
        self.folder.forget(topic, partition)
        self.bell.ring(topic)
        return self._ask(self.folder.bounds, topic, partition)

    # -- groups --------------------------------------------------------------------------------

    def group(self, key: GroupKey) -> AbstractAsyncContextManager[Group]:
        return _Transaction(self, key)

    def in_hand(self, key: GroupKey) -> InHand | None:
        return self._ask(self.folder.in_hand, key)

    def marked_by(self, key: GroupKey, member: str) -> Callable[[int], bool] | None:
        return self._ask(self.folder.marked_by, key, member)

    def announce(self, told: Sequence[MemberInfo]) -> None:
        self._ask(self.folder.announce, told)

    async def members(self) -> list[MemberInfo]:
        return self._ask(self.folder.listening)

    async def remove_group(self, key: GroupKey) -> None:
        self._ask(self.folder.remove_group, key)
        self.bell.ring(key.topic)  # or pumps of this process hear of it by a reminder

    async def lock(self, key: GroupKey) -> tuple[AbstractContextManager[Group], Group]:
        """Open the group's transaction in the folder, once no other process has it locked.

        Not in a thread: a transaction looks at subscribers, and the loop looks at the group;
        neither may change meanwhile.
        """
        self._ask(self.folder.join)
        turn = self._group_locks.get(key)
        if turn is None:
            for unused in self.folder.let_go(self.bell.groups()):
                self._group_locks.pop(unused, None)
            turn = self._group_locks[key] = asyncio.Lock()
        if not turn.locked():
            with contextlib.suppress(LockTimeout):
                return self._ask(self._open_group, key, 0.02)
        wait_s = self.options.lock_timeout_s
        async with turn:
            until = monotonic() + wait_s
            while True:
                try:
                    return self._ask(self._open_group, key, 0.0)
                except LockTimeout as error:
                    if monotonic() >= until:
                        why = f"{key.group} on {key.topic} has been locked for {wait_s} s"
                        raise LockTimeout(why, hint=error.hint, **error.fields) from None
                await asyncio.sleep(_LOCK_S)

    def _open_group(
        self, key: GroupKey, timeout_s: float
    ) -> tuple[AbstractContextManager[Group], Group]:
        transaction = self.folder.transaction(key, timeout_s)
        return transaction, transaction.__enter__()

    def tell_news(self, key: GroupKey) -> None:
        """Tell the group's pump about changes by others that a transaction found. The files have
        changed already, so nothing else would.
        """
        if self.folder.has_news(key):
            self.bell.tell(key)

    async def groups(self) -> list[GroupKey]:
        return self._ask(self.folder.groups)

    # -- topics --------------------------------------------------------------------------------

    async def topics(self) -> dict[str, TopicOptions]:
        return self._ask(self.folder.topics)

    async def define(self, topic: str, options: TopicOptions | None) -> None:
        if options is None:
            await asyncio.to_thread(self._ask, self.folder.remove_topic, topic)
            self.folder.forget(topic)
        else:
            await asyncio.to_thread(self._ask, self.folder.define, topic, options)
        self.bell.ring(topic)

    async def edit(self, topic: str, values: dict[str, Any]) -> TopicOptions:
        def change(options: TopicOptions) -> TopicOptions:
            return merged(options, values)

        options = await asyncio.to_thread(self._ask, self.folder.edit, topic, change)
        self.bell.ring(topic)
        return options

    async def compact(self, topic: str, partition: int) -> int:
        gone = await asyncio.to_thread(self._ask, upkeep.compact, self.folder, topic, partition)
        self.folder.forget(topic, partition)
        return gone

    def room(self) -> Room:
        free: int | None = None
        with contextlib.suppress(OSError):
            device = os.statvfs(self.folder.path)
            free = device.f_bavail * device.f_frsize
        return Room(self.folder.is_full, free, self.folder.problem())

    # -- life ----------------------------------------------------------------------------------

    def watch(self) -> None:
        """Ring the bell when another process changes something, and sync the journals at times.
        Subscribers need it; a store that only publishes does without.
        """
        if self._life is _NEW:
            self._tend()
        if self._life is StoreLife.TENDING:
            self._life = StoreLife.WATCHING
            self._spawn(Watcher(self.folder, self.bell).run())
            sync = self.folder.sync_groups
            self._spawn(_every(self.options.journal_sync_s, sync, "syncing journals"))

    def _tend(self) -> None:
        self._life = StoreLife.TENDING
        self._tend_at = monotonic() + self.options.upkeep_s
        self._spawn(_every(self.options.upkeep_s, partial(upkeep.tend, self.folder), "upkeep"))

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(job))

    def _ask(self, look: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The folder's answer. An error of the system becomes a ``StorageError``."""
        if self._life is _CLOSED:
            raise Closed("the bus is closed")
        try:
            return look(*args, **kwargs)
        except OSError as error:
            raise self.folder.storage_error(error) from error

    async def close(self) -> None:
        if self._life is _CLOSED:
            return
        self._life = _CLOSED
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.committer.close()
        done = self.committer.finished
        if done and monotonic() < self._tend_at:  # short scripts leave upkeep to nobody else
            try:
                await asyncio.to_thread(upkeep.tend, self.folder, done)
            except (TrunklineError, OSError) as error:
                logger.warning("upkeep failed: %s", error)
        try:
            self.folder.close()
        except OSError as error:
            raise self.folder.storage_error(error) from error
        except StorageError as error:
            raise self.folder.explain(error) from error


async def _every(seconds: float, job: Callable[[], object], what: str) -> None:
    """Do a job in a thread now and then. A job that fails is tried again."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await asyncio.to_thread(job)
        except (TrunklineError, OSError) as error:
            logger.warning("%s failed: %s", what, error)
