"""A key ring: a folder with the keys of spaces and subjects, each wrapped by one key from outside.

::

    keys/ring.json                      format, and a text that only the right wrapping key opens
    keys/<space>-<subject>.jwks         an encrypted JWK set (RFC 7517, section 7), 0600
    keys/<space>-<subject>.erased       the key was shredded: when, and the keys' thumbprints

Names are digests. The newest key of a set seals, all of them open. Keep the ring outside of the bus
folder and out of its backups: a copy of a key outlives its shredding.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final, NamedTuple

import msgspec

from trunkline.check import load_extra
from trunkline.crypto.jwe import (
    EXTRA,
    KEY_BYTES,
    data_key,
    decode64,
    encode64,
    open_compact,
    split_kid,
)
from trunkline.errors import Corrupt, Erased, InvalidOption, KeyMissing, NotFound, WrongKey
from trunkline.log import atomic
from trunkline.log.line import Damaged, decode

FORMAT: Final = 1
_LOCK_S: Final = 10.0
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_COMMAND_S: Final = 30.0
_CHECK: Final = b"trunkline key ring"
_CTY: Final = "jwk-set+json"
_SET_BYTES: Final = 1 << 28  # of one encrypted set of keys


class Key(NamedTuple):
    """``id`` is in each payload that the key sealed; ``thumbprint`` is that of RFC 7638."""

    id: str
    secret: bytes
    thumbprint: str


class Shredded(NamedTuple):
    """What is left of shredded keys."""

    keys: tuple[str, ...]
    thumbprints: tuple[str, ...]
    at: str


def wrapping_key(source: str) -> bytes:
    """The 32 bytes behind ``file:PATH``, ``env:NAME`` or ``cmd:COMMAND``: as they are, in base64,
    in hex, or as a JWK of kind ``oct``.
    """
    kind, _, place = source.partition(":")
    if kind == "file":
        try:
            with open(os.path.expanduser(place), "rb") as file:
                data = file.read(4096)
        except OSError as error:
            raise KeyMissing(f"{place}: {error.strerror}", source=kind) from None
    elif kind == "env":
        data = os.environb.get(place.encode(), b"")
        if not data:
            raise KeyMissing(f"{place} is not set", source=kind)
    elif kind == "cmd":
        data = _output(place)
    else:
        hint = "file:PATH, env:NAME or cmd:COMMAND"
        raise InvalidOption("not a source of a key", name="source", hint=hint)
    return _key_of(data, f"{kind}:{place.split(' ')[0]}")


def _output(command: str) -> bytes:
    try:
        done = subprocess.run(
            shlex.split(command), capture_output=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise KeyMissing(f"the key command failed: {type(error).__name__}", source="cmd") from None
    if done.returncode:
        raise KeyMissing(f"the key command ended with {done.returncode}", source="cmd")
    return done.stdout


def _key_of(data: bytes, place: str) -> bytes:
    if len(data) == KEY_BYTES:
        return data
    text = data.strip()
    found = b""
    with suppress(ValueError, KeyError, TypeError, msgspec.DecodeError):
        if text.startswith(b"{"):
            found = decode64(msgspec.json.decode(text)["k"].encode())
        elif len(text) == 2 * KEY_BYTES:
            found = bytes.fromhex(text.decode())
        else:
            found = decode64(text.rstrip(b"=").replace(b"+", b"-").replace(b"/", b"_"))
    if len(found) != KEY_BYTES:
        hint = "32 bytes: raw, base64, hex or a JWK; 'trunkline keys new-key' prints one"
        raise InvalidOption(f"{place} holds no key of 256 bits", name="source", hint=hint)
    return found


def new_wrapping_key() -> str:
    """A key to wrap a ring with, in base64."""
    return encode64(secrets.token_bytes(KEY_BYTES)).decode()


class KeyRing:
    """Open a ring; ``create=True`` makes it. ``WrongKey`` if the wrapping key is another one."""

    def __init__(self, path: str | os.PathLike[str], source: str, *, create: bool = False) -> None:
        self.path = os.path.abspath(os.path.expanduser(os.fspath(path)))
        self.source = source
        self._wrap = wrapping_key(source)
        self._sets: dict[str, list[Key]] = {}
        self._aeads: dict[str, Any] = {}
        self._mark = -1
        self._check(create)
        self._finish_shredding()

    def __reduce__(self) -> tuple[Any, ...]:
        """On another machine, or in another process, the ring is opened there."""
        return type(self), (self.path, self.source)

    # -- using keys ----------------------------------------------------------------------------

    def newest(self, space: str, subject: str = "") -> Key:
        """The key that seals for a space, or for a subject in it; made when it is first asked for.
        ``Erased`` if it was shredded: a new key then takes ``rotate``.
        """
        name = owner_name(space, subject)
        self.refresh()
        keys = self._load(name)
        if keys:
            return keys[-1]
        with self._locked():
            self._sets.pop(name, None)
            if keys := self._load(name):
                return keys[-1]
            if os.path.exists(self._path(name, "erased")):
                raise Erased(
                    "the key was shredded",
                    space=space,
                    hint="'trunkline keys rotate' makes a new one, for new payloads",
                )
            return self._add(name, space, subject)

    def aead(self, kid: str, space: str = "", subject: str = "") -> Any:
        """An AESGCM of the data key ``kid``. The owner only tells where to look first.
        ``KeyMissing`` if the ring has no such key, ``Erased`` if it was shredded.
        """
        self.refresh()
        found = self._aeads.get(kid)
        if found is None:
            key_id, salt = split_kid(kid)
            key = self._find(key_id, [owner_name(space, subject), owner_name(space, "")])
            aead = load_extra("cryptography.hazmat.primitives.ciphers.aead", EXTRA)
            if len(self._aeads) > 10_000:
                self._aeads.clear()
            found = self._aeads[kid] = aead.AESGCM(data_key(key.secret, salt))
        return found

    def refresh(self) -> bool:
        """Forget what is known if the ring was changed, here or elsewhere; whether it was."""
        try:
            mark = os.stat(self.path).st_mtime_ns
        except OSError as error:
            raise KeyMissing(f"{self.path}: {error.strerror}", path=self.path) from None
        if mark == self._mark:
            return False
        self._mark = mark
        self._sets.clear()
        self._aeads.clear()
        return True

    def owners(self) -> dict[str, tuple[str, str]]:
        """``(space, subject)`` of each set of keys, by the name of its file."""
        found = {}
        for name in self._names("jwks"):
            owner = self._unwrapped(name)["owner"]
            found[name] = owner["space"], owner["subject"]
        return found

    def keys_of(self, space: str, subject: str = "") -> list[Key]:
        """Every key of one owner, the oldest first."""
        self.refresh()
        return list(self._load(owner_name(space, subject)))

    # -- changing keys -------------------------------------------------------------------------

    def rotate(self, space: str, subject: str = "") -> Key:
        """A new key for new payloads; older payloads keep theirs. After shredding, too: what is
        known of the shredded keys stays.
        """
        with self._locked():
            return self._add(owner_name(space, subject), space, subject)

    def rewrap(self, source: str) -> int:
        """Wrap every key anew by the key behind another source. Returns how many sets.

        The sets are wrapped one after another and each is replaced at once; a crash in the middle
        leaves a ring that opens with either key, until this is called again.
        """
        fresh = wrapping_key(source)
        with self._locked():
            names = list(self._names("jwks"))
            found = {name: self._unwrapped(name, fresh) for name in names}
            self._wrap, self.source = fresh, source
            for name, content in found.items():
                self._write(name, content)
            self._write_check()
        return len(names)

    def shred(self, space: str, subject: str | None = None) -> Shredded:
        """Destroy the keys of a subject, or of a space with all its subjects. Overwrites and
        removes their files; the payloads they sealed are unreadable everywhere from then on.
        ``NotFound`` if there is nothing to shred.
        """
        with self._locked():
            if subject is None:
                prefix = owner_name(space, "").partition("-")[0]
                names = [n for n in self._names("jwks") if n.partition("-")[0] == prefix]
            else:
                names = [n for n in self._names("jwks") if n == owner_name(space, subject)]
            if not names:
                raise NotFound("there is no key to shred", space=space)
            now = datetime.now(UTC).isoformat()
            gone: list[Key] = []
            for name in names:
                self._sets.pop(name, None)  # another process may have made a key since
                keys = self._load(name)
                gone += keys
                before = self._mark_of(name)
                mark = {
                    "format": FORMAT,
                    "at": now,
                    "keys": [*before["keys"], *(key.id for key in keys)],
                    "thumbprints": [*before["thumbprints"], *(key.thumbprint for key in keys)],
                }
                # First the mark: a crash behind it is made up for when the ring is next opened.
                atomic.replace_file(self._path(name, "erased"), msgspec.json.encode(mark) + b"\n")
                _destroy(self._path(name, "jwks"))
            self._sets.clear()
            self._aeads.clear()
        return Shredded(tuple(k.id for k in gone), tuple(k.thumbprint for k in gone), now)

    def shredded(self, space: str, subject: str | None = None) -> Shredded | None:
        """What is left of keys that were shredded before; None if there is nothing."""
        prefix = owner_name(space, "").partition("-")[0]
        found = [
            self._mark_of(name)
            for name in self._names("erased")
            if (subject is None and name.startswith(f"{prefix}-"))
            or (subject is not None and name == owner_name(space, subject))
        ]
        if not found:
            return None
        keys = [key for mark in found for key in mark["keys"]]
        prints = [one for mark in found for one in mark["thumbprints"]]
        return Shredded(tuple(keys), tuple(prints), max(mark["at"] for mark in found))

    # -- files ---------------------------------------------------------------------------------

    def _check(self, create: bool) -> None:
        place = os.path.join(self.path, "ring.json")
        if not os.path.exists(place):
            if not create:
                hint = "'trunkline keys init' makes one"
                raise KeyMissing(f"there is no key ring at {self.path}", path=self.path, hint=hint)
            _refuse_inside_bus(self.path)
            atomic.make_dir(self.path)
            self._write_check()
            return
        try:
            about = decode(_decode_object, atomic.read_file(place))
            form, text = int(about["format"]), str(about["check"])
        except (Damaged, KeyError, TypeError, ValueError):
            raise Corrupt(f"{place} is damaged", path=place, position=0) from None
        if form > FORMAT:
            raise InvalidOption(f"{place} has format {form}", hint="upgrade trunkline")
        if _unwrap(text, self._wrap) != _CHECK:
            raise WrongKey("the wrapping key does not open this key ring", path=self.path)

    def _write_check(self) -> None:
        text = _wrapped(_CHECK, self._wrap, {})
        content = msgspec.json.encode({"format": FORMAT, "check": text})
        atomic.replace_file(os.path.join(self.path, "ring.json"), content + b"\n")

    def _finish_shredding(self) -> None:
        """A crash may have come between a mark and the removal of the keys that it speaks of."""
        for name in list(self._names("erased")):
            if os.path.exists(self._path(name, "jwks")):
                with self._locked():
                    if not self._load(name):  # else a new key was made since
                        _destroy(self._path(name, "jwks"))
                    self._sets.pop(name, None)

    def _find(self, key_id: str, first: list[str]) -> Key:
        for name in dict.fromkeys([*first, *self._names("jwks")]):
            for key in self._load(name):
                if key.id == key_id:
                    return key
        for name in self._names("erased"):
            marked = self._mark_of(name)
            if key_id in marked["keys"]:
                raise Erased("the payload's key was shredded", kid=key_id, at=marked["at"])
        raise KeyMissing("the key ring has no such key", kid=key_id, path=self.path)

    def _load(self, name: str) -> list[Key]:
        if name not in self._sets:
            try:
                content = self._unwrapped(name)
            except FileNotFoundError:
                return []
            erased = self._mark_of(name)["keys"]
            keys = [_key(jwk) for jwk in content["keys"]]
            self._sets[name] = [key for key in keys if key.id not in erased]
        return self._sets[name]

    def _mark_of(self, name: str) -> dict[str, Any]:
        """What is known of the shredded keys of one owner."""
        path = self._path(name, "erased")
        try:
            return decode(_decode_object, atomic.read_file(path))
        except FileNotFoundError:
            return {"keys": [], "thumbprints": [], "at": ""}
        except Damaged:
            raise Corrupt(f"{path} is damaged", path=path, position=0) from None

    def _add(self, name: str, space: str, subject: str) -> Key:
        try:
            content = self._unwrapped(name)
        except FileNotFoundError:
            content = {"owner": {"space": space, "subject": subject}, "keys": []}
        jwk = {
            "kty": "oct",
            "use": "enc",
            "kid": secrets.token_hex(8),
            "k": encode64(secrets.token_bytes(KEY_BYTES)).decode(),
            "iat": int(datetime.now(UTC).timestamp()),
        }
        # A shredding that a crash cut short may have left its keys here.
        erased = self._mark_of(name)["keys"]
        content["keys"] = [one for one in content["keys"] if one["kid"] not in erased] + [jwk]
        self._write(name, content)
        self._sets.pop(name, None)
        return _key(jwk)

    def _unwrapped(self, name: str, also: bytes | None = None) -> dict[str, Any]:
        """The JWK set of a file. ``also`` is a second key to try: see ``rewrap``."""
        path = self._path(name, "jwks")
        text = atomic.read_file(path).decode("ascii", "replace").strip()
        plain = _unwrap(text, self._wrap)
        if plain is None and also is not None:
            plain = _unwrap(text, also)
        if plain is None:
            raise WrongKey("the wrapping key does not open a key set", path=path)
        content: dict[str, Any] = msgspec.json.decode(plain)
        return content

    def _write(self, name: str, content: dict[str, Any]) -> None:
        text = _wrapped(msgspec.json.encode(content), self._wrap, {"cty": _CTY})
        path = self._path(name, "jwks")
        atomic.replace_file(path, text.encode() + b"\n")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time changes a ring. Others see by the folder's time that it changed, so
        that moves on even if the clock of the file system has not.
        """
        path = os.path.join(self.path, "ring.lock")
        fd = atomic.open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            atomic.lock(fd, _LOCK_S, path)
            before = os.stat(self.path).st_mtime_ns
            try:
                yield
            finally:
                if os.stat(self.path).st_mtime_ns <= before:
                    os.utime(self.path, ns=(before + 1, before + 1))
        finally:
            os.close(fd)

    def _names(self, ending: str) -> Iterator[str]:
        for file in sorted(os.listdir(self.path)):
            stem, _, kind = file.rpartition(".")
            if kind == ending and "-" in stem:
                yield stem

    def _path(self, name: str, ending: str) -> str:
        return os.path.join(self.path, f"{name}.{ending}")


