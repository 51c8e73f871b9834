"""The folder: topics, partitions, groups and members of one bus, for one process among several.

``Folder`` is the front. Each noun has a module of its own: ``root``, ``topics``, ``partitions``,
``groups``, ``members``, ``reserve``. What is done to a log besides appending is in ``upkeep``.

Synchronous, and safe to share with other processes; within a process one thread at a time may use
a partition's writer or a group. A child made by ``fork`` must open the folder itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import TypeVar

from trunkline.clock import Clock
from trunkline.errors import Conflict, InvalidOption, NotFound, StorageError
from trunkline.event import Bounds, Event, Record
from trunkline.folder import news
from trunkline.folder.groups import FolderGroups
from trunkline.folder.in_hand import GroupMarks
from trunkline.folder.inotify import Change
from trunkline.folder.members import FolderMembers
from trunkline.folder.partitions import Partitions
from trunkline.folder.reserve import Reserve
from trunkline.folder.root import Root
from trunkline.folder.topics import DEFAULT, FolderTopics
from trunkline.group import Group
from trunkline.group.members import MemberInfo
from trunkline.log import atomic, layout
from trunkline.log.head import Head
from trunkline.log.reader import PartitionReader
from trunkline.log.recover import READ_BYTES
from trunkline.log.writer import PartitionWriter, Placed
from trunkline.names import GroupKey, check_topic, is_dead
from trunkline.options import StoreOptions, TopicOptions

T = TypeVar("T")

_folders: weakref.WeakSet[Folder] = weakref.WeakSet()


def _abandon_all() -> None:
    """A forked child must not keep its parent's locks alive."""
    for folder in list(_folders):
        folder.abandon()


os.register_at_fork(after_in_child=_abandon_all)


