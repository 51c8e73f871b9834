"""A query's progress shown as a group, so that its lag is seen beside all others.

Spark's checkpoint decides where a query goes on; the group only shows it, and keeps retention from
removing what the query has not read. The group should have a name of its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from trunkline.folder import Folder
from trunkline.group import Group
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, StoreOptions


class Mirror:
    def __init__(self, root: str, group: str) -> None:
        self._root = root
        self._group = group
        self._shown: dict[tuple[str, str], int] = {}
        self._folder: Folder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_folder": None}

    def begin(self, place: dict[str, dict[str, int]]) -> None:
        """A new query starts at ``place``."""
        self._show(place, anew=True)

    def advance(self, place: dict[str, dict[str, int]]) -> None:
        """Everything below ``place`` is done."""
        self._show(place, anew=False)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _show(self, place: dict[str, dict[str, int]], *, anew: bool) -> None:
        if not self._group:
            return
        if self._folder is None:
            self._folder = Folder(self._root, StoreOptions(create=False, reserve_bytes=0))
        for topic, partitions in place.items():
            for partition, offset in partitions.items():
                key = (topic, partition)
                if self._shown.get(key) != offset:
                    move = partial(_move, floor=offset - 1, anew=anew)
                    self._folder.step(GroupKey(topic, int(partition), self._group), move)
                    self._shown[key] = offset


def _move(group: Group, *, floor: int, anew: bool) -> None:
    if not group.created:
        group.define(GroupOptions(), floor)
    elif anew and group.floor != floor:
        group.seek(floor)
    else:
        group.skip(group.floor + 1, floor)
