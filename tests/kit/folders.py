"""Fixtures: a folder with small files and a clock that stands still."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trunkline.folder import Folder
from trunkline.options import StoreOptions
from trunkline.testing.clock import ManualClock

Opener = Callable[..., Folder]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def root(tmp_path: Path) -> str:
    return os.fspath(tmp_path / "bus")


@pytest.fixture
def opener(root: str, clock: ManualClock) -> Iterator[Opener]:
    """Opens the folder, each time as another process would."""
    opened: list[Folder] = []

    def open_folder(**options: object) -> Folder:
        settings = {"reserve_bytes": 0, "index_bytes": 1024, **options}
        opened.append(Folder(root, StoreOptions(**settings), clock))  # type: ignore[arg-type]
        return opened[-1]

    yield open_folder
    for folder in opened:
        folder.close()


@pytest.fixture
def folder(opener: Opener) -> Folder:
    return opener()
