"""A group's snapshot, ``offsets/<name>.json``: the group's state at one position of its journal.

The snapshot before it is kept beside it as ``.json.bak``. Either is a base that the journal can be
replayed from, so the loss of one of them is no loss.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from trunkline.errors import Corrupt, UnsupportedFormat
from trunkline.explain import reason
from trunkline.group import Saved
from trunkline.log import atomic
from trunkline.log.head import FORMAT
from trunkline.log.line import Damaged, close_line, is_intact, parse_object

_encode = msgspec.json.Encoder().encode


class Snapshot(Saved, frozen=True, kw_only=True):
    topic: str
    partition: int
    group: str
    segment: int
    ts: str
    format: int = FORMAT
    generation: int = 1
    position: int = 0
    epoch: int = 1


def read(stem: str) -> tuple[Snapshot | None, str]:
    """The newest intact snapshot, and the path of a damaged one if no intact one is left."""
    first_damaged = ""
    for ending in (".json", ".json.bak"):
        path = stem + ending
        try:
            data = atomic.read_file(path).rstrip(b"\n")
        except FileNotFoundError:
            continue
        try:
            found = parse_object(data)
        except Damaged:
            first_damaged = first_damaged or path
            continue
        check_format(path, found.get("format", 0))
        try:
            return msgspec.convert(found, Snapshot), ""
        except msgspec.ValidationError as error:
            raise not_ours(path, error) from error
    return None, first_damaged


def write(stem: str, values: dict[str, Any]) -> None:
    """Replace the snapshot. The one before it becomes the backup if it is intact."""
    path = stem + ".json"
    try:
        before = atomic.read_file(path)
    except FileNotFoundError:
        before = b""
    if is_intact(before.rstrip(b"\n")):
        atomic.replace_file(path + ".bak", before)
    atomic.replace_file(path, close_line(_encode(values)[:-1]))


def copy_to_backup(stem: str) -> None:
    """Make the backup a copy of the snapshot, so that neither can be lost alone."""
    atomic.replace_file(stem + ".json.bak", atomic.read_file(stem + ".json"))


def check_format(path: str, number: Any) -> None:
    if isinstance(number, int) and number > FORMAT:
        raise UnsupportedFormat(
            f"offsets/{os.path.basename(path)} has format {number}, this version reads "
            f"up to {FORMAT}: see {path}",
            path=path,
            hint="upgrade trunkline",
        )


def not_ours(path: str, error: msgspec.ValidationError) -> UnsupportedFormat:
    """The line is intact and means nothing to this version, so a newer version wrote it."""
    return UnsupportedFormat(
        f"offsets/{os.path.basename(path)}: {reason(error)}",
        path=path,
        hint="a newer version wrote it: upgrade trunkline",
    )


def damaged(path: str, position: int, why: str) -> Corrupt:
    return Corrupt(
        f"offsets/{os.path.basename(path)} is damaged at byte {position}: {why}",
        path=path,
        position=position,
        hint="'trunkline group seek' sets the group to a known offset",
    )
