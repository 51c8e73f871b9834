"""Tamper evidence for one partition: its Merkle tree, its signed checkpoint, and the check.

::

    tlog/wal/orders/checkpoint      the signed head of the tree, C2SP tlog-checkpoint
    tlog/wal/orders/tile/…          the hashes, C2SP tlog-tiles
    tlog/wal/orders/removed         the offsets that retention and compaction took, as ranges

The leaf of a record is ``offset ‖ meta ‖ SHA-256(salt ‖ payload)``: eight bytes, the meta object's
bytes as the log has them, 32 bytes. The salt, in the header ``leaf-salt``, is left out of the meta:
when it is erased with its record, nobody can try payloads against the hash. A sealed payload needs
none. The hashes stay when records go, so retention and compaction keep the tree; the signed
checkpoint says which offsets they took.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from hashlib import sha256
from typing import Final, NamedTuple

import msgspec

from trunkline.crypto.merkle import (
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    root_hash,
    subtree_hash,
)
from trunkline.crypto.note import Checkpoint, Signer, Verifier
from trunkline.crypto.tiles import TileTree
from trunkline.errors import Corrupt, NotFound, Tampered
from trunkline.folder import Folder
from trunkline.log import atomic, layout
from trunkline.log.line import offset_at
from trunkline.log.reader import PartitionReader
from trunkline.log.segment import Segment

SALT: Final = "leaf-salt"
FOLDER: Final = "tlog"
_SALT_NAME: Final = b'"leaf-salt":"'
_SALT_CHARS: Final = 22
_SALT = re.compile(rb'"leaf-salt":"([A-Za-z0-9_-]{22})"')
_LOCK_S: Final = 30.0
_BATCH: Final = 4096
_GONE: Final = b"removed before it was sealed"
_NAMED: Final = 5


class _Line(msgspec.Struct, gc=False):
    offset: int = 0
    meta: msgspec.Raw = msgspec.Raw()
    payload: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Line).decode
_meta = msgspec.json.Decoder(dict).decode


class Leaf(NamedTuple):
    """A record's leaf: ``data`` is hashed, ``salt`` and ``payload`` are not in it themselves."""

    offset: int
    data: bytes
    salt: bytes
    payload: bytes

    @property
    def hash(self) -> bytes:
        return leaf_hash(self.data)


def read_leaf(line: bytes) -> Leaf | None:
    """The leaf of a log's line; None if the line is a seal."""
    found = _decode(line)
    meta, payload = bytes(found.meta), bytes(found.payload)
    if not meta:
        return None
    salt = b""
    if marked := _SALT.search(meta):
        salt = marked[1]
        meta = meta[: marked.start(1)] + meta[marked.end(1) :]
    digest = sha256(salt + payload).digest()
    return Leaf(found.offset, found.offset.to_bytes(8, "big") + meta + digest, salt, payload)


def _hash_line(line: bytes) -> tuple[int, bytes] | None:
    """Offset and leaf hash, as ``read_leaf`` has them, for less: it is done for every record."""
    found = _decode(line)
    meta = bytes(found.meta)
    if not meta:
        return None
    payload, offset = found.payload, found.offset
    at = meta.find(_SALT_NAME)
    start = at + len(_SALT_NAME)
    end = start + _SALT_CHARS
    salt = meta[start:end]
    # What ``_SALT`` matches, for a third of its time; the 0 is for a salt of dashes alone.
    if (
        at >= 0
        and meta[end : end + 1] == b'"'
        and len(salt) == _SALT_CHARS
        and (b"0" + salt.translate(None, b"-_")).isalnum()
    ):
        digest = sha256(salt + bytes(payload)).digest()
        meta = meta[:start] + meta[end:]
    else:
        digest = sha256(payload).digest()
    return offset, sha256(b"\0%b%b%b" % (offset.to_bytes(8, "big"), meta, digest)).digest()


def missing_leaf(offset: int) -> bytes:
    """The leaf hash of a record that was gone before it could be sealed."""
    return leaf_hash(offset.to_bytes(8, "big") + _GONE)


class TreeFinding(NamedTuple):
    """What is wrong with one partition. ``offset`` is the first record concerned, or 0. What is
    not ``severe`` is nothing wrong, but something that the signatures do not cover.
    """

    topic: str
    partition: int
    offset: int
    problem: str
    severe: bool = True


class Sealing(NamedTuple):
    """What one round of sealing did."""

    topic: str
    partition: int
    size: int
    added: int
    removed: int


