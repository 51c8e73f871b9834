"""The signed list of the partitions of a bus that were ever signed.

::

    tlog/partitions     a signed note: the bus, the time, and a line for each partition

A line ``orders 0 1200`` says that the tree of ``orders/0`` had at least 1,200 records when the list
was signed: a topic that is removed together with its tree is missed. A line ``gone orders 0 1200
<root>`` says that the owner of the signing key removed that partition on purpose.
"""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from trunkline.crypto.note import Checkpoint, Signer, Verifier
from trunkline.errors import Tampered
from trunkline.folder import Folder
from trunkline.guard.tree import FOLDER, PartitionTree, TreeFinding
from trunkline.log import atomic

NAME: Final = "partitions"
_LOCK_S: Final = 30.0
Place = tuple[str, int]


class PartitionList(NamedTuple):
    """``sizes`` are the records that each tree has at least. ``gone`` are the last heads of the
    partitions that were removed on purpose.
    """

    sizes: dict[Place, int]
    gone: dict[Place, list[tuple[int, bytes]]]
    at: str = ""

    def forgave(self, topic: str, partition: int, old: Checkpoint) -> bool:
        """Whether an older checkpoint is one of a partition that was removed on purpose. Of a
        partition that was made anew since, only the last head of the removed one counts.
        """
        heads = self.gone.get((topic, partition), ())
        if (topic, partition) in self.sizes:
            return (old.size, old.root) in heads
        return any(old.size < size or (old.size, old.root) == (size, root) for size, root in heads)


def read_list(folder: Folder, verifier: Verifier) -> PartitionList | None:
    """The list as it was signed; None if there is none, ``Tampered`` if it was changed."""
    try:
        note = atomic.read_file(_path(folder)).decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    return parse_list(note, folder.id, verifier)


def parse_list(note: str, bus: str, verifier: Verifier) -> PartitionList:
    origin, at, *lines = verifier.open(note).splitlines()
    if origin != f"trunkline/{bus}/{NAME}":
        raise Tampered(f"the list of partitions is that of {origin}")
    found = PartitionList({}, {}, at)
    for line in lines:
        match line.split(" "):
            case ["gone", topic, number, size, root]:
                head = (int(size), b64decode(root))
                found.gone.setdefault((topic, int(number)), []).append(head)
            case [topic, number, size]:
                found.sizes[topic, int(number)] = int(size)
    return found


def list_partitions(folder: Folder, signer: Signer, places: Iterable[Place]) -> None:
    """Take these partitions, with the sizes of their trees, into the list. ``Tampered`` where a
    tree is smaller than the list says: that tree was removed, or put back.
    """
    verifier = Verifier(signer.public)
    with _locked(folder):
        found = read_list(folder, verifier) or PartitionList({}, {})
        is_new = not found.at
        for topic, partition in places:
            size = PartitionTree(folder, topic, partition).checkpoint(verifier)[1].size
            before = found.sizes.get((topic, partition))
            if before is not None and size < before:
                raise _shrunk(topic, partition, before, size)
            is_new = is_new or before != size
            found.sizes[topic, partition] = size
        if is_new:
            _sign(folder, signer, found)


def strike(folder: Folder, signer: Signer, heads: dict[Place, Checkpoint | None]) -> None:
    """Take partitions out of the list that are gone on purpose. ``heads`` are their last
    checkpoints; None where that is gone as well.
    """
    with _locked(folder):
        found = read_list(folder, Verifier(signer.public)) or PartitionList({}, {})
        for place, head in heads.items():
            size = found.sizes.pop(place, 0)
            last = (size, b"") if head is None else (head.size, head.root)
            found.gone.setdefault(place, []).append(last)
        _sign(folder, signer, found)


def check_listed(folder: Folder, signer: Signer, there: Iterable[Place]) -> None:
    """``Tampered`` if a partition of the list is not there any more."""
    found = read_list(folder, Verifier(signer.public))
    have = set(there)
    for place, size in sorted((found or PartitionList({}, {})).sizes.items()):
        if size and place not in have:
            raise _shrunk(*place, size, 0)


def verify_list(
    found: PartitionList, sizes: dict[Place, int], topics: Iterable[str] | None
) -> Iterator[TreeFinding]:
    """Partitions that are gone, or whose trees are smaller than when the list was signed."""
    wanted = None if topics is None else set(topics)
    for (topic, partition), size in sorted(found.sizes.items()):
        if wanted is not None and topic not in wanted:
            continue
        now = sizes.get((topic, partition))
        if now is None and size:
            said = f"{size} records were signed, and the partition is gone with its tree"
            yield TreeFinding(topic, partition, 0, said)
        elif now is not None and now < size:
            said = f"rolled back: the signed list of partitions has {size} records of it"
            yield TreeFinding(topic, partition, now + 1, said)


def _sign(folder: Folder, signer: Signer, found: PartitionList) -> None:
    lines = [f"{topic} {number} {size}\n" for (topic, number), size in sorted(found.sizes.items())]
    lines += [
        f"gone {topic} {number} {size} {b64encode(root).decode()}\n"
        for (topic, number), heads in sorted(found.gone.items())
        for size, root in heads
    ]
    head = f"trunkline/{folder.id}/{NAME}\n{folder.clock.now().isoformat()}\n"
    atomic.replace_file(_path(folder), signer.sign(head + "".join(lines)).encode())


def _shrunk(topic: str, partition: int, before: int, now: int) -> Tampered:
    said = f"{before} records of {topic}/{partition} were signed, and now there are {now}"
    hint = f"if it was removed on purpose: trunkline seal --forget {topic}"
    return Tampered(said, topic=topic, partition=partition, hint=hint)


def _path(folder: Folder) -> str:
    return os.path.join(folder.path, FOLDER, NAME)


@contextmanager
def _locked(folder: Folder) -> Iterator[None]:
    """One process at a time changes the list."""
    atomic.make_dir(os.path.join(folder.path, FOLDER))
    path = os.path.join(folder.path, FOLDER, "lock")
    fd = atomic.open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        atomic.lock(fd, _LOCK_S, path)
        yield
    finally:
        os.close(fd)
