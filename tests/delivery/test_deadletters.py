"""Dead letters: how they are written down and read back, and what the desk makes of odd ones."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import trunkline
from trunkline.delivery.deadletters import Desk, Letter, read_letter, write_letter
from trunkline.errors import NotFound
from trunkline.event import Event, Record
from trunkline.group import Group
from trunkline.names import NAME_BYTES_MAX, GroupKey, dead_topic
from trunkline.options import GroupOptions
from trunkline.store.memory import MemoryStore
from trunkline.testing import ManualClock
from trunkline.testing.clock import EPOCH

KEY = GroupKey("orders", 0, "billing")


def record(offset: int = 1, **fields: Any) -> Record:
    event = Event(id=f"id-{offset}", topic="orders", payload=offset, ts=EPOCH, **fields)
    return Record(event, 0, offset)


def letter_of(one: Record, error: str = "no", group: str = "billing") -> Event:
    return write_letter(one, group, 6, "retries", error, EPOCH + timedelta(seconds=9))


def test_a_letter_tells_the_whole_story() -> None:
    one = record(7, key="k", idem_key="i", ttl_s=5.0, headers={"mine": "x", "dlq-group": "old"})
    event = letter_of(one)

    assert event.topic == "orders.DLQ"
    assert event.headers == {
        "mine": "x",
        "dlq-topic": "orders",
        "dlq-partition": "0",
        "dlq-offset": "7",
        "dlq-group": "billing",
        "dlq-attempts": "6",
        "dlq-reason": "retries",
        "dlq-error": "no",
        "dlq-at": "2030-01-01T00:00:09+00:00",
        "dlq-id": one.event.id,
        "dlq-ts": "2030-01-01T00:00:00+00:00",
    }
    assert (event.key, event.payload, event.cause) == ("k", 7, one.event.id)
    assert (event.idem_key, event.ttl_s, event.not_before) == (None, None, None)
    assert event.id != one.event.id


def test_a_long_error_is_cut_between_characters() -> None:
    event = letter_of(record(), "é" * 5000 + "\udc80")
    assert event.headers["dlq-error"] == "é" * 500


def test_what_is_written_is_read_back() -> None:
    event = letter_of(record(7))
    letter = read_letter(Record(event, 0, 3))
    assert letter == Letter(
        offset=3,
        topic="orders",
        partition=0,
        origin=7,
        group="billing",
        attempts=6,
        reason="retries",
        error="no",
        at="2030-01-01T00:00:09+00:00",
        event=event,
    )


@pytest.mark.parametrize(
    "headers", [{}, {"dlq-topic": "orders"}, {"dlq-offset": "x"}], ids=["none", "one", "no number"]
)
def test_a_record_that_is_no_letter_is_none(headers: dict[str, str]) -> None:
    base = letter_of(record()).headers if "dlq-offset" in headers else {}
    event = Event(topic="orders.DLQ", headers=base | headers)
    assert read_letter(Record(event, 0, 1)) is None


class Office:
    """A store with settled records 1 to 5 of orders, and a desk."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(clock=self.clock)
        self.desk = Desk(self.store, "orders", self.clock)

    async def open(self) -> None:
        await self.store.append("orders", [record(n).event for n in range(1, 6)])

        def define(group: Group) -> None:
            group.define(GroupOptions(), 0)
            group.settle(range(1, 6))

        await self.store.update(KEY, define)

    async def write(self, *events: Event) -> None:
        await self.store.append("orders.DLQ", events)

    async def letters(self, **options: Any) -> list[tuple[int, int, int]]:
        found = self.desk.letters(**options)
        return [(letter.offset, letter.origin, letter.redrives) async for letter in found]


@pytest.fixture
async def office() -> Office:
    office = Office()
    await office.open()
    return office


async def test_without_letters_nothing_is_made(office: Office) -> None:
    assert await office.letters() == []
    assert await office.store.groups() == [KEY]
    assert list(await office.store.topics()) == ["orders"]


async def test_a_letter_that_was_written_twice_is_one_letter(office: Office) -> None:
    twice = letter_of(record(2))
    await office.write(twice, letter_of(record(3)), twice)
    assert await office.letters() == [(1, 2, 0), (2, 3, 0)]

    assert [one.refused async for one in office.desk.redrive(offsets={1})] == [""]

    assert await office.letters() == [(2, 3, 0)]
    assert await office.store.update(KEY, lambda group: group.again) == {2}


async def test_a_letter_after_a_redrive_is_another_one(office: Office) -> None:
    await office.write(letter_of(record(2)))
    [_ async for _ in office.desk.redrive()]
    await office.write(letter_of(record(2)))
    assert await office.letters() == [(2, 2, 1)]
    assert await office.letters(closed=True) == [(1, 2, 0), (2, 2, 1)]


