"""The hub by itself: how it ends, and what it keeps once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from trunkline.access import NOBODY
from trunkline.broker import tokens as rights
from trunkline.broker.publisher import Publisher, Turn
from trunkline.broker.server import Broker
from trunkline.broker.session import Session
from trunkline.event import Event
from trunkline.options import BrokerOptions

from .client import peer, until


async def test_it_ends_also_when_rights_change_at_that_very_moment(broker: Broker) -> None:
    await asyncio.sleep(0)  # it waits for changes by now
    async with asyncio.timeout(5):
        broker.hub.bus.store.bell.ring(rights.TOPIC)
        await broker.hub.close()
    assert not broker.hub.is_open


async def test_it_reads_no_more_once_it_is_to_end(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What floods it would be refused frame by frame, and hold up those that have an answer."""
    kept, publish = asyncio.Event(), broker.hub.bus.publish_many

    async def slow(topic: str, events: Any) -> Any:
        await kept.wait()
        return await publish(topic, events)

    async with peer(broker.url) as one:
        monkeypatch.setattr(broker.hub.bus, "publish_many", slow)
        await one.say("PUBLISH", topic="t", payload=1, corr=1)
        assert (await one.ask("PING"))["type"] == "PONG"
        ending = asyncio.ensure_future(broker.hub.close())
        await until(lambda: not broker.hub.is_open)
        await one.say("PUBLISH", topic="t", payload=2, corr=2)
        await asyncio.sleep(0.1)
        kept.set()
        said = [await one.hear() for _ in range(2)]
        assert [(frame["type"], frame.get("corr")) for frame in said] == [
            ("PUBLISHED", 1),
            ("ERROR", None),
        ]
        await ending


async def test_a_turn_is_had_back_in_the_order_in_which_it_was_wanted() -> None:
    turn = Turn()
    had: list[str] = []

    async def want(name: str, first: bool) -> None:
        await turn.take(first=first)
        had.append(name)
        await asyncio.sleep(0)
        turn.give()

    await turn.take()
    async with asyncio.TaskGroup() as tasks:
        for name, first in (("d", False), ("a", True), ("b", True), ("c", True)):
            tasks.create_task(want(name, first))
        await asyncio.sleep(0)
        turn.give()
    assert had == ["a", "b", "c", "d"]


async def test_an_answer_that_cannot_be_given_leaves_the_turn_to_the_next(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = asyncio.Event()

    def fail(*_: Any) -> None:
        failed.set()
        raise RuntimeError("nobody thought of this")

    event = {"topic": "t", "ts": "2026-05-04T12:00:00Z", "payload": 1}
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with peer(broker.url) as one:
        with monkeypatch.context() as patched:
            patched.setattr(Publisher, "_answer", fail)
            await one.say("PUBLISH", event={**event, "event_id": "a"}, again=True)
            await asyncio.wait_for(failed.wait(), 10)
        said = await one.ask("PUBLISH", event={**event, "event_id": "b"}, again=True)
        assert said["offset"] == 2
        (session,) = broker.hub.sessions
        assert isinstance(session, Session)
        assert session._publisher.underway == 0


async def test_an_event_that_is_sent_again_on_two_connections_at_once_is_kept_once(
    tmp_path: Path,
) -> None:
    """A client's second connection may be lost as well, while the broker looks in the log."""
    async with Broker(BrokerOptions(url=f"file:{tmp_path}", port=0, metrics_s=0)) as broker:
        hub = broker.hub
        await hub.bus.publish("t", 0)
        for n in range(1, 21):  # it is a matter of moments
            event = Event(topic="t", payload=n)
            await asyncio.gather(*(hub.publish(NOBODY, "t", [event], again=True) for _ in range(4)))
        assert [record.event.payload for record in await hub.bus.read("t")] == list(range(21))


async def test_a_connection_that_cannot_be_reviewed_keeps_no_other_from_it(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = asyncio.Semaphore(0)
    monkeypatch.setattr(broker.hub.sticky, "review", lambda: 1 / 0)
    async with peer(broker.url), peer(broker.url):
        await until(lambda: len(broker.hub.sessions) == 2)
        for session in broker.hub.sessions:
            monkeypatch.setattr(session, "review", lambda: rounds.release() or 1 / 0)  # type: ignore[func-returns-value]
        for _ in range(2):
            broker.hub.bus.store.bell.ring(rights.TOPIC)
            async with asyncio.timeout(10):
                for _ in broker.hub.sessions:
                    await rounds.acquire()
    assert caplog.text.count("could not be held to its rights") >= 6
