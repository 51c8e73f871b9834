"""A Merkle tree in files: C2SP tlog-tiles, 256 hashes a tile.

::

    checkpoint                   the signed head, written last
    tile/0/000                   the first 256 leaf hashes
    tile/0/x001/234              tile 1234
    tile/1/000.p/4               the first four hashes of level 1: a tile that is not full

Full tiles never change. A tile of level L holds hashes of subtrees of ``256 ** L`` leaves.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from trunkline.crypto.merkle import root_hash, subtree_hash
from trunkline.errors import Tampered
from trunkline.log import atomic

WIDTH: Final = 256
_HEIGHT: Final = 8
_HASH: Final = 32
_KEPT: Final = 64  # tiles in memory
_OPEN: Final = 128  # files at once
_SYNCS: Final = 16


def tile_path(level: int, number: int, width: int = WIDTH) -> str:
    """The path of a tile, below the tree's folder."""
    digits = f"{number:03d}"
    digits = digits.zfill(-(-len(digits) // 3) * 3)
    parts = [digits[at : at + 3] for at in range(0, len(digits), 3)]
    name = "/".join([f"x{part}" for part in parts[:-1]] + parts[-1:])
    return f"tile/{level}/{name}" + (f".p/{width}" if width < WIDTH else "")


class TileTree:
    """The tree of ``size`` leaves in a folder. ``Tampered`` where a tile is missing or cut."""

    def __init__(self, path: str, size: int = 0) -> None:
        self.path = path
        self.size = size
        self._tails: list[list[bytes]] = []  # of each level, the hashes of the tile not yet full
        self._cache: dict[tuple[int, int], list[bytes]] = {}
        level, count = 0, size
        while count:
            self._tails.append(
                self._read(level, count // WIDTH, count % WIDTH) if count % WIDTH else []
            )
            level, count = level + 1, count >> _HEIGHT

    # -- reading -------------------------------------------------------------------------------

    def root(self) -> bytes:
        return root_hash(self.size, self.node)

    def node(self, level: int, index: int) -> bytes:
        """The root of the full subtree of ``2 ** level`` leaves at ``index``."""
        tier, height = divmod(level, _HEIGHT)
        start = index << height
        tile = self.tile(tier, start // WIDTH)
        at = start % WIDTH
        hashes = tile[at : at + (1 << height)]
        if len(hashes) < 1 << height:
            raise Tampered("a tile of the tree is too short", path=self.path, position=index)
        return subtree_hash(hashes)

    def leaves(self, first: int, end: int) -> list[bytes]:
        """The hashes of the leaves ``first`` up to ``end``."""
        found: list[bytes] = []
        for number in range(first // WIDTH, -(-end // WIDTH)):
            found += self.tile(0, number)
        skip = first // WIDTH * WIDTH
        return found[first - skip : end - skip]

    def tile(self, level: int, number: int) -> list[bytes]:
        """The hashes of a tile, as far as the tree reaches."""
        count = self.size >> _HEIGHT * level
        if number == count // WIDTH and level < len(self._tails):
            return self._tails[level]
        if number > count // WIDTH:
            return []
        known = self._cache.get((level, number))
        if known is None:
            if len(self._cache) >= _KEPT:
                self._cache.clear()
            known = self._cache[level, number] = self._read(level, number, WIDTH)
        return known

    def _read(self, level: int, number: int, width: int) -> list[bytes]:
        path = os.path.join(self.path, tile_path(level, number, width))
        try:
            data = atomic.read_file(path)
        except FileNotFoundError:
            raise Tampered(
                f"the tree has no {tile_path(level, number, width)}", path=path
            ) from None
        if len(data) != width * _HASH:
            raise Tampered(f"{tile_path(level, number, width)} is cut", path=path)
        return [data[at : at + _HASH] for at in range(0, len(data), _HASH)]

    def check_tiles(self) -> None:
        """Compare each hash above level 0 with the tile below that it stands for."""
        level, count = 0, self.size
        while count >= WIDTH:
            above = count >> _HEIGHT
            for number in range(above):
                here = self.tile(level + 1, number // WIDTH)[number % WIDTH]
                if subtree_hash(self.tile(level, number)) != here:
                    raise Tampered(f"{tile_path(level, number)} was changed", path=self.path)
            level, count = level + 1, above

    # -- growing -------------------------------------------------------------------------------

    def extend(self, leaves: Sequence[bytes]) -> list[tuple[str, bytes]]:
        """Add leaf hashes. Returns the tiles to write before anybody signs the new root, full ones
        and those not yet full.
        """
        tiles: list[tuple[str, bytes]] = []
        size = self.size + len(leaves)
        level = 0
        fresh = list(leaves)
        while fresh or level < len(self._tails):
            if level == len(self._tails):
                self._tails.append([])
            tail = self._tails[level]
            number = (self.size >> _HEIGHT * level) // WIDTH
            tail += fresh
            risen = []
            while len(tail) >= WIDTH:
                full, tail = tail[:WIDTH], tail[WIDTH:]
                tiles.append((tile_path(level, number), b"".join(full)))
                risen.append(subtree_hash(full))
                number += 1
            self._tails[level] = tail
            if tail and fresh:
                tiles.append((tile_path(level, number, len(tail)), b"".join(tail)))
            fresh = risen
            level += 1
        self.size = size
        return tiles

    def write(self, tiles: Sequence[tuple[str, bytes]]) -> None:
        """Make tiles durable. No checkpoint speaks of them yet, so a crash in the middle leaves
        nothing that counts; a tile that is there already is the same one, and is not touched.
        """
        folders: set[str] = set()
        with ThreadPoolExecutor(_SYNCS) as threads:  # the device syncs many for the price of one
            for at in range(0, len(tiles), _OPEN):
                opened: list[int] = []
                try:
                    for name, data in tiles[at : at + _OPEN]:
                        if (fd := self._write(folders, name, data)) >= 0:
                            opened.append(fd)
                    list(threads.map(atomic.sync, opened))
                finally:
                    for fd in opened:
                        os.close(fd)
        for folder in sorted(folders):
            atomic.sync_dir(folder)

    def _write(self, folders: set[str], name: str, data: bytes) -> int:
        """The file of a tile, written and not yet synced; -1 if it is there."""
        path = os.path.join(self.path, name)
        folder = os.path.dirname(path)
        with suppress(FileNotFoundError):
            if atomic.read_file(path) == data:
                return -1
        if folder not in folders:
            atomic.make_dir(folder)
            folders.add(folder)
        fd = atomic.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            atomic.write_all(fd, data)
        except OSError:
            os.close(fd)
            raise
        return fd

    def remove_partial(self, size: int) -> None:
        """Remove the tiles that were not full when the tree had ``size`` leaves and that no other
        tree of interest needs: its own are there under other names.
        """
        level, count = 0, size
        while count:
            if count % WIDTH and self.size >> _HEIGHT * level != count:
                path = os.path.join(self.path, tile_path(level, count // WIDTH, count % WIDTH))
                with suppress(OSError):
                    os.unlink(path)
                with suppress(OSError):
                    os.rmdir(os.path.dirname(path))
            level, count = level + 1, count >> _HEIGHT
