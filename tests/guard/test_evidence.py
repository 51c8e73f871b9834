"""Whoever changes a signed log is found out; whoever does not, is not."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import shutil
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

import trunkline
from trunkline.cli import main
from trunkline.crypto.keyring import KeyRing, new_wrapping_key
from trunkline.crypto.note import Checkpoint, Signer, Verifier
from trunkline.errors import InvalidOption, NotFound, Tampered
from trunkline.event import Event
from trunkline.folder import Folder, upkeep
from trunkline.guard.notary import (
    Notary,
    check_proof,
    copy_checkpoints,
    forget_tree,
    prove_record,
    read_checkpoints,
    salted,
    seal_folder,
    verify_folder,
)
from trunkline.guard.tree import _hash_line, read_leaf
from trunkline.guard.vault import Vault
from trunkline.options import StoreOptions, TopicOptions

from . import tampering

SIGNER = Signer.new("example.com/audit")
PUBLIC = Verifier(SIGNER.public)
WHOLE = [pytest.mark.slow, pytest.mark.timeout(900)]


def opened(place: Path) -> Any:
    return closing(Folder(str(place), StoreOptions(create=False)))


def seal(place: Path, **options: Any) -> Any:
    with opened(place) as folder:
        return seal_folder(folder, SIGNER, **options)


def findings(place: Path, **options: Any) -> list[str]:
    with opened(place) as folder:
        return [one.problem for one in verify_folder(folder, PUBLIC, **options)]


def damage(place: Path) -> list[str]:
    """What the checksums alone find."""
    with opened(place) as folder:
        return [one.problem for one in upkeep.verify(folder, "orders", 0)]


async def fill(place: Path, count: int, *, start: int = 0, **topic: Any) -> None:
    async with trunkline.connect(f"file:{place}") as bus:
        if topic:
            await bus.define("orders", **topic)
        for number in range(start, start + count):
            await bus.publish(
                "orders", {"text": f"n{number}"}, type="made", actor="shop", key=f"k{number % 5}"
            )


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sealed segments and an open one, all of it signed."""
    place = tmp_path_factory.mktemp("signed") / "bus"
    asyncio.run(fill(place, 32, segment_records=12))
    seal(place)
    assert findings(place) == []
    return place


@pytest.mark.parametrize("cases", [25, pytest.param(1000, marks=WHOLE)], ids=["quick", "whole"])
@pytest.mark.parametrize("kind", tampering.KINDS)
def test_every_change_of_a_signed_log_is_found(
    signed: Path, tmp_path: Path, kind: str, cases: int
) -> None:
    draw = random.Random(f"{kind}{cases}")
    place = tmp_path / "bus"
    tampering.copy(signed, place)
    whole = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    unseen = 0
    for case in range(cases):
        files = tampering.load(place / "wal", "orders")
        gap = tampering.KINDS[kind](draw, files)
        tampering.store(place / "wal", "orders", files, gap)
        found = findings(place)
        assert found, f"{kind}: case {case} was not found"
        unseen += not damage(place)
        for path in [path for path in place.rglob("*") if path.is_file() and path not in whole]:
            path.unlink()
        for path, data in whole.items():
            path.write_bytes(data)
    assert unseen > cases / 2  # by checksums alone most of it passes
    assert findings(place) == []


@pytest.mark.parametrize("cases", [10, pytest.param(1000, marks=WHOLE)], ids=["quick", "whole"])
def test_every_roll_back_is_found_by_a_checkpoint_kept_elsewhere(
    tmp_path: Path, cases: int
) -> None:
    """The whole folder, tree and checkpoint included, is put back to an earlier state."""
    place, states = tmp_path / "bus", []
    for number in range(6):
        asyncio.run(fill(place, 7, start=7 * number, segment_records=12))
        seal(place)
        states.append(tmp_path / f"state{number}")
        tampering.copy(place, states[-1])
    kept = [read_checkpoints(str(one), PUBLIC) for one in states]
    draw = random.Random(cases)
    for _ in range(cases):
        old, new = sorted(draw.sample(range(6), 2))
        assert findings(states[old]) == []  # it is consistent in itself
        assert any("rolled back" in one for one in findings(states[old], against=kept[new]))
        assert findings(states[new], against=kept[old]) == []


