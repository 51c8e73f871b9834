"""The bus on NATS passes the suites that are shipped for buses."""

from __future__ import annotations

from typing import Any

import pytest

from trunkline.bus.nats.bus import FEATURES, NatsBus
from trunkline.testing import BusContract, HandlerContract
from trunkline.testing.bus_fixtures import Connect
from trunkline.testing.clock import PassingClock


class TestNatsBus(BusContract, HandlerContract):
    covers = (NatsBus,)
    features = FEATURES
    unit_s = 0.3

    @pytest.fixture
    def clock(self) -> PassingClock:
        return PassingClock()

    @pytest.fixture
    def connect(self, url: str) -> Connect:
        def connect(**options: Any) -> NatsBus:
            return NatsBus(url, **options)

        return connect
