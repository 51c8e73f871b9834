"""The folder: topics, partitions and groups of one bus, for one process among several.

Synchronous, and safe to share with other processes; within a process one thread at a time may use
a partition's writer or a group. A child made by ``fork`` must open the folder itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from trunkline.clock import Clock, SystemClock
from trunkline.errors import (
    Closed,
    Conflict,
    InvalidOption,
    NoBus,
    NotFound,
    StorageError,
    StorageFull,
)
from trunkline.event import Event, Record, new_id
from trunkline.group import Group
from trunkline.log import atomic, defined, layout, marker, reserve
from trunkline.log.head import Head
from trunkline.log.inotify import Change
from trunkline.log.journal import GroupFile, group_of
from trunkline.log.reader import Bounds, PartitionReader
from trunkline.log.recovery import READ_BYTES
from trunkline.log.writer import PartitionWriter, Placed
from trunkline.options import GroupOptions, StoreOptions, TopicOptions
from trunkline.topics import check_group, check_topic, is_dead

T = TypeVar("T")

_DEFAULT = TopicOptions()
_NO_NEWS = ("jsonl", "index", "lock", "tmp", "bak")  # what is in a log shows in its head
_REMOVED = 256
_AT_A_LOOK, _TURNS = 16, 5  # groups, as long as five turns will do for all of them
_folders: weakref.WeakSet[Folder] = weakref.WeakSet()


def _let_go() -> None:
    """A forked child must not keep its parent's locks alive."""
    for folder in list(_folders):
        folder.abandon()


os.register_at_fork(after_in_child=_let_go)


class GroupKey(NamedTuple):
    topic: str
    partition: int
    group: str