class PartitionTree:
    """The tree of one partition of a bus folder."""

    def __init__(self, folder: Folder, topic: str, partition: int = 0) -> None:
        self.topic = topic
        self.partition = partition
        self._folder = folder
        stem = layout.log_stem(topic, partition)
        self.path = os.path.join(folder.path, FOLDER, stem)
        self.origin = origin(folder.id, topic, partition)
        self._tree: TileTree | None = None
        self._note = ""
        self._holes: dict[int, tuple[int, list[tuple[int, int]]]] = {}  # by segment: inode, ranges

    # -- sealing -------------------------------------------------------------------------------

    def seal(self, signer: Signer, *, accept_removed: bool = False) -> Sealing:
        """Add what the log has gained to the tree, and sign its head.

        Records that are gone since the last time are noted as removed if the topic's retention or
        compaction takes records, or ``accept_removed`` says so; else ``Tampered``.
        """
        with self._locked(), closing(self._reader()) as reader:
            tree, last = self._load(signer)
            removed = self._removed(last)
            head = reader.head()
            size = head.next - 1
            if size < tree.size:
                raise Tampered(
                    f"the log of {self.topic}/{self.partition} ends at {size}, and its tree at "
                    f"{tree.size}",
                    topic=self.topic,
                    partition=self.partition,
                    hint="records were cut off, or the topic was removed and made anew",
                )
            gone = self._gone(reader, head.start, size)
            fresh = _minus(gone, removed)
            before = [(a, min(b, tree.size)) for a, b in fresh if a <= tree.size]
            if before and not (accept_removed or self._may_remove()):
                raise Tampered(
                    f"{_said(before)} of {self.topic}/{self.partition} are gone, and no option of "
                    "the topic takes records",
                    topic=self.topic,
                    partition=self.partition,
                    hint="if that was on purpose: trunkline seal --accept-removed",
                )
            leaves = self._leaves(reader, tree.size + 1, size)
            if not leaves and not fresh and last is not None:
                return Sealing(self.topic, self.partition, size, 0, 0)
            was = tree.size
            tiles = tree.extend(leaves)
            tree.write(tiles)
            self._sign(signer, tree, _union(removed, gone))
            tree.remove_partial(was)
            return Sealing(self.topic, self.partition, size, len(leaves), _count(fresh))

    def _sign(self, signer: Signer, tree: TileTree, removed: list[tuple[int, int]]) -> None:
        extensions = []
        if removed:
            text = "".join(f"{first}-{last}\n" for first, last in removed).encode()
            digest = sha256(text).hexdigest()
            # Under a name of its own: the file of the last checkpoint counts until this one is in
            # its place.
            atomic.replace_file(os.path.join(self.path, f"removed.{digest[:16]}"), text)
            extensions.append(f"removed {digest}")
        checkpoint = Checkpoint(self.origin, tree.size, tree.root(), tuple(extensions))
        self._note = signer.sign(checkpoint.text())
        atomic.replace_file(os.path.join(self.path, "checkpoint"), self._note.encode())
        kept = f"removed.{digest[:16]}" if removed else ""
        stale = [n for n in os.listdir(self.path) if n.startswith("removed.") and n != kept]
        atomic.remove_files([os.path.join(self.path, name) for name in stale])

    def _load(self, signer: Signer) -> tuple[TileTree, Checkpoint | None]:
        note = self._read_note()
        if note is None:
            if os.path.exists(os.path.join(self.path, "tile")):
                raise Tampered(f"{self.path} has tiles and no checkpoint", path=self.path)
            self._tree, self._note = TileTree(self.path), ""
            return self._tree, None
        last = self._opened(note, Verifier(signer.public))
        if self._tree is None or note != self._note or self._tree.size != last.size:
            self._tree, self._note = TileTree(self.path, last.size), note
        if self._tree.root() != last.root:
            raise Tampered(f"the tree of {self.topic}/{self.partition} has another root")
        return self._tree, last

    def _may_remove(self) -> bool:
        options = self._folder.topic(self.topic)
        limits = (options.retention_age_s, options.retention_bytes, options.retention_records)
        return options.compact or any(limit is not None for limit in limits)

    # -- verifying -----------------------------------------------------------------------------

    def verify(
        self, verifier: Verifier, against: Sequence[Checkpoint] = ()
    ) -> Iterator[TreeFinding]:
        """What in the log, in the tree or in the checkpoint is not as it was signed. ``against``
        are checkpoints that were kept elsewhere: of a tree that does not begin with them, the log
        was rolled back or written anew.
        """
        try:
            yield from self._verify(verifier, against)
        except (Tampered, Corrupt) as error:
            yield self._finding(0, error.message)
        except (msgspec.DecodeError, ValueError, OSError) as error:
            yield self._finding(0, f"it cannot be read: {error}")

    def _verify(self, verifier: Verifier, against: Sequence[Checkpoint]) -> Iterator[TreeFinding]:
        note = self._read_note()
        if note is None:
            if self._is_empty() and not against:
                return
            yield self._finding(0, "there is no checkpoint")
            return
        head = self._opened(note, verifier)
        tree = TileTree(self.path, head.size)
        hashes = tree.leaves(0, head.size)
        if len(hashes) != head.size or subtree_hash(hashes) != head.root:
            yield self._finding(0, "the tree's hashes do not lead to the signed root")
            return
        tree.check_tiles()
        for old in against:
            if old.size > head.size:
                said = f"rolled back: a checkpoint of {old.size} records was signed before"
                yield self._finding(head.size + 1, said)
            elif subtree_hash(hashes[: old.size]) != old.root:
                yield self._finding(0, f"its first {old.size} records were written anew")
        removed = self._removed(head)
        yield from self._compare(hashes, removed)

    def _compare(
        self, hashes: list[bytes], removed: list[tuple[int, int]]
    ) -> Iterator[TreeFinding]:
        """Compare each record with its leaf. A record that is neither there nor noted as removed is
        missing; records that come after the checkpoint are not looked at.
        """
        expected = 1
        starts = [first for first, _ in removed]

        def gap(end: int) -> Iterator[TreeFinding]:
            """The offsets from ``expected`` up to ``end`` that ought to be there."""
            for first, last in _minus([(expected, end - 1)], removed) if end > expected else ():
                what = f"{_said([(first, last)])} missing"
                yield self._finding(first, what)

        with closing(self._reader()) as reader:
            for line in raw_lines(reader, reader.head().start, len(hashes)):
                hashed = _hash_line(line)
                if hashed is None:
                    continue
                offset, digest = hashed
                if offset < expected:
                    yield self._finding(offset, f"record {offset} stands in the wrong place")
                    continue
                yield from gap(offset)
                expected = offset + 1
                if digest != hashes[offset - 1]:
                    yield self._finding(offset, f"record {offset} was changed")
                elif starts and _holds(removed, starts, offset):
                    yield self._finding(offset, f"record {offset} was removed, and is there again")
        yield from gap(len(hashes) + 1)

    @property
    def is_begun(self) -> bool:
        """Whether anything of a tree is there."""
        return os.path.exists(self.path)

    # -- proofs --------------------------------------------------------------------------------

    def checkpoint(self, verifier: Verifier) -> tuple[str, Checkpoint]:
        """The signed note, and what it says."""
        note = self._read_note()
        if note is None:
            raise NotFound(f"{self.topic}/{self.partition} has no checkpoint", topic=self.topic)
        return note, self._opened(note, verifier)

    def prove(self, offset: int, head: Checkpoint) -> tuple[Leaf, list[bytes]]:
        """A record's leaf, and the proof that the checkpoint's tree includes it."""
        if offset > head.size:
            raise NotFound(
                f"record {offset} came after the checkpoint", offset=offset, hint="trunkline seal"
            )
        with closing(self._reader()) as reader:
            for line in raw_lines(reader, offset, offset):
                leaf = read_leaf(line)
                if leaf is not None and leaf.offset == offset:
                    tree = TileTree(self.path, head.size)
                    return leaf, inclusion_proof(offset - 1, head.size, tree.node)
        raise NotFound(f"there is no record {offset}", offset=offset)

    def prove_consistency(self, old: int, head: Checkpoint) -> list[bytes]:
        """The proof that the checkpoint's tree begins with its first ``old`` leaves."""
        return consistency_proof(old, head.size, TileTree(self.path, head.size).node)

    def root_at(self, size: int, head: Checkpoint) -> bytes:
        return root_hash(size, TileTree(self.path, head.size).node)

    # -- files ---------------------------------------------------------------------------------

    def _reader(self) -> PartitionReader:
        return PartitionReader(self._folder.path, self.topic, self.partition)

    def _is_empty(self) -> bool:
        with closing(self._reader()) as reader:
            return reader.head().next == 1

    def _read_note(self) -> str | None:
        try:
            return atomic.read_file(os.path.join(self.path, "checkpoint")).decode()
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            raise Tampered("the checkpoint is no text", path=self.path) from None

    def _opened(self, note: str, verifier: Verifier) -> Checkpoint:
        found = Checkpoint.parse(verifier.open(note))
        if found.origin != self.origin:
            raise Tampered(f"the checkpoint is that of {found.origin}", path=self.path)
        return found

    def _removed(self, head: Checkpoint | None) -> list[tuple[int, int]]:
        digest = None if head is None else head.extension("removed")
        if digest is None:
            return []
        try:
            text = atomic.read_file(os.path.join(self.path, f"removed.{digest[:16]}"))
        except FileNotFoundError:
            raise Tampered("the list of removed offsets is gone", path=self.path) from None
        if sha256(text).hexdigest() != digest:
            raise Tampered("the list of removed offsets was changed", path=self.path)
        pairs = (line.split("-") for line in text.decode().splitlines())
        return [(int(first), int(last)) for first, last in pairs]

    def _leaves(self, reader: PartitionReader, first: int, last: int) -> list[bytes]:
        """The leaf hashes of these offsets; those of missing records say so."""
        found: list[bytes] = []
        at = first
        for segment, position, end, before in _stretches(reader, first, last):
            for _, line in segment.lines(position, end):
                hashed = _hash_line(line)
                if hashed is None:
                    continue
                offset, digest = hashed
                if not first <= offset < before:
                    continue
                if offset > at:
                    found += [missing_leaf(gone) for gone in range(at, offset)]
                found.append(digest)
                at = offset + 1
            segment.close()
        at = first + len(found)
        found += [missing_leaf(offset) for offset in range(at, last + 1)]
        return found

    def _gone(self, reader: PartitionReader, start: int, size: int) -> list[tuple[int, int]]:
        """The offsets up to ``size`` that the log does not hold, as ranges."""
        gone = [(1, start - 1)] if start > 1 else []
        fresh: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        for segment in reader.files():
            seal = None if segment.bad else segment.seal
            if seal is None or not seal.holes or seal.last < start:
                continue
            inode = os.stat(segment.path).st_ino
            known = self._holes.get(segment.number)
            if known is None or known[0] != inode:
                known = inode, _holes_of(segment, seal.first, seal.last)
            fresh[segment.number] = known
            gone += known[1]
        self._holes = fresh
        return _union([], [(a, min(b, size)) for a, b in gone if a <= size])

    def _finding(self, offset: int, problem: str) -> TreeFinding:
        return TreeFinding(self.topic, self.partition, offset, problem)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time extends a tree."""
        atomic.make_dir(self.path)
        path = os.path.join(self.path, "lock")
        fd = atomic.open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            atomic.lock(fd, _LOCK_S, path)
            yield
        finally:
            os.close(fd)


def origin(bus: str, topic: str, partition: int) -> str:
    """The name of a partition's log in its checkpoints."""
    return f"trunkline/{bus}/{topic}~{partition}"


