"""The pytest plugin: a ready bus in memory, on a clock that the test moves.

::

    async def test_an_order_is_billed(trunkline_bus, trunkline_clock):
        trunkline_bus.on("orders", group="billing")(bill)
        await trunkline_bus.publish("orders", {"id": 1})
        await trunkline_bus.drain()
        assert billed == [1]

A retry comes at once unless the handler asks for a delay; then ``await trunkline_clock.run(60)``.
The same tests prove that a handler is idempotent, when they still pass with

* ``--trunkline-duplicate``: each event is handled twice;
* ``--trunkline-shuffle=SEED``: deliveries come in another order, as far as the group's ordering
  leaves it open;
* ``--trunkline-crash=append``: the process dies after the first event that a handler publishes,
  ``ack``: after the handler, before its ack, ``commit``: after the ack, before that is saved, which
  happens in ``drain``. Each event meets it once, and is delivered again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from trunkline.testing.clock import ManualClock


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("trunkline", "what happens to handlers on trunkline_bus")
    group.addoption(
        "--trunkline-duplicate", action="store_true", help="handle each event a second time"
    )
    group.addoption(
        "--trunkline-shuffle", type=int, metavar="SEED", help="deliver in an order drawn by SEED"
    )
    group.addoption(
        "--trunkline-crash",
        choices=("append", "ack", "commit"),
        help="die there, once for each event, and deliver it again",
    )


def pytest_configure(config: pytest.Config) -> None:
    from trunkline.testing import fixtures

    config.pluginmanager.register(fixtures, "trunkline_fixtures")


def pytest_report_header(config: pytest.Config) -> str | None:
    names = ("duplicate", "shuffle", "crash")
    asked = {name: config.getoption(f"trunkline_{name}") for name in names}
    shown = [f"{name}={value}" for name, value in asked.items() if value not in (None, False)]
    return f"trunkline: {', '.join(shown)}" if shown else None


@pytest.fixture
def trunkline_clock() -> ManualClock:
    """A clock that moves when the test says so."""
    from trunkline.testing.clock import ManualClock

    return ManualClock()