def open_payload(
    text: Any, ring: KeyRing, *, id: str, topic: str, space: str = "", subject: str = ""
) -> bytes:
    """The JSON of a sealed payload. It opens for its own event alone: a payload that was moved to
    another event or topic is a ``WrongKey``. This is what a reader without a bus calls, a task of
    Spark for example: a ring is opened anew where it is sent to.
    """
    header, plain = open_compact(text, lambda kid: ring.aead(kid, space, subject))
    if (header.id, header.topic) != (id, topic):
        raise WrongKey(
            "the payload belongs to another event", kid=header.kid, hint="it was moved or copied"
        )
    return plain


def owner_name(space: str, subject: str = "") -> str:
    """The name of an owner's files. All those of one space begin alike."""
    return f"{_digest(space)}-{_digest(subject) if subject else '0' * 16}"


def owner_digest(space: str, subject: str = "") -> str:
    """An owner's name for evidence: it can be checked if the owner is known."""
    return hashlib.sha256(f"{space}\0{subject}".encode()).hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _key(jwk: dict[str, Any]) -> Key:
    # RFC 7638: the required members, sorted, without white space.
    canonical = b'{"k":%b,"kty":"oct"}' % msgspec.json.encode(jwk["k"])
    return Key(
        jwk["kid"],
        decode64(jwk["k"].encode()),
        encode64(hashlib.sha256(canonical).digest()).decode(),
    )


