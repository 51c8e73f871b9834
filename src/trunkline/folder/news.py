"""What other processes did to a bus folder, told by its files.

A piece of news is a topic that has new records, a group that others changed, or "" for any other
change that matters here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from trunkline.folder.groups import FolderGroups
from trunkline.folder.inotify import Change
from trunkline.folder.partitions import Partitions
from trunkline.log import layout
from trunkline.names import GroupKey

News = set[str | GroupKey]
_NO_NEWS = ("jsonl", "index", "lock", "tmp", "bak")  # a change of a log shows in its head


def from_changes(changes: Iterable[Change], partitions: Partitions, groups: FolderGroups) -> News:
    """The news in files that the kernel says have changed."""
    found: News = set()
    for folder, name in changes:
        stem, _, kind = name.rpartition(".")
        if kind == "head":
            log = layout.parse_stem(stem, folder.endswith("dlq"))
            if log is not None and partitions.is_behind(*log):
                found.add(log[0])
        elif kind in ("journal", "json") and (parsed := layout.parse_group_stem(stem)):
            key = GroupKey(*parsed)
            if groups.is_behind(key):
                found.add(key)
        elif os.path.basename(folder) == "members":
            found |= groups.held_by(name)
        elif kind not in _NO_NEWS:
            found.add("")
    return found


def from_a_look(turn: int, partitions: Partitions, groups: FolderGroups) -> News:
    """The news that a look at the files shows. It also finds a member that is gone, of which no
    change of a file tells.
    """
    return {*partitions.grown(), *groups.changed(turn)}
