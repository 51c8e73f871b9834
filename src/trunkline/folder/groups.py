"""The groups of a bus folder: transactions on them, looks at them, and their removal."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TypeVar

from trunkline.errors import NotFound, StorageError, StorageFull
from trunkline.folder.group_file import GroupFile
from trunkline.folder.journal import group_of
from trunkline.folder.members import FolderMembers
from trunkline.folder.partitions import Partitions, open_max
from trunkline.folder.reserve import Reserve
from trunkline.folder.root import Root
from trunkline.group import Group
from trunkline.log import layout
from trunkline.names import GroupKey, check_group, check_topic
from trunkline.options import GroupOptions

T = TypeVar("T")
_COMPARE_S = 1.0  # how long a publisher waits for a group to be compared with its log
_STEM = 100  # characters of a file name that are never cut
_REMOVED = 256  # policies that are kept of groups that were removed
_AT_A_LOOK = 16  # groups that one look goes through,
_LOOKS = 5  # unless that would take more looks than this to go through all


class FolderGroups:
    def __init__(
        self, root: Root, partitions: Partitions, members: FolderMembers, reserve: Reserve
    ) -> None:
        self._root = root
        self._partitions = partitions
        self._members = members
        self._reserve = reserve
        self._open_max = open_max()
        self._files: dict[GroupKey, GroupFile] = {}
        self._removed: dict[GroupKey, GroupOptions | None] = {}
        self._compared: set[tuple[str, int]] = set()

    # -- transactions --------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self, key: GroupKey, timeout_s: float | None = None) -> Iterator[Group]:
        """A group under its lock, after the leases of members that are gone were freed. On leaving,
        every other process sees the changes; after an error there are none.
        """
        self._root.check()
        file = self._file(key)
        options = self._root.options
        if timeout_s is None:
            timeout_s = options.lock_timeout_s
        if not file.is_adopted:
            self._look_at_boot(key.topic, key.partition, timeout_s)
            file.begin(self._partitions.reader(key.topic, key.partition).head(), timeout_s)
        try:
            before, make_room = partial(self._free_the_dead, key), self._reserve.spend
            with file.transaction(timeout_s, before=before, make_room=make_room) as group:
                yield group
            if file.size > options.snapshot_bytes or file.is_poisoned:
                with contextlib.suppress(StorageError, OSError):  # the next transaction tries again
                    reader = self._partitions.reader(key.topic, key.partition)
                    file.renew(reader.segment_of(file.group.floor))
        finally:  # a thread may have removed the group while this one waited
            if self._files.get(key) is not file and self._files.setdefault(key, file) is not file:
                file.close()

    def look(self, key: GroupKey, action: Callable[[Group], T]) -> T:
        """Run ``action`` on a group as it is now, and leave no trace. It works where this process
        may not write, and changes of the action are forgotten. From any thread.
        """
        with (
            self.apart(key, read_only=True) as file,
            file.transaction(file.timeout_s, before=partial(self._free_the_dead, key)) as group,
        ):
            return action(group)

    @contextlib.contextmanager
    def apart(self, key: GroupKey, *, read_only: bool = False) -> Iterator[GroupFile]:
        """A group as another process would have it: from any thread, and for a moment."""
        self._root.check()
        root = self._root
        timeout_s = root.options.lock_timeout_s
        file = GroupFile(root.path, key, root.clock, timeout_s, read_only=read_only)
        reader = self._partitions.fresh_reader(key.topic, key.partition)
        try:
            file.begin(reader.head(), timeout_s)
            yield file
        finally:
            reader.close()
            file.close()

    def spread(self, key: GroupKey, partitions: range) -> None:
        """Begin a group on partitions that its topic gets."""
        first = self.look(key, lambda group: group)
        for partition in partitions:
            with (
                self.apart(key._replace(partition=partition)) as file,
                file.transaction(file.timeout_s, make_room=self._reserve.spend) as later,
            ):
                first.spread(later)

    def holders(self, key: GroupKey) -> set[str]:
        """The members, living or not, that hold records of a group. From any thread."""
        with (
            self.apart(key, read_only=True) as file,
            file.transaction(file.timeout_s) as group,
        ):
            return group.holders()

    def _free_the_dead(self, key: GroupKey, group: Group) -> None:
        for member in self._members.gone(group.holders()) if group.leases else ():
            group.free(member, self._members.marked_by(member, key))
            group.add_news()

    # -- which groups there are ----------------------------------------------------------------

    def all(self, *, looked_at: bool = False, begin: str = "") -> list[GroupKey]:
        """Every group; with ``looked_at`` also the files that a mere look at a group left, with
        ``begin`` those whose files begin so.
        """
        found: set[GroupKey] = set()
        place = os.path.join(self._root.path, "offsets")
        names = set(self._root.names("offsets"))
        for name in names:
            stem, _, kind = name.rpartition(".")
            if not stem.startswith(begin) or kind not in ("journal", "json"):
                continue
            if kind == "json" and f"{stem}.journal" in names:
                continue  # a snapshot speaks for a group only where its journal is gone
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                key = group_of(os.path.join(place, name), looked_at=looked_at)
                if key is not None:
                    found.add(GroupKey(*key))
        return sorted(found)

    def has(self, key: GroupKey) -> bool:
        return self._file(key).exists()

    def remove(self, key: GroupKey) -> None:
        if not self.has(key):
            raise NotFound(f"there is no group {key.group} on {key.topic}", group=key.group)
        file = self._file(key)
        file.remove(partial(self._forget, key, file))

    def _forget(self, key: GroupKey, file: GroupFile) -> None:
        self._removed[key] = file.group.was
        if len(self._removed) > _REMOVED:
            del self._removed[next(iter(self._removed))]
        self._files.pop(key, None)

    def _file(self, key: GroupKey) -> GroupFile:
        file = self._files.get(key)
        if file is None:
            check_topic(key.topic)
            check_group(key.group)
            root, was = self._root, self._removed.pop(key, None)
            file = GroupFile(root.path, key, root.clock, root.options.lock_timeout_s, was=was)
            self._files[key] = file
        return file

    # -- epochs of the log ---------------------------------------------------------------------

    def _look_at_boot(self, topic: str, partition: int, timeout_s: float) -> None:
        """Let the log begin an epoch if the machine was booted since records lay unsynced in it,
        before a group says where it stands.
        """
        head = self._partitions.reader(topic, partition).head()
        if head.boot:
            writer = self._partitions.writer(topic, partition)
            if not writer.is_of_boot(head):
                writer.begin(timeout_s)
                writer.end()
                self.tell_epoch(topic, partition)

    def compare(self, topic: str, partition: int) -> None:
        """Before this process first writes to a log that is not always synced: if a group has
        settled offsets that the log does not have, records would get offsets that it skips.
        """
        if (topic, partition) not in self._compared:
            self._compared.add((topic, partition))
            stem = layout.group_stem(topic, partition, "").removeprefix("offsets/")
            found = self.all(begin=stem[:_STEM])
            mine = [key for key in found if (key.topic, key.partition) == (topic, partition)]
            if mine:
                self._partitions.writer(topic, partition).compare(partial(self._is_ahead, mine))

    def _is_ahead(self, keys: list[GroupKey], next_offset: int) -> bool:
        """Whether a group has settled an offset that its log has yet to give."""
        root = self._root
        for key in keys:
            file = GroupFile(root.path, key, root.clock, _COMPARE_S, read_only=True)
            reader = self._partitions.fresh_reader(key.topic, key.partition)
            try:
                file.begin(reader.head(), _COMPARE_S)
                with file.transaction(_COMPARE_S) as group:
                    if group.last_settled >= next_offset:
                        return True
            except (StorageError, OSError):  # damage, or a lock: its own user meets it
                continue
            finally:
                reader.close()
                file.close()
        return False

    def tell_epoch(self, topic: str, partition: int) -> None:
        """Tell every group of a partition about a new epoch now. A group that missed this one
        would learn less exactly from the next one where offsets were used again.
        """
        if not self._partitions.writer(topic, partition).take_new_epoch():
            return
        for key in self.all():
            if (key.topic, key.partition) == (topic, partition):
                file = GroupFile(self._root.path, key, self._root.clock, 0.0)
                reader = self._partitions.fresh_reader(topic, partition)
                with contextlib.suppress(StorageError, OSError):
                    file.begin(reader.head(), 0.0)
                reader.close()
                file.close()

    # -- news of other members -----------------------------------------------------------------

    def take_news(self, key: GroupKey) -> bool:
        """Whether others changed a group since this process last asked."""
        file = self._files.get(key)
        return file is not None and file.group.take_news()

    def is_behind(self, key: GroupKey) -> bool:
        """Whether others changed a group that this process has open."""
        file = self._files.get(key)
        return file is not None and file.is_behind()

    def held_by(self, member: str) -> set[GroupKey]:
        """The groups in which a member holds leases."""
        return {key for key, file in list(self._files.items()) if member in file.group.holders()}

    def changed(self, turn: int) -> set[GroupKey]:
        """The groups that others changed, or in which a member that is gone holds leases. Each is
        told once until its next transaction. Where there are many groups each turn looks at some
        of them, so that no turn takes long.
        """
        turns = min(1 + len(self._files) // _AT_A_LOOK, _LOOKS)
        some = [*self._files.items()][turn % turns :: turns]
        files = {key: file for key, file in some if not file.is_noticed}
        holders = {member for file in files.values() for member in file.group.holders()}
        gone = self._members.gone(holders)
        found: set[GroupKey] = set()
        for key, file in files.items():
            if file.is_behind() or not gone.isdisjoint(file.group.holders()):
                file.notice()
                found.add(key)
        return found

    # -- files ---------------------------------------------------------------------------------

    def rest(self, used: Collection[GroupKey]) -> list[GroupKey]:
        """Close the files of groups that nobody in ``used`` needs, where many are open. Returns
        them. The next transaction opens them, as another process would.
        """
        closed: list[GroupKey] = []
        surplus = len(self._files) - self._open_max
        if surplus > 0:
            for key in [key for key in self._files if key not in used][:surplus]:
                file = self._files.pop(key)
                with contextlib.suppress(StorageError):
                    file.sync()
                file.close()
                closed.append(key)
        return closed

    def sync(self) -> None:
        """Make durable what transactions wrote without waiting for it."""
        failed: StorageError | None = None
        for file in list(self._files.values()):
            try:
                file.sync()
            except StorageError as error:
                failed = error
        if failed is not None:
            raise failed

    def close(self, stack: contextlib.ExitStack) -> None:
        """Write the snapshots and close the files, as callbacks of ``stack``."""
        for key, file in self._files.items():
            stack.callback(file.close)
            if file.group.created and file.exists():  # else this process merely looked at it
                stack.callback(self._save, key, file)

    def _save(self, key: GroupKey, file: GroupFile) -> None:
        with contextlib.suppress(StorageFull):
            reader = self._partitions.fresh_reader(key.topic, key.partition)
            try:
                file.save(reader.segment_of(file.group.floor))
            finally:
                reader.close()

    def abandon(self) -> None:
        """Let go of every lock, as the death of the process would."""
        for file in self._files.values():
            file.abandon()
