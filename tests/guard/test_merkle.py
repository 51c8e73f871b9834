"""Trees, proofs and notes are those of RFC 6962 and C2SP."""

from __future__ import annotations

import random
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.crypto.merkle import (
    consistency_proof,
    inclusion_proof,
    is_consistent,
    leaf_hash,
    node_hash,
    range_hash,
    root_from_inclusion,
    root_hash,
    subtree_hash,
)
from trunkline.crypto.tiles import TileTree, tile_path
from trunkline.errors import InvalidOption, Tampered

# The leaves and roots of the reference implementation's tests (certificate-transparency, and
# quoted in many others): seven roots over these eight leaves.
LEAVES = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = {
    1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    2: "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    4: "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    5: "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    6: "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    7: "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}


def naive(hashes: list[bytes]) -> bytes:
    """MTH by its definition in RFC 6962."""
    if not hashes:
        return sha256(b"").digest()
    if len(hashes) == 1:
        return hashes[0]
    split = 1
    while split * 2 < len(hashes):
        split *= 2
    return node_hash(naive(hashes[:split]), naive(hashes[split:]))


class Memory:
    def __init__(self, count: int) -> None:
        self.hashes = [leaf_hash(b"%d" % number) for number in range(count)]

    def node(self, level: int, index: int) -> bytes:
        return subtree_hash(self.hashes[index << level : (index + 1) << level])


def test_roots_are_those_of_the_reference_implementation() -> None:
    hashes = [leaf_hash(data) for data in LEAVES]
    for size, root in ROOTS.items():
        assert subtree_hash(hashes[:size]).hex() == root
        assert naive(hashes[:size]).hex() == root


def test_every_inclusion_and_consistency_proof_up_to_70_leaves_holds() -> None:
    tree = Memory(70)
    for size in range(1, 71):
        root = root_hash(size, tree.node)
        assert root == naive(tree.hashes[:size])
        for index in range(size):
            proof = inclusion_proof(index, size, tree.node)
            assert root_from_inclusion(index, size, tree.hashes[index], proof) == root
        for old in range(1, size + 1):
            proof = consistency_proof(old, size, tree.node)
            assert is_consistent(old, size, naive(tree.hashes[:old]), root, proof)


@given(st.integers(2, 5000), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_forged_proof_is_refused(size: int, draw: random.Random) -> None:
    tree = Memory(size)
    root = root_hash(size, tree.node)
    index, old = draw.randrange(size), draw.randrange(1, size)
    proof = inclusion_proof(index, size, tree.node)
    other = draw.choice([at for at in (index + 1, index - 1, size - 1) if 0 <= at < size])
    if other != index:
        assert root_from_inclusion(other, size, tree.hashes[index], proof) != root
    assert root_from_inclusion(index, size, leaf_hash(b"forged"), proof) != root
    assert root_from_inclusion(index, size, tree.hashes[index], proof[:-1]) != root
    assert root_from_inclusion(index, size, tree.hashes[index], [*proof, root]) != root
    assert root_from_inclusion(size, size, tree.hashes[index], proof) is None
    steps = consistency_proof(old, size, tree.node)
    old_root = root_hash(old, tree.node)
    assert is_consistent(old, size, old_root, root, steps)
    assert not is_consistent(old, size, leaf_hash(b"x"), root, steps)
    assert not is_consistent(old, size, old_root, leaf_hash(b"x"), steps)
    assert not is_consistent(old, size, old_root, root, [*steps, root])
    changed = list(steps)
    changed[draw.randrange(len(steps))] = leaf_hash(b"x")
    assert not is_consistent(old, size, old_root, root, changed)


def test_proofs_that_cannot_be_are_refused() -> None:
    tree = Memory(5)
    for bad in ((5, 5), (-1, 5)):
        with pytest.raises(ValueError, match="no leaf"):
            inclusion_proof(*bad, tree.node)
    for old in (0, 6):
        with pytest.raises(ValueError, match="before"):
            consistency_proof(old, 5, tree.node)
    assert range_hash(3, 3, tree.node) == sha256(b"").digest()


def test_tile_paths_are_those_of_the_specification() -> None:
    assert tile_path(0, 0) == "tile/0/000"
    assert tile_path(0, 1234067) == "tile/0/x001/x234/067"
    assert tile_path(1, 0, 4) == "tile/1/000.p/4"
    assert tile_path(2, 1000, 255) == "tile/2/x001/000.p/255"


@given(st.lists(st.integers(0, 700), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_a_tree_that_grows_in_steps_is_the_tree(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int]
) -> None:
    place = tmp_path_factory.mktemp("tree")
    hashes: list[bytes] = []
    tree = TileTree(str(place))
    for count in steps:
        was = tree.size
        fresh = [leaf_hash(b"%d" % (len(hashes) + at)) for at in range(count)]
        hashes += fresh
        tree.write(tree.extend(fresh))
        tree.remove_partial(was)
        again = TileTree(str(place), len(hashes))
        assert tree.root() == again.root() == naive(hashes)
        assert again.leaves(0, len(hashes)) == hashes
        again.check_tiles()
    partial = [path for path in place.rglob("*") if path.is_file() and ".p/" in str(path)]
    assert len(partial) <= 3


def test_a_tree_over_two_levels_proves_every_leaf_and_finds_a_changed_tile(tmp_path: Path) -> None:
    size = 256 * 256 + 300
    hashes = [leaf_hash(b"%d" % number) for number in range(size)]
    tree = TileTree(str(tmp_path))
    tree.write(tree.extend(hashes))
    tree = TileTree(str(tmp_path), size)
    root = subtree_hash(hashes)
    assert tree.root() == root
    for index in (0, 255, 256, 65535, 65536, size - 1):
        proof = inclusion_proof(index, size, tree.node)
        assert root_from_inclusion(index, size, hashes[index], proof) == root
    tree.check_tiles()
    path = tmp_path / "tile" / "0" / "007"
    path.write_bytes(bytes(32) + path.read_bytes()[32:])
    with pytest.raises(Tampered, match="007 was changed"):
        TileTree(str(tmp_path), size).check_tiles()
    path.unlink()
    with pytest.raises(Tampered, match="has no tile/0/007"):
        TileTree(str(tmp_path), size).check_tiles()


def test_a_note_is_signed_and_opened() -> None:
    pytest.importorskip("cryptography")
    from trunkline.crypto.note import Checkpoint, Signer, Verifier

    signer = Signer.new("example.com/audit")
    note = signer.sign("example.com/log\n3\nAAAA\n")
    verifier = Verifier(signer.public)
    assert verifier.open(note) == "example.com/log\n3\nAAAA\n"
    assert verifier.open(Signer.parse(signer.private).sign("x\n")) == "x\n"
    beside = note + Signer.new("other").sign("x\n").rpartition("\n\n")[2]
    assert verifier.open(beside).startswith("example.com/log")  # unknown signatures are passed over
    for bad in (
        note.replace("\n3\n", "\n4\n"),
        note.replace("— example", "— exampel"),
        note[:-10] + "AAAAAAAA=\n",
        note.rpartition("\n\n")[0],
        Signer.new("example.com/audit").sign("example.com/log\n3\nAAAA\n"),
        "",
    ):
        with pytest.raises(Tampered):
            verifier.open(bad)
    for text in ("x", "x\n\ny\n"):
        with pytest.raises(InvalidOption):
            signer.sign(text)
    for text in ("", "a+b+c", signer.public[:-4] + "AAAA", "a b+00000000+AA"):
        with pytest.raises(InvalidOption):
            Verifier(text)
        with pytest.raises(InvalidOption):
            Signer.parse("PRIVATE+KEY+" + text)
    head = Checkpoint("o", 5, bytes(32), ("removed abc",))
    assert Checkpoint.parse(head.text()) == head
    assert head.extension("removed") == "abc"
    for text in ("o\n05\nAA\n", "o\nx\n", "", "o\n5\n" + "A" * 43 + "=\n\n"):
        with pytest.raises(Tampered):
            Checkpoint.parse(text)
