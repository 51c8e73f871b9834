"""Every bus passes the suites that are shipped for buses, on every store."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import trunkline.buses
from trunkline.buses.local import LocalBus
from trunkline.stores.file import FileStore
from trunkline.stores.memory import MemoryStore
from trunkline.testing import BusContract, BusFeatures, HandlerContract, ManualClock
from trunkline.testing.bus_fixtures import Connect

from .test_stores import implementations as stores


class TestLocalBusInMemory(BusContract, HandlerContract):
    covers = (LocalBus, MemoryStore)
    features = BusFeatures(persistent=False, shared=False)

    @pytest.fixture
    def connect(self, clock: ManualClock) -> Connect:
        def connect(**options: Any) -> LocalBus:
            return LocalBus(MemoryStore(clock=clock), clock=clock, **options)

        return connect


class TestLocalBusInAFolder(BusContract, HandlerContract):
    covers = (LocalBus, FileStore)

    @pytest.fixture
    def connect(self, tmp_path: Path, clock: ManualClock) -> Connect:
        def connect(**options: Any) -> LocalBus:
            store = FileStore(str(tmp_path / "bus"), clock=clock)
            return LocalBus(store, clock=clock, **options)

        return connect


def buses() -> set[type]:
    """Each public class in ``trunkline.buses`` that publishes and subscribes."""
    found: set[type] = set()
    for module in pkgutil.iter_modules(trunkline.buses.__path__, "trunkline.buses."):
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
    for package in ("contract", "buses"):
        for module in pkgutil.iter_modules([str(Path(__file__).parents[1] / package)]):
            names = vars(importlib.import_module(f"{package}.{module.name}"))
            found |= {value.covers for value in names.values() if hasattr(value, "covers")}
    return found


def test_no_bus_is_left_out() -> None:
    listed = covered()
    assert {bus for bus, *_ in listed} == buses()
    assert {(LocalBus, store) for store in stores()} <= listed