class Folder:
    def __init__(
        self, path: str, options: StoreOptions | None = None, clock: Clock | None = None
    ) -> None:
        self._root = root = Root(path, options, clock)
        self.path = root.path
        self.options = root.options
        self.clock = root.clock
        self.id = root.id
        self.reserve = Reserve(root.path, self.options.reserve_bytes)
        if self.options.reserve_bytes:
            self.reserve.fill()
        self._members = FolderMembers(root.path, self.options.lock_timeout_s)
        self._topics = FolderTopics(root)
        self._partitions = Partitions(root, self.reserve)
        self._groups = FolderGroups(root, self._partitions, self._members, self.reserve)
        self.member = self._members.own
        self.compacted: dict[tuple[str, int], tuple[int, int]] = {}  # what compaction last saw
        _folders.add(self)

    @property
    def is_full(self) -> bool:
        """Whether the device was full when this process last wrote."""
        return self.reserve.is_full

    def names(self, place: str) -> list[str]:
        """The files of a folder in it."""
        return self._root.names(place)

    def storage_error(self, error: OSError) -> StorageError:
        """What an error of the system means to a user of the folder."""
        return self.explain(atomic.storage_error(error, error.filename or self.path))

    def problem(self) -> str:
        """Why nothing can be written any more; "" if there is no reason."""
        return self._root.problem()

    def explain(self, error: StorageError) -> StorageError:
        """The error of one file, or what happened to the whole folder, if that is its cause."""
        number = error.fields.get("errno")
        if number in (errno.ENOENT, errno.ESTALE, *atomic.READ_ONLY) and (why := self.problem()):
            hint = "put the folder back, or end this process and open the bus anew"
            return StorageError(why, path=self.path, errno=number, hint=hint)
        return error

    # -- topics --------------------------------------------------------------------------------

    def topics(self) -> dict[str, TopicOptions]:
        """Every topic there is: those that were defined, and those that were published to."""
        return self._topics.all()

    def topic(self, name: str) -> TopicOptions:
        """A topic's options, as they were at most a tenth of a second ago."""
        return self._topics.options(name)

    def has_topic(self, name: str) -> bool:
        return self._topics.has(name)

    def define(self, name: str, options: TopicOptions) -> None:
        """Set the options of a topic. Partitions can be added, not taken away."""
        self.edit(name, lambda _: options)

    def edit(self, name: str, change: Callable[[TopicOptions], TopicOptions]) -> TopicOptions:
        """Change the options of a topic from what they are now, also while others change them."""
        check_topic(name)
        with self._topics.changing() as topics:
            before = topics.get(name, DEFAULT)
            options, have = change(before), before.partitions
            if options.partitions < have:
                raise Conflict(f"{name} has {have} partitions, they cannot be reduced", topic=name)
            if is_dead(name) and options.partitions > 1:
                raise InvalidOption("a dead letter topic has one partition", name="partitions")
            # The groups come first: retention would remove records that no group waits for.
            for key in self.groups() if options.partitions > have else ():
                if (key.topic, key.partition) == (name, 0):
                    self._groups.spread(key, range(have, options.partitions))
            topics[name] = options
        return options

    def remove_topic(self, name: str) -> None:
        """Remove a topic, its records and its groups for good. From any thread."""
        if not self.has_topic(name):
            raise NotFound(f"there is no topic {name}", topic=name)
        for partition in range(self.topics().get(name, DEFAULT).partitions):
            self._remove_partition(name, partition)
        with self._topics.changing() as topics:
            topics.pop(name, None)

    def _remove_partition(self, topic: str, partition: int) -> None:
        """The records go first: a member that works for a removed group then finds none to begin
        anew with. The head goes last: while it is there, and empty, nobody can publish to the next
        log.
        """
        writer = self.writer(topic, partition)
        head = writer.begin()
        try:
            folder, _, start = layout.log_stem(topic, partition).partition("/")
            place = os.path.join(self.path, folder)
            writer.hide(head)  # if this process dies now, the offsets go on and groups are right
            mine = [f for f in os.listdir(place) if layout.belongs(f, start, folder == "dlq")]
            paths = [os.path.join(place, f) for f in mine if not f.endswith(".head")]
            atomic.remove_files(paths)
            self._remove_groups(topic, partition)
            writer.clear()
            self._remove_groups(topic, partition)  # begun anew where the log had ended
            atomic.remove_files([os.path.join(place, start + ".head")])
            writer.abandon()
        finally:
            writer.end()

    def _remove_groups(self, topic: str, partition: int) -> None:
        for key in self.groups(looked_at=True):
            if (key.topic, key.partition) == (topic, partition):
                with contextlib.suppress(NotFound):  # another process removed it
                    self.remove_group(key)

    # -- records -------------------------------------------------------------------------------

    def append(
        self,
        topic: str,
        partition: int,
        bodies: Sequence[bytes],
        events: Sequence[Event],
        timeout_s: float | None = None,
    ) -> Placed:
        """Write one batch; see ``PartitionWriter.append``."""
        options = self._topics.options(topic)
        if options.durability == "os":
            self._groups.compare(topic, partition)
        placed = self._partitions.append(topic, partition, bodies, events, options, timeout_s)
        if options.durability == "os":
            self._groups.tell_epoch(topic, partition)
        return placed

    def read(
        self, topic: str, partition: int, start: int, limit: int, bytes_max: int = READ_BYTES
    ) -> list[Record]:
        return self._partitions.reader(topic, partition).read(start, limit, bytes_max)

    def bounds(self, topic: str, partition: int) -> Bounds:
        return self._partitions.reader(topic, partition).bounds()

    def seek(self, topic: str, partition: int, when: datetime) -> int:
        return self._partitions.reader(topic, partition).seek(when)

    def head(self, topic: str, partition: int) -> Head:
        return self._partitions.reader(topic, partition).head()

    def reader(self, topic: str, partition: int) -> PartitionReader:
        return self._partitions.reader(topic, partition)

    def fresh_reader(self, topic: str, partition: int) -> PartitionReader:
        """A reader of the caller's own, for another thread."""
        return self._partitions.fresh_reader(topic, partition)

    def writer(self, topic: str, partition: int) -> PartitionWriter:
        return self._partitions.writer(topic, partition)

    def forget(self, topic: str, partition: int | None = None) -> None:
        """Look at the files anew: they were rewritten, or removed."""
        self._partitions.forget(topic, partition)

    # -- groups --------------------------------------------------------------------------------

    def transaction(
        self, key: GroupKey, timeout_s: float | None = None
    ) -> AbstractContextManager[Group]:
        """A group under its lock; see ``FolderGroups.transaction``."""
        return self._groups.transaction(key, timeout_s)

    def step(
        self, key: GroupKey, action: Callable[[Group], T], timeout_s: float | None = None
    ) -> T:
        """Run ``action`` on a group in a transaction."""
        with self._groups.transaction(key, timeout_s) as group:
            return action(group)

    def look(self, key: GroupKey, action: Callable[[Group], T]) -> T:
        """Run ``action`` on a group as it is now, and leave no trace. From any thread."""
        return self._groups.look(key, action)

    def holders(self, key: GroupKey) -> set[str]:
        """The members, living or not, that hold records of a group. From any thread."""
        return self._groups.holders(key)

    def group(self, key: GroupKey) -> Group:
        """The group as it is now; ``NotFound`` if there is none."""
        if not self.has_group(key):
            raise NotFound(
                f"there is no group {key.group} on {key.topic}/{key.partition}", group=key.group
            )
        return self._groups.look(key, lambda group: group)

    def has_group(self, key: GroupKey) -> bool:
        return self._groups.has(key)

    def groups(self, *, looked_at: bool = False) -> list[GroupKey]:
        """Every group; with ``looked_at`` also the files that a mere look at a group left."""
        return self._groups.all(looked_at=looked_at)

    def remove_group(self, key: GroupKey) -> None:
        self._groups.remove(key)

    def floors(self, topic: str, partition: int, group: str = "") -> list[int]:
        """For each group of the partition, or for one of them, the offset up to which nothing is
        left to deliver. From any thread.
        """
        return [
            self.look(key, _delivered)
            for key in self.groups()
            if (key.topic, key.partition) == (topic, partition) and group in ("", key.group)
        ]

    def has_news(self, key: GroupKey) -> bool:
        """Whether others changed a group since this process last asked."""
        return self._groups.take_news(key)

    def sync_groups(self) -> None:
        """Make durable what groups wrote without waiting for it."""
        self._groups.sync()

    # -- members, and what they do -------------------------------------------------------------

    def join(self) -> str:
        """Become a member: what this process leases is its own as long as it lives."""
        return self._members.join()

    def in_hand(self, key: GroupKey) -> GroupMarks | None:
        """Where the handlers of this process mark the records of a group that they have in hand;
        None if the device is full.
        """
        return self._members.marks(key)

    def marked_by(self, key: GroupKey, member: str) -> Callable[[int], bool] | None:
        """Whether a member, living or not, has a record of a group in hand; None if that is not
        known.
        """
        return self._members.marked_by(member, key)

    def is_alive(self, member: str) -> bool:
        return self._members.is_alive(member)

    def announce(self, told: Sequence[MemberInfo]) -> None:
        """Let others see what this process is subscribed to."""
        self._members.announce(told)

    def listening(self) -> list[MemberInfo]:
        """What the living members are subscribed to."""
        return self._members.listening()

    def heard(self, changes: Iterable[Change]) -> news.News:
        """The news in files that the kernel says have changed."""
        return news.from_changes(changes, self._partitions, self._groups)

    def noticed(self, turn: int = 0) -> news.News:
        """The news that a look at the files shows."""
        return news.from_a_look(turn, self._partitions, self._groups)

    # -- life ----------------------------------------------------------------------------------

    def make_room(self) -> bool:
        """Give up the reserve, for something that must be written on a full device; False if it
        is used up. Publishing waits until it is there again.
        """
        return self.reserve.spend()

    def let_go(self, used: Collection[GroupKey]) -> list[GroupKey]:
        """Close files, where many are open: groups that are not in ``used``, and logs that were
        written to longest ago. Returns the groups.
        """
        closed = self._groups.rest(used)
        self._partitions.rest()
        return closed

    def close(self) -> None:
        """Sync, write the groups' snapshots, let go of everything. Later calls do nothing."""
        if not self._root.close() or self._root.is_forked:
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._members.leave)
            for file in self._partitions.files():
                stack.callback(file.close)
            self._groups.close(stack)

    def abandon(self) -> None:
        """Let go of every lock without a word, as the death of the process would."""
        self._members.abandon()
        self._partitions.abandon()
        self._groups.abandon()


def _delivered(group: Group) -> int:
    """The offset up to which nothing is left to deliver. Redriven records are left."""
    return min([group.floor, *(offset - 1 for offset in group.again)])
