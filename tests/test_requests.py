from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import trunkline
from trunkline.errors import Closed, Reject
from trunkline.event import Event
from trunkline.requests import REPLIES, Refused, Requests, respond


@pytest.fixture
async def bus() -> AsyncIterator[Any]:
    async with trunkline.connect("memory:") as bus:
        yield bus


async def test_a_question_gets_its_answer(bus: Any) -> None:
    @respond(bus, "double", group="doublers")
    async def double(event: Event) -> int:
        return int(event.payload) * 2

    async with Requests(bus) as requests:
        answers = await asyncio.gather(*(requests.request("double", n) for n in range(5)))
    assert answers == [0, 2, 4, 6, 8]


async def test_a_refusal_is_told(bus: Any) -> None:
    @respond(bus, "double", group="doublers")
    def double(event: Event) -> None:
        raise Reject("not today")

    async with Requests(bus) as requests:
        with pytest.raises(Refused, match="not today"):
            await requests.request("double", 1)


async def test_a_failure_is_tried_again_until_there_is_an_answer(bus: Any) -> None:
    tries = []

    @respond(bus, "double", group="doublers", policy=trunkline.GroupOptions(backoff_base_s=0.0))
    async def double(event: Event) -> str:
        tries.append(event.id)
        if len(tries) < 3:
            raise ValueError
        return "done"

    async with Requests(bus) as requests:
        assert await requests.request("double") == "done"
    assert len(set(tries)) == 1


async def test_no_answer_is_a_timeout_and_the_question_expires(bus: Any) -> None:
    async with Requests(bus) as requests:
        with pytest.raises(TimeoutError, match="no answer on"):
            await requests.request("nobody", 1, timeout_s=0.05)
    (record,) = await bus.read("nobody")
    assert record.event.ttl_s == 0.05


async def test_nothing_is_left_of_who_asked(bus: Any) -> None:
    async with Requests(bus):
        assert [key.topic for key in await bus.store.groups()] == [REPLIES]
    assert await bus.store.groups() == []
    assert (await bus.topics())[REPLIES].retain_unsettled is False


async def test_when_answers_can_no_longer_come_nobody_waits_for_them(bus: Any) -> None:
    async with Requests(bus) as requests:
        asked = asyncio.ensure_future(requests.request("nobody", timeout_s=60))
        while not await bus.read("nobody"):
            await asyncio.sleep(0.01)
        requests._replies._stream.fail(Closed("gone"))
        with pytest.raises(Closed, match="gone"):
            await asyncio.wait_for(asked, 30)
