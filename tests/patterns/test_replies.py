from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import trunkline
from trunkline.broker.server import Broker
from trunkline.errors import Closed, Reject
from trunkline.event import Event
from trunkline.names import is_own
from trunkline.options import BrokerOptions
from trunkline.patterns.measures import measure, to_text
from trunkline.patterns.replies import REPLIES, Refused, Requests, respond


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


async def test_nothing_is_left_of_a_caller_that_asked(bus: Any) -> None:
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


async def test_a_request_ends_in_time_while_the_broker_is_away() -> None:
    """There is one deadline for the way there and back. Leaving does not wait either."""
    options = BrokerOptions(url="memory:", port=0, metrics_s=0)
    loop = asyncio.get_running_loop()
    async with Broker(options) as broker:
        bus = trunkline.connect(broker.url, patience_s=600.0, backoff_base_s=0.01)
        requests = await Requests(bus).__aenter__()

        @bus.on("orders", group="billing")
        async def bill(event: Any) -> None: ...

        await bus.start()
        await bus.publish("orders", 1)
        assert await bus.drain(20)
    with pytest.raises(TimeoutError, match=r"no answer on prices within 0\.2 s"):
        await asyncio.wait_for(requests.request("prices", 1, timeout_s=0.2), 60)
    began = loop.time()
    await asyncio.wait_for(requests.__aexit__(None, None, None), 60)
    await asyncio.wait_for(bus.close(), 60)
    assert loop.time() - began < 30, "it did not wait for the patience of 600 s"


async def test_closing_tells_of_what_was_fired_while_the_broker_is_away() -> None:
    options = BrokerOptions(url="memory:", port=0, metrics_s=0)
    async with Broker(options) as broker:
        bus = trunkline.connect(broker.url, patience_s=600.0, backoff_base_s=0.01)
        await bus.publish("orders", 1)
    while not bus.link.is_lost:  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
    bus.fire("orders", 2)
    with pytest.raises(Closed):
        await asyncio.wait_for(bus.close(), 60)


async def test_groups_of_one_process_are_hidden_and_leave_with_the_bus(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/bus"
    bus = trunkline.connect(url)
    await Requests(bus).__aenter__()
    assert await bus.groups() == []
    (own,) = await bus.groups("replies")
    assert is_own(own.group)
    figures = to_text(await measure(bus))
    assert "replies-" not in figures
    await bus.close()  # nobody left the requests
    async with trunkline.connect(url) as again:
        assert await again.groups("replies") == []
