"""``trunkline seal``, ``prove`` and ``shred``: proofs of what was written and what was erased."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import closing
from typing import Any

from trunkline.bus.connect import connect
from trunkline.cli import OK, Commands, leaf
from trunkline.cli.arguments import bus_path, bus_url, open_folder, pick_topics
from trunkline.cli.keys import add_ring, open_ring
from trunkline.cli.render import Printer, amount
from trunkline.cli.spark import part
from trunkline.crypto.note import Verifier, read_key, read_signer
from trunkline.errors import InvalidOption
from trunkline.event import Receipt
from trunkline.guard.erasure import erase
from trunkline.guard.notary import (
    check_proof,
    copy_checkpoints,
    forget_tree,
    prove_growth,
    prove_record,
    read_checkpoints,
    seal_folder,
)


def register(commands: Commands[Any]) -> None:
    shred = leaf(commands, "shred", run_shred, "erase a subject, or a space, for good")
    shred.add_argument("space")
    shred.add_argument("subject", nargs="?", help="only this subject (the whole space)")
    shred.add_argument("--key", required=True, help="the signing key's file")
    shred.add_argument("--lake", metavar="FOLDER", help="delete the rows of lake tables as well")
    shred.add_argument("--yes", action="store_true", help="it cannot be undone, and I know")
    add_ring(shred)

    seal = leaf(commands, "seal", run_seal, "sign the records of the log")
    seal.add_argument("topics", metavar="TOPIC", nargs="*", help="only these (all)")
    seal.add_argument("--key", required=True, help="the signing key's file")
    seal.add_argument(
        "--accept-removed",
        action="store_true",
        help="records were removed on purpose",
    )
    seal.add_argument("--forget", action="store_true", help="remove trees of topics that are gone")
    seal.add_argument("--copy-to", metavar="FOLDER", help="copy checkpoints, for verify --against")

    prove = leaf(commands, "prove", run_prove, "prove that an event is in the signed log")
    prove.add_argument("id", nargs="?", help="the event's id; - checks a proof from standard input")
    prove.add_argument("--public-key", required=True, metavar="KEY", help="the key, or its file")
    prove.add_argument(
        "--since", metavar="CHECKPOINT", help="prove that the log only grew since this checkpoint"
    )


def run_shred(args: argparse.Namespace) -> int:
    if not args.yes:
        raise InvalidOption("shredding cannot be undone", hint="--yes")
    ring, signer = open_ring(args), read_signer(args.key)
    url = f"file:{bus_path(bus_url(args))}"

    async def run() -> Receipt:
        async with connect(url, create=False, allow_network=args.allow_network) as bus:
            return await erase(bus, ring, signer, args.space, args.subject)

    receipt = asyncio.run(run())
    rows: dict[str, int] = {}
    if args.lake:
        rows = part("lake.erase").erase_rows(args.lake, args.space, args.subject)
    row = {"id": receipt.id, "topic": receipt.topic, "offset": receipt.offset, "lake": rows}
    more = f", and {amount(sum(rows.values()), 'row')} of the lake" if args.lake else ""
    Printer(args).row(row, f"shredded; proven by {receipt.id} on {receipt.topic}{more}")
    return OK


def run_seal(args: argparse.Namespace) -> int:
    signer = read_signer(args.key)
    out = Printer(args)
    with closing(open_folder(args)) as folder:
        if args.forget:
            if not args.topics:
                raise InvalidOption("name the topics to forget", name="forget")
            for topic in args.topics:
                count = forget_tree(folder, signer, topic)
                out.row({"topic": topic, "forgot": count}, f"forgot {amount(count, 'tree')}")
            return OK
        topics: list[str] | None = None
        for pattern in args.topics:
            topics = [*(topics or ()), *pick_topics(folder, pattern)]
        done = seal_folder(folder, signer, topics, accept_removed=args.accept_removed)
        if args.copy_to:
            copy_checkpoints(folder, args.copy_to, Verifier(signer.public))
    rows = [one._asdict() for one in done]
    out.table(rows, ("topic", "partition", "size", "added", "removed"), "no topics")
    return OK


def run_prove(args: argparse.Namespace) -> int:
    verifier = Verifier(read_key(args.public_key))
    if args.id == "-":
        try:
            proof = json.load(sys.stdin)
        except ValueError:
            raise InvalidOption("standard input holds no proof") from None
        head = check_proof(proof, verifier)
        row = {"ok": True, "origin": head.origin, "size": head.size}
        Printer(args).row(row, f"proven by the checkpoint of {head.origin} at {head.size}")
        return OK
    with closing(open_folder(args)) as folder:
        if args.since is not None:
            (old,) = read_checkpoints(args.since, verifier)
            found = prove_growth(folder, old, verifier)
        elif args.id:
            found = prove_record(folder, args.id, verifier)
        else:
            raise InvalidOption(
                "what is to be proven?", hint="an event's id, or --since CHECKPOINT"
            )
    print(json.dumps(found, indent=None if args.json else 2))
    return OK
