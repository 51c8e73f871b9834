"""How to test handlers: a bus in memory, on a clock that the test moves.

    python -m pytest examples/6_testing.py
    python -m pytest examples/6_testing.py --trunkline-duplicate       handles every event twice
    python -m pytest examples/6_testing.py --trunkline-crash=ack       dies before each first ack

A handler that passes all three is idempotent. It takes ``trunkline[testing]``: pytest, and
pytest-asyncio in any mode. In this repository its own settings need pytest-timeout, too, which
``make test`` installs.
"""

from typing import Any

from trunkline import Event, Retry


class Ledger:
    """Counts each order once, however often it is delivered."""

    def __init__(self) -> None:
        self.booked: dict[str, int] = {}

    async def book(self, event: Event) -> None:
        self.booked[event.id] = event.payload["price"]


async def test_every_order_is_booked_once(trunkline_bus: Any) -> None:
    ledger = Ledger()
    trunkline_bus.on("orders", group="ledger", workers=2)(ledger.book)
    await trunkline_bus.publish_many("orders", [{"price": 1}, {"price": 20}, {"price": 300}])

    await trunkline_bus.drain()

    assert sum(ledger.booked.values()) == 321


async def test_a_bank_that_is_away_is_asked_again_a_minute_later(
    trunkline_bus: Any, trunkline_clock: Any
) -> None:
    asked: list[float] = []

    async def pay(event: Event) -> None:
        asked.append(trunkline_clock.monotonic())
        if event.payload["price"] > 0 and asked[-1] - asked[0] < 60:
            raise Retry(delay_s=60)

    trunkline_bus.on("orders", group="bank")(pay)
    await trunkline_bus.publish("orders", {"price": 1})
    await trunkline_clock.run(61)

    assert asked[-1] - asked[0] >= 60
