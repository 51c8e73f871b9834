"""Every bus passes the suites that are shipped for buses, on every store."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import trunkline.bus
from trunkline.bus.local import LocalBus
from trunkline.features import Features
from trunkline.store.file import FileStore
from trunkline.store.memory import MemoryStore
from trunkline.testing import BusContract, GroupContract, HandlerContract, ManualClock
from trunkline.testing.bus_fixtures import Connect

from .test_stores import implementations as stores


class TestLocalBusInMemory(BusContract, GroupContract, HandlerContract):
    covers = (LocalBus, MemoryStore)
    features = Features(persistent=False, shared=False, durability="none")

    @pytest.fixture
    def connect(self, clock: ManualClock) -> Connect:
        def connect(**options: Any) -> LocalBus:
            return LocalBus(MemoryStore(clock=clock), clock=clock, **options)

        return connect


class TestLocalBusInAFolder(BusContract, GroupContract, HandlerContract):
    covers = (LocalBus, FileStore)

    @pytest.fixture
    def connect(self, tmp_path: Path, clock: ManualClock) -> Connect:
        def connect(**options: Any) -> LocalBus:
            store = FileStore(str(tmp_path / "bus"), clock=clock)
            return LocalBus(store, clock=clock, **options)

        return connect


def buses() -> set[type]:
    """Each public class in ``trunkline.bus`` that publishes and subscribes; not the twin without
    asyncio, which is a face of another bus.
    """
    found: set[type] = set()
    for module in pkgutil.walk_packages(trunkline.bus.__path__, "trunkline.bus."):
        if module.name == "trunkline.bus.sync":
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if (
                isinstance(value, type)
                and not name.startswith("_")
                and value.__module__ == module.name
                and not value.__subclasses__()
                and all(hasattr(value, method) for method in ("publish", "subscribe", "close"))
            ):
                found.add(value)
    return found


def covered() -> set[tuple[type, ...]]:
    """What the suites here, and among the tests of buses, say they cover."""
    found: set[tuple[type, ...]] = set()
    for package in ("contract", "bus", "jetstream", "mongo"):
        for module in pkgutil.iter_modules([str(Path(__file__).parents[1] / package)]):
            names = vars(importlib.import_module(f"{package}.{module.name}"))
            found |= {value.covers for value in names.values() if hasattr(value, "covers")}
    return found


def test_no_bus_is_left_out() -> None:
    listed = covered()
    assert {bus for bus, *_ in listed} == buses()
    assert {(LocalBus, store) for store in stores()} <= listed