def raw_lines(reader: PartitionReader, first: int, last: int) -> Iterator[bytes]:
    """The lines of the records ``first`` to ``last``, as the files have them."""
    for segment, position, end, before in _stretches(reader, first, last):
        for _, line in segment.lines(position, end):
            offset = offset_at(line[:64])
            if offset is not None and first <= offset < before:
                yield line
        segment.close()


def _stretches(
    reader: PartitionReader, first: int, last: int
) -> Iterator[tuple[Segment, int, int, int]]:
    """Where the records ``first`` to ``last`` are: a segment, the positions between which its lines
    count, and the offset before which they do.
    """
    head = reader.head()
    segments = [s for s in reader.files() if s.number <= head.segment]
    for at, segment in enumerate(segments):
        if segment.bad:
            continue
        is_active = segment.number == head.segment
        seal = None if is_active else segment.seal
        before = last + 1
        if seal is None:  # the last one, or one that was abandoned: the next one overrules it
            later = (s.first for s in segments[at + 1 :] if not s.bad)
            before = min(before, next((start for start in later if start is not None), head.next))
        begin = segment.first
        is_behind = seal is not None and seal.last < first
        if begin is not None and begin < before and not is_behind:
            end = head.end if is_active else segment.size()
            yield segment, segment.locate(first, end) if first > begin else 0, end, before
        segment.close()


