"""A group's files: a journal of what happened, and a snapshot of where that led.

Under the group's lock each process reads what others appended to the journal, runs its step on the
group, and appends the ops of that step. The snapshot says up to which byte of which generation of
the journal it reaches; a new generation begins when the journal has grown large. Its first line
says where the last one ended, so that only a snapshot of all of that, or a later one, is its base.

A line ``{"synced":n}`` says that the first ``n`` bytes were durable when it was written. What does
not fit behind the last such mark is what a power cut left, and is cut off; before it, it is damage.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from random import getrandbits
from typing import Any, TypeVar

import msgspec

from trunkline.clock import Clock
from trunkline.errors import (
    Corrupt,
    LockTimeout,
    StorageError,
    StorageFull,
    UnsupportedFormat,
    reason,
)
from trunkline.group import Group, Saved, load
from trunkline.log import atomic, layout
from trunkline.log.head import FORMAT, Head, decode
from trunkline.log.line import Damaged, close_line, is_intact, parse_object
from trunkline.ops import Anchored, AnyOp, Created, Edited, Paused, Redriven, Sought

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_decode_op = msgspec.json.Decoder(AnyOp).decode
_MARK = b'{"synced":'
# What somebody asked for is durable when it is done.
_AT_ONCE = frozenset({Created, Edited, Paused, Redriven, Sought})


class Snapshot(Saved, frozen=True, kw_only=True):
    topic: str
    partition: int
    group: str
    segment: int
    ts: str
    format: int = FORMAT
    generation: int = 1
    position: int = 0
    epoch: int = 1


class GroupFile:
    """One group of one partition. ``step`` is all there is to it. With ``read_only`` the files are
    left as they are, and so a step that changes something is forgotten.
    """

    def __init__(
        self,
        root: str,
        key: tuple[str, int, str],
        clock: Clock,
        timeout_s: float,
        *,
        read_only: bool = False,
    ) -> None:
        self.topic, self.partition, self.name = key
        self._read_only = read_only
        self._clock = clock
        self.timeout_s = timeout_s
        self._stem = os.path.join(root, layout.group_stem(*key))
        self._head = os.path.join(root, layout.log_stem(*key[:2]) + ".head")
        self._lock_fd = -1
        self._fd = -1
        self._inode = 0  # of the journal that is held open, so that no other file can have it
        self._position = 0
        self._generation = 1
        self._snapshot_at = (0, 0)
        self._synced = self._marked = 0  # what is durable, and what the journal says is
        self._turn = threading.Lock()  # a file's lock keeps no other thread of this process out
        self._holding = threading.Lock()  # the journal may be synced by another thread
        self._poisoned = 0  # the inode of a journal that could not be synced
        self._segment = 1
        self.group = Group(era=getrandbits(31))
        self.epoch = 0
        self.is_adopted = False
        self.was_noticed = False  # that others changed it, since a step was taken here
        self.dirty = False

    @property
    def size(self) -> int:
        """How long the journal is."""
        return self._position

    @property
    def is_poisoned(self) -> bool:
        """Whether a sync of the journal failed: it must not be relied upon any more."""
        return bool(self._poisoned) and self._inode == self._poisoned

    def is_behind(self) -> bool:
        """Whether somebody else may have written since this process did, if it ever looked."""
        try:
            return self._fd >= 0 and os.stat(self._stem + ".journal").st_size != self._position
        except OSError:  # it was removed
            return True

    def exists(self) -> bool:
        return os.path.exists(self._stem + ".journal") or os.path.exists(self._stem + ".json")

    def step(
        self,
        action: Callable[[Group], T],
        timeout_s: float,
        *,
        before: Callable[[Group], None] | None = None,
        make_room: Callable[[], bool] | None = None,
    ) -> T:
        """Run ``action`` on the group as it is now, and share what it changed.

        If the change cannot be written the group is read anew, so that memory never runs ahead of
        the files. ``make_room`` is asked once when the device is full.
        """
        self._lock(timeout_s)
        self.was_noticed = False
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
            result = action(group)
            if group.ops:
                if self._read_only:
                    self._forget()
                else:
                    self._append(group.ops, make_room)
            return result
        except BaseException:
            if self.group.ops:
                self._forget()
            raise
        finally:
            self._unlock()

    def save(self, segment: int) -> None:
        """Write the snapshot; a crash then replays less."""
        if not self.group.created or self._snapshot_at == (self._generation, self._position):
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
        """Tell a group that is used from now on which epoch of the log it belongs to."""
        if self.exists():
            self.adopt(head.epoch, head.reused, timeout_s)
        else:
            self.epoch = head.epoch
        self.is_adopted = True

    def adopt(self, epoch: int, reused: int, timeout_s: float) -> None:
        """Take notice of an epoch of the log: from ``reused`` on its offsets are other records now,
        so what the group knows of them is void.
        """
        with self.locked(timeout_s):
            self._catch_up()
            if self.epoch >= epoch:
                return
            if self.epoch and self.group.last_settled >= reused:
                self.group.apply(Sought(min(self.group.floor, reused - 1)))
            self.epoch = epoch
            if self.group.created and not self._read_only:
                self._begin_next()
            elif not self._read_only:
                self._begin_journal(1, 0)  # a snapshot would make it a group

    def sync(self) -> None:
        """Make durable what was noted. After a failure this journal is not synced again: the next
        generation takes its place.
        """
        with self._holding:
            if not self.dirty or self._fd < 0:
                return
            if self.is_poisoned:
                raise StorageError("the journal could not be synced", path=self._stem + ".journal")
            self.dirty = False  # first: what is noted meanwhile needs another sync
            position = self._position
            try:
                atomic.sync(self._fd)
            except OSError as error:
                self.dirty, self._poisoned = True, self._inode
                raise atomic.storage_error(error, self._stem + ".journal") from error
            self._synced = position

    def remove(self, forget: Callable[[], object]) -> None:
        """Members that are at work begin it anew, with the policy that it had. ``forget`` is called
        before any of them can.
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
        self._swap(-1)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def abandon(self) -> None:
        """In a forked child: let go of the lock that the parent may hold."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _swap(self, fd: int) -> None:
        """Hold another journal, or none."""
        with self._holding:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = fd
            self._inode = os.fstat(fd).st_ino if fd >= 0 else 0
            self._synced = self._marked = 0
            self.dirty = False

    @contextlib.contextmanager
    def locked(self, timeout_s: float | None = None) -> Iterator[None]:
        """No member takes a step meanwhile."""
        self._lock(self.timeout_s if timeout_s is None else timeout_s)
        try:
            yield
        finally:
            self._unlock()

    def _unlock(self) -> None:
        try:
            if self._lock_fd >= 0:
                atomic.unlock(self._lock_fd)
        finally:
            self._turn.release()

    def _lock(self, timeout_s: float) -> None:
        path = self._stem + ".lock"
        if not self._turn.acquire(timeout=timeout_s):
            name = os.path.basename(path)
            raise LockTimeout(f"a thread has held {name} for {timeout_s} s", path=path)
        try:
            self._lock_file(path, timeout_s)
        except BaseException:
            self._turn.release()
            raise

    def _lock_file(self, path: str, timeout_s: float) -> None:
        flags = os.O_RDONLY if self._read_only else os.O_RDWR | os.O_CREAT
        while True:
            if self._lock_fd < 0:
                try:
                    self._lock_fd = atomic.open_file(path, flags)
                except OSError as error:
                    if self._read_only and error.errno == errno.ENOENT:
                        return  # who takes a step makes it, so there was none yet
                    raise atomic.storage_error(error, path) from error
            atomic.lock(self._lock_fd, timeout_s, path, shared=self._read_only)
            if os.fstat(self._lock_fd).st_nlink:
                return
            os.close(self._lock_fd)  # the group was removed while we waited
            self._lock_fd = -1
            self._lose()

    def _lose(self) -> None:
        """The group was removed."""
        if self.group.created:
            self.group.was = self.group.options
        self.epoch = 0  # its log may be another one by now
        self._forget()

    def _forget(self) -> None:
        self._swap(-1)
        self._position, self._generation, self._snapshot_at = 0, 1, (0, 0)
        was, self.group = self.group.was, Group(era=getrandbits(31))
        self.group.was = was

    # -- reading -------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        path = self._stem + ".journal"
        size = 0
        if self._fd >= 0:
            try:
                here = os.stat(path)
                size = here.st_size if here.st_ino == self._inode else 0
            except FileNotFoundError:
                pass
            if size < self._position:
                self._forget()
        try:
            if self._fd < 0:
                self._load(path)
            elif size > self._position:
                self._read_journal(size)
            else:
                return
            self.group.news = True
        except BaseException as error:
            self._forget()
            if isinstance(error, OSError):
                raise atomic.storage_error(error, path) from error
            if isinstance(error, msgspec.ValidationError):
                raise _strange(path, error) from error
            raise

    def _load(self, path: str) -> None:
        snapshot = self._read_snapshot()
        if snapshot is not None:
            self.group = load(snapshot)
            self.epoch, self._segment = snapshot.epoch, snapshot.segment
        base = (snapshot.generation, snapshot.position) if snapshot else (0, 0)
        try:
            flags = os.O_RDONLY if self._read_only else os.O_RDWR | os.O_APPEND
            self._swap(atomic.open_file(path, flags))
        except FileNotFoundError:
            self._begin_journal(base[0] + 1, base[1])
            return
        generation, after, header, anchor = self._header()
        size = os.fstat(self._fd).st_size
        if generation == 0 or base[0] > generation or (base[0] == generation and base[1] > size):
            # It was torn when it was begun, or is older than the snapshot, which has it all.
            self._begin_journal(base[0] + 1, base[1])
            return
        if base < (generation - 1, after):
            raise self._corrupt(path, 0, "its snapshot is missing or too old")
        self._generation = generation
        self._position = max(header, base[1]) if base[0] == generation else header
        if base[0] < generation and anchor is not None:
            self.group.apply(anchor)
        self._read_journal(size)
        if self.group.anchor is None or self.group.anchor.boot != self._clock.boot:
            anchor = self._now()
            self.group.apply(anchor)
            if not self._read_only:
                self._append([anchor], None)

    def _now(self) -> Anchored:
        """Under which boot the times that follow are meant."""
        clock = self._clock
        return Anchored(clock.boot, clock.monotonic(), clock.now().timestamp())

    def _header(self) -> tuple[int, int, int, Anchored | None]:
        """The generation of the journal, where the one before ended, where its ops begin, and the
        clocks then; zeros if its only line is torn.
        """
        line, newline, _ = os.pread(self._fd, 4096, 0).partition(b"\n")
        if newline and is_intact(line):
            header = parse_object(line)
            if header.get("format", 0) > FORMAT:
                raise self._unsupported(".journal", header["format"])
            if "generation" not in header:
                raise self._corrupt(self._stem + ".journal", 0, "its first line is missing")
            self.epoch = max(self.epoch, header.get("epoch", 0))
            anchor = msgspec.convert(header.get("anchor"), Anchored)
            return header["generation"], header.get("after", 0), len(line) + 1, anchor
        if os.fstat(self._fd).st_size > len(line) + len(newline):
            raise self._corrupt(self._stem + ".journal", 0, "its first line is damaged")
        return 0, 0, 0, None

    def _read_journal(self, size: int) -> None:
        if size <= self._position:
            return
        data = os.pread(self._fd, size - self._position, self._position)
        lines = data.split(b"\n")
        rest = lines.pop()
        for index, line in enumerate(lines):
            if not is_intact(line):
                if any(_mark(later) > self._position for later in lines[index + 1 :]):
                    raise self._corrupt(
                        self._stem + ".journal", self._position, "the checksum does not fit"
                    )
                rest = line or b"\n"
                break
            if line.startswith(_MARK):
                self._marked = max(self._marked, _mark(line))
            else:
                self.group.apply(_decode_op(line))
            self._position += len(line) + 1
        if rest and not self._read_only:
            os.ftruncate(self._fd, self._position)  # torn, and never durable

    def _read_snapshot(self) -> Snapshot | None:
        """The newest intact one; an error if there are only damaged ones."""
        damaged = ""
        for ending in (".json", ".json.bak"):
            try:
                data = atomic.read_file(self._stem + ending).rstrip(b"\n")
            except FileNotFoundError:
                continue
            try:
                found = parse_object(data)
            except (Damaged, msgspec.DecodeError):
                damaged = damaged or self._stem + ending
                continue
            if found.get("format", 0) > FORMAT:
                raise self._unsupported(ending, found["format"])
            try:
                return msgspec.convert(found, Snapshot)
            except msgspec.ValidationError as error:
                raise _strange(self._stem + ending, error) from error
        if damaged:
            raise self._corrupt(damaged, 0, "no intact snapshot is left")
        return None

    def _unsupported(self, ending: str, number: int) -> UnsupportedFormat:
        path = self._stem + ending
        return UnsupportedFormat(
            f"{self.name} on {self.topic}/{self.partition} has format {number}, this version reads "
            f"up to {FORMAT}: see {path}",
            path=path,
            hint="upgrade trunkline",
        )

    def _corrupt(self, path: str, position: int, why: str) -> Corrupt:
        return Corrupt(
            f"offsets/{os.path.basename(path)} is damaged at byte {position}: {why}",
            path=path,
            position=position,
            hint="'trunkline group seek' sets the group to a known offset",
        )

    # -- writing -------------------------------------------------------------------------------

    def _append(self, ops: list[AnyOp], make_room: Callable[[], bool] | None) -> None:
        data = b"".join([close_line(_encode(op)[:-1]) for op in ops])
        marks = self._synced > self._marked
        if marks:
            data = close_line(b"%b%d" % (_MARK, self._synced)) + data
        try:
            atomic.write_all(self._fd, data)
        except OSError as error:
            os.ftruncate(self._fd, self._position)
            if error.errno not in atomic.FULL or make_room is None or not make_room():
                raise atomic.storage_error(error, self._stem + ".journal") from error
            self._append(ops, None)
            return
        self._position += len(data)
        self.dirty = True
        if marks:
            self._marked = self._synced
        if not _AT_ONCE.isdisjoint(map(type, ops)):
            try:
                self.sync()
            except StorageError:
                self._begin_next()

    def _begin_next(self) -> None:
        """A new generation. Either copy of its base will do, so none can be lost alone."""
        self._write_snapshot()
        atomic.replace_file(self._stem + ".json.bak", atomic.read_file(self._stem + ".json"))
        self._begin_journal(self._generation + 1, self._position)

    def _begin_journal(self, generation: int, after: int) -> None:
        path = self._stem + ".journal"
        anchor = self._now()
        self.group.apply(anchor)
        if self._read_only:
            self._swap(-1)
            return
        self.epoch = self.epoch or self._log_epoch()
        header: dict[str, Any] = {"format": FORMAT, "generation": generation, "after": after}
        header |= {"topic": self.topic, "partition": self.partition, "group": self.name}
        header |= {"epoch": self.epoch, "anchor": anchor}
        line = close_line(_encode(header)[:-1])
        self._swap(-1)
        atomic.replace_file(path, line)
        self._swap(atomic.open_file(path, os.O_RDWR | os.O_APPEND))
        self._position, self._generation, self._poisoned = len(line), generation, 0

    def _log_epoch(self) -> int:
        """The epoch of the log as it is now; the first, if it has yet to begin."""
        try:
            head = decode(atomic.read_file(self._head), self._head)
        except FileNotFoundError:
            head = None
        return 1 if head is None else head.epoch

    def _write_snapshot(self) -> None:
        state: dict[str, Any] = self.group.dump()
        snapshot = {
            "committed": state.pop("committed"),
            "segment": self._segment,
            "ts": self._clock.now().isoformat(),
            "topic": self.topic,
            "partition": self.partition,
            "group": self.name,
            "format": FORMAT,
            "generation": self._generation,
            "position": self._position,
            "epoch": self.epoch,
            **state,
        }
        path = self._stem + ".json"
        try:
            old = atomic.read_file(path)
        except FileNotFoundError:
            old = b""
        if is_intact(old.rstrip(b"\n")):
            atomic.replace_file(path + ".bak", old)
        atomic.replace_file(path, close_line(_encode(snapshot)[:-1]))
        self._snapshot_at = (self._generation, self._position)


def _strange(path: str, error: msgspec.ValidationError) -> UnsupportedFormat:
    """What is intact and still means nothing here was not written by this version."""
    return UnsupportedFormat(
        f"offsets/{os.path.basename(path)}: {reason(error)}",
        path=path,
        hint="a newer version wrote it: upgrade trunkline",
    )


def _mark(line: bytes) -> int:
    """How many bytes a line says were durable; 0 if it says nothing of the kind, or is damaged."""
    if not line.startswith(_MARK) or not is_intact(line):
        return 0
    return int(parse_object(line)["synced"])


def group_of(path: str, *, looked_at: bool = False) -> tuple[str, int, str] | None:
    """The topic, partition and group that a journal or a snapshot belongs to; None where it is
    damaged beyond telling, or a mere look left it behind and ``looked_at`` does not ask for those.
    """
    stem = path.rpartition(".")[0]
    try:
        with os.fdopen(atomic.open_file(path, os.O_RDONLY), "rb") as file:
            start = file.read(4096)
        made = b'{"op":"created"' in start or os.path.exists(stem + ".json")
    except FileNotFoundError:
        raise
    except (StorageError, OSError):  # whoever asks for the group is told why
        start, made = b"", True
    name = layout.parse_group_stem(os.path.basename(stem))
    if name is None:  # it was too long for a file
        try:
            header = msgspec.json.decode(start.partition(b"\n")[0])
            name = header["topic"], header["partition"], header["group"]
        except (msgspec.DecodeError, KeyError, TypeError, UnicodeDecodeError):
            return None
    return name if made or looked_at else None
