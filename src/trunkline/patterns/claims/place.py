"""Where the claims of a tree live.

In a git repository the place is decided once and written into the repository's common folder, which
all its working trees share. Elsewhere it is the NDJSON log of the current folder if there is one,
else ``.bus``.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple

from trunkline.errors import Conflict, TrunklineError
from trunkline.files import ndjson
from trunkline.patterns.claims import Claim, open_claims

_RECORD = os.path.join("trunkline", "claims")


class Tree(NamedTuple):
    """A working tree, or a plain folder: ``common`` is git's folder that all trees share."""

    top: str
    common: str | None

    @property
    def record(self) -> str | None:
        return None if self.common is None else os.path.join(self.common, _RECORD)


def find_tree(start: str | None = None) -> Tree:
    """The tree around ``start``, or around the current folder."""
    start = os.path.abspath(start or os.getcwd())
    place = start
    while not os.path.exists(os.path.join(place, ".git")):
        above = os.path.dirname(place)
        if above == place:
            return Tree(start, None)
        place = above
    return Tree(place, _common(os.path.join(place, ".git")))


def _common(git: str) -> str | None:
    """A working tree's ``.git`` is a file that names its folder, which names the common one."""
    folder = git
    with suppress(OSError):
        if os.path.isfile(git):
            with open(git, encoding="utf-8") as file:
                named = file.read().partition("gitdir:")[2].strip()
            folder = os.path.normpath(os.path.join(os.path.dirname(git), named))
        with suppress(FileNotFoundError), open(os.path.join(folder, "commondir")) as file:
            return os.path.normpath(os.path.join(folder, file.read().strip()))
        return folder
    return None


def find_place(tree: Tree, *, decide: bool = False) -> str:
    """The URL of the claims of a tree. With ``decide``, a repository without a decision gets one.

    ``Conflict`` where two places have open claims: their holders would not see each other.
    """
    decided = _decided(tree)
    url = decided or _choose(tree)
    other = next((one for one in _candidates(tree) if one != url and open_at(one)), None)
    if other is not None and (decided or open_at(url)):
        raise Conflict(
            f"claims are open in two places: {url} and {other}",
            places=[url, other],
            hint=f"release those of one place (--url {other}), or choose one: "
            f"trunkline claims place {other}",
        )
    if other is not None:
        url = other
    if decide and not decided and tree.record is not None:
        set_place(tree, url)
    return url


def set_place(tree: Tree, url: str) -> None:
    """Write down where the claims of a repository live."""
    from trunkline.log import atomic

    if tree.record is None:
        raise Conflict(
            f"{tree.top} is not in a git repository",
            hint="give every command the same --url, or set TRUNKLINE_URL",
        )
    os.makedirs(os.path.dirname(tree.record), exist_ok=True)
    atomic.replace_file(tree.record, f"{url}\n".encode())


def open_at(url: str) -> list[Claim]:
    """The claims that are held or wait at a place; none where there is no log."""
    try:
        with open_claims(url, "nobody", create=False) as claims:
            return [claim for claim, _ in claims.table()]
    except (TrunklineError, OSError):
        return []


def _decided(tree: Tree) -> str | None:
    if tree.record is None:
        return None
    try:
        with open(tree.record, encoding="utf-8") as file:
            return file.read().strip() or None
    except FileNotFoundError:
        return None


def _candidates(tree: Tree) -> list[str]:
    """The places that may carry claims: the NDJSON log and the bus of each working tree."""
    found: list[str] = []
    for top in _tops(tree):
        events, bus = os.path.join(top, ndjson.EVENTS_FILE), os.path.join(top, ".bus")
        if os.path.exists(events):
            found.append(f"ndjson:{events}")
        if os.path.exists(os.path.join(bus, "wal", "coord.claim.00000001.jsonl")):
            found.append(f"file:{bus}")
    return found


def _tops(tree: Tree) -> list[str]:
    """The working trees of the repository, this one first."""
    found = [tree.top]
    if tree.common is not None:
        if os.path.basename(tree.common) == ".git":
            found.append(os.path.dirname(tree.common))
        trees = os.path.join(tree.common, "worktrees")
        with suppress(OSError):
            for name in sorted(os.listdir(trees)):
                with suppress(OSError), open(os.path.join(trees, name, "gitdir")) as file:
                    found.append(os.path.dirname(file.read().strip()))
    return list(dict.fromkeys(found))


def _choose(tree: Tree) -> str:
    events = os.path.join(tree.top, ndjson.EVENTS_FILE)
    if os.path.exists(events):
        return f"ndjson:{events}"
    if tree.common is not None:
        return f"file:{os.path.join(tree.common, 'trunkline', 'bus')}"
    return f"file:{os.path.join(tree.top, '.bus')}"
