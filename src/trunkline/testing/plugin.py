"""The pytest plugin: a ready bus in memory, on a clock that the test moves.

::

    async def test_an_order_is_billed(trunkline_bus, trunkline_clock):
        trunkline_bus.on("orders", group="billing")(bill)
        await trunkline_bus.publish("orders", {"id": 1})
        await trunkline_bus.drain()
        assert billed == [1]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from trunkline.testing.clock import ManualClock


@pytest.fixture
def trunkline_clock() -> ManualClock:
    """A clock that moves when the test says so."""
    from trunkline.testing.clock import ManualClock

    return ManualClock()
