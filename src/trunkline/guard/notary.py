"""Sign what the log holds: middleware that salts and seals as events are published, and the same
for a whole folder at once.

``Notary`` is publish middleware. It gives each event a salt, and signs the heads of the trees every
so many records or seconds, and when the bus closes. Records that were published since the last
checkpoint are not covered yet. ``seal_folder`` does one round for every topic, from a scheduler for
example; ``verify_folder`` checks everything that was signed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from trunkline.bus import Bus
from trunkline.bus.local import LocalBus
from trunkline.crypto.jwe import encode64
from trunkline.crypto.merkle import is_consistent, leaf_hash, root_from_inclusion
from trunkline.crypto.note import Checkpoint, Signer, Verifier
from trunkline.errors import InvalidOption, NotFound, Tampered, TrunklineError
from trunkline.event import Event, Receipt
from trunkline.folder import Folder
from trunkline.guard import offsets as group_offsets
from trunkline.guard import partitions as partition_list
from trunkline.guard.offsets import seal_offsets, verify_offsets
from trunkline.guard.partitions import (
    PartitionList,
    Place,
    check_listed,
    list_partitions,
    read_list,
    strike,
    verify_list,
)
from trunkline.guard.tree import (
    FOLDER,
    SALT,
    PartitionTree,
    Sealing,
    TreeFinding,
    origin,
)
from trunkline.guard.vault import HEADER as SEALED
from trunkline.log import atomic, layout
from trunkline.middleware import PublishNext
from trunkline.store.file import FileStore
from trunkline.units import read_time

logger = logging.getLogger(__name__)

_SALT_CHARS: Final = 22  # of base64: 132 random bits
_SALTS_DRAWN: Final = 1000
_salts: list[str] = []  # drawn together, because asking the system costs more than the rest
os.register_at_fork(after_in_child=_salts.clear)


def salted(event: Event) -> Event:
    """The event with a salt for its leaf. A sealed payload, and a tombstone, need none."""
    if event.payload is None or SEALED in event.headers or SALT in event.headers:
        return event
    try:
        salt = _salts.pop()
    except IndexError:
        salt = _draw()
    return msgspec.structs.replace(event, headers={**event.headers, SALT: salt})


def _draw() -> str:
    """A salt, with more of them for later."""
    chars = _SALT_CHARS * _SALTS_DRAWN
    text = encode64(secrets.token_bytes(chars * 3 // 4)).decode()
    fresh = [text[at : at + _SALT_CHARS] for at in range(0, chars, _SALT_CHARS)]
    _salts.extend(fresh[1:])
    return fresh[0]


class Notary:
    """Publish middleware for a bus in a folder: ``bus.use(Notary(bus, signer))``, behind a vault if
    there is one. It signs after ``every`` records, or with the first publish after ``interval_s``.
    """

    def __init__(
        self, bus: Bus, signer: Signer, *, every: int = 10_000, interval_s: float = 5.0
    ) -> None:
        if not isinstance(bus, LocalBus) or not isinstance(bus.store, FileStore):
            raise InvalidOption("a notary signs a bus in a folder", hint="file:<folder>")
        self._folder: Folder = bus.store.folder
        self._signer = signer
        self._clock = bus.clock
        self._every = every
        self._interval_s = interval_s
        self._trees: dict[tuple[str, int], PartitionTree] = {}
        self._touched: set[Place] = set()
        self._listed: set[Place] = set()  # that the signed list of partitions has from this notary
        self._count = 0
        self._signed_at = self._clock.monotonic()
        self._round: asyncio.Task[None] | None = None
        bus.at_close(self.close)

    async def publish(self, events: list[Event], call_next: PublishNext) -> list[Receipt]:
        receipts = await call_next([salted(event) for event in events])
        touch = self._touched.add
        for one in receipts:
            touch((one.topic, one.partition))
        self._count += len(receipts)
        if self._round is None and self._is_due():
            self._round = asyncio.get_running_loop().create_task(self._seal_in_passing())
        return receipts

    def _is_due(self) -> bool:
        if self._count >= self._every:
            return True
        return self._clock.monotonic() - self._signed_at >= self._interval_s

    async def _seal_in_passing(self) -> None:
        try:
            await self.seal()
        except (TrunklineError, OSError) as error:
            logger.error("the log could not be signed: %s", error)
        finally:
            self._round = None

    async def seal(self) -> list[Sealing]:
        """Sign what was published through this notary."""
        touched, self._touched = self._touched, set()
        self._count = 0
        self._signed_at = self._clock.monotonic()
        try:
            return await asyncio.to_thread(self._seal, touched)
        except BaseException:
            self._touched |= touched
            raise

    def _seal(self, places: Iterable[tuple[str, int]]) -> list[Sealing]:
        done = []
        for place in sorted(places):
            tree = self._trees.get(place)
            if tree is None:
                tree = self._trees[place] = PartitionTree(self._folder, *place)
            done.append(tree.seal(self._signer))
        if fresh := {(one.topic, one.partition) for one in done} - self._listed:
            list_partitions(self._folder, self._signer, sorted(fresh))
            self._listed |= fresh
        return done

    async def close(self) -> None:
        """Sign everything, with the groups' offsets."""
        if self._round is not None:
            await asyncio.gather(self._round, return_exceptions=True)
        with suppress(FileNotFoundError):
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        places = {
            (topic, number)
            for topic, options in self._folder.topics().items()
            for number in range(options.partitions)
        }
        self._seal(places)
        list_partitions(self._folder, self._signer, sorted(places))
        seal_offsets(self._folder, self._signer)


