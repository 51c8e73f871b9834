"""The Merkle tree of RFC 6962 (and RFC 9162): roots, inclusion proofs and consistency proofs.

A leaf is ``SHA-256(0x00 ‖ data)``, a node ``SHA-256(0x01 ‖ left ‖ right)``. Functions that read a
tree take ``node(level, index)``: the root of the full subtree of ``2 ** level`` leaves that begins
at leaf ``index * 2 ** level``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256

Node = Callable[[int, int], bytes]
EMPTY = sha256(b"").digest()


def leaf_hash(data: bytes) -> bytes:
    return sha256(b"\0" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return sha256(b"\1" + left + right).digest()


def subtree_hash(hashes: Sequence[bytes]) -> bytes:
    """The root over neighbouring nodes of one level."""
    if not hashes:
        return EMPTY
    row = list(hashes)
    while len(row) > 1:
        # An odd node at the end rises as it is, which is what RFC 6962's split at the largest
        # power of two comes to.
        pairs = [node_hash(row[at], row[at + 1]) for at in range(0, len(row) - 1, 2)]
        row = pairs + row[len(row) & ~1 :]
    return row[0]


def range_hash(start: int, end: int, node: Node) -> bytes:
    """The hash of the leaves ``start`` up to ``end``, which RFC 6962 calls MTH(D[start:end]). The
    range is one that the RFC's splits make: it begins at a multiple of a power of two that is not
    smaller than it is long.
    """
    count = end - start
    if count <= 0:
        return EMPTY
    if count & (count - 1) == 0:
        level = count.bit_length() - 1
        return node(level, start >> level)
    split = 1 << (count - 1).bit_length() - 1
    return node_hash(range_hash(start, start + split, node), range_hash(start + split, end, node))


def root_hash(size: int, node: Node) -> bytes:
    return range_hash(0, size, node)


def inclusion_proof(index: int, size: int, node: Node) -> list[bytes]:
    """PATH(index, D[size]) of RFC 6962."""
    if not 0 <= index < size:
        raise ValueError(f"a tree of {size} leaves has no leaf {index}")
    proof: list[bytes] = []
    start, end = 0, size
    while end - start > 1:
        split = 1 << (end - start - 1).bit_length() - 1
        middle = start + split
        if index < middle:
            proof.append(range_hash(middle, end, node))
            end = middle
        else:
            proof.append(range_hash(start, middle, node))
            start = middle
    return proof[::-1]


def consistency_proof(old: int, size: int, node: Node) -> list[bytes]:
    """PROOF(old, D[size]) of RFC 6962."""
    if not 0 < old <= size:
        raise ValueError(f"a tree of {size} leaves had no {old} before")
    proof: list[bytes] = []
    start, end, is_whole = 0, size, True
    while end != old:
        split = 1 << (end - start - 1).bit_length() - 1
        middle = start + split
        if old <= middle:
            proof.append(range_hash(middle, end, node))
            end = middle
        else:
            proof.append(range_hash(start, middle, node))
            start, is_whole = middle, False
    if not is_whole:
        proof.append(range_hash(start, end, node))
    return proof[::-1]


def root_from_inclusion(index: int, size: int, leaf: bytes, proof: Sequence[bytes]) -> bytes | None:
    """The root that a proof leads to (RFC 9162, 2.1.3.2); None if it cannot be one."""
    if not 0 <= index < size:
        return None
    place, last, found = index, size - 1, leaf
    for step in proof:
        if last == 0:
            return None
        if place & 1 or place == last:
            found = node_hash(step, found)
            while not place & 1 and place:
                place, last = place >> 1, last >> 1
        else:
            found = node_hash(found, step)
        place, last = place >> 1, last >> 1
    return found if last == 0 else None


def is_consistent(
    old: int, size: int, old_root: bytes, root: bytes, proof: Sequence[bytes]
) -> bool:
    """Whether the tree of ``size`` leaves begins with the tree of ``old`` (RFC 9162, 2.1.4.2)."""
    if old == size:
        return not proof and old_root == root
    if old == 0:
        return not proof and old_root == EMPTY
    if not 0 < old < size or not proof:
        return False
    path = list(proof)
    if old & (old - 1) == 0:
        path.insert(0, old_root)
    place, last = old - 1, size - 1
    while place & 1:
        place, last = place >> 1, last >> 1
    before = after = path[0]
    for step in path[1:]:
        if last == 0:
            return False
        if place & 1 or place == last:
            before, after = node_hash(step, before), node_hash(step, after)
            while not place & 1 and place:
                place, last = place >> 1, last >> 1
        else:
            after = node_hash(after, step)
        place, last = place >> 1, last >> 1
    return last == 0 and before == old_root and after == root