async def test_a_letter_of_another_topic_put_there_by_hand_is_not_ours(office: Office) -> None:
    forged = Event(
        topic="orders.DLQ", headers=letter_of(record()).headers | {"dlq-topic": "secrets"}
    )
    await office.write(forged, Event(topic="orders.DLQ", payload="by hand"), letter_of(record(2)))
    assert await office.letters() == [(3, 2, 0)]


async def test_a_letter_that_is_not_open_is_not_passed_over(office: Office) -> None:
    await office.write(letter_of(record(2)), letter_of(record(3)))
    [_ async for _ in office.desk.drop(offsets={2})]
    for do in (office.desk.redrive, office.desk.drop):
        with pytest.raises(NotFound, match=r"no open letter 2 7 of orders"):
            [_ async for _ in do(offsets={1, 2, 7})]
    assert await office.letters() == [(1, 2, 0)]


async def test_what_others_closed_meanwhile_is_left_alone(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trunkline.delivery.deadletters._TOGETHER", 1)
    await office.write(*(letter_of(record(n)) for n in (1, 2, 3)))
    slow, other = office.desk.redrive(), Desk(office.store, "orders", office.clock)
    assert (await anext(slow)).refused == ""
    dropping = office.desk.drop()
    assert (await anext(dropping)).offset == 2
    assert [one.offset async for one in other.drop()] == [3]

    assert [one.refused async for one in slow] == ["redriven or dropped meanwhile"] * 2
    assert [one async for one in dropping] == []
    assert await office.store.update(KEY, lambda group: group.again) == {1}


async def test_what_cannot_be_given_back_is_refused_and_stays(office: Office) -> None:
    await office.write(letter_of(record(2)), letter_of(record(4), group="gone"))
    await office.store.trim("orders", 0, 4)

    for dry_run in (True, False):
        refused = [one.refused async for one in office.desk.redrive(dry_run=dry_run)]
        assert refused == ["its record was removed", "the group gone is gone"]
        assert len(await office.letters()) == 2


async def test_another_record_in_its_place_is_not_given_back(office: Office) -> None:
    """The topic was removed and made anew: the offset is another record's now."""
    await office.write(letter_of(Record(record(9).event, 0, 2)))
    refused = [one.refused async for one in office.desk.redrive()]
    assert refused == ["its record was removed"]
    assert await office.store.update(KEY, lambda group: group.again) == set()
    assert len(await office.letters()) == 1


async def test_letters_of_the_topic_before_are_none_of_the_next_one(office: Office) -> None:
    """The topic was removed and made anew: what died at the same offset is another record."""
    older = Record(record(9).event, 0, 2)
    await office.write(letter_of(older), letter_of(record(2)))
    assert await office.letters() == [(1, 2, 0), (2, 2, 0)]

    assert [one.offset async for one in office.desk.drop(offsets={1})] == [1]

    assert await office.letters() == [(2, 2, 0)]
    assert [one.refused async for one in office.desk.redrive(max_redrives=1)] == [""]


async def test_a_rate_counts_what_is_given_back_alone(office: Office) -> None:
    """Nobody waits behind the last letter, or behind one about which nothing was done."""
    letters = [letter_of(record(n), group=name) for n, name in ((1, "gone"), (2, "billing"))]
    await office.write(*letters, letters[0], letter_of(record(3)))
    clock, began = office.clock, office.clock.monotonic()

    async def redrive() -> list[tuple[int, float]]:
        done = office.desk.redrive(rate=0.1)
        return [(one.letter.origin, clock.monotonic() - began) async for one in done]

    job = asyncio.ensure_future(redrive())
    await clock.run(10)
    assert await asyncio.wait_for(job, 1) == [(1, 0.0), (2, 0.0), (3, 10.0)]


async def test_the_desk_of_a_dead_letter_topic_is_that_of_its_topic(office: Office) -> None:
    await office.write(letter_of(record(2)))
    desk = Desk(office.store, "orders.DLQ", office.clock)
    assert desk.topic == "orders"
    assert [letter.origin async for letter in desk.letters()] == [2]


async def test_more_letters_than_one_read_are_all_found(office: Office) -> None:
    await office.write(*(letter_of(record(2), group=f"g{n}") for n in range(1100)))
    assert len(await office.letters()) == 1100


@pytest.mark.parametrize("url", ["memory:", "file:bus"])
async def test_the_longest_topic_has_dead_letters_and_these_have_too(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    topic = "a" * NAME_BYTES_MAX
    async with trunkline.connect(url) as bus:
        await bus.publish(topic, 1)
        for name in (topic, dead_topic(topic)):
            async with bus.subscribe(name, group="g") as deliveries:
                await (await anext(deliveries)).term("no")
            desk = bus.dead_letters(dead_topic(name))
            assert [letter.topic async for letter in desk.letters()] == [name]
