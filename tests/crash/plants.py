"""Bugs to plant: each one is a mistake that a proof must find, else the proof is worth nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from trunkline.delivery.pump import Pump
from trunkline.folder import compaction
from trunkline.folder.group_file import GroupFile
from trunkline.group.changes import AnyOp
from trunkline.log import atomic, writer
from trunkline.log import recover as recovery
from trunkline.log.head import Head
from trunkline.log.line import frame_batch
from trunkline.log.segment import Segment
from trunkline.log.writer import PartitionWriter, Placed


def _plant(where: Any, name: str, what: Any) -> None:
    setattr(where, name, what)


def no_sync() -> None:
    """Nothing is ever synced."""
    _plant(atomic, "sync", lambda fd: None)


def no_folder_sync_for_new_files() -> None:
    def create_file(path: str, flags: int = os.O_RDWR) -> int:
        return atomic.open_file(path, flags | os.O_CREAT | os.O_EXCL)

    _plant(atomic, "create_file", create_file)


def no_folder_sync_after_rename() -> None:
    def move_file(source: str, target: str) -> None:
        os.rename(source, target)  # noqa: TID251 -- the bug itself

    _plant(atomic, "move_file", move_file)


def finished_segment_not_synced() -> None:
    """A segment is sealed and left, and what was not synced in it stays so."""
    roll, sync = PartitionWriter.roll, atomic.sync

    def lazy(self: PartitionWriter, head: Head) -> Head:
        _plant(atomic, "sync", lambda fd: None)
        try:
            return roll(self, head)
        finally:
            _plant(atomic, "sync", sync)

    _plant(PartitionWriter, "roll", lazy)


def torn_tail_kept() -> None:
    """Who comes next writes behind the torn line."""
    survey = recovery.survey

    def careless(*args: Any) -> recovery.Survey:
        found = survey(*args)
        head = found.head
        for segment, _ in found.cuts:
            head = replace(head, end=segment.size())
        return found._replace(cuts=[], head=head)

    _plant(writer, "survey", careless)


def acknowledged_too_early() -> None:
    """A batch is written when the next one comes."""
    append = PartitionWriter.append
    waiting: list[Any] = []

    def early(self: PartitionWriter, bodies: Any, events: Any, *rest: Any) -> Placed:
        for late in waiting:
            append(self, *late)
        waiting[:] = [(bodies, events, *rest)]
        head = self.begin()
        self.end()
        return Placed(head.next, len(events), {})

    _plant(PartitionWriter, "append", early)


def head_before_bytes() -> None:
    """Readers are told of a batch before it is written."""
    write = PartitionWriter._write

    def hasty(self: PartitionWriter, head: Head, bodies: list[bytes], *rest: Any) -> Head:
        data = b"".join(frame_batch(head.next, bodies, head.durable, 0))
        self._head.store(replace(head, next=head.next + len(bodies), end=head.end + len(data)))
        return write(self, head, bodies, *rest)

    _plant(PartitionWriter, "_write", hasty)


def settled_before_dead_letter() -> None:
    bury = Pump._bury

    async def hasty(self: Pump) -> None:
        self._outcomes.acks += [one.lease for one in self._letters._given_up]
        await self._commit(take=False)
        await bury(self)

    _plant(Pump, "_bury", hasty)


def settled_in_memory() -> None:
    """A step is over before the journal has it."""
    append = GroupFile._append
    waiting: list[Any] = []

    def lazy(self: GroupFile, ops: list[AnyOp], make_room: Any) -> None:
        for late in waiting:
            append(self, late, make_room)
        waiting[:] = [list(ops)]

    _plant(GroupFile, "_append", lazy)


def replaced_in_place() -> None:
    """A file is written over, not replaced."""

    def move_file(source: str, target: str) -> None:
        with open(source, "rb") as file:
            data = file.read()
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(fd, data[: len(data) // 2])
        os.write(fd, data[len(data) // 2 :])
        os.close(fd)
        os.unlink(source)

    _plant(atomic, "move_file", move_file)


def journal_before_its_base() -> None:
    """The new journal begins before the snapshot that it goes on from is there."""

    def hasty(self: GroupFile) -> None:
        self._begin_journal(self._journal.generation + 1, self._journal.position)
        self._write_snapshot()

    _plant(GroupFile, "_begin_next", hasty)


def sync_tried_again() -> None:
    """A sync that failed is called again, and then lies."""
    sync = atomic.sync

    def stubborn(fd: int) -> None:
        try:
            sync(fd)
        except OSError:
            sync(fd)

    _plant(atomic, "sync", stubborn)


def old_file_removed_first() -> None:
    """Compression removes the plain segment before the packed one is there."""
    from trunkline.folder.rewrite import rewrite

    def hasty(segment: Segment, *args: Any, packed: bool | None = None, guard: Any = None) -> None:
        if packed:
            lines, guard = list(args[0]), None
            atomic.remove_files([segment.path])
            args = (lines, *args[1:])
        rewrite(segment, *args, packed=packed, guard=guard)

    _plant(compaction, "rewrite", hasty)


# What a power cut shows, and what kill -9 shows: the scene, and the mistake in it.
PLANTS: dict[str, Callable[[], None]] = {
    "no sync": no_sync,
    "no folder sync for new files": no_folder_sync_for_new_files,
    "no folder sync after rename": no_folder_sync_after_rename,
    "finished segment not synced": finished_segment_not_synced,
    "torn tail kept": torn_tail_kept,
}
KILLED: list[tuple[str, Callable[[], None]]] = [
    ("publish", acknowledged_too_early),
    ("publish", head_before_bytes),
    ("rollover", head_before_bytes),
    ("dead letter", settled_before_dead_letter),
    ("commit", settled_in_memory),
    ("compaction", replaced_in_place),
    ("new journal", journal_before_its_base),
    ("compression", old_file_removed_first),
]