# -- a folder as a whole -----------------------------------------------------------------------


def places_of(folder: Folder, topics: Iterable[str] | None = None) -> list[tuple[str, int]]:
    """The partitions of a folder, and those that have a tree and no log any more."""
    found = {
        (topic, number)
        for topic, options in folder.topics().items()
        for number in range(options.partitions)
    }
    for place in ("wal", "dlq"):
        with suppress(FileNotFoundError):
            for name in os.listdir(os.path.join(folder.path, FOLDER, place)):
                if parsed := layout.parse_stem(name, place == "dlq"):
                    found.add(parsed)
    wanted = None if topics is None else set(topics)
    return sorted(place for place in found if wanted is None or place[0] in wanted)


def seal_folder(
    folder: Folder,
    signer: Signer,
    topics: Iterable[str] | None = None,
    *,
    accept_removed: bool = False,
) -> list[Sealing]:
    """Sign every partition, or those of some topics, their list, and the groups' offsets.
    ``Tampered`` if a partition of the list is gone.
    """
    places = places_of(folder, topics)
    if topics is None:
        check_listed(folder, signer, places)
    done = [
        PartitionTree(folder, *place).seal(signer, accept_removed=accept_removed)
        for place in places
    ]
    list_partitions(folder, signer, places)
    seal_offsets(folder, signer)
    return done


def verify_folder(
    folder: Folder,
    verifier: Verifier,
    topics: Iterable[str] | None = None,
    against: Sequence[Checkpoint] = (),
) -> Iterator[TreeFinding]:
    """What is not as it was signed."""
    by_origin: dict[str, list[Checkpoint]] = {}
    for old in against:
        by_origin.setdefault(old.origin, []).append(old)
    places = places_of(folder, topics)
    try:
        signed = read_list(folder, verifier)
    except Tampered as error:
        yield TreeFinding(partition_list.NAME, 0, 0, error.message)
        signed = PartitionList({}, {})
    if signed is None:
        signed = PartitionList({}, {})
        if topics is None:
            said = "the list of partitions was not signed, or is gone"
            yield TreeFinding(partition_list.NAME, 0, 0, said)
    sizes: dict[Place, int] = {}
    for topic, partition in places:
        mine = by_origin.pop(origin(folder.id, topic, partition), [])
        mine = [old for old in mine if not signed.forgave(topic, partition, old)]
        tree = PartitionTree(folder, topic, partition)
        is_new = (topic, partition) not in signed.sizes and not mine and not tree.is_begun
        if signed.at and is_new:  # since the last round, the list would have it otherwise
            if folder.reader(topic, partition).count():
                yield TreeFinding(topic, partition, 0, "not signed yet", severe=False)
            continue
        told = list(tree.verify(verifier, mine))
        yield from told
        try:
            sizes[topic, partition] = tree.checkpoint(verifier)[1].size
        except (NotFound, Tampered):
            if told:  # once is enough
                sizes[topic, partition] = signed.sizes.get((topic, partition), 0)
    yield from verify_list(signed, sizes, topics)
    if topics is None:
        yield from _unknown(folder, signed, by_origin)
        yield from verify_offsets(folder, verifier)


def _unknown(
    folder: Folder, signed: PartitionList, by_origin: dict[str, list[Checkpoint]]
) -> Iterator[TreeFinding]:
    """Older checkpoints of partitions that the folder does not have."""
    here = f"trunkline/{folder.id}/"
    for name, kept in by_origin.items():
        if not name.startswith(here):
            said = f"a checkpoint of {name} was given, and this is {here}"
        else:
            topic, _, number = name.removeprefix(here).rpartition("~")
            place = (topic, int(number) if number.isdigit() else 0)
            if all(signed.forgave(*place, old) for old in kept):
                continue
            said = f"rolled back: {kept[0].size} records were signed before, and there are none"
        yield TreeFinding(name.removeprefix(here), 0, 0, said)


