"""One group of one partition on disk: its lock, its journal and its snapshot.

Under the group's lock each process reads what others appended to the journal, changes the group,
and appends its own changes. The snapshot says up to which byte of which generation of the journal
it reaches. A new generation begins when the journal has grown large.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from random import getrandbits
from typing import Any

import msgspec

from trunkline.clock import Clock
from trunkline.errors import StorageError, StorageFull
from trunkline.folder import snapshot
from trunkline.folder.group_lock import GroupLock
from trunkline.folder.journal import Journal, is_first_generation
from trunkline.group import Group, load
from trunkline.group.changes import Anchored, AnyOp, Created, Edited, Paused, Redriven, Sought
from trunkline.log import atomic, layout
from trunkline.log.head import FORMAT, Head, decode
from trunkline.options import GroupOptions

# A change that somebody asked for is durable when the call returns.
_AT_ONCE = frozenset({Created, Edited, Paused, Redriven, Sought})


class GroupFile:
    """One group. Everything happens in a ``transaction``. With ``read_only`` the files are left as
    they are, and the changes of a transaction are forgotten. ``was`` is the policy that the group
    had before it was removed.
    """

    def __init__(
        self,
        root: str,
        key: tuple[str, int, str],
        clock: Clock,
        timeout_s: float,
        *,
        read_only: bool = False,
        was: GroupOptions | None = None,
    ) -> None:
        self.topic, self.partition, self.name = key
        self.timeout_s = timeout_s
        self.epoch = 0
        self.is_adopted = False  # whether this process compared the group's epoch with the log's
        self.is_noticed = False  # whether a change by others was told since the last transaction
        self.group = Group(era=getrandbits(31), was=was)
        self._clock = clock
        self._read_only = read_only
        self._stem = os.path.join(root, layout.group_stem(*key))
        self._head = os.path.join(root, layout.log_stem(*key[:2]) + ".head")
        self._lock = GroupLock(self._stem + ".lock", self._lose, read_only=read_only)
        self._journal = Journal(self._stem + ".journal", read_only=read_only)
        self._snapshot_at = (0, 0)  # generation and position
        self._segment = 1

    @property
    def size(self) -> int:
        """How long the journal is."""
        return self._journal.position

    @property
    def is_poisoned(self) -> bool:
        """Whether a sync of the journal failed: it must not be relied upon any more."""
        return self._journal.is_poisoned

    def is_behind(self) -> bool:
        """Whether another process may have written since this process did, if it ever looked."""
        return self._journal.is_behind()

    def notice(self) -> None:
        """Note that the group's pump was told of a change by others."""
        self.is_noticed = True

    def exists(self) -> bool:
        return os.path.exists(self._stem + ".journal") or os.path.exists(self._stem + ".json")

    @contextlib.contextmanager
    def transaction(
        self,
        timeout_s: float,
        *,
        before: Callable[[Group], None] | None = None,
        make_room: Callable[[], bool] | None = None,
    ) -> Iterator[Group]:
        """The group as it is now, under its lock; on leaving, its changes are in the journal.

        After an error of any kind the group is read anew, so that memory never runs ahead of the
        files. ``before`` runs first. ``make_room`` is asked once when the device is full.
        """
        self._lock.acquire(timeout_s)
        self.is_noticed = False
        try:
            try:
                self._catch_up()
            except StorageFull:  # to begin a journal takes room too
                if make_room is None or not make_room():
                    raise
                self._catch_up()
            group = self.group
            group.ops.clear()
            if before is not None:
                before(group)
            yield group
            if group.ops:
                if self._read_only:
                    self._forget()
                else:
                    self._append(group.ops, make_room)
        except BaseException:
            if self.group.ops:
                self._forget()
            raise
        finally:
            self._lock.release()

    def locked(self, timeout_s: float | None = None) -> contextlib.AbstractContextManager[None]:
        """No member changes the group meanwhile."""
        return self._lock.held(self.timeout_s if timeout_s is None else timeout_s)

    def save(self, segment: int) -> None:
        """Write the snapshot; a crash then replays less."""
        if not self.group.created or self._snapshot_at == self._position():
            return
        with self.locked():
            self._catch_up()
            with contextlib.suppress(StorageError):  # then the snapshot alone holds it all
                self.sync()
            self._segment = segment
            self._write_snapshot()

    def renew(self, segment: int) -> None:
        """Begin a new journal behind a snapshot of everything so far."""
        with self.locked():
            self._catch_up()
            self._segment = segment
            self._begin_next()

    def begin(self, head: Head, timeout_s: float) -> None:
        """Compare the group's epoch with the log's, before this process uses the group."""
        if self.exists():
            self.adopt(head, timeout_s)
        else:
            self.epoch = head.epoch
        self.is_adopted = True

    def adopt(self, head: Head, timeout_s: float) -> None:
        """Take in a new epoch of the log. From some offset on the log holds other records now, so
        what the group knows of those offsets is void.
        """
        epoch = head.epoch
        with self.locked(timeout_s):
            self._catch_up()
            if self.epoch >= epoch:
                return
            is_next = self.epoch == epoch - 1 and head.since > 0
            reused = head.since if is_next else head.reused
            if self.epoch and self.group.last_settled >= reused:
                self.group.apply(Sought(min(self.group.floor, reused - 1)))
            self.epoch = epoch
            if self.group.created and not self._read_only:
                self._begin_next()
            elif not self._read_only:
                self._begin_journal(1, 0)  # a snapshot would make it a group

    def sync(self) -> None:
        """Make the changes durable, from any thread."""
        self._journal.sync()

    def remove(self, forget: Callable[[], object]) -> None:
        """Remove the files. Members that are at work begin the group anew, with the policy that it
        had. ``forget`` is called before any of them can.
        """
        with self.locked():
            try:
                # A journal without the snapshot that it begins behind would be damage.
                names = (".json.bak", ".journal", ".json", ".lock")
                atomic.remove_files([self._stem + name for name in names])
            finally:
                self._lose()
                self.close()
                forget()

    def close(self) -> None:
        self._journal.close()
        self._lock.close()

    def abandon(self) -> None:
        """In a forked child: let go of the lock that the parent may hold."""
        self._lock.close()

    def _lose(self) -> None:
        """The group was removed. Its policy is kept for members that go on."""
        if self.group.created:
            self.group = Group(was=self.group.options)
        self.epoch = 0  # its log may be another one by now
        self._forget()

    def _forget(self) -> None:
        """Read everything anew in the next transaction."""
        self._journal.forget()
        self._snapshot_at = (0, 0)
        self.group = Group(era=getrandbits(31), was=self.group.was)

    def _position(self) -> tuple[int, int]:
        return (self._journal.generation, self._journal.position)

    # -- reading -------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        journal = self._journal
        size = 0
        if journal.is_open:
            size = journal.file_size()
            if size < journal.position:
                self._forget()
        try:
            if not journal.is_open:
                self._load()
            elif size > journal.position:
                self._replay(size)
            else:
                return
            self.group.add_news()
        except BaseException as error:
            self._forget()
            if isinstance(error, OSError):
                raise atomic.storage_error(error, journal.path) from error
            if isinstance(error, msgspec.ValidationError):
                raise snapshot.not_ours(journal.path, error) from error
            raise

    def _replay(self, size: int) -> None:
        for change in self._journal.read(size):
            self.group.apply(change)

    def _load(self) -> None:
        journal = self._journal
        base = self._load_snapshot()
        try:
            size = journal.open()
        except FileNotFoundError:
            self._begin_journal(base[0] + 1, base[1])
            return
        found = journal.header()
        if found is None:  # it was torn when it was begun
            self._begin_journal(base[0] + 1, base[1])
            return
        header, start = found
        self.epoch = max(self.epoch, header.epoch)
        generation = header.generation
        if base[0] > generation or (base[0] == generation and base[1] > size):
            # It is older than the snapshot, which has it all.
            self._begin_journal(base[0] + 1, base[1])
            return
        if base < (generation - 1, header.after):
            raise snapshot.damaged(journal.path, 0, "its snapshot is missing or too old")
        if base[0] == generation:
            start = max(start, base[1])
        elif header.anchor is not None:
            self.group.apply(header.anchor)
        journal.start_at(generation, start)
        self._replay(size)
        if self.group.anchor is None or self.group.anchor.boot != self._clock.boot:
            anchor = self._now()
            self.group.apply(anchor)
            if not self._read_only:
                self._append([anchor], None)

    def _load_snapshot(self) -> tuple[int, int]:
        """Take over the snapshot. Returns the generation and the position that it reaches."""
        found, damaged = snapshot.read(self._stem)
        if found is not None:
            self.group = load(found)
            self.epoch, self._segment = found.epoch, found.segment
            return found.generation, found.position
        if damaged:
            if not is_first_generation(self._journal.path):
                raise snapshot.damaged(damaged, 0, "no intact snapshot is left")
            import logging  # short commands do without it

            logger = logging.getLogger(__name__)
            logger.warning("%s is damaged; the group is read from its journal", damaged)
        return 0, 0

    def _now(self) -> Anchored:
        """The clocks and the boot that the times of the following changes refer to."""
        clock = self._clock
        return Anchored(clock.boot, clock.monotonic(), clock.now().timestamp())

    # -- writing -------------------------------------------------------------------------------

    def _append(self, changes: list[AnyOp], make_room: Callable[[], bool] | None) -> None:
        self._journal.append(changes, make_room)
        if not _AT_ONCE.isdisjoint(map(type, changes)):
            try:
                self.sync()
            except StorageError:
                self._begin_next()

    def _begin_next(self) -> None:
        """Begin a new generation. Either copy of its base will do, so none can be lost alone."""
        self._write_snapshot()
        snapshot.copy_to_backup(self._stem)
        self._begin_journal(self._journal.generation + 1, self._journal.position)

    def _begin_journal(self, generation: int, after: int) -> None:
        anchor = self._now()
        self.group.apply(anchor)
        if self._read_only:
            self._journal.close()
            return
        self.epoch = self.epoch or self._log_epoch()
        header: dict[str, Any] = {"format": FORMAT, "generation": generation, "after": after}
        header |= {"topic": self.topic, "partition": self.partition, "group": self.name}
        header |= {"epoch": self.epoch, "anchor": anchor}
        self._journal.begin(header)

    def _log_epoch(self) -> int:
        """The epoch of the log as it is now; the first, if the log has yet to begin."""
        try:
            head = decode(atomic.read_file(self._head), self._head)
        except FileNotFoundError:
            head = None
        return 1 if head is None else head.epoch

    def _write_snapshot(self) -> None:
        state: dict[str, Any] = self.group.dump()
        generation, position = self._position()
        values = {
            "committed": state.pop("committed"),
            "segment": self._segment,
            "ts": self._clock.now().isoformat(),
            "topic": self.topic,
            "partition": self.partition,
            "group": self.name,
            "format": FORMAT,
            "generation": generation,
            "position": position,
            "epoch": self.epoch,
            **state,
        }
        snapshot.write(self._stem, values)
        self._snapshot_at = (generation, position)
