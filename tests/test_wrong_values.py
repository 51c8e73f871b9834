"""A value of another kind is refused by its name, wherever it is given, and nothing is done."""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import nan
from pathlib import Path
from typing import Any

import pytest

import trunkline
from trunkline.buses.local import LocalBus
from trunkline.errors import Invalid, InvalidOption
from trunkline.options import Flow, TopicOptions
from trunkline.tasks import TaskQueue

WRONG = [-1, nan, "x", b"x", "\ud800", object(), ["a"]]


@pytest.fixture(params=["memory:", "file:"])
async def bus(request: Any, tmp_path: Path) -> AsyncIterator[LocalBus]:
    place = tmp_path if request.param == "file:" else ""
    async with trunkline.connect(f"{request.param}{place}") as bus:
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
        trunkline.connect("memory:", middleware=one)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_script_waits_for_a_number_of_seconds(wrong: Any) -> None:
    with trunkline.open("memory:") as bus, pytest.raises(InvalidOption, match="timeout_s is"):
        next(bus.subscribe("orders", group="billing", timeout_s=wrong))