def forget_tree(folder: Folder, signer: Signer, topic: str) -> int:
    """Remove the trees of a topic that is gone on purpose, and sign that it is. Returns how many
    partitions it had.
    """
    if topic in folder.topics():
        raise InvalidOption(f"{topic} is there", hint="the tree of a topic goes after the topic")
    verifier = Verifier(signer.public)
    listed = read_list(folder, verifier)
    gone: dict[Place, Checkpoint | None] = {
        place: None for place in (listed.sizes if listed else ()) if place[0] == topic
    }
    for place in places_of(folder, [topic]):
        gone[place] = None
        with suppress(NotFound, Tampered):
            gone[place] = PartitionTree(folder, *place).checkpoint(verifier)[1]
    if gone:
        strike(folder, signer, gone)
    for place in gone:
        with suppress(FileNotFoundError):
            shutil.rmtree(PartitionTree(folder, *place).path)
    return len(gone)


# -- copies elsewhere ----------------------------------------------------------------------------


def copy_checkpoints(folder: Folder, place: str, verifier: Verifier) -> int:
    """Copy what is signed to a folder elsewhere, for ``verify --against``. Returns how many
    checkpoints. A copy that is there is replaced by one that extends it; ``Tampered`` if the new
    one does not, and then no copy is changed.
    """
    atomic.make_dir(place)
    fresh: dict[str, bytes] = {}
    signed = read_list(folder, verifier) or PartitionList({}, {})
    for topic, partition in places_of(folder):
        with suppress(NotFound):
            tree = PartitionTree(folder, topic, partition)
            note, head = tree.checkpoint(verifier)
            fresh[_copy_name(folder, topic, partition)] = note.encode()
            old = _kept(os.path.join(place, _copy_name(folder, topic, partition)), verifier)
            if old is not None and not signed.forgave(topic, partition, old):
                _check_extends(tree, head, old)
    count = len(fresh)
    ours = f"{folder.id}."
    for name in sorted(os.listdir(place)):
        if not (name.startswith(ours) and name.endswith(".checkpoint")) or name in fresh:
            continue
        old = _kept(os.path.join(place, name), verifier)
        topic, _, number = name.removeprefix(ours).removesuffix(".checkpoint").rpartition("~")
        if old is not None and not (number.isdigit() and signed.forgave(topic, int(number), old)):
            raise Tampered(
                f"{old.size} records of {old.origin} were signed before, and there are none",
                origin=old.origin,
                hint=f"if it was removed on purpose: trunkline seal --forget {topic}",
            )
    for name in (group_offsets.NAME, partition_list.NAME):
        with suppress(FileNotFoundError):
            note = atomic.read_file(os.path.join(folder.path, FOLDER, name)).decode()
            copied = os.path.join(place, f"{ours}{name}")
            _check_later(note, copied, verifier)
            fresh[f"{ours}{name}"] = note.encode()
    for name, data in fresh.items():
        atomic.replace_file(os.path.join(place, name), data)
    return count


def _copy_name(folder: Folder, topic: str, partition: int) -> str:
    return f"{folder.id}.{topic}~{partition}.checkpoint"


def _kept(path: str, verifier: Verifier) -> Checkpoint | None:
    return read_checkpoints(path, verifier)[0] if os.path.exists(path) else None


def _check_extends(tree: PartitionTree, head: Checkpoint, old: Checkpoint) -> None:
    """``Tampered`` unless the signed tree begins with the one that an older checkpoint covers."""
    hint = "the older copy was kept: trunkline verify --against it says what is wrong"
    if old.origin != head.origin:
        said = f"the copy is a checkpoint of {old.origin}, and this is {head.origin}"
        raise Tampered(said, origin=head.origin, hint=hint)
    if old.size > head.size:
        said = f"rolled back: {old.size} records of {head.origin} were signed before"
        raise Tampered(f"{said}, now {head.size}", origin=head.origin, hint=hint)
    proof = tree.prove_consistency(old.size, head) if old.size else []
    if not is_consistent(old.size, head.size, old.root, head.root, proof):
        said = f"the first {old.size} records of {head.origin} were written anew"
        raise Tampered(said, origin=head.origin, hint=hint)


def _check_later(note: str, copied: str, verifier: Verifier) -> None:
    """``Tampered`` if a copy of a note was signed later than the note."""
    if not os.path.exists(copied):
        return
    with open(copied, encoding="utf-8", errors="replace") as file:
        old = verifier.open(file.read()).splitlines()
    new = verifier.open(note).splitlines()
    if read_time(new[1]) < read_time(old[1]):
        said = f"rolled back: {old[0]} was signed at {old[1]} before, now {new[1]}"
        raise Tampered(said, origin=old[0])