def _wrapped(plain: bytes, key: bytes, header: dict[str, Any]) -> str:
    """A compact JWE with a content key of its own, wrapped by ``key`` (A256KW)."""
    jwe, oct_key = load_extra("joserfc.jwe", EXTRA), load_extra("joserfc.jwk", EXTRA).OctKey
    protected = {"alg": "A256KW", "enc": "A256GCM", **header}
    text: str = jwe.encrypt_compact(protected, plain, oct_key.import_key(key), registry=_registry())
    return text


@cache
def _registry() -> Any:
    """What a ring's files are sealed with. The library opens no more than 64 KiB by itself: a key
    that is rotated every day is over that in 14 months.
    """
    found = load_extra("joserfc.jwe", EXTRA).JWERegistry(algorithms=["A256KW", "A256GCM"])
    found.max_ciphertext_length = _SET_BYTES
    return found


def _unwrap(text: str, key: bytes) -> bytes | None:
    """None if ``key`` does not open it."""
    jwe, oct_key = load_extra("joserfc.jwe", EXTRA), load_extra("joserfc.jwk", EXTRA).OctKey
    failed = (
        load_extra("joserfc.errors", EXTRA).JoseError,
        load_extra("cryptography.exceptions", EXTRA).InvalidTag,
        load_extra("cryptography.hazmat.primitives.keywrap", EXTRA).InvalidUnwrap,
        ValueError,
    )
    try:
        opened = jwe.decrypt_compact(text, oct_key.import_key(key), registry=_registry())
    except failed:
        return None
    plain: bytes = opened.plaintext
    return plain


def _destroy(path: str) -> None:
    """Overwrite a file, wait until that is on the device, and remove its name."""
    fd = atomic.open_file(path, os.O_RDWR)
    try:
        size = os.fstat(fd).st_size
        atomic.write_all(fd, secrets.token_bytes(max(1, size)))
        atomic.sync(fd)
        os.ftruncate(fd, 0)
        atomic.sync(fd)
    finally:
        os.close(fd)
    atomic.remove_files([path])


def _refuse_inside_bus(path: str) -> None:
    place = path
    while (parent := os.path.dirname(place)) != place:
        place = parent
        if os.path.exists(os.path.join(place, "bus.json")):
            raise InvalidOption(
                f"a key ring does not lie inside the bus {place}",
                path=path,
                hint="keep it elsewhere: a backup of the bus must not carry its keys",
            )