class Folder:
    def __init__(
        self, path: str, options: StoreOptions | None = None, clock: Clock | None = None
    ) -> None:
        self.path = os.path.abspath(path)
        self.options = options or StoreOptions()
        self.clock = clock or SystemClock()
        self.member = secrets.token_hex(6)
        self.is_full = False
        self._pid = os.getpid()
        self._closed = False
        self._readers: dict[tuple[str, int], PartitionReader] = {}
        self._writers: dict[tuple[str, int], PartitionWriter] = {}
        self._groups: dict[GroupKey, GroupFile] = {}
        self.removed: dict[GroupKey, GroupOptions | None] = {}  # policies, should members go on
        self._member_fd = -1
        self._topics_until = 0.0
        self.compacted: dict[tuple[str, int], tuple[int, int]] = {}
        self._topics: tuple[tuple[int, int], dict[str, TopicOptions]] = ((-1, -1), {})
        try:
            self._open()
        except NotADirectoryError as error:
            said = f"there is no bus at {self.path}: it is, or is in, a file"
            raise NoBus(said, path=self.path, hint="a bus is a folder") from error
        except OSError as error:
            kind = StorageFull if error.errno in atomic.FULL else StorageError
            said = f"{self.path} cannot be opened: {error.strerror}"
            hint = f"see who may: ls -ld {self.path}" if error.errno == errno.EACCES else ""
            raise kind(said, path=self.path, errno=error.errno, hint=hint) from error
        _folders.add(self)

    def _open(self) -> None:
        path = os.path.join(self.path, "bus.json")
        try:
            os.stat(path)
        except FileNotFoundError:
            # A folder without the marker is adopted if it looks like a bus, made if it is empty.
            if not self.options.create and not os.path.isdir(os.path.join(self.path, "wal")):
                said = f"there is no bus at {self.path}"
                raise NoBus(said, path=self.path, hint="trunkline init makes one") from None
            atomic.make_dir(self.path)
        kind = atomic.network_kind(self.path)
        if kind is not None and not self.options.allow_network:
            raise StorageError(
                f"{self.path} is on a network file system ({kind}), where locks cannot be trusted",
                path=self.path,
                hint="use a local disk, or allow_network=True if one process uses it at a time",
            )
        try:
            self._make(path)
        except OSError as error:
            if self.options.create or error.errno not in atomic.READ_ONLY:
                raise  # else what is there can be read
        self.id = marker.read(path)
        if self.options.reserve_bytes:
            reserve.fill(self.path, self.options.reserve_bytes)

    def _make(self, path: str) -> None:
        for name in ("wal", "offsets", "dlq", "members"):
            atomic.make_dir(os.path.join(self.path, name))
        if not os.path.exists(path):
            with self._locked():
                if not os.path.exists(path):
                    now = self.clock.now().isoformat()
                    atomic.replace_file(path, marker.encode(new_id(), now))

    def names(self, place: str) -> list[str]:
        """The files of a folder in it; none where one may only read, and it was never made."""
        path = os.path.join(self.path, place)
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise atomic.storage_error(error, path) from error

    # -- topics --------------------------------------------------------------------------------

    def topics(self) -> dict[str, TopicOptions]:
        """Every topic there is: those that were defined, and those that were published to, also
        where a head or ``topics.json`` was lost since.
        """
        found = dict(self._defined())
        for folder in ("wal", "dlq"):
            for topic, partition in layout.partitions(self.names(folder), folder == "dlq"):
                options = found.setdefault(topic, _DEFAULT)
                if partition >= options.partitions:
                    found[topic] = replace(options, partitions=partition + 1)
        return found

    def topic(self, name: str) -> TopicOptions:
        """A topic's options. Asked for with every publish, so that a change by another process is
        seen within a tenth of a second, not at once.
        """
        now = time.monotonic()
        if now > self._topics_until:
            self._topics_until = now + 0.1
            self._defined()
        return self._topics[1].get(name, _DEFAULT)

    def has_topic(self, name: str) -> bool:
        stem = layout.log_stem(check_topic(name), 0)
        head = os.path.join(self.path, stem + ".head")
        return name in self._defined() or os.path.exists(head) or name in self.topics()

    def define(self, name: str, options: TopicOptions) -> None:
        """Set the options of a topic. Partitions can be added, not taken away."""
        self.edit(name, lambda _: options)

    def edit(self, name: str, change: Callable[[TopicOptions], TopicOptions]) -> None:
        """Change the options of a topic from what they are now, whoever else does so too."""
        check_topic(name)
        with self._locked_topics() as topics:
            before = topics.get(name, _DEFAULT)
            options, have = change(before), before.partitions
            if options.partitions < have:
                raise Conflict(f"{name} has {have} partitions, they cannot be reduced", topic=name)
            if is_dead(name) and options.partitions > 1:
                raise InvalidOption("a dead letter topic has one partition", name="partitions")
            self._spread_groups(name, range(have, options.partitions))
            topics[name] = options

    def _spread_groups(self, topic: str, partitions: range) -> None:
        """Let the groups of a topic have the partitions that it gets, before there can be records
        in them that retention would remove.
        """
        for key in self.groups() if partitions else ():
            if (key.topic, key.partition) == (topic, 0):
                first = self.look(key, lambda group: group)
                for partition in partitions:
                    with self._apart(key._replace(partition=partition)) as file:
                        file.step(first.spread, file.timeout_s, make_room=self.make_room)

    def remove_topic(self, name: str) -> None:
        """Remove a topic, its records and its groups for good. From any thread."""
        if not self.has_topic(name):
            raise NotFound(f"there is no topic {name}", topic=name)
        for partition in range(self.topics().get(name, _DEFAULT).partitions):
            self._remove_partition(name, partition)
        with self._locked_topics() as topics:
            topics.pop(name, None)

    def _remove_partition(self, topic: str, partition: int) -> None:
        """Its records first: who works for a group that was removed finds none to begin anew with.
        Its head last: as long as that is there, and empty, nobody can publish to the next log.
        """
        writer = self.writer(topic, partition)
        head = writer.begin()
        try:
            folder, _, start = layout.log_stem(topic, partition).partition("/")
            place = os.path.join(self.path, folder)
            writer.hide(head)  # should we die now the offsets go on, and groups are right
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
                with contextlib.suppress(NotFound):  # somebody else removed it
                    self.remove_group(key)

    def _defined(self) -> dict[str, TopicOptions]:
        path = os.path.join(self.path, "topics.json")
        try:
            about = os.stat(path)
            stamp = (about.st_ino, about.st_mtime_ns)
            if self._topics[0] != stamp:
                self._topics = (stamp, defined.read(path))
        except FileNotFoundError:
            self._topics = ((-1, -1), {})
        except OSError as error:
            raise atomic.storage_error(error, path) from error
        return self._topics[1]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock of the folder itself, for what is neither a partition's nor a group's."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            atomic.lock(fd, self.options.lock_timeout_s, self.path)
            yield
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _locked_topics(self) -> Iterator[dict[str, TopicOptions]]:
        with self._locked():
            before = self._defined()
            yield (after := dict(before))
            if after != before:
                atomic.replace_file(os.path.join(self.path, "topics.json"), defined.encode(after))
                self._defined()

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
        options = self.topic(topic)
        if self.is_full and not reserve.fill(self.path, self.options.reserve_bytes):
            raise StorageFull(
                "no room to write: the reserve cannot be filled again",
                path=self.path,
                hint="free some space; publishing then goes on by itself",
            )
        try:
            placed = self.writer(topic, partition).append(bodies, events, options, timeout_s)
        except StorageFull:
            self.is_full = True
            raise
        self.is_full = False
        return placed

    def read(
        self, topic: str, partition: int, start: int, limit: int, bytes_max: int = READ_BYTES
    ) -> list[Record]:
        return self.reader(topic, partition).read(start, limit, bytes_max)

    def bounds(self, topic: str, partition: int) -> Bounds:
        return self.reader(topic, partition).bounds()

    def seek(self, topic: str, partition: int, when: datetime) -> int:
        return self.reader(topic, partition).seek(when)

    def reader(self, topic: str, partition: int) -> PartitionReader:
        key = (topic, partition)
        reader = self._readers.get(key)
        if reader is None:
            self._check()
            check_topic(topic)
            reader = self._readers[key] = PartitionReader(self.path, topic, partition)
        return reader

    def fresh_reader(self, topic: str, partition: int) -> PartitionReader:
        """A reader of one's own, for another thread."""
        return PartitionReader(self.path, check_topic(topic), partition)

    def forget(self, topic: str, partition: int | None = None) -> None:
        """Look at the files anew: they were rewritten, or removed."""
        for (name, number), reader in self._readers.items():
            if name == topic and partition in (None, number):
                reader.forget()

    def writer(self, topic: str, partition: int) -> PartitionWriter:
        if os.getpid() != self._pid or self._closed:
            self._check()
        key = (topic, partition)
        writer = self._writers.get(key)
        if writer is None:
            check_topic(topic)
            writer = PartitionWriter(self.path, topic, partition, self.options, self.clock)
            self._writers[key] = writer
        return writer

    def heard(self, changes: Iterable[Change]) -> set[str | GroupKey]:
        """What others did, from files that changed: the topics they published to, the groups they
        worked for or left, and "" for anything else that matters here.
        """
        found: set[str | GroupKey] = set()
        for folder, name in changes:
            stem, _, kind = name.rpartition(".")
            if kind == "head":
                if (place := layout.parse_stem(stem, folder.endswith("dlq"))) is not None:
                    writer = self._writers.get(place)
                    if writer is None or writer.is_behind():
                        found.add(place[0])
            elif kind in ("journal", "json") and (key := layout.parse_group_stem(stem)):
                file = self._groups.get(whose := GroupKey(*key))
                if file is not None and file.is_behind():
                    found.add(whose)
            elif os.path.basename(folder) == "members":
                found |= {k for k, f in list(self._groups.items()) if name in f.group.holders()}
            elif kind not in _NO_NEWS:
                found.add("")
        return found

    def noticed(self, turn: int = 0) -> set[str | GroupKey]:
        """The same by looking, for what no file tells: that a member is no more. Where there are
        many groups each turn looks at some of them, so as to hold up nobody for long. What nobody
        here reads, or takes a step for, is told once.
        """
        turns = min(1 + len(self._groups) // _AT_A_LOOK, _TURNS)
        some = [*self._groups.items()][turn % turns :: turns]
        files = {key: file for key, file in some if not file.was_noticed}
        readers = list(self._readers.items())  # a thread may be removing a topic
        found: set[str | GroupKey] = {topic for (topic, _), one in readers if one.is_behind()}
        holders = {who for file in files.values() for who in file.group.holders()} - {self.member}
        gone = {member for member in holders if not self.is_alive(member)}
        for key, file in files.items():
            if file.is_behind() or not gone.isdisjoint(file.group.holders()):
                file.was_noticed = True
                found.add(key)
        return found

    # -- groups --------------------------------------------------------------------------------

    def step(
        self, key: GroupKey, action: Callable[[Group], T], timeout_s: float | None = None
    ) -> T:
        """Run ``action`` on a group under its lock, after what members that are gone held was
        freed. What it changed is seen by every other process.
        """
        if os.getpid() != self._pid or self._closed:
            self._check()
        file = self._group(key)
        if timeout_s is None:
            timeout_s = self.options.lock_timeout_s
        if not file.is_adopted:
            file.begin(self.head(key.topic, key.partition), timeout_s)
        try:
            before, make_room = self._free_the_dead, self.make_room
            result = file.step(action, timeout_s, before=before, make_room=make_room)
            if file.size > self.options.snapshot_bytes or file.is_poisoned:
                with contextlib.suppress(StorageError, OSError):  # the next step tries again
                    file.renew(self._segment(key))
            return result
        finally:  # a thread may have removed it while we waited
            if self._groups.get(key) is not file and self._groups.setdefault(key, file) is not file:
                file.close()

    def has_news(self, key: GroupKey) -> bool:
        """Whether others changed a group, and nobody here was told so. Said once."""
        file = self._groups.get(key)
        if file is None or not file.group.news:
            return False
        file.group.news = False
        return True

    def look(self, key: GroupKey, action: Callable[[Group], T]) -> T:
        """Run ``action`` on a group as it is now, and leave no trace: one may look where one may
        not write, and what the action changes is forgotten. From any thread.
        """
        with self._apart(key, read_only=True) as file:
            return file.step(action, file.timeout_s, before=self._free_the_dead)

    @contextlib.contextmanager
    def _apart(self, key: GroupKey, *, read_only: bool = False) -> Iterator[GroupFile]:
        """A group as another process would have it: from any thread, and for a moment."""
        self._check()
        timeout_s = self.options.lock_timeout_s
        file = GroupFile(self.path, key, self.clock, timeout_s, read_only=read_only)
        reader = self.fresh_reader(key.topic, key.partition)
        try:
            file.begin(reader.head(), timeout_s)
            yield file
        finally:
            reader.close()
            file.close()

    def group(self, key: GroupKey) -> Group:
        """The group as it is now; ``NotFound`` if there is none."""
        if not self.has_group(key):
            raise NotFound(
                f"there is no group {key.group} on {key.topic}/{key.partition}", group=key.group
            )
        return self.look(key, lambda group: group)

    def has_group(self, key: GroupKey) -> bool:
        return self._group(key).exists()

    def groups(self, *, looked_at: bool = False) -> list[GroupKey]:
        found: set[GroupKey] = set()
        place = os.path.join(self.path, "offsets")
        names = set(self.names("offsets"))
        for name in names:
            stem, _, kind = name.rpartition(".")
            if kind not in ("journal", "json") or (kind == "json" and f"{stem}.journal" in names):
                continue  # a snapshot speaks for a group only where its journal is gone
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                whose = group_of(os.path.join(place, name), looked_at=looked_at)
                if whose is not None:
                    found.add(GroupKey(*whose))
        return sorted(found)

    def remove_group(self, key: GroupKey) -> None:
        if not self.has_group(key):
            raise NotFound(f"there is no group {key.group} on {key.topic}", group=key.group)
        file = self._group(key)
        file.remove(partial(self._forget_group, key, file))

    def _forget_group(self, key: GroupKey, file: GroupFile) -> None:
        self.removed[key] = file.group.was
        if len(self.removed) > _REMOVED:
            del self.removed[next(iter(self.removed))]
        self._groups.pop(key, None)

    def floors(self, topic: str, partition: int, group: str = "") -> list[int]:
        """Where each group of the partition stands, or that one if there is such a group. From
        any thread.
        """
        return [
            self.look(key, _done)
            for key in self.groups()
            if (key.topic, key.partition) == (topic, partition) and group in ("", key.group)
        ]

    def _group(self, key: GroupKey) -> GroupFile:
        file = self._groups.get(key)
        if file is None:
            check_topic(key.topic)
            check_group(key.group)
            file = GroupFile(self.path, key, self.clock, self.options.lock_timeout_s)
            file.group.was = self.removed.pop(key, None)
            self._groups[key] = file
        return file

    def _segment(self, key: GroupKey) -> int:
        floor = self._group(key).group.floor
        return self.reader(key.topic, key.partition).segment_of(floor)

    def join(self) -> str:
        """Become a member: as long as this process lives, what it leases is its own."""
        if self._member_fd < 0:
            place = os.path.join(self.path, "members")
            try:
                self._join(place)
            except OSError as error:
                raise atomic.storage_error(error, place) from error
        return self.member

    def _join(self, place: str) -> None:
        while self._member_fd < 0:
            for name in os.listdir(place):
                atomic.remove_unlocked(os.path.join(place, name))
            path = os.path.join(place, self.member)
            fd = atomic.open_file(path, os.O_RDWR | os.O_CREAT)
            atomic.lock(fd, self.options.lock_timeout_s, path)
            if os.fstat(fd).st_nlink:
                self._member_fd = fd
            else:
                os.close(fd)

    def is_alive(self, member: str) -> bool:
        return atomic.is_locked(os.path.join(self.path, "members", member))

    def _free_the_dead(self, group: Group) -> None:
        for member in group.holders() if group.leases else ():
            if member != self.member and not self.is_alive(member):
                group.free(member)
                group.news = True

    # -- room ----------------------------------------------------------------------------------

    def make_room(self) -> bool:
        """Give up the reserve, for what must be written on a full device; False if it is used up.
        Publishing waits until it is there again.
        """
        self.is_full = True
        return reserve.spend(self.path)

    # -- life ----------------------------------------------------------------------------------

    def sync_groups(self) -> None:
        """Make durable what groups noted without waiting for it."""
        failed: StorageError | None = None
        for file in list(self._groups.values()):
            try:
                file.sync()
            except StorageError as error:
                failed = error
        if failed is not None:
            raise failed

    def head(self, topic: str, partition: int) -> Head:
        return self.reader(topic, partition).head()

    def close(self) -> None:
        """Sync, write the groups' snapshots, let go of everything. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._leave)
            for reader in list(self._readers.values()):
                stack.callback(reader.close)
            for writer in list(self._writers.values()):
                stack.callback(writer.close)
            for key, file in self._groups.items():
                stack.callback(file.close)
                if file.group.created and file.exists():  # else it was merely asked about
                    stack.callback(self._save_group, key, file)

    def _save_group(self, key: GroupKey, file: GroupFile) -> None:
        with contextlib.suppress(StorageFull):
            reader = PartitionReader(self.path, key.topic, key.partition)
            try:
                file.save(reader.segment_of(file.group.floor))
            finally:
                reader.close()

    def abandon(self) -> None:
        """Let go of every lock without a word, as the death of the process would."""
        if self._member_fd >= 0:
            os.close(self._member_fd)
            self._member_fd = -1
        for writer in self._writers.values():
            writer.abandon()
        for file in self._groups.values():
            file.abandon()

    def _leave(self) -> None:
        if self._member_fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, "members", self.member))
            os.close(self._member_fd)
            self._member_fd = -1

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise Closed("this bus was opened before a fork", hint="open it again in the child")
        if self._closed:
            raise Closed("the bus is closed")


def _done(group: Group) -> int:
    """Up to where nothing is left to deliver; what was redriven is."""
    return min([group.floor, *(offset - 1 for offset in group.again)])