def verify_notes(folder: Folder, place: str, verifier: Verifier) -> Iterator[TreeFinding]:
    """Copies in a folder elsewhere of signed offsets and of the list of partitions that were signed
    later than those of the bus.
    """
    for name in (group_offsets.NAME, partition_list.NAME):
        try:
            note = atomic.read_file(os.path.join(folder.path, FOLDER, name)).decode()
            _check_later(note, os.path.join(place, f"{folder.id}.{name}"), verifier)
        except FileNotFoundError:
            continue  # told already
        except Tampered as error:
            yield TreeFinding(name, 0, 0, error.message)


def read_checkpoints(place: str, verifier: Verifier) -> list[Checkpoint]:
    """Every signed checkpoint in a file, or in the files of a folder named ``*checkpoint``."""
    paths = [place]
    if os.path.isdir(place):
        paths = [
            os.path.join(where, name)
            for where, _, names in os.walk(place)
            for name in sorted(names)
            if name.endswith("checkpoint")
        ]
    found = []
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                found.append(Checkpoint.parse(verifier.open(file.read())))
        except FileNotFoundError:
            raise NotFound(f"there is no {path}", path=path) from None
        except UnicodeDecodeError:
            raise Tampered(f"{path} is no checkpoint", path=path) from None
        except Tampered as error:
            raise Tampered(f"{path}: {error.message}", path=path) from None
    if not found:
        raise NotFound(f"there is no checkpoint in {place}", path=place)
    return found


# -- proofs ------------------------------------------------------------------------------------


def prove_record(folder: Folder, event_id: str, verifier: Verifier) -> dict[str, Any]:
    """Proof that a record, found by its event's id, is in the signed log. It holds no payload:
    with the payload and the salt one can check that the leaf commits to them.
    """
    topic, partition, offset = _find(folder, event_id)
    tree = PartitionTree(folder, topic, partition)
    note, head = tree.checkpoint(verifier)
    leaf, proof = tree.prove(offset, head)
    return {
        "origin": head.origin,
        "topic": topic,
        "partition": partition,
        "offset": offset,
        "index": offset - 1,
        "size": head.size,
        "leaf": _text(leaf.data),
        "salt": leaf.salt.decode(),
        "proof": [_text(step) for step in proof],
        "checkpoint": note,
    }


def prove_growth(folder: Folder, old: Checkpoint, verifier: Verifier) -> dict[str, Any]:
    """Proof that the signed log begins with everything that an older checkpoint covers."""
    here = f"trunkline/{folder.id}/"
    name, _, number = old.origin.removeprefix(here).rpartition("~")
    if not old.origin.startswith(here) or not number.isdigit():
        raise InvalidOption(f"the checkpoint is that of {old.origin}")
    tree = PartitionTree(folder, name, int(number))
    note, head = tree.checkpoint(verifier)
    if old.size > head.size:
        raise Tampered(f"rolled back: {old.size} records were signed before, now {head.size}")
    proof = tree.prove_consistency(old.size, head) if old.size else []
    return {
        "origin": head.origin,
        "old_size": old.size,
        "old_root": _text(old.root),
        "size": head.size,
        "proof": [_text(step) for step in proof],
        "checkpoint": note,
    }


def check_proof(proof: dict[str, Any], verifier: Verifier) -> Checkpoint:
    """The checkpoint that a proof leads to; ``Tampered`` if it leads nowhere. Needs no bus."""
    try:
        head = Checkpoint.parse(verifier.open(proof["checkpoint"]))
        steps = [b64decode(step, validate=True) for step in proof["proof"]]
        if "old_root" in proof:
            old_root = b64decode(proof["old_root"], validate=True)
            holds = is_consistent(proof["old_size"], head.size, old_root, head.root, steps)
        else:
            leaf = b64decode(proof["leaf"], validate=True)
            offset = int.from_bytes(leaf[:8], "big")
            root = root_from_inclusion(offset - 1, head.size, leaf_hash(leaf), steps)
            holds = root == head.root and offset == proof["offset"]
    except (KeyError, TypeError, ValueError):
        raise Tampered("this is no proof") from None
    if not holds or proof["origin"] != head.origin:
        raise Tampered("the proof does not lead to the signed root", origin=head.origin)
    return head


def _find(folder: Folder, event_id: str) -> tuple[str, int, int]:
    for topic, options in folder.topics().items():
        for partition in range(options.partitions):
            reader = folder.fresh_reader(topic, partition)
            try:
                start, end = reader.bounds()
                while start < end and (records := reader.read(start, strict=False)):
                    for record in records:
                        if record.event.id == event_id:
                            return topic, partition, record.offset
                    start = records[-1].offset + 1
            finally:
                reader.close()
    raise NotFound(f"there is no event {event_id}", id=event_id)


def _text(data: bytes) -> str:
    return b64encode(data).decode()
