"""Every store passes the suite that is shipped for stores."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import trunkline.stores
from trunkline.store import Store
from trunkline.stores.file import FileStore
from trunkline.stores.memory import MemoryStore
from trunkline.testing import ManualClock, StoreContract
from trunkline.testing.store_contract import Make


class TestMemoryStore(StoreContract):
    kind = MemoryStore

    @pytest.fixture
    def make(self, clock: ManualClock) -> Make:
        def make(**options: Any) -> Store:
            return MemoryStore(clock=clock, **options)

        return make


class TestFileStore(StoreContract):
    kind = FileStore

    @pytest.fixture
    def make(self, tmp_path: Path, clock: ManualClock) -> Make:
        def make(**options: Any) -> Store:
            return FileStore(str(tmp_path / "bus"), clock=clock, **options)

        return make


class TestFileStoreByThreads(TestFileStore):
    """The same when every commit is handed to a thread, as it is when the disk is slow."""

    @pytest.fixture
    def make(self, tmp_path: Path, clock: ManualClock) -> Make:
        def make(**options: Any) -> Store:
            store = FileStore(str(tmp_path / "bus"), clock=clock, inline_commit_s=0.0, **options)
            store._sync_s = 1.0
            return store

        return make


def implementations() -> set[type]:
    """Each public class in ``trunkline.stores`` that has the methods of a store."""
    found: set[type] = set()
    methods = [
        name for name in vars(Store) if not name.startswith("_") and callable(getattr(Store, name))
    ]
    for module in pkgutil.iter_modules(trunkline.stores.__path__, "trunkline.stores."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if (
                isinstance(value, type)
                and not name.startswith("_")
                and value.__module__ == module.name
                and all(hasattr(value, method) for method in methods)
            ):
                found.add(value)
    return found


def test_no_store_is_left_out() -> None:
    suites = [value for value in globals().values() if isinstance(value, type)]
    listed = {suite.kind for suite in suites if hasattr(suite, "kind")}
    assert implementations() == listed