def test_a_log_written_anew_is_found_by_a_checkpoint_kept_elsewhere(tmp_path: Path) -> None:
    """With the signing key, too: who has it can sign another log, but not undo a checkpoint."""
    place = tmp_path / "bus"
    asyncio.run(fill(place, 20))
    seal(place)
    (kept,) = read_checkpoints(str(place), PUBLIC)
    files = tampering.load(place / "wal", "orders")
    files[0].bodies[3] = files[0].bodies[3].replace(b"n3", b"n9")
    tampering.store(place / "wal", "orders", files)
    shutil.rmtree(place / "tlog")
    asyncio.run(fill(place, 5, start=20))
    seal(place)
    assert findings(place) == []
    assert findings(place, against=[kept]) == ["its first 20 records were written anew"]


def test_changed_trees_checkpoints_and_offsets_are_found(signed: Path, tmp_path: Path) -> None:
    place = tmp_path / "bus"
    tree = place / "tlog" / "wal" / "orders"

    def changed(path: Path, data: bytes | None) -> list[str]:
        tampering.copy(signed, place)
        if data is None:
            path.unlink() if path.is_file() else shutil.rmtree(path)
        else:
            path.write_bytes(data)
        return findings(place)

    tampering.copy(signed, place)
    tile = next(path for path in tree.rglob("*") if ".p" in str(path) and path.is_file())
    head = tree / "checkpoint"
    note = head.read_text()
    assert any("signed root" in one for one in changed(tile, bytes(32) + tile.read_bytes()[32:]))
    assert any("is cut" in one for one in changed(tile, b""))
    assert any("has no tile" in one for one in changed(tile, None))
    assert changed(head, None) == ["there is no checkpoint"]
    assert changed(head, note.replace("\n32\n", "\n31\n").encode())
    assert changed(
        head, Signer.new("example.com/audit").sign(note.rpartition("\n\n")[0] + "\n").encode()
    )
    assert changed(head, b"\xff")
    assert changed(place / "tlog", None)
    tampering.copy(signed, place)
    offsets = place / "tlog" / "offsets"
    assert changed(offsets, offsets.read_bytes().replace(b"/offsets", b"/offzets"))
    assert changed(offsets, None)
    listed = place / "tlog" / "partitions"
    assert changed(listed, listed.read_bytes().replace(b"orders 0 32", b"orders 0 31"))
    assert changed(listed, None)


async def test_offsets_that_were_set_back_are_found(tmp_path: Path) -> None:
    place = tmp_path / "bus"
    await fill(place, 10)
    async with trunkline.connect(f"file:{place}") as bus:

        @bus.on("orders", group="billing")
        async def bill(event: Any) -> None: ...

        await bus.drain(20)
    await asyncio.to_thread(seal, place)
    assert await asyncio.to_thread(findings, place) == []
    words = ["--url", f"file:{place}", "group", "seek", "orders", "billing", "--to", "3"]
    await asyncio.to_thread(main, words)
    found = await asyncio.to_thread(findings, place)
    assert [one for one in found if "the group billing was set back from 10" in one], found
    words = ["--url", f"file:{place}", "group", "rm", "orders", "billing", "--yes"]
    await asyncio.to_thread(main, words)
    assert "the group billing is gone" in await asyncio.to_thread(findings, place)


