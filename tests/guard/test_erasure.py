"""After shredding nobody reads the subject, everything else reads as before, and it is proven."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("joserfc")

import trunkline
from trunkline.cli import main
from trunkline.crypto.keyring import KeyRing, new_wrapping_key
from trunkline.crypto.note import Signer, Verifier
from trunkline.errors import Corrupt, Erased, NotFound, Sealed, Tampered
from trunkline.guard.erasure import check_erased, erase
from trunkline.guard.vault import Vault

SIGNER = Signer.new("example.com/audit")
PUBLIC = Verifier(SIGNER.public)


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "wrapping.key"
    path.write_text(new_wrapping_key())
    return f"file:{path}"


@pytest.fixture
def ring(tmp_path: Path, source: str) -> KeyRing:
    return KeyRing(tmp_path / "keys", source, create=True)


async def fill(place: Path, ring: KeyRing) -> None:
    async with trunkline.connect(f"file:{place}", middleware=[Vault(ring, per="subject")]) as bus:
        for number in range(12):
            who = ("anna", "ben", "cleo")[number % 3]
            await bus.publish(
                "notes", {"secret": f"{who}-{number}"}, space="home", subject=who, key=who
            )


async def readable(place: Path, ring: KeyRing) -> list[Any]:
    vault, found = Vault(ring), []
    async with trunkline.connect(f"file:{place}") as bus:
        for record in await bus.read("notes"):
            try:
                found.append(vault.open(record.event).payload["secret"])
            except Sealed:
                found.append(None)
    return found


@pytest.mark.parametrize("body", [b"", b"[" * 100_000, b'{"at":"\xff"}', b"[]"])
def test_a_damaged_file_of_a_key_ring_is_named(ring: KeyRing, source: str, body: bytes) -> None:
    ring.rotate("home", "anna")
    ring.shred("home", "anna")
    (mark,) = Path(ring.path).rglob("*.erased")
    mark.write_bytes(body)
    with pytest.raises(Corrupt, match=r"erased is damaged"):
        KeyRing(ring.path, source).shredded("home", "anna")
    (Path(ring.path) / "ring.json").write_bytes(body)
    with pytest.raises(Corrupt, match=r"ring\.json is damaged"):
        KeyRing(ring.path, source)


async def test_a_subject_is_erased_everywhere_and_nobody_else(
    ring: KeyRing, source: str, tmp_path: Path
) -> None:
    place, backup = tmp_path / "bus", tmp_path / "backup"
    await fill(place, ring)
    words = ["--url", f"file:{place}", "backup", str(backup)]
    assert await asyncio.to_thread(main, words) == 0  # before the erasure
    before = await readable(place, ring)
    async with trunkline.connect(f"file:{place}") as bus:
        receipt = await erase(bus, ring, SIGNER, "home", "anna")
        (record,) = await bus.read("system.erasure")
    assert record.event.id == receipt.id
    assert record.event.type == "subject.erased"
    assert check_erased(record.event, PUBLIC, "home", "anna") == 4
    assert "anna" not in msgspec.json.encode(record.event.payload).decode()
    left = [one if one.split("-")[0] != "anna" else None for one in before]
    assert await readable(place, ring) == left
    assert await readable(backup, KeyRing(ring.path, source)) == left
    words = ["--url", f"file:{place}", "verify"]
    assert await asyncio.to_thread(main, words) == 0
    for wrong in (("home", "ben"), ("home", None), ("work", "anna")):
        with pytest.raises(Tampered):
            check_erased(record.event, PUBLIC, *wrong)
    forged = msgspec.structs.replace(record.event, payload=record.event.payload | {"records": 9})
    for bad in (forged, msgspec.structs.replace(record.event, payload={})):
        with pytest.raises(Tampered):
            check_erased(bad, PUBLIC, "home", "anna")
    with pytest.raises(Tampered):
        check_erased(record.event, Verifier(Signer.new("example.com/audit").public), "home", "anna")


async def test_an_erasure_that_was_cut_short_is_proven_later(ring: KeyRing) -> None:
    async with trunkline.connect("memory:", middleware=[Vault(ring, per="subject")]) as bus:
        await bus.publish("notes", 1, space="home", subject="anna")
        ring.shred("home", "anna")  # and the process died before it could publish
        await erase(bus, ring, SIGNER, "home", "anna")
        (record,) = await bus.read("system.erasure")
        assert check_erased(record.event, PUBLIC, "home", "anna") == 1
        with pytest.raises(NotFound):
            await erase(bus, ring, SIGNER, "home", "nobody")


async def test_a_space_is_erased_with_its_subjects(ring: KeyRing) -> None:
    vault = Vault(ring, per="subject")
    async with trunkline.connect("memory:", middleware=[vault]) as bus:
        for who in ("anna", "ben", None):
            await bus.publish("notes", 1, space="home", subject=who)
        await bus.publish("notes", 2, space="work", subject="anna")
        await erase(bus, ring, SIGNER, "home")
        (record,) = await bus.read("system.erasure")
        assert check_erased(record.event, PUBLIC, "home") == 3
        *gone, kept = await bus.read("notes")
        for one in gone:
            with pytest.raises(Erased):
                vault.open(one.event)
        assert vault.open(kept.event).payload == 2


def test_the_command_shreds_and_clears_the_lake(
    ring: KeyRing, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deltalake = pytest.importorskip("deltalake")
    pa = pytest.importorskip("pyarrow")
    place, lake = tmp_path / "bus", tmp_path / "lake"
    asyncio.run(fill(place, ring))
    rows = pa.table(
        {
            "space": ["home", "home", "work"],
            "subject": ["anna", "ben", "anna"],
            "summary": ["anna likes tea", "ben likes milk", "anna works late"],
        }
    )
    deltalake.write_deltalake(str(lake / "summaries"), rows)
    deltalake.write_deltalake(str(lake / "traffic"), pa.table({"topic": ["notes"], "count": [12]}))
    key = tmp_path / "audit.key"
    key.write_text(SIGNER.private)
    words = ["--url", f"file:{place}", "shred", "home", "anna", "--key", str(key)]
    words += ["--ring", ring.path, "--wrapping-key", source, "--lake", str(lake)]
    assert main(words) == 4  # not without --yes
    assert asyncio.run(readable(place, ring))[0] == "anna-0"
    assert main([*words, "--yes", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["lake"] == {"summaries": 1}
    assert asyncio.run(readable(place, ring))[0] is None
    table = deltalake.DeltaTable(str(lake / "summaries")).to_pyarrow_table()
    assert sorted(table["summary"].to_pylist()) == ["anna works late", "ben likes milk"]
    data = b"".join(path.read_bytes() for path in (lake / "summaries").glob("*.parquet"))
    assert b"anna likes tea" not in data
    assert main([*words, "--yes"]) == 0  # once more, the proof of what is gone


async def test_what_was_erased_stays_erased_after_a_rotation(ring: KeyRing, source: str) -> None:
    """A new key for the owner takes nothing back of what is known of the shredded ones."""
    vault = Vault(ring, per="subject")
    async with trunkline.connect("memory:", middleware=[vault]) as bus:
        await bus.publish("notes", 1, space="home", subject="anna")
        await erase(bus, ring, SIGNER, "home", "anna")
        ring.rotate("home", "anna")
        await bus.publish("notes", 2, space="home", subject="anna")
        first, second = [record.event for record in await bus.read("notes")]
        for reader in (ring, KeyRing(ring.path, source)):
            assert Vault(reader).open(second).payload == 2
            with pytest.raises(Erased):  # and no missing key
                Vault(reader).open(first)
        await erase(bus, ring, SIGNER, "home", "anna")
        for one in (first, second):
            with pytest.raises(Erased):
                vault.open(one)
        *_, proof = await bus.read("system.erasure")
        assert check_erased(proof.event, PUBLIC, "home", "anna") == 1


def test_a_shredding_that_was_cut_short_is_not_undone_by_a_rotation(
    ring: KeyRing, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark is written and the process dies: a process that has the ring open rotates."""
    other = KeyRing(ring.path, source)
    old = other.newest("home", "anna")
    with monkeypatch.context() as patch:
        patch.setattr("trunkline.crypto.keyring._destroy", lambda _path: None)
        ring.shred("home", "anna")
    new = other.rotate("home", "anna")
    for reader in (other, KeyRing(ring.path, source)):
        assert reader.keys_of("home", "anna") == [new]
        with pytest.raises(Erased):
            reader.aead(f"{old.id}.AAAA", "home", "anna")
