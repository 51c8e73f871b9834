"""Erase a subject, or a space: shred the key, and prove that it was done.

Shredding makes every payload that the key sealed unreadable, wherever it was copied to: the log,
dead letters, bridges, old backups, lake tables. The event ``subject.erased`` on ``system.erasure``
says so; it is signed, and names the owner by a digest and the keys by their thumbprints only.
"""

from __future__ import annotations

import asyncio
from typing import Final

from trunkline.bus import Bus
from trunkline.crypto.jwe import split_kid
from trunkline.crypto.keyring import KeyRing, Shredded, owner_digest
from trunkline.crypto.note import Signer, Verifier
from trunkline.errors import NotFound, OutOfRange, Tampered
from trunkline.event import Event, Receipt
from trunkline.guard.vault import HEADER

TOPIC: Final = "system.erasure"
TYPE: Final = "subject.erased"


async def erase(
    bus: Bus, ring: KeyRing, signer: Signer, space: str, subject: str | None = None
) -> Receipt:
    """Shred the key of a subject, or of a space with all its subjects, and publish the proof. It
    may be called again after a crash: the proof of keys that are gone already is published then.
    """
    try:
        gone = await asyncio.to_thread(ring.shred, space, subject)
    except NotFound:
        marked = await asyncio.to_thread(ring.shredded, space, subject)
        if marked is None:
            raise
        gone = marked
    records = await _count(bus, gone)
    owner = owner_digest(space, subject or "")
    text = _text(owner, gone, records)
    payload = {
        "owner": owner,
        "scope": "space" if subject is None else "subject",
        "keys": list(gone.keys),
        "thumbprints": list(gone.thumbprints),
        "at": gone.at,
        "records": records,
        "note": signer.sign(text),
    }
    return await bus.publish(TOPIC, payload, type=TYPE)


def check_erased(event: Event, verifier: Verifier, space: str, subject: str | None = None) -> int:
    """How many records an event proves to be erased; ``Tampered`` unless it is signed and speaks of
    this very owner.
    """
    try:
        told = event.payload
        gone = Shredded(tuple(told["keys"]), tuple(told["thumbprints"]), told["at"])
        owner, records = owner_digest(space, subject or ""), int(told["records"])
        if verifier.open(told["note"]) != _text(owner, gone, records):
            raise Tampered("the signed note speaks of something else")
    except (KeyError, TypeError, ValueError):
        raise Tampered("this is no proof of an erasure") from None
    return records


def _text(owner: str, gone: Shredded, records: int) -> str:
    keys = "".join(
        f"key {key} {thumbprint}\n"
        for key, thumbprint in zip(gone.keys, gone.thumbprints, strict=True)
    )
    return f"{TYPE}\nowner {owner}\nat {gone.at}\nrecords {records}\n{keys}"


async def _count(bus: Bus, gone: Shredded) -> int:
    """How many records the keys had sealed, by the names of their data keys."""
    keys, count = set(gone.keys), 0
    for topic, options in (await bus.topics()).items():
        for partition in range(options.partitions):
            start: int | None = None
            while True:
                try:
                    records = await bus.read(topic, start, 1000, partition=partition)
                except OutOfRange:
                    start = None
                    continue
                if not records:
                    break
                for record in records:
                    kid = record.event.headers.get(HEADER)
                    count += kid is not None and split_kid(kid)[0] in keys
                start = records[-1].offset + 1
    return count
