"""The store in MongoDB passes the suites that are shipped, on a real server."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest

from trunkline.bus.local import LocalBus
from trunkline.store import Store
from trunkline.store.mongo import MongoStore
from trunkline.testing import BusContract, HandlerContract, ManualClock, StoreContract
from trunkline.testing.bus_fixtures import Connect


@pytest.fixture
def database() -> str:
    return f"t{secrets.token_hex(6)}"


class TestMongoStore(StoreContract):
    kind = MongoStore

    @pytest.fixture
    def make(self, mongo_url: str, database: str, clock: ManualClock) -> Callable[..., Store]:
        def make(**options: Any) -> MongoStore:
            store = MongoStore(mongo_url, clock=clock, database=database, **options)
            clock.wait_for(store)
            return store

        return make

    @pytest.fixture
    def kill(self) -> Any:
        async def kill(store: MongoStore) -> None:
            await store.abandon()

        return kill


class TestLocalBusInMongo(BusContract, HandlerContract):
    covers = (LocalBus, MongoStore)

    @pytest.fixture
    def connect(self, mongo_url: str, database: str, clock: ManualClock) -> Connect:
        def connect(**options: Any) -> LocalBus:
            store = MongoStore(mongo_url, clock=clock, database=database)
            clock.wait_for(store)
            return LocalBus(store, clock=clock, **options)

        return connect
