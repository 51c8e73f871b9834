"""A small folder with one of everything in it, and a look at all that it says."""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from typing import NamedTuple

from trunkline.errors import Corrupt, TrunklineError
from trunkline.folder import Folder, upkeep
from trunkline.options import GroupOptions, TopicOptions

from .promises import BASE, OPTIONS, StillClock, append, records_of, values
from .scenes import KEY, TOPIC, take

RECORDS = 11


def make(root: str) -> None:
    """Segments 1 (compressed), 2 (plain, with an index) and 3 (not finished), and a group with a
    journal, two snapshots and things left to do.
    """
    folder = Folder(root, OPTIONS, StillClock())
    folder.define(TOPIC, TopicOptions(segment_records=4))
    for number in range(1, 5):
        append(folder, TOPIC, [number], key="k", payload="a" * 10)
    for number in range(5, 9, 2):
        append(folder, TOPIC, [number, number + 1], payload="b" * 500)
    upkeep.pack_segments(folder, TOPIC, 0)
    append(folder, TOPIC, [9])
    append(folder, TOPIC, [10, 11])
    folder.step(KEY, lambda group: group.define(GroupOptions(ordering="none"), 0))
    take(folder, 6)
    folder.step(KEY, lambda group: group.settle([1, 2]))
    folder._groups._files[KEY].save(1)
    folder.step(KEY, lambda group: group.settle([4]))
    folder.sync_groups()
    folder._groups._files[KEY].save(1)
    folder.step(KEY, lambda group: group.settle([3]))
    folder.sync_groups()
    folder.step(KEY, lambda group: group.settle([6]))
    folder.sync_groups()
    folder.step(KEY, lambda group: group.settle([7]))
    folder.abandon()


def load(root: str) -> dict[str, bytes]:
    """What each file holds."""
    found = {}
    for place, _, names in os.walk(root):
        for name in names:
            path = os.path.join(place, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, root)] = file.read()
    return found


def put(files: dict[str, bytes], root: str) -> None:
    shutil.rmtree(root, ignore_errors=True)
    for name in ("wal", "dlq", "offsets", "members"):
        os.makedirs(os.path.join(root, name))
    for name, data in files.items():
        with open(os.path.join(root, name), "wb") as file:
            file.write(data)


class View(NamedTuple):
    """What a folder shows; an error in the place of what it refuses to show."""

    records: dict[int, int] | TrunklineError
    later: list[int] | TrunklineError
    settled: set[int] | TrunklineError
    repaired: dict[int, int] | TrunklineError
    added: int | TrunklineError

    @property
    def errors(self) -> list[TrunklineError]:
        return [part for part in self if isinstance(part, TrunklineError)]


def look(root: str) -> View:
    """Read, seek, ask the group, then publish and read again, as five users would."""
    try:
        folder = Folder(root, OPTIONS, StillClock())
    except TrunklineError as error:
        return View(error, error, error, error, error)

    def read() -> dict[int, int] | TrunklineError:
        try:
            return values(records_of(folder, TOPIC))
        except TrunklineError as error:
            return error

    try:
        first = read()
        later: list[int] | TrunklineError
        try:
            later = [folder.seek(TOPIC, 0, BASE + timedelta(seconds=at)) for at in (2, 6, 8, 11)]
        except TrunklineError as error:
            later = error
        settled: set[int] | TrunklineError
        try:
            group = folder.group(KEY)
            settled = {offset for offset in range(1, 30) if group.is_settled(offset)}
        except TrunklineError as error:
            settled = error
        added: int | TrunklineError
        try:
            (added,) = append(folder, TOPIC, [12])
        except TrunklineError as error:
            added = error
            if isinstance(error, Corrupt) and not error.path.endswith("topics.json"):
                append(folder, TOPIC, [12])  # it is said once; then publishing goes on
        return View(first, later, settled, read(), added)
    finally:
        folder.close()
