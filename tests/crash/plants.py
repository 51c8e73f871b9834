"""Bugs to plant: each one is a mistake that a proof must find, else the proof is worth nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from trunkline.log import atomic, recovery, writer
from trunkline.log.head import Head
from trunkline.log.writer import PartitionWriter


def no_sync() -> None:
    """Nothing is ever synced."""
    atomic.sync = lambda fd: None


def no_folder_sync_for_new_files() -> None:
    def create_file(path: str, flags: int = os.O_RDWR) -> int:
        return atomic.open_file(path, flags | os.O_CREAT | os.O_EXCL)

    atomic.create_file = create_file


def no_folder_sync_after_rename() -> None:
    def move_file(source: str, target: str) -> None:
        os.rename(source, target)  # noqa: TID251 -- the bug itself

    atomic.move_file = move_file


def finished_segment_not_synced() -> None:
    """A segment is sealed and left, and what was not synced in it stays so."""
    roll, sync = PartitionWriter.roll, atomic.sync

    def lazy(self: PartitionWriter, head: Head) -> Head:
        atomic.sync = lambda fd: None
        try:
            return roll(self, head)
        finally:
            atomic.sync = sync

    PartitionWriter.roll = lazy  # type: ignore[method-assign]


def torn_tail_kept() -> None:
    """Who comes next writes behind the torn line."""
    survey = recovery.survey

    def careless(*args: Any) -> recovery.Survey:
        found = survey(*args)
        ends = [segment.size() for segment, _ in found.cuts]
        head = found.head
        for end in ends:
            head = Head(**{**{f: getattr(head, f) for f in head.__struct_fields__}, "end": end})
        return found._replace(cuts=[], head=head)

    writer.survey = careless


PLANTS: dict[str, Callable[[], None]] = {
    "no sync": no_sync,
    "no folder sync for new files": no_folder_sync_for_new_files,
    "no folder sync after rename": no_folder_sync_after_rename,
    "finished segment not synced": finished_segment_not_synced,
    "torn tail kept": torn_tail_kept,
}
