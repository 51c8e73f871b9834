"""A delivery: a record in a consumer's hands."""

from __future__ import annotations

from typing import Any

import pytest

import trunkline
from trunkline.bus import Bus, Delivery, Outcome, Subscription
from trunkline.bus.local import LocalBus
from trunkline.bus.subscription import LocalSubscription
from trunkline.errors import InvalidOption
from trunkline.event import Event, Record
from trunkline.group import Lease
from trunkline.store.memory import MemoryStore

BUS: Bus = LocalBus(MemoryStore())  # it is a Bus, and its streams are: the type checker reads this
STREAM: type[Subscription] = LocalSubscription


class Book:
    def __init__(self) -> None:
        self.lines: list[Any] = []
        record = Record(Event(topic="orders", payload={"id": 1}), 3, 7)
        self.delivery = Delivery(
            record, Lease(7, 2, 0.0, "me"), "billing", self._settle, self._extend
        )

    def _settle(
        self, delivery: Delivery, outcome: Outcome, delay_s: float | None, reason: str
    ) -> None:
        self.lines.append((outcome.value, delay_s, reason))

    def _extend(self, delivery: Delivery) -> None:
        self.lines.append("longer")


def test_a_delivery_shows_its_record_and_its_place() -> None:
    delivery = Book().delivery
    assert delivery.event.payload == {"id": 1}
    assert (delivery.topic, delivery.partition, delivery.offset) == ("orders", 3, 7)
    assert (delivery.attempt, delivery.group, delivery.outcome) == (2, "billing", None)
    assert repr(delivery) == "<Delivery orders/3@7 attempt 2 of billing>"


async def test_each_verb_says_what_it_says() -> None:
    cases: list[tuple[str, tuple[Any, ...], Any]] = [
        ("ack", (), ("ack", None, "")),
        ("nack", (), ("nack", None, "")),
        ("nack", (2.5, "busy"), ("nack", 2.5, "busy")),
        ("term", (), ("term", None, "rejected")),
        ("term", ("broken",), ("term", None, "broken")),
    ]
    for verb, arguments, line in cases:
        book = Book()
        assert await getattr(book.delivery, verb)(*arguments) is True
        assert book.lines == [line]


@pytest.mark.parametrize("first", ["ack", "nack", "term"])
async def test_after_the_first_verb_no_other_counts(first: str) -> None:
    book = Book()
    await book.delivery.in_progress()
    await getattr(book.delivery, first)()
    for then in ("ack", "nack", "term"):
        assert await getattr(book.delivery, then)() is False
    await book.delivery.in_progress()
    assert book.lines == ["longer", book.lines[1]]
    assert book.delivery.outcome is Outcome(first)


@pytest.mark.parametrize("delay_s", [-1, float("nan"), float("inf"), 1e300, "x"])
async def test_a_delay_that_is_none_is_refused_and_the_delivery_is_still_open(delay_s: Any) -> None:
    async with trunkline.connect("memory:") as bus:
        await bus.publish("orders", 1)
        async with bus.subscribe("orders", group="billing") as stream:
            delivery = await anext(stream)
            with pytest.raises(InvalidOption, match="delay_s"):
                await delivery.nack(delay_s)
            with pytest.raises(InvalidOption, match="delay_s"):
                raise trunkline.Retry(delay_s)
            assert await delivery.ack()
