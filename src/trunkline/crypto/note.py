"""Signed notes and tree checkpoints (C2SP signed-note and tlog-checkpoint), with Ed25519.

A note is text, an empty line, and a line ``— name base64`` for each signature. A checkpoint is a
note whose lines are the log's origin, its size, the tree's root, and extensions. Both are read by
whatever reads Go's checksum database or a transparency log.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from base64 import b64decode, b64encode
from typing import Final, NamedTuple

from trunkline.check import load_extra
from trunkline.crypto.jwe import EXTRA
from trunkline.errors import InvalidOption, NotFound, Tampered

_ED25519: Final = b"\x01"
_PRIVATE: Final = "PRIVATE+KEY"
_MARK: Final = "— "


def _key_id(name: str, public: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + _ED25519 + public).digest()[:4]


def _check_name(name: str) -> str:
    if not name or "+" in name or any(char.isspace() for char in name):
        hint = "like example.com/audit: no white space, no +"
        raise InvalidOption(f"not a name of a key: {name!r}", name="name", hint=hint)
    return name


class Signer:
    """A private key and its name. ``private`` is its text, to be kept secret."""

    def __init__(self, name: str, seed: bytes) -> None:
        self.name = _check_name(name)
        ed25519 = load_extra("cryptography.hazmat.primitives.asymmetric.ed25519", EXTRA)
        self._seed = seed
        self._key = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
        self._public: bytes = self._key.public_key().public_bytes_raw()
        self._id = _key_id(name, self._public)

    @classmethod
    def new(cls, name: str) -> Signer:
        return cls(name, secrets.token_bytes(32))

    @classmethod
    def parse(cls, text: str) -> Signer:
        """``PRIVATE+KEY+<name>+<key id>+<base64>``, as Go's note package has it."""
        try:
            private, key, name, key_id, data = text.strip().split("+", 4)
            raw = b64decode(data, validate=True)
            if f"{private}+{key}" != _PRIVATE or raw[:1] != _ED25519 or len(raw) != 33:
                raise ValueError
            found = cls(name, raw[1:])
            if found._id.hex() != key_id:
                raise ValueError
        except ValueError:
            raise InvalidOption(
                "not a signing key", hint="'trunkline keys signer' makes one"
            ) from None
        return found

    @property
    def private(self) -> str:
        data = b64encode(_ED25519 + self._seed).decode()
        return f"{_PRIVATE}+{self.name}+{self._id.hex()}+{data}"

    @property
    def public(self) -> str:
        """The verifier key, to be published."""
        return f"{self.name}+{self._id.hex()}+{b64encode(_ED25519 + self._public).decode()}"

    def sign(self, text: str) -> str:
        """A signed note of ``text``, which ends in a newline."""
        if not text.endswith("\n") or "\n\n" in text:
            raise InvalidOption("a note's text ends in a newline and has no empty line")
        signature = self._id + self._key.sign(text.encode())
        return f"{text}\n{_MARK}{self.name} {b64encode(signature).decode()}\n"


class Verifier:
    """A public key: ``<name>+<key id>+<base64>``."""

    def __init__(self, text: str) -> None:
        try:
            name, key_id, data = text.strip().split("+", 2)
            raw = b64decode(data, validate=True)
            if raw[:1] != _ED25519 or len(raw) != 33 or _key_id(name, raw[1:]).hex() != key_id:
                raise ValueError
        except ValueError:
            hint = "a line like example.com/audit+1a2b3c4d+AbC…, as 'trunkline keys signer' prints"
            raise InvalidOption("not a public key", name="public-key", hint=hint) from None
        self.name = _check_name(name)
        self._id = bytes.fromhex(key_id)
        ed25519 = load_extra("cryptography.hazmat.primitives.asymmetric.ed25519", EXTRA)
        self._key = ed25519.Ed25519PublicKey.from_public_bytes(raw[1:])

    def open(self, note: str) -> str:
        """The text of a note that this key has signed; ``Tampered`` if it has not. Signatures of
        other keys are passed over.
        """
        text, gap, rest = note.rpartition("\n\n")
        text += "\n"
        invalid = load_extra("cryptography.exceptions", EXTRA).InvalidSignature
        for line in rest.split("\n") if gap else []:
            name, _, data = line.removeprefix(_MARK).partition(" ")
            if not line.startswith(_MARK) or name != self.name:
                continue
            try:
                raw = b64decode(data, validate=True)
                if raw[:4] == self._id:
                    self._key.verify(raw[4:], text.encode())
                    return text
            except (ValueError, invalid):
                raise Tampered("the signature does not fit", name=self.name) from None
        raise Tampered(f"there is no signature of {self.name}", name=self.name)


class Checkpoint(NamedTuple):
    """``extensions`` are further lines, which the signature covers as well."""

    origin: str
    size: int
    root: bytes
    extensions: tuple[str, ...] = ()

    def text(self) -> str:
        lines = (self.origin, str(self.size), b64encode(self.root).decode(), *self.extensions)
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Checkpoint:
        try:
            origin, size, root, *rest = text.removesuffix("\n").split("\n")
            if not size.isascii() or not size.isdigit() or str(int(size)) != size:
                raise ValueError
            found = cls(origin, int(size), b64decode(root, validate=True), tuple(rest))
            if not origin or len(found.root) != 32 or not all(rest):
                raise ValueError
        except ValueError:
            raise Tampered("this is no checkpoint") from None
        return found

    def extension(self, name: str) -> str | None:
        """The rest of the extension line that begins with ``name``."""
        found = (line.partition(" ") for line in self.extensions)
        return next((rest for word, _, rest in found if word == name), None)


def read_key(given: str) -> str:
    """A key as it was given: itself, or the first line of a file."""
    if "+" in given and not os.path.exists(given):
        return given
    try:
        with open(os.path.expanduser(given), encoding="utf-8") as file:
            return file.read(4096).partition("\n")[0]
    except OSError as error:
        raise NotFound(f"{given}: {error.strerror}", path=given) from None


def read_signer(path: str) -> Signer:
    return Signer.parse(read_key(path))