async def test_retention_compaction_and_compression_keep_the_tree(tmp_path: Path) -> None:
    place = tmp_path / "bus"
    await fill(place, 40, segment_records=10)
    await asyncio.to_thread(seal, place)

    def tend() -> None:
        with opened(place) as folder:
            folder.define("orders", TopicOptions(segment_records=10, compact=True))
            assert upkeep.compact(folder, "orders", 0) > 0
            assert upkeep.pack_segments(folder, "orders", 0) > 0

    await asyncio.to_thread(tend)
    assert any("missing" in one for one in await asyncio.to_thread(findings, place))
    (done, *_) = [one for one in await asyncio.to_thread(seal, place) if one.topic == "orders"]
    assert done.removed > 0
    assert await asyncio.to_thread(findings, place) == []
    await fill(place, 25, start=40)
    await asyncio.to_thread(seal, place)

    def retain() -> None:
        with opened(place) as folder:
            options = TopicOptions(segment_records=10, compact=True, retention_records=30)
            folder.define("orders", options)
            assert upkeep.retain(folder, "orders", 0) > 0

    await asyncio.to_thread(retain)
    await asyncio.to_thread(seal, place)
    assert await asyncio.to_thread(findings, place) == []
    (kept,) = [one for one in read_checkpoints(str(place), PUBLIC) if "orders" in one.origin]
    assert kept.size == 65
    assert kept.extension("removed")
    # A record that was removed is not put back unnoticed, and the list is signed.
    (listed,) = (place / "tlog" / "wal" / "orders").glob("removed.*")
    listed.write_text(listed.read_text().replace("-", "-1", 1))
    assert any("list of removed" in one for one in await asyncio.to_thread(findings, place))


def test_records_that_nothing_may_remove_are_missed_when_the_log_is_signed(tmp_path: Path) -> None:
    place = tmp_path / "bus"
    asyncio.run(fill(place, 30, segment_records=10))
    seal(place)

    with opened(place) as folder:
        upkeep.trim(folder, "orders", 0, 12)
    asyncio.run(fill(place, 1, start=30))
    with pytest.raises(Tampered, match="records 1 to 11"):
        seal(place)
    seal(place, accept_removed=True)
    assert findings(place) == []
    assert main(["--url", f"file:{place}", "topic", "rm", "orders", "--yes"]) == 0
    assert any("missing" in one for one in findings(place))


async def test_the_notary_signs_while_events_are_published(tmp_path: Path) -> None:
    place = tmp_path / "bus"
    async with trunkline.connect(f"file:{place}") as bus:
        await bus.define("orders", partitions=2)
        notary = Notary(bus, SIGNER, every=50)
        bus.use(notary)
        for number in range(8):
            await bus.publish_many("orders", [{"text": f"n{number}-{at}"} for at in range(30)])
        (first, *_) = await bus.read("orders")
        assert len(first.event.headers["leaf-salt"]) == 22
        await bus.publish("other", 1)
    assert findings(place) == []
    sizes = {
        one.origin.rpartition("/")[2]: one.size for one in read_checkpoints(str(place), PUBLIC)
    }
    assert sizes["orders~0"] + sizes["orders~1"] == 240
    assert sizes["other~0"] == 1
    with pytest.raises(InvalidOption):
        Notary(trunkline.connect("memory:"), SIGNER)


async def test_a_leaf_tells_nothing_of_a_payload_without_its_salt(tmp_path: Path) -> None:
    """Two records with the same payload have leaves that a guess cannot be tried on."""
    from hashlib import sha256

    from trunkline.crypto.merkle import leaf_hash

    place = tmp_path / "bus"
    async with trunkline.connect(f"file:{place}") as bus:
        bus.use(Notary(bus, SIGNER))
        receipt = await bus.publish("orders", "yes")

    def prove() -> dict[str, Any]:
        with opened(place) as folder:
            return prove_record(folder, receipt.id, PUBLIC)

    proof = await asyncio.to_thread(prove)
    leaf = base64.b64decode(proof["leaf"])
    assert proof["salt"].encode() not in leaf
    assert leaf[-32:] != sha256(b'"yes"').digest()
    assert leaf[-32:] == sha256(proof["salt"].encode() + b'"yes"').digest()
    assert leaf_hash(leaf)


