"""Upkeep: everything that is done to a log besides appending, and when.

The modules ``trim``, ``retention``, ``compaction`` and ``verify`` have one verb each, and ``tend``
runs those that a topic's options ask for. Any process may run them at any time: a file that another
process changed or removed meanwhile is left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress

from trunkline.errors import StorageError, TrunklineError
from trunkline.folder import Folder, in_hand
from trunkline.folder.compaction import Progress, compact, pack_segments
from trunkline.folder.retention import LAKE_GROUP, free, retain
from trunkline.folder.trim import trim
from trunkline.folder.verify import Finding, verify
from trunkline.log import atomic
from trunkline.options import TopicOptions

__all__ = [
    "LAKE_GROUP",
    "Finding",
    "Progress",
    "compact",
    "free",
    "pack_segments",
    "retain",
    "tend",
    "trim",
    "verify",
]


def tend(folder: Folder, only: Collection[tuple[str, int]] | None = None) -> None:
    """Do for every partition, or for these, what the options of its topic ask for. What fails keeps
    nothing else from it.
    """
    folder.reserve.look_again()  # a process that publishes nothing would not find out
    _clear_locks(folder)
    _clear_hands(folder)
    failed: TrunklineError | None = None
    for topic, options in folder.topics().items():
        for partition in range(options.partitions):
            if only is not None and (topic, partition) not in only:
                continue
            try:
                with suppress(FileNotFoundError):  # another process is at it
                    _tend(folder, topic, partition, options)
            except TrunklineError as error:
                failed = failed or error
    if failed is not None:
        raise failed


def _clear_locks(folder: Folder) -> None:
    """Remove the locks of groups whose removal was cut short. A later user makes another."""
    place = os.path.join(folder.path, "offsets")
    names = set(folder.names("offsets"))
    for name in names:
        stem, _, kind = name.rpartition(".")
        group = [f"{stem}.journal", f"{stem}.json"]
        if kind == "lock" and names.isdisjoint(group):
            made = [os.path.join(place, one) for one in group]  # since they were listed
            with suppress(OSError):  # it is another user's, for example
                atomic.remove_unlocked(os.path.join(place, name), unless=made)


def _clear_hands(folder: Folder) -> None:
    """Remove the marks of members that were killed, once no group has a lease of theirs."""
    found = [name for name in folder.names("members") if name.endswith(in_hand.SUFFIX)]
    gone = {name.removesuffix(in_hand.SUFFIX) for name in found}
    gone = {member for member in gone if not folder.is_alive(member)}
    for key in folder.groups() if gone else ():
        try:
            gone -= folder.holders(key)
        except (StorageError, OSError):  # it is damaged: it may have a lease of any of them
            return
    for member in gone:
        with suppress(OSError):  # it is another user's, for example
            os.unlink(os.path.join(folder.path, "members", member + in_hand.SUFFIX))


def _tend(folder: Folder, topic: str, partition: int, options: TopicOptions) -> None:
    limits = (options.retention_age_s, options.retention_bytes, options.retention_records)
    if any(limit is not None for limit in limits):
        retain(folder, topic, partition)
    if options.compact:
        compact(folder, topic, partition)
    if options.compress:
        pack_segments(folder, topic, partition)
