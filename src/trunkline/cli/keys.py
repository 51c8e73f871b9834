"""``trunkline keys``: the keys that seal payloads, and the key that signs checkpoints."""

from __future__ import annotations

import argparse
import os
from typing import Any

from trunkline.cli import OK, branch, leaf
from trunkline.cli.render import Printer, amount
from trunkline.crypto.keyring import KeyRing, new_wrapping_key
from trunkline.crypto.note import Signer
from trunkline.errors import Conflict, InvalidOption
from trunkline.log import atomic

_SOURCE = "file:PATH, env:NAME or cmd:COMMAND (else TRUNKLINE_WRAPPING_KEY)"


def register(commands: argparse._SubParsersAction[Any]) -> None:
    below = branch(commands, "keys", "make, list, rotate and shred the keys of payloads")
    new = leaf(below, "new-key", run_new_key, "make a wrapping key")
    new.add_argument("file", help="where to put it; it must not be there yet")
    signer = leaf(below, "signer", run_signer, "make a key that signs checkpoints")
    signer.add_argument("file", help="where to put the private key; the public one is FILE.pub")
    signer.add_argument("--name", default="trunkline", help="the key's name in signatures")
    init = leaf(below, "init", run_init, "make a key ring")
    ls = leaf(below, "ls", run_ls, "list the owners of keys")
    rotate = leaf(below, "rotate", run_rotate, "a new key for new payloads")
    rewrap = leaf(below, "rewrap", run_rewrap, "wrap the ring by another key")
    rewrap.add_argument("--to", required=True, metavar="SOURCE", help=_SOURCE)
    for parser in (init, ls, rotate, rewrap):
        add_ring(parser)
    rotate.add_argument("space")
    rotate.add_argument("subject", nargs="?", default="")


def add_ring(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ring", metavar="FOLDER", help="the key ring (else TRUNKLINE_KEYS)")
    parser.add_argument("--wrapping-key", metavar="SOURCE", help=_SOURCE)


def open_ring(args: argparse.Namespace, *, create: bool = False) -> KeyRing:
    """The key ring of this command."""
    place = args.ring or os.environ.get("TRUNKLINE_KEYS")
    source = args.wrapping_key
    if source is None and "TRUNKLINE_WRAPPING_KEY" in os.environ:
        source = os.environ["TRUNKLINE_WRAPPING_KEY"]
        if source.partition(":")[0] not in ("file", "env", "cmd"):
            source = "env:TRUNKLINE_WRAPPING_KEY"  # the key itself
    if not place or not source:
        raise InvalidOption(
            "a key ring and its wrapping key are needed", hint="--ring, --wrapping-key"
        )
    return KeyRing(place, source, create=create)


def run_new_key(args: argparse.Namespace) -> int:
    _write_new(args.file, new_wrapping_key() + "\n")
    Printer(args).row({"path": args.file}, f"made {args.file}: keep it safe, and a copy elsewhere")
    return OK


def run_signer(args: argparse.Namespace) -> int:
    signer = Signer.new(args.name)
    _write_new(args.file, signer.private + "\n")
    _write_new(f"{args.file}.pub", signer.public + "\n")
    Printer(args).row({"path": args.file, "public": signer.public}, signer.public)
    return OK


def run_init(args: argparse.Namespace) -> int:
    ring = open_ring(args, create=True)
    Printer(args).row({"path": ring.path}, f"there is a key ring at {ring.path}")
    return OK


def run_ls(args: argparse.Namespace) -> int:
    ring = open_ring(args)
    rows = []
    for space, subject in sorted(ring.owners().values()):
        keys = ring.keys_of(space, subject)
        rows.append({"space": space, "subject": subject, "keys": len(keys), "newest": keys[-1].id})
    Printer(args).table(rows, ("space", "subject", "keys", "newest"), "no keys")
    return OK


def run_rotate(args: argparse.Namespace) -> int:
    key = open_ring(args).rotate(args.space, args.subject)
    Printer(args).row({"key": key.id}, f"new payloads of {args.space} are sealed by {key.id}")
    return OK


def run_rewrap(args: argparse.Namespace) -> int:
    count = open_ring(args).rewrap(args.to)
    Printer(args).row({"sets": count}, f"wrapped {amount(count, 'key set')} anew")
    return OK


def _write_new(path: str, text: str) -> None:
    try:
        fd = atomic.create_file(os.path.abspath(path))
    except FileExistsError:
        raise Conflict(f"{path} is there already", hint="choose another name") from None
    try:
        atomic.write_all(fd, text.encode())
        atomic.sync(fd)
    finally:
        os.close(fd)
