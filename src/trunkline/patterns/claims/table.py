"""``coord_claims.md``: claims as a table that people and older tools read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime

from trunkline.errors import InvalidName
from trunkline.files import ndjson
from trunkline.files.globs import clean
from trunkline.files.ndjson import find_ts
from trunkline.patterns.claims.ledger import Claim

_ROW = re.compile(r"^\|?\s*([^|]+?)\s*\|\s*([^|]+?)\s*\|\s*([^|]+?)\s*(?:\|.*)?$")


def check_actor(actor: str) -> str:
    if not actor or any(ord(char) < 32 for char in actor):
        raise InvalidName(f"not an actor: {actor!r}", name=actor)
    return actor


def import_table(text: str) -> list[tuple[str, str, datetime]]:
    """(path, actor, time) of every row of a ``coord_claims.md``: ``path | actor | time``, with or
    without bars around it. Headings, rulers and anything else are passed over.
    """
    found: list[tuple[str, str, datetime]] = []
    for line in text.splitlines():
        row = _ROW.match(line.strip())
        moment = find_ts(row.group(3)) if row else None
        if row is None or moment is None:
            continue
        with suppress(InvalidName):
            found.append((clean(row.group(1).strip("`")), check_actor(row.group(2)), moment))
    return found


def export_table(rows: Iterable[tuple[Claim, str]], *, header: bool = False) -> str:
    """The held claims as lines of a ``coord_claims.md``. A heading makes it a Markdown table, which
    programs that read the bare lines would complain about.
    """
    lines = ["path | actor | claimed at", "--- | --- | ---"] if header else []
    lines += [
        f"{path} | {claim.actor} | {ndjson.format_ts(claim.claimed_at)}"
        for claim, state in rows
        if state == "held"
        for path in claim.paths
        if "|" not in path + claim.actor
    ]
    return "".join(line + "\n" for line in lines)
