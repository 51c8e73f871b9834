"""A group's files: a journal of what happened, and a snapshot of where that led.

Under the group's lock each process reads what others appended to the journal, runs its step on the
group, and appends the ops of that step. The snapshot says up to which byte of which generation of
the journal it reaches; a new generation begins when the journal has grown large.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from trunkline.clock import Clock
from trunkline.errors import Corrupt, UnsupportedFormat
from trunkline.group import Anchored, AnyOp, Group, Saved, load
from trunkline.log import atomic, layout
from trunkline.log.head import FORMAT
from trunkline.log.line import Damaged, close_line, is_intact, parse_object

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_decode_op = msgspec.json.Decoder(AnyOp).decode


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
    """One group of one partition. ``step`` is all there is to it."""

    def __init__(
        self, root: str, key: tuple[str, int, str], clock: Clock, timeout_s: float
    ) -> None:
        self.topic, self.partition, self.name = key
        self._clock = clock
        self._timeout_s = timeout_s
        self._stem = os.path.join(root, layout.group_stem(*key))
        self._lock_fd = -1
        self._fd = -1
        self._position = 0
        self._generation = 1
        self._snapshot_at = -1
        self.group = Group()
        self.epoch = 0
        self.dirty = False

    @property
    def size(self) -> int:
        """How long the journal is."""
        return self._position

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
        try:
            self._catch_up()
            group = self.group
            group.ops.clear()
            if before is not None:
                before(group)
            result = action(group)
            if group.ops:
                self._append(group.ops, make_room)
            return result
        except BaseException:
            if self.group.ops:
                self._forget()
            raise
        finally:
            atomic.unlock(self._lock_fd)

    def save(self, segment: int) -> None:
        """Write the snapshot; a crash then replays less."""
        if not self.group.created or self._snapshot_at == self._position:
            return
        self._lock()
        try:
            self._catch_up()
            if self._fd >= 0:
                atomic.sync(self._fd)
                self._write_snapshot(self._generation, self._position, segment)
        finally:
            atomic.unlock(self._lock_fd)

    def renew(self, segment: int) -> None:
        """Begin a new journal behind a snapshot of everything so far."""
        self._lock()
        try:
            self._catch_up()
            self._write_snapshot(self._generation + 1, 0, segment)
            self._begin_journal(self._generation + 1)
        finally:
            atomic.unlock(self._lock_fd)

    def sync(self) -> None:
        if self.dirty and self._fd >= 0:
            self.dirty = False
            atomic.sync(self._fd)

    def remove(self) -> None:
        self._lock()
        try:
            names = (".json", ".json.bak", ".journal", ".lock")
            atomic.remove_files([self._stem + name for name in names])
        finally:
            self._forget()
            self.close()

    def close(self) -> None:
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1

    def _lock(self, timeout_s: float | None = None) -> None:
        path = self._stem + ".lock"
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        while True:
            if self._lock_fd < 0:
                self._lock_fd = atomic.open_file(path, os.O_RDWR | os.O_CREAT)
            atomic.lock(self._lock_fd, timeout_s, path)
            if os.fstat(self._lock_fd).st_nlink:
                return
            os.close(self._lock_fd)  # the group was removed while we waited
            self._lock_fd = -1
            self._forget()

    def _forget(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._position, self._generation, self._snapshot_at = 0, 1, -1
        self.group = Group()

    # -- reading -------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        path = self._stem + ".journal"
        if self._fd >= 0:
            try:
                same = os.stat(path).st_ino == os.fstat(self._fd).st_ino
            except FileNotFoundError:
                same = False
            if not same:
                self._forget()
        if self._fd < 0:
            self._load(path)
        self._read_journal()

    def _load(self, path: str) -> None:
        snapshot = self._read_snapshot()
        if snapshot is not None:
            self.group = load(snapshot)
            self.epoch = snapshot.epoch
        try:
            self._fd = atomic.open_file(path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            self._begin_journal(snapshot.generation if snapshot else 1)
            return
        generation, header = self._header()
        if snapshot is None and generation > 1:
            raise self._corrupt(path, 0, "its snapshot is missing")
        behind = snapshot is not None and generation < snapshot.generation
        if behind or generation == 0:
            self._begin_journal(snapshot.generation if snapshot else 1)
        else:
            self._generation = generation
            same = snapshot is not None and snapshot.generation == generation
            self._position = max(header, snapshot.position) if snapshot and same else header
        self._read_journal()
        if self.group.anchor is None or self.group.anchor.boot != self._clock.boot:
            anchor = self._now()
            self.group.apply(anchor)
            self._append([anchor], None)

    def _now(self) -> Anchored:
        """Under which boot the times that follow are meant."""
        clock = self._clock
        return Anchored(clock.boot, clock.monotonic(), clock.now().timestamp())

    def _header(self) -> tuple[int, int]:
        """The generation of the journal, and where its ops begin. A torn header is begun anew."""
        line, newline, _ = os.pread(self._fd, 4096, 0).partition(b"\n")
        if newline and is_intact(line):
            header = parse_object(line)
            if header.get("format", 0) > FORMAT:
                raise UnsupportedFormat(
                    f"the group has format {header['format']}, this version reads up to {FORMAT}",
                    hint="upgrade trunkline",
                )
            self.group.apply(msgspec.convert(header["anchor"], Anchored))
            return int(header["generation"]), len(line) + 1
        if os.fstat(self._fd).st_size > len(line) + len(newline):
            raise self._corrupt(self._stem + ".journal", 0, "its first line is damaged")
        os.ftruncate(self._fd, 0)
        return 0, 0

    def _read_journal(self) -> None:
        size = os.fstat(self._fd).st_size
        if size <= self._position:
            return
        data = os.pread(self._fd, size - self._position, self._position)
        lines = data.split(b"\n")
        rest = lines.pop()
        for index, line in enumerate(lines):
            if not is_intact(line):
                if any(is_intact(later) for later in lines[index + 1 :]):
                    raise self._corrupt(
                        self._stem + ".journal", self._position, "the checksum does not fit"
                    )
                rest = line
                break
            self.group.apply(_decode_op(line))
            self._position += len(line) + 1
        if rest:
            os.ftruncate(self._fd, self._position)  # torn, and never acted upon

    def _read_snapshot(self) -> Snapshot | None:
        """The newest intact one; an error if there are only damaged ones."""
        damaged = ""
        for ending in (".json", ".json.bak"):
            try:
                with open(self._stem + ending, "rb") as file:
                    data = file.read().rstrip(b"\n")
            except FileNotFoundError:
                continue
            try:
                found = parse_object(data)
            except (Damaged, msgspec.DecodeError):
                damaged = damaged or self._stem + ending
                continue
            if found.get("format", 0) > FORMAT:
                raise UnsupportedFormat(
                    f"the group has format {found['format']}, this version reads up to {FORMAT}",
                    hint="upgrade trunkline",
                )
            return msgspec.convert(found, Snapshot)
        if damaged:
            raise self._corrupt(damaged, 0, "no intact snapshot is left")
        return None

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

    def _begin_journal(self, generation: int) -> None:
        path = self._stem + ".journal"
        anchor = self._now()
        self.group.apply(anchor)
        header: dict[str, Any] = {"format": FORMAT, "generation": generation}
        header |= {"topic": self.topic, "partition": self.partition, "group": self.name}
        header["anchor"] = anchor
        line = close_line(_encode(header)[:-1])
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        atomic.replace_file(path, line)
        self._fd = atomic.open_file(path, os.O_RDWR | os.O_APPEND)
        self._position, self._generation = len(line), generation

    def _write_snapshot(self, generation: int, position: int, segment: int) -> None:
        state: dict[str, Any] = self.group.dump()
        snapshot = {
            "committed": state.pop("committed"),
            "segment": segment,
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
        path = self._stem + ".json"
        try:
            with open(path, "rb") as file:
                old = file.read()
        except FileNotFoundError:
            old = b""
        if is_intact(old.rstrip(b"\n")):
            atomic.replace_file(path + ".bak", old)
        atomic.replace_file(path, close_line(_encode(snapshot)[:-1]))
        self._snapshot_at = position