def _holes_of(segment: Segment, first: int, last: int) -> list[tuple[int, int]]:
    holes = []
    expected = first
    for _, line in segment.lines(0, segment.size()):
        offset = offset_at(line[:64])
        if offset is not None:
            if offset > expected:
                holes.append((expected, offset - 1))
            expected = offset + 1
    if expected <= last:
        holes.append((expected, last))
    return holes


def _union(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, last in sorted(left + right):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        elif first <= last:
            found.append((first, last))
    return found


def _minus(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found = []
    for first, last in left:
        at = first
        for other_first, other_last in right:
            if other_last < at or other_first > last:
                continue
            if other_first > at:
                found.append((at, other_first - 1))
            at = other_last + 1
        if at <= last:
            found.append((at, last))
    return found


def _holds(ranges: list[tuple[int, int]], starts: list[int], offset: int) -> bool:
    at = bisect_right(starts, offset) - 1
    return at >= 0 and offset <= ranges[at][1]


def _count(ranges: list[tuple[int, int]]) -> int:
    return sum(last - first + 1 for first, last in ranges)


def _said(ranges: list[tuple[int, int]]) -> str:
    """``record 7 is`` or ``records 7 to 9 are``, without the verb where there are several."""
    named = [str(a) if a == b else f"{a} to {b}" for a, b in ranges[:_NAMED]]
    more = " …" if len(ranges) > _NAMED else ""
    count = _count(ranges)
    return f"record{'s' if count != 1 else ''} {', '.join(named)}{more}"