def test_proofs_are_made_and_checked_by_the_command(
    signed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    place = tmp_path / "bus"
    tampering.copy(signed, place)
    url, key = f"file:{place}", tmp_path / "audit.key"
    key.write_text(SIGNER.private)
    (tmp_path / "audit.pub").write_text(SIGNER.public + "\n")
    public = str(tmp_path / "audit.pub")
    copies = tmp_path / "copies"
    words = ["--url", url, "seal", "--key", str(key), "--copy-to", str(copies)]
    assert main(words) == 0
    assert main(["--url", url, "verify", "--public-key", public]) == 0
    assert "32 records" in capsys.readouterr().out
    line = (place / "wal" / "orders.00000001.jsonl").read_bytes().splitlines()[4]
    name = json.loads(line)["meta"]["event_id"]
    assert main(["--url", url, "prove", name, "--public-key", SIGNER.public, "--json"]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert (proof["topic"], proof["offset"]) == ("orders", 5)
    assert check_proof(proof, PUBLIC).size == 32
    asyncio.run(fill(place, 9, start=32))
    assert main(words) == 0
    (old,) = signed.rglob("checkpoint")
    capsys.readouterr()
    since = ["--url", url, "prove", "--since", str(old), "--public-key", public, "--json"]
    assert main(since) == 0
    growth = json.loads(capsys.readouterr().out)
    assert (growth["old_size"], check_proof(growth, PUBLIC).size) == (32, 41)
    wrongs: list[dict[str, Any]] = [
        {"leaf": growth["old_root"]},
        {"offset": 6},
        {"proof": []},
        {"origin": "x"},
    ]
    for wrong in wrongs:
        with pytest.raises(Tampered):
            check_proof(proof | wrong, PUBLIC)
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(proof)))
    assert main(["prove", "-", "--public-key", public]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(proof | {"offset": 7})))
    assert main(["prove", "-", "--public-key", public]) == 1
    assert main(["--url", url, "prove", "none", "--public-key", public]) == 3
    # The folder is put back; the copies know better.
    tampering.copy(signed, place)
    assert main(["--url", url, "verify", "--public-key", public]) == 0
    capsys.readouterr()
    against = ["--url", url, "verify", "--public-key", public, "--against", str(copies)]
    assert main(against) == 1
    assert "rolled back" in capsys.readouterr().out


async def test_a_sealed_and_erased_log_still_verifies(tmp_path: Path) -> None:
    place, key = tmp_path / "bus", tmp_path / "wrapping.key"
    await asyncio.to_thread(key.write_text, new_wrapping_key())
    ring = KeyRing(tmp_path / "keys", f"file:{key}", create=True)
    async with trunkline.connect(f"file:{place}") as bus:
        bus.use(Vault(ring, per="subject"))
        bus.use(Notary(bus, SIGNER))
        for number in range(10):
            await bus.publish("orders", number, space="home", subject=f"p{number % 2}")
        (first, *_) = await bus.read("orders")
        assert "leaf-salt" not in first.event.headers  # what is sealed needs none
    ring.shred("home", "p1")
    assert await asyncio.to_thread(findings, place) == []


