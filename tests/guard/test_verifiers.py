"""Implementations that nobody here wrote accept our evidence and refuse forged evidence."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cryptography")

import trunkline
from trunkline.crypto.note import Checkpoint, Signer, Verifier
from trunkline.folder import Folder
from trunkline.guard.notary import prove_growth, prove_record, read_checkpoints, seal_folder
from trunkline.guard.tree import PartitionTree
from trunkline.options import StoreOptions

SIGNER = Signer.new("example.com/audit")
PUBLIC = Verifier(SIGNER.public)
HERE = Path(__file__).parent / "verifier"
OLD, SIZE = 300, 711


class Evidence(NamedTuple):
    """Each is a JSON object: a checkpoint alone, or with an inclusion or a consistency proof."""

    tree: Path
    good: list[dict[str, Any]]
    forged: list[dict[str, Any]]


async def _fill(place: Path, first: int, last: int) -> None:
    async with trunkline.connect(f"file:{place}") as bus:
        await bus.publish_many("orders", [{"text": f"n{number}"} for number in range(first, last)])


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    place = tmp_path_factory.mktemp("evidence") / "bus"
    good: list[dict[str, Any]] = []
    for first, last in ((0, OLD), (OLD, SIZE)):
        asyncio.run(_fill(place, first, last))
        with closing(Folder(str(place), StoreOptions(create=False))) as folder:
            seal_folder(folder, SIGNER)
            if last == OLD:
                (old,) = read_checkpoints(str(place), PUBLIC)
                continue
            tree = PartitionTree(folder, "orders")
            note, head = tree.checkpoint(PUBLIC)
            good.append({"checkpoint": note})
            good.append(prove_growth(folder, old, PUBLIC))
            records = folder.read("orders", 0, 1, 1000)
            some = random.Random(1).sample(records, 40)
            good += [prove_record(folder, record.event.id, PUBLIC) for record in some]
    assert head.size == SIZE
    forged = []
    swap = base64.b64encode(b"\1" * 32).decode()
    for one in good[1:]:
        proof = one["proof"]
        grown = "old_root" in one
        forged.append(one | {"proof": [swap, *proof[1:]]})
        forged.append(one | {"proof": proof[:-1]})
        forged.append(one | {"proof": [*proof, swap]})
        forged.append(one | {"checkpoint": note.replace(f"\n{SIZE}\n", f"\n{SIZE + 1}\n")})
        forged.append(one | ({"old_root": swap} if grown else {"leaf": swap}))
        forged.append(one | ({"old_size": 299} if grown else {"offset": one["offset"] % SIZE + 1}))
    false = Signer.new(SIGNER.name).sign(Checkpoint(head.origin, SIZE, head.root).text())
    forged.append({"checkpoint": false})
    forged.append({"checkpoint": note.partition("\n\n")[0] + "\n"})
    return Evidence(Path(tree.path), good, forged)


# -- Go's checksum database ----------------------------------------------------------------------


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Go's own packages for signed notes and trees, as a program."""
    go = shutil.which("go")
    if go is None:
        _cannot("go is not installed: make tools")
    built = tmp_path_factory.mktemp("verifier") / "verify"
    done = subprocess.run(
        [str(go), "build", "-o", str(built), "."],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return str(built)


def _cannot(why: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


def test_the_packages_of_gos_checksum_database_agree(verifier: str, evidence: Evidence) -> None:
    _, good, forged = evidence
    questions = [one | {"public_key": SIGNER.public} for one in good + forged]
    lines = "".join(json.dumps(one) + "\n" for one in questions)
    done = subprocess.run([verifier], input=lines, capture_output=True, text=True, timeout=60)
    answers = done.stdout.splitlines()
    assert answers[: len(good)] == ["ok"] * len(good)
    assert len(answers) == len(questions)
    assert all(one.startswith("refused") for one in answers[len(good) :]), answers[len(good) :]


# -- aics-tlog, in Python ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tlog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The package, installed to a folder of its own: it asks for a newer Python than it needs."""
    place = tmp_path_factory.mktemp("aics")
    words = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    words += ["--ignore-requires-python", "--target", str(place), "-r", str(HERE / "python.txt")]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        _cannot(f"aics-tlog cannot be installed: {done.stderr[-500:]}")
    sys.path.insert(0, str(place))
    try:
        import aics_tlog  # type: ignore[import-not-found]

        yield aics_tlog
    finally:
        sys.path.remove(str(place))


def _accepts(tlog: ModuleType, one: dict[str, Any]) -> bool:
    try:
        note = tlog.parse_note(one["checkpoint"])
        if not tlog.verify_note(note, [tlog.parse_vkey(SIGNER.public)]):
            return False
        head = tlog.parse_checkpoint(note.text)
        steps = [base64.b64decode(step) for step in one.get("proof", ())]
        if "old_root" in one:
            old = base64.b64decode(one["old_root"])
            found = tlog.verify_consistency(one["old_size"], head.size, old, head.root, steps)
        elif "leaf" in one:
            leaf = base64.b64decode(one["leaf"])
            found = tlog.verify_leaf_inclusion(leaf, one["offset"] - 1, head.size, steps, head.root)
        else:
            found = True
    except ValueError:
        return False
    return bool(found)


def test_a_second_implementation_agrees(tlog: ModuleType, evidence: Evidence) -> None:
    assert [one for one in evidence.good if not _accepts(tlog, one)] == []
    assert [one for one in evidence.forged if _accepts(tlog, one)] == []


def test_a_second_implementation_reads_the_tiles(tlog: ModuleType, evidence: Evidence) -> None:
    """It makes our proofs anew from the files, and refuses files that were changed."""
    tree, good, _ = evidence
    reader = tlog.FileSystemTileReader(tree)
    head = tlog.parse_checkpoint(tlog.parse_note(good[0]["checkpoint"]).text)
    assert tlog.tree_root_from_tiles(reader, SIZE) == head.root
    for one in good[1:]:
        ours = [base64.b64decode(step) for step in one["proof"]]
        if "old_root" in one:
            assert tlog.consistency_proof_from_tiles(reader, OLD, SIZE) == ours
        else:
            assert tlog.inclusion_proof_from_tiles(reader, one["index"], SIZE) == ours
    checked = tlog.VerifiedTileReader(reader, SIZE, head.root)
    assert tlog.inclusion_proof_from_tiles(checked, 7, SIZE)
    tile = tree / "tile" / "0" / "000"
    whole = tile.read_bytes()
    try:
        tile.write_bytes(bytes(32) + whole[32:])
        checked = tlog.VerifiedTileReader(tlog.FileSystemTileReader(tree), SIZE, head.root)
        with pytest.raises(tlog.TileVerificationError):
            tlog.inclusion_proof_from_tiles(checked, 7, SIZE)
    finally:
        tile.write_bytes(whole)
