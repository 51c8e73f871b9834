"""Where all groups stand, as lists and metrics show them: a look at thousands of groups holds up
neither the loop nor the members of the groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from trunkline.bus import GroupInfo
from trunkline.bus.groups import describe, group_info
from trunkline.bus.local import LocalBus
from trunkline.errors import NotFound, StorageError
from trunkline.folder import Folder
from trunkline.group import Group
from trunkline.group.members import MemberInfo
from trunkline.log import layout
from trunkline.names import GroupKey
from trunkline.patterns.measures import beside
from trunkline.store.file import FileStore

logger = logging.getLogger(__name__)

_AT_ONCE = 8  # groups that a thread reads before it lets others go first

_Stamp = tuple[int, int, int]


class GroupLooks:
    """The groups of a bus. In a folder, those that nobody works for in this process are read as
    another process would read them, in a thread, and kept until their files change: a scrape opens
    no file of a group that is idle.
    """

    def __init__(self, bus: LocalBus) -> None:
        self._bus = bus
        self._kept: dict[GroupKey, tuple[_Stamp, Group]] = {}

    async def all(self, turn: Callable[[], Awaitable[None]]) -> list[GroupInfo]:
        """Every group; ``turn`` is awaited between two of them."""
        bus = self._bus
        await bus.members()  # so that what this process is subscribed to is told
        members: defaultdict[str, list[MemberInfo]] = defaultdict(list)
        for one in await bus.store.members():
            members[one.group].append(one)
        if isinstance(bus.store, FileStore):
            found = await self._of_folder(bus.store, members, turn)
        else:
            found = []
            for key in await bus.store.groups():
                with contextlib.suppress(NotFound):  # it was removed meanwhile
                    found.append(await group_info(bus.store, key, members[key.group]))
                await turn()
        return found

    async def _of_folder(
        self,
        store: FileStore,
        members: defaultdict[str, list[MemberInfo]],
        turn: Callable[[], Awaitable[None]],
    ) -> list[GroupInfo]:
        keys = await beside(store, store.folder.groups)
        at_work = store.bell.groups()  # their files are open
        await self._read_changed(store.folder, [key for key in keys if key not in at_work], turn)
        wall = store.clock.now().timestamp()
        found = []
        for key in keys:
            kept = self._kept.get(key)
            with contextlib.suppress(NotFound):
                if key in at_work:
                    found.append(await group_info(store, key, members[key.group]))
                elif kept is not None:
                    bounds = await store.bounds(key.topic, key.partition)
                    found.append(describe(key, kept[1], bounds, members[key.group], wall))
            await turn()
        return found

    async def _read_changed(
        self, folder: Folder, keys: Sequence[GroupKey], turn: Callable[[], Awaitable[None]]
    ) -> None:
        before, self._kept = self._kept, {}
        stale = []
        for key in keys:
            stamp = _stamp(folder, key)
            kept = before.get(key)
            # A member that dies leaves its leases without a change to the files.
            if kept is not None and kept[0] == stamp and not kept[1].leases:
                self._kept[key] = kept
            else:
                stale.append(key)
            await turn()
        for start in range(0, len(stale), _AT_ONCE):
            some = stale[start : start + _AT_ONCE]
            self._kept.update(await asyncio.to_thread(_read, folder, some))
            await turn()


def _read(folder: Folder, keys: Sequence[GroupKey]) -> dict[GroupKey, tuple[_Stamp, Group]]:
    found = {}
    for key in keys:
        stamp = _stamp(folder, key)  # before the look: a change meanwhile shows in the next one
        try:
            found[key] = stamp, folder.look(key, _itself)
        except NotFound:  # it was removed meanwhile
            continue
        except StorageError as error:
            logger.warning("a group is left out of lists and metrics: %s", error)
    return found


def _itself(group: Group) -> Group:
    return group


def _stamp(folder: Folder, key: GroupKey) -> _Stamp:
    try:
        about = os.stat(os.path.join(folder.path, layout.group_stem(*key) + ".journal"))
    except OSError:
        return (0, 0, 0)
    return about.st_ino, about.st_size, about.st_mtime_ns