def test_a_topic_that_is_new_since_the_last_round_is_told_and_no_damage(
    signed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An erasure makes such a topic. One that was signed is missed, with its tree and without."""
    place, key = tmp_path / "bus", tmp_path / "key.pub"
    key.write_text(SIGNER.public)
    tampering.copy(signed, place)

    async def more() -> None:
        async with trunkline.connect(f"file:{place}") as bus:
            await bus.publish("system.erasure", 1)

    asyncio.run(more())
    words = ["verify", "--url", f"file:{place}", "--public-key", str(key), "--json"]
    assert main(words) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["path"], one["problem"], one["severe"]) for one in lines if "path" in one] == [
        ("system.erasure/0", "not signed yet", False)
    ]
    shutil.rmtree(place / "tlog" / "wal" / "orders")
    assert main(words) == 1
    assert "there is no checkpoint" in capsys.readouterr().out
    shutil.rmtree(place / "tlog")
    assert main(words) == 1
    seal(place)
    (place / "tlog" / "wal" / "system.erasure" / "checkpoint").unlink()
    (place / "tlog" / "partitions").unlink()
    assert main(words) == 1


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"leaf-salt": "hDJV6T0X3TN82if8_iiiHA"},
        {"leaf-salt": "-" * 22, "x": "y"},
        {"leaf-salt": "_a" * 11, "a": '"leaf-salt":"' + "b" * 22},
        {"leaf-salt": "short"},
        {"leaf-salt": "with a space and a few"},
        {"leaf-salt": 'with"a quote in it 12"'},
        {"leaf-salt": "é" * 11},
        {"leaf-salt": "x" * 23},
    ],
)
def test_the_quick_hash_of_a_line_is_the_hash_of_its_leaf(headers: dict[str, str]) -> None:
    meta = json.dumps({"id": "e", "headers": headers}, separators=(",", ":"), ensure_ascii=False)
    for payload in ('{"a":1}', '"sealed"', "null"):
        line = f'{{"offset":7,"meta":{meta},"payload":{payload},"crc":"0"}}'.encode()
        leaf = read_leaf(line)
        assert leaf is not None
        assert _hash_line(line) == (7, leaf.hash)


def test_salts_are_never_given_twice() -> None:
    """Also not by a process and its forked child."""
    drawn = [salted(Event(topic="t", payload=1)).headers["leaf-salt"] for _ in range(2500)]
    assert len(set(drawn)) == 2500
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{22}", one) for one in drawn)
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        child = pool.submit(_salt).result()
    assert child not in {_salt() for _ in range(1000)}


def _salt() -> str:
    return salted(Event(topic="t", payload=1)).headers["leaf-salt"]


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_checkpoints(str(tmp_path / "none"), PUBLIC)
    with pytest.raises(NotFound):
        read_checkpoints(str(tmp_path), PUBLIC)
    (tmp_path / "x.checkpoint").write_text("x")
    with pytest.raises(Tampered):
        read_checkpoints(str(tmp_path), PUBLIC)


@pytest.mark.parametrize("name", ["backup", "backup.tar.gz"])
def test_a_backup_carries_the_evidence(signed: Path, tmp_path: Path, name: str) -> None:
    backup, restored = tmp_path / name, tmp_path / "restored"
    assert main(["--url", f"file:{signed}", "backup", str(backup)]) == 0
    assert main(["restore", str(backup), str(restored)]) == 0
    assert findings(restored) == []
    assert main(["--url", f"file:{restored}", "doctor"]) == 0


# -- copies elsewhere, and the list of partitions ------------------------------------------------


def copied(place: Path, copies: Path) -> int:
    with opened(place) as folder:
        return copy_checkpoints(folder, str(copies), PUBLIC)


def test_a_copy_is_replaced_only_by_a_checkpoint_that_extends_it(tmp_path: Path) -> None:
    """Else ``seal --copy-to`` in a scheduler would replace the one proof of a roll-back."""
    place, copies = tmp_path / "bus", tmp_path / "copies"
    asyncio.run(fill(place, 20))
    seal(place)
    tampering.copy(place, tmp_path / "old")
    asyncio.run(fill(place, 10, start=20))
    asyncio.run(fill(tmp_path / "other", 1))
    seal(place)
    assert copied(place, copies) == 1
    kept = {path: path.read_bytes() for path in copies.iterdir()}
    tampering.copy(tmp_path / "old", place)  # rolled back
    with pytest.raises(Tampered, match="rolled back: 30 records"):
        copied(place, copies)
    asyncio.run(fill(place, 15, start=50))  # and other records were written and signed since
    seal(place)
    with pytest.raises(Tampered, match=r"first 30 records .* were written anew"):
        copied(place, copies)
    key = tmp_path / "audit.key"
    key.write_text(SIGNER.private)
    words = ["--url", f"file:{place}", "seal", "--key", str(key), "--copy-to", str(copies)]
    assert main(words) == 1
    assert {path: path.read_bytes() for path in copies.iterdir()} == kept
    assert any("written anew" in one for one in findings(place, against=_read(copies)))


def _read(copies: Path) -> list[Checkpoint]:
    return read_checkpoints(str(copies), PUBLIC)


def test_a_copy_of_a_partition_that_is_gone_stops_the_copying(tmp_path: Path) -> None:
    place, copies = tmp_path / "bus", tmp_path / "copies"
    asyncio.run(fill(place, 5))
    asyncio.run(_publish(place, "diary", 3))
    seal(place)
    assert copied(place, copies) == 2
    forge_removal(place, "diary")
    with pytest.raises(Tampered, match=r"3 records of .*diary~0 were signed before"):
        copied(place, copies)
    assert len(_read(copies)) == 2


async def _publish(place: Path, topic: str, count: int) -> None:
    async with trunkline.connect(f"file:{place}") as bus:
        await bus.publish_many(topic, list(range(count)))


def forge_removal(place: Path, topic: str) -> None:
    """A topic goes with its log, its definition and its tree."""
    assert main(["--url", f"file:{place}", "topic", "rm", topic, "--yes"]) == 0
    shutil.rmtree(place / "tlog" / "wal" / topic)


def test_a_topic_that_is_removed_with_its_tree_is_missed(tmp_path: Path) -> None:
    place = tmp_path / "bus"
    asyncio.run(fill(place, 5))
    asyncio.run(_publish(place, "diary", 3))
    seal(place)
    forge_removal(place, "diary")
    said = "3 records were signed, and the partition is gone with its tree"
    assert findings(place) == [said]
    with pytest.raises(Tampered, match="3 records of diary/0 were signed"):
        seal(place)  # a scheduler must not sign it away
    assert findings(place) == [said]
    asyncio.run(_publish(place, "diary", 2))  # the topic is made anew
    with pytest.raises(Tampered, match="now there are 2"):
        seal(place)
    assert any("rolled back" in one for one in findings(place))


def test_a_topic_that_is_removed_on_purpose_is_signed_as_gone(tmp_path: Path) -> None:
    place, copies = tmp_path / "bus", tmp_path / "copies"
    asyncio.run(fill(place, 5))
    asyncio.run(_publish(place, "diary", 3))
    seal(place)
    copied(place, copies)
    older = _read(copies)
    assert main(["--url", f"file:{place}", "topic", "rm", "diary", "--yes"]) == 0
    with opened(place) as folder:
        assert forget_tree(folder, SIGNER, "diary") == 1
    seal(place)
    assert findings(place) == []
    assert findings(place, against=older) == []
    copied(place, copies)
    asyncio.run(_publish(place, "diary", 7))  # another topic of that name
    seal(place)
    assert findings(place, against=older) == []
    copied(place, copies)
    assert sorted(one.size for one in _read(copies)) == [5, 7]
    assert findings(place, against=_read(copies)) == []


def test_a_partition_that_is_put_back_alone_is_found_without_a_copy(tmp_path: Path) -> None:
    place, old = tmp_path / "bus", tmp_path / "old"
    asyncio.run(fill(place, 5))
    seal(place)
    tampering.copy(place, old)
    asyncio.run(fill(place, 5, start=5))
    seal(place)
    for part in ("wal", "tlog/wal"):
        tampering.copy(old / part, place / part)
    assert any("signed list of partitions has 10 records" in one for one in findings(place))


async def test_offsets_that_are_put_back_with_their_note_are_found_by_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, old, copies = tmp_path / "bus", tmp_path / "old", tmp_path / "copies"
    await fill(place, 10)
    await asyncio.to_thread(seal, place)
    await asyncio.to_thread(tampering.copy, place, old)
    async with trunkline.connect(f"file:{place}") as bus:

        @bus.on("orders", group="billing")
        async def bill(event: Any) -> None: ...

        await bus.drain(20)
    await asyncio.to_thread(seal, place)
    await asyncio.to_thread(copied, place, copies)
    await asyncio.to_thread(tampering.copy, old / "offsets", place / "offsets")
    await asyncio.to_thread(shutil.copy, old / "tlog" / "offsets", place / "tlog" / "offsets")
    assert await asyncio.to_thread(findings, place) == []
    words = ["--url", f"file:{place}", "verify", "--public-key", SIGNER.public]
    assert await asyncio.to_thread(main, [*words, "--against", str(copies)]) == 1
    assert "rolled back" in capsys.readouterr().out
    with pytest.raises(Tampered, match="rolled back"):
        await asyncio.to_thread(copied, place, copies)


def test_several_processes_sign_one_folder(tmp_path: Path) -> None:
    """Each signs what it sees; the list of partitions never goes back."""
    from concurrent.futures import ThreadPoolExecutor

    place = tmp_path / "bus"

    def work(number: int) -> None:
        for step in range(4):
            asyncio.run(_publish(place, f"t{number % 2}", 3 + step))
            seal(place)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert findings(place) == []
