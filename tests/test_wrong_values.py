"""A value of another kind is refused by its name, wherever it is given, and nothing is done."""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import nan
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import trunkline
from trunkline.bus.connect import open_local
from trunkline.bus.local import LocalBus
from trunkline.errors import Invalid, InvalidEvent, InvalidOption
from trunkline.event import Event
from trunkline.options import Flow, TopicOptions
from trunkline.patterns.heartbeat import Heartbeat, Monitor
from trunkline.patterns.inbox import Inbox
from trunkline.patterns.outbox import Drainer, SqlOutbox
from trunkline.patterns.schemas import Registry
from trunkline.patterns.tasks import TaskQueue

WRONG = [-1, nan, "x", b"x", "\ud800", object(), ["a"]]


@pytest.fixture(params=["memory:", "file:"])
async def bus(request: Any, tmp_path: Path) -> AsyncIterator[LocalBus]:
    place = tmp_path if request.param == "file:" else ""
    async with open_local(f"{request.param}{place}") as bus:
        yield bus


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_call_is_refused_and_does_not_fail_inside(bus: LocalBus, wrong: Any) -> None:
    await bus.publish("orders", 1)
    desk = bus.dead_letters("orders")
    for call in (
        lambda: bus.read("orders", wrong),
        lambda: bus.read("orders", limit=wrong),
        lambda: bus.bounds("orders", wrong),
        lambda: bus.drain(wrong),
        lambda: bus.stop(wrong),
        lambda: anext(desk.redrive(offsets=wrong)),
        lambda: anext(desk.redrive(rate=wrong)),
        lambda: anext(desk.redrive(max_redrives=wrong)),
        lambda: anext(desk.drop(offsets={wrong} if wrong == "x" else wrong)),
        lambda: TaskQueue(bus, "jobs").work(print, workers=wrong),
        lambda: TaskQueue(bus, "jobs").work(wrong),
    ):
        with pytest.raises(InvalidOption):
            await call()
    with pytest.raises(InvalidOption):
        bus.subscribe("orders", group="billing", policy=wrong)
    assert await bus.drain(1)


@pytest.mark.parametrize("topic", [[], {}, None, 7, "", "\ud800"])
async def test_what_is_no_topic_cannot_be_read(bus: LocalBus, topic: Any) -> None:
    for call in (bus.read(topic), bus.bounds(topic)):
        with pytest.raises(Invalid):
            await call


@pytest.mark.parametrize("wrong", WRONG)
def test_an_option_is_refused_whatever_it_is(wrong: Any) -> None:
    with pytest.raises(InvalidOption):
        Flow(max_inflight=wrong)
    with pytest.raises(InvalidOption):
        TopicOptions(ttl_policy=wrong)


@pytest.mark.parametrize("one", [object(), None, 7])
def test_one_middleware_is_no_list_of_them(one: Any) -> None:
    with pytest.raises(InvalidOption, match="middleware is a list"):
        open_local("memory:", middleware=one)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_script_waits_for_a_number_of_seconds(wrong: Any) -> None:
    with trunkline.open("memory:") as bus, pytest.raises(InvalidOption, match="timeout_s is"):
        next(bus.subscribe("orders", group="billing", timeout_s=wrong))


@pytest.mark.parametrize("digits", [7, 400, 5000])
async def test_numbers_that_nothing_can_hold_are_refused(digits: int) -> None:
    many = 10**digits
    async with open_local("memory:") as bus:
        for call in (
            lambda: TaskQueue(bus, "jobs").work(print, workers=many),
            lambda: bus.read("orders", -many),
        ):
            with pytest.raises(InvalidOption, match="is a whole number from"):
                await call()
        with pytest.raises(InvalidOption, match="workers is a whole number from 1 to"):
            bus.on("orders", group="billing", workers=many)
        with pytest.raises(Invalid, match="delay_s"):
            await bus.publish("orders", 1, delay_s=-many)
    with pytest.raises(InvalidOption, match="max_inflight="):
        Flow(max_inflight=-many)


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_span_prunes_nothing(wrong: Any) -> None:
    engine = sa.create_engine("sqlite://")
    for table in (Inbox(engine), SqlOutbox(engine)):
        with pytest.raises(InvalidOption, match="older_than_s is a number of seconds"):
            table.prune(wrong)


@pytest.mark.parametrize("event", [None, 7, b"x", object(), "\ud800"])
def test_what_has_no_id_is_not_seen_for_the_first_time(event: Any) -> None:
    engine = sa.create_engine("sqlite://")
    inbox = Inbox(engine)
    inbox.create()
    with engine.begin() as connection, pytest.raises(InvalidEvent, match="an event's id is"):
        inbox.first_time(connection, "billing", event)


def test_an_outbox_takes_the_fields_of_an_event_and_no_others() -> None:
    engine = sa.create_engine("sqlite://")
    outbox = SqlOutbox(engine)
    outbox.create()
    with engine.begin() as connection:
        assert outbox.add(connection, "orders", 1, id="mine") == "mine"
        wrong: list[tuple[Any, Any, Any]] = [
            ("orders", 1, {"colour": "red"}),
            (Event(topic="orders"), None, {"key": "c42"}),
            (Event(topic="orders"), 1, {}),
        ]
        for topic, payload, fields in wrong:
            with pytest.raises(InvalidEvent):
                outbox.add(connection, topic, payload, **fields)
    assert outbox.waiting() == 1
    with pytest.raises(InvalidOption):
        Drainer(outbox, None, colour="red")  # type: ignore[arg-type]


@pytest.mark.parametrize("topic", [[], {}, None, 7, "\ud800"])
async def test_what_is_no_topic_has_no_schema(topic: Any) -> None:
    async with open_local("memory:") as bus:
        registry = Registry(bus)
        for call in (registry.versions, registry.current):
            with pytest.raises(Invalid):
                call(topic)
        with pytest.raises(Invalid):
            await registry.remove(topic)


@pytest.mark.parametrize("wrong", WRONG)
async def test_signs_of_life_come_at_times(wrong: Any) -> None:
    async with open_local("memory:") as bus:
        for call in (
            lambda: Heartbeat(bus, "till", every_s=wrong),
            lambda: Monitor(bus, late_s=wrong),
        ):
            with pytest.raises(InvalidOption):
                call()


@pytest.mark.parametrize("clock", [object(), 7, "noon"])
@pytest.mark.parametrize("url", ["memory:", "file:{}", "ws://127.0.0.1:1"])
def test_what_is_no_clock_is_refused_before_a_folder_is_made(
    tmp_path: Path, url: str, clock: Any
) -> None:
    with pytest.raises(InvalidOption, match="a clock has now"):
        trunkline.connect(url.format(tmp_path / "bus"), clock=clock)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [*WRONG, True, 0])
def test_what_is_no_context_for_tls_is_refused_before_there_is_a_connection(wrong: Any) -> None:
    with pytest.raises(InvalidOption, match=r"tls is an ssl\.SSLContext"):
        trunkline.connect("wss://127.0.0.1:1", tls=wrong)
