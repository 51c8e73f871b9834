"""Signed group offsets: a note that says how far each group had settled when it was signed.

::

    tlog/offsets        a signed note: the bus, the time, and a line for each group

A group that is set back, or removed, delivers settled records again. The note shows that it
happened.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from trunkline.crypto.note import Signer, Verifier
from trunkline.errors import NotFound, StorageError, Tampered
from trunkline.folder import Folder
from trunkline.guard.tree import FOLDER, TreeFinding
from trunkline.log import atomic

logger = logging.getLogger(__name__)

NAME: Final = "offsets"
_Place = tuple[str, int, str]


def seal_offsets(folder: Folder, signer: Signer) -> int:
    """Sign how far each group has settled. Returns how many groups. A group that has settled less
    than when it was last signed is logged: a seek does that, and so does a forger.
    """
    now: dict[_Place, int] = {}
    for key in sorted(folder.groups()):
        with suppress(StorageError, NotFound):
            floor = folder.look(key, lambda group: group.floor)
            now[key.topic, key.partition, key.group] = floor
    with suppress(Tampered, FileNotFoundError):
        _, before = _read(folder, Verifier(signer.public))
        for place, floor in before.items():
            if now.get(place, -1) < floor:
                said = "the group %s of %s/%d had settled %d when it was last signed, now %s"
                topic, partition, group = place
                logger.warning(said, group, topic, partition, floor, now.get(place, "it is gone"))
    lines = "".join(f"{t} {number} {name} {floor}\n" for (t, number, name), floor in now.items())
    text = f"{_origin(folder)}\n{folder.clock.now().isoformat()}\n{lines}"
    atomic.make_dir(os.path.join(folder.path, FOLDER))
    atomic.replace_file(_path(folder), signer.sign(text).encode())
    return len(now)


def verify_offsets(folder: Folder, verifier: Verifier) -> Iterator[TreeFinding]:
    """Groups that are gone, or have settled less than when they were signed."""
    try:
        _, signed = _read(folder, verifier)
    except FileNotFoundError:
        yield TreeFinding(NAME, 0, 0, "the groups' offsets were not signed, or that is gone")
        return
    except Tampered as error:
        yield TreeFinding(NAME, 0, 0, error.message)
        return
    groups = {(key.topic, key.partition, key.group): key for key in folder.groups()}
    for (topic, number, name), floor in signed.items():
        key = groups.get((topic, number, name))
        if key is None:
            yield TreeFinding(topic, number, 0, f"the group {name} is gone")
            continue
        now = folder.look(key, lambda group: group.floor)
        if now < floor:
            said = f"the group {name} was set back from {floor} to {now}"
            yield TreeFinding(topic, number, now, said)


def _read(folder: Folder, verifier: Verifier) -> tuple[str, dict[_Place, int]]:
    """When the offsets were signed, and the floor of each group then."""
    note = atomic.read_file(_path(folder)).decode("utf-8", "replace")
    origin, at, *lines = verifier.open(note).splitlines()
    if origin != _origin(folder):
        raise Tampered(f"the signed offsets are those of {origin}")
    found: dict[_Place, int] = {}
    for line in lines:
        topic, number, name, floor = line.split(" ")
        found[topic, int(number), name] = int(floor)
    return at, found


def _origin(folder: Folder) -> str:
    return f"trunkline/{folder.id}/{NAME}"


def _path(folder: Folder) -> str:
    return os.path.join(folder.path, FOLDER, NAME)
