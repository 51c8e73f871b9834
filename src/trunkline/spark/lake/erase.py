"""Delete the rows of a subject, or of a space, from the tables of a lake.

A table that holds sealed payloads needs no more than the shredding of their key. A table that a
pipeline made of opened payloads, a summary for example, holds them in the plain: its rows go here,
with the files of older versions, and with the older commits, whose statistics quote values. No
Spark is needed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from trunkline.check import load_extra
from trunkline.errors import NotFound

if TYPE_CHECKING:
    from trunkline.spark.lake.table import Lake

_LOG = "_delta_log"
_KEPT: Final = "delta.logRetentionDuration"


class ErasedOwner(NamedTuple):
    """Whose rows go: by the digest that a ``subject.erased`` event names. ``whole`` is for a space
    with all its subjects.
    """

    digest: str
    whole: bool

    def has(self, space: str, subject: str) -> bool:
        text = f"{space}\0{'' if self.whole else subject}"
        return hashlib.sha256(text.encode()).hexdigest() == self.digest


def tables_of(lake: str) -> list[str]:
    """The folders below ``lake`` that are Delta tables."""
    return sorted(where for where, folders, _ in os.walk(lake) if _LOG in folders)


def erase_rows(lake: str, space: str, subject: str | None = None) -> dict[str, int]:
    """Delete the rows with this ``space`` and ``subject`` from every table that has the columns;
    without a subject all rows of the space. Returns how many rows went, by table; a table without
    the columns is not in it, and is the caller's to rebuild.
    """
    deltalake = load_extra("deltalake", "spark")
    found = tables_of(lake)
    if not found:
        raise NotFound(f"there is no table in {lake}", path=lake)
    gone: dict[str, int] = {}
    for place in found:
        table = deltalake.DeltaTable(place)
        columns = _columns(table)
        if "space" not in columns or (subject is not None and "subject" not in columns):
            continue
        gone[os.path.relpath(place, lake)] = _delete(table, space, subject)
    return gone


def erase_owners(lake: Lake, owners: Collection[ErasedOwner]) -> dict[str, dict[ErasedOwner, int]]:
    """Delete the rows of owners that are known by their digests. Returns how many rows of which
    owner went, by table; a table without the columns is not in it.
    """
    deltalake = load_extra("deltalake", "spark")
    gone: dict[str, dict[ErasedOwner, int]] = {}
    for name in lake.tables():
        table = deltalake.DeltaTable(**lake.storage.delta(name))
        columns = _columns(table)
        if "space" not in columns:
            continue
        counts = dict.fromkeys(owners, 0)
        for space, subject in list(_pairs(table, "subject" in columns)):
            for owner in owners:
                if owner.has(space, subject) and (owner.whole or "subject" in columns):
                    counts[owner] += _delete(table, space, None if owner.whole else subject)
        if "subject" in columns or any(owner.whole for owner in owners):
            _forget(table)  # also after a crash, when the rows are gone already
            gone[name] = counts
    return gone


def _columns(table: Any) -> set[str]:
    return {field.name for field in table.schema().fields}


def _pairs(table: Any, by_subject: bool) -> Iterator[tuple[str, str]]:
    """The different spaces, and subjects in them, of a table."""
    names = ["space", "subject"] if by_subject else ["space"]
    rows = table.to_pyarrow_table(columns=names).group_by(names).aggregate([]).to_pylist()
    for row in rows:
        if row["space"] is not None:
            yield row["space"], row.get("subject") or ""


def _delete(table: Any, space: str, subject: str | None) -> int:
    wanted = f"space = {_quoted(space)}"
    if subject is not None:
        wanted += f" AND subject = {_quoted(subject)}"
    count = int(table.delete(wanted)["num_deleted_rows"] or 0)
    _forget(table)
    return count


def _forget(table: Any) -> None:
    """Remove the files of older versions, and the commits: the statistics of a commit quote values,
    and a deletion names what it deleted. No version that is left may lead to the rows. Files that
    belong to no version yet are those of a batch at work: they stay.
    """
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)
    kept = table.metadata().configuration.get(_KEPT, "interval 30 days")
    table.alter.set_table_properties({_KEPT: "interval 0 seconds"})
    table.create_checkpoint()
    table.cleanup_metadata()
    table.alter.set_table_properties({_KEPT: kept})


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
