"""The hub by itself: how it ends, and what it keeps once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from trunkline.access import NOBODY
from trunkline.broker import rights
from trunkline.broker.options import BrokerOptions
from trunkline.broker.server import Broker
from trunkline.event import Event

from .client import peer, until


async def test_it_ends_also_when_rights_change_at_that_very_moment(broker: Broker) -> None:
    await asyncio.sleep(0)  # it waits for changes by now
    async with asyncio.timeout(5):
        broker.hub.bus.store.bell.ring(rights.TOPIC)
        await broker.hub.close()
    assert not broker.hub.is_open


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
