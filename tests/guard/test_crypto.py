"""Payloads and keys follow the standards, and no nonce is used twice."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("joserfc")
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from joserfc import jwe
from joserfc.jwk import KeySet, OctKey

from trunkline.crypto.jwe import Sealer, data_key, decode64, header_of, open_compact, split_kid
from trunkline.crypto.keyring import KeyRing, new_wrapping_key, open_payload, wrapping_key
from trunkline.errors import Erased, InvalidOption, KeyMissing, NotFound, WrongKey

REGISTRY = jwe.JWERegistry(algorithms=["dir", "A256GCM"], strict_check_header=False)


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "wrapping.key"
    path.write_text(new_wrapping_key())
    return f"file:{path}"


@pytest.fixture
def ring(tmp_path: Path, source: str) -> KeyRing:
    return KeyRing(tmp_path / "keys", source, create=True)


def sealed(ring: KeyRing, text: bytes = b'{"a":1}', space: str = "s", subject: str = "") -> str:
    key = ring.newest(space, subject)
    return Sealer(key.id, key.secret).seal(text, "id-1", "orders")


def test_a_jose_library_opens_what_is_sealed_here() -> None:
    key = os.urandom(32)
    sealer = Sealer("k1", key)
    text = sealer.seal(b'{"a":1}', "id-1", "orders")
    found = jwe.decrypt_compact(
        text, OctKey.import_key(data_key(key, split_kid(sealer.kid)[1])), registry=REGISTRY
    )
    assert found.plaintext == b'{"a":1}'
    assert found.protected == {
        "alg": "dir",
        "enc": "A256GCM",
        "kid": sealer.kid,
        "id": "id-1",
        "topic": "orders",
    }


def test_what_a_jose_library_seals_is_opened_here() -> None:
    key = os.urandom(32)
    head = {"alg": "dir", "enc": "A256GCM", "kid": "k", "id": "é", "topic": "t"}
    text = jwe.encrypt_compact(head, b"[1]", OctKey.import_key(key), registry=REGISTRY)
    header, plain = open_compact(text, lambda _: AESGCM(key))
    assert (header.id, header.topic, plain) == ("é", "t", b"[1]")


def test_every_changed_character_is_noticed() -> None:
    key = os.urandom(32)
    sealer = Sealer("k1", key)
    text = sealer.seal(b'{"a":1}', "id-1", "orders")
    aead = AESGCM(data_key(key, split_kid(sealer.kid)[1]))
    opened = 0
    for at in range(len(text)):
        other = "A" if text[at] != "A" else "B"
        changed = text[:at] + other + text[at + 1 :]
        try:
            _, plain = open_compact(changed, lambda _: aead)
            # The last character of a part may hold bits that base64 does not use.
            assert plain == b'{"a":1}'
            assert [decode64(p.encode()) for p in changed.split(".")] == [
                decode64(p.encode()) for p in text.split(".")
            ]
            opened += 1
        except WrongKey:
            continue
    assert opened <= 4
    for bad in ("", "a.b.c", "....", 7, None, text + ".x"):
        with pytest.raises(WrongKey):
            header_of(bad)


def test_nonces_of_one_data_key_are_counted_and_each_sealer_has_its_own_key() -> None:
    key = os.urandom(32)
    seen = set()
    for _ in range(20):
        sealer = Sealer("k1", key)
        for number in range(50):
            text = sealer.seal(b"1", str(number), "t")
            salt = split_kid(header_of(text).kid)[1]
            seen.add((data_key(key, salt), text.split(".")[2]))
    assert len(seen) == 1000


def test_a_forked_child_never_uses_its_parents_data_key() -> None:
    sealer = Sealer("k1", os.urandom(32))
    pid = os.fork()
    if pid == 0:
        os._exit(7 if sealer.is_mine else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sealer.is_mine


def test_a_ring_gives_each_owner_its_key_and_keeps_it(ring: KeyRing, source: str) -> None:
    first = ring.newest("s", "anna")
    assert ring.newest("s", "anna") == first
    assert ring.newest("s") != first
    again = KeyRing(ring.path, source)
    assert again.newest("s", "anna") == first
    assert sorted(again.owners().values()) == [("s", ""), ("s", "anna")]
    for name in os.listdir(ring.path):
        mode = stat.S_IMODE(os.stat(os.path.join(ring.path, name)).st_mode)
        assert mode == 0o600
        data = Path(ring.path, name).read_bytes()
        assert first.secret not in data
        assert b"anna" not in data


def test_a_key_file_is_an_encrypted_jwk_set(ring: KeyRing, source: str) -> None:
    key = ring.newest("s")
    (name,) = [n for n in os.listdir(ring.path) if n.endswith(".jwks")]
    text = Path(ring.path, name).read_text().strip()
    found = jwe.decrypt_compact(text, OctKey.import_key(wrapping_key(source)))
    assert found.protected["cty"] == "jwk-set+json"
    content = msgspec.json.decode(found.plaintext or b"")
    keys = KeySet.import_key_set({"keys": content["keys"]})
    assert keys.keys[0].kid == key.id
    assert keys.keys[0].thumbprint() == key.thumbprint


def test_rotation_seals_with_the_new_key_and_opens_with_the_old(ring: KeyRing, source: str) -> None:
    other = KeyRing(ring.path, source)  # of another process
    old = sealed(ring)
    before = other.newest("s")
    made = ring.rotate("s")
    assert other.newest("s") == made != before
    for text in (old, sealed(other)):
        assert open_payload(text, ring, id="id-1", topic="orders") == b'{"a":1}'
    assert len(ring.keys_of("s")) == 2


def test_a_key_is_rotated_hundreds_of_times_and_every_process_sees_each_at_once(
    ring: KeyRing, source: str
) -> None:
    other, first = KeyRing(ring.path, source), ring.newest("home")
    for _ in range(450):
        key = ring.rotate("home")
        assert other.newest("home") == key
    keys = KeyRing(ring.path, source).keys_of("home")
    assert (len(keys), keys[0], keys[-1]) == (451, first, key)


def test_a_payload_opens_for_its_own_event_alone(ring: KeyRing) -> None:
    text = sealed(ring)
    for place in ({"id": "id-2", "topic": "orders"}, {"id": "id-1", "topic": "other"}):
        with pytest.raises(WrongKey, match="belongs to another event"):
            open_payload(text, ring, **place)


def test_a_wrong_or_missing_key_is_an_error_and_changes_nothing(
    ring: KeyRing, source: str, tmp_path: Path
) -> None:
    text = sealed(ring)
    before = {p: p.read_bytes() for p in Path(ring.path).iterdir()}
    other = tmp_path / "other.key"
    other.write_text(new_wrapping_key())
    with pytest.raises(WrongKey, match="does not open this key ring"):
        KeyRing(ring.path, f"file:{other}")
    with pytest.raises(WrongKey):
        KeyRing(ring.path, f"file:{other}", create=True)
    strange = KeyRing(tmp_path / "strange", source, create=True)
    with pytest.raises(KeyMissing):
        open_payload(text, strange, id="id-1", topic="orders")
    with pytest.raises(KeyMissing, match="no key ring"):
        KeyRing(tmp_path / "none", source)
    assert {p: p.read_bytes() for p in Path(ring.path).iterdir()} == before
    assert not (tmp_path / "none").exists()


def test_shredding_is_for_good_and_finishes_after_a_crash(
    ring: KeyRing, source: str, tmp_path: Path
) -> None:
    anna, ben = sealed(ring, subject="anna"), sealed(ring, subject="ben")
    copy = {p.name: p.read_bytes() for p in Path(ring.path).glob("*.jwks")}
    gone = ring.shred("s", "anna")
    assert len(gone.keys) == len(gone.thumbprints) == 1
    place: dict[str, Any] = {"id": "id-1", "topic": "orders"}
    with pytest.raises(Erased):
        open_payload(anna, ring, **place)
    with pytest.raises(Erased, match="shredded"):
        ring.newest("s", "anna")
    assert open_payload(ben, ring, **place) == b'{"a":1}'
    with pytest.raises(NotFound):
        ring.shred("s", "anna")
    # A crash between the mark and the removal: the file is there again.
    (name,) = copy.keys() - {p.name for p in Path(ring.path).glob("*.jwks")}
    Path(ring.path, name).write_bytes(copy[name])
    again = KeyRing(ring.path, source)
    assert not Path(ring.path, name).exists()
    with pytest.raises(Erased):
        open_payload(anna, again, **place)
    # A person may come back: with a new key.
    again.rotate("s", "anna")
    assert open_payload(sealed(again, subject="anna"), again, **place) == b'{"a":1}'
    with pytest.raises(Erased):
        open_payload(anna, again, **place)


def test_shredding_a_space_takes_its_subjects_along(ring: KeyRing) -> None:
    texts = [sealed(ring), sealed(ring, subject="anna"), sealed(ring, subject="ben")]
    other = sealed(ring, space="t", subject="anna")
    assert len(ring.shred("s").keys) == 3
    for text in texts:
        with pytest.raises(Erased):
            open_payload(text, ring, id="id-1", topic="orders")
    assert open_payload(other, ring, id="id-1", topic="orders")


def test_a_ring_is_wrapped_anew(ring: KeyRing, source: str, tmp_path: Path) -> None:
    text = sealed(ring)
    fresh = tmp_path / "fresh.key"
    fresh.write_bytes(os.urandom(32))
    assert ring.rewrap(f"file:{fresh}") == 1
    assert open_payload(text, ring, id="id-1", topic="orders")
    with pytest.raises(WrongKey):
        KeyRing(ring.path, source)
    again = KeyRing(ring.path, f"file:{fresh}")
    assert open_payload(text, again, id="id-1", topic="orders")


def test_a_wrapping_key_comes_from_a_file_the_environment_or_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = bytes(range(32))
    text = new_wrapping_key()
    path = tmp_path / "k"
    for data in (raw, raw.hex().encode(), msgspec.json.encode({"kty": "oct", "k": text})):
        path.write_bytes(data)
        assert len(wrapping_key(f"file:{path}")) == 32
    monkeypatch.setenv("RING_KEY", text)
    assert wrapping_key("env:RING_KEY") == decode64(text.encode())
    program = f"import sys; sys.stdout.write({text!r})"
    path.write_text(program)
    assert wrapping_key(f"cmd:{sys.executable} {path}") == decode64(text.encode())
    for bad in (f"file:{tmp_path}/none", "env:NOT_SET", "cmd:false", "cmd:/no/such"):
        with pytest.raises(KeyMissing):
            wrapping_key(bad)
    path.write_text("short")
    for bad in (f"file:{path}", "vault:x"):
        with pytest.raises(InvalidOption):
            wrapping_key(bad)


def test_a_ring_does_not_lie_inside_a_bus(tmp_path: Path, source: str) -> None:
    (tmp_path / "bus").mkdir()
    (tmp_path / "bus" / "bus.json").write_text("{}")
    with pytest.raises(InvalidOption, match="inside the bus"):
        KeyRing(tmp_path / "bus" / "keys", source, create=True)


def test_a_ring_can_be_sent_to_another_process(ring: KeyRing) -> None:
    text = sealed(ring)
    there = pickle.loads(pickle.dumps(ring))
    assert open_payload(text, there, id="id-1", topic="orders") == b'{"a":1}'
    assert pickle.dumps(ring).find(ring.newest("s").secret) == -1


def test_without_the_extra_the_error_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from trunkline.crypto.jwe import Sealer\n"
        "from trunkline.errors import NotFound\n"
        "try: Sealer('k', b'0' * 32)\n"
        "except NotFound as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "trunkline[crypto]" in done.stdout, done.stderr


def test_the_command_makes_lists_rotates_and_rewraps_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trunkline.cli import main

    old, new = str(tmp_path / "old.key"), str(tmp_path / "new.key")
    assert main(["keys", "new-key", old]) == 0
    assert main(["keys", "new-key", old]) == 1
    assert main(["keys", "new-key", new]) == 0
    assert stat.S_IMODE(os.stat(old).st_mode) == 0o600
    monkeypatch.setenv("TRUNKLINE_KEYS", str(tmp_path / "keys"))
    assert main(["keys", "ls"]) == 4
    monkeypatch.setenv("TRUNKLINE_WRAPPING_KEY", f"file:{old}")
    assert main(["keys", "ls"]) == 1
    assert main(["keys", "init"]) == 0
    assert main(["keys", "rotate", "home", "anna"]) == 0
    assert main(["keys", "rewrap", "--to", f"file:{new}"]) == 0
    assert main(["keys", "ls"]) == 1
    capsys.readouterr()
    monkeypatch.setenv("TRUNKLINE_WRAPPING_KEY", Path(new).read_text().strip())  # the key itself
    assert main(["keys", "ls", "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out.splitlines()[0])
    assert (found["space"], found["subject"], found["keys"]) == ("home", "anna", 1)
    assert main(["keys", "signer", str(tmp_path / "s.key"), "--name", "example.com/audit"]) == 0
    assert (tmp_path / "s.key.pub").read_text().startswith("example.com/audit+")
