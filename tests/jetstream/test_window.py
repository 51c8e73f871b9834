"""The window of publishes, and the continuous pull, on a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from trunkline.bus.nats.connection import NatsLink
from trunkline.bus.nats.place import parse
from trunkline.bus.nats.pull import Pull
from trunkline.bus.nats.server import Servers
from trunkline.bus.nats.window import Window
from trunkline.errors import ConnectionLost, TrunklineError
from trunkline.options import NatsOptions


async def make(link: NatsLink) -> tuple[str, str]:
    name, subject = link.place.stream("t", 0), link.place.subject("t", 0)
    body = {"name": name, "subjects": [subject], "storage": "file", "allow_atomic": True}
    await link.api(f"STREAM.CREATE.{name}", body)
    config = {"durable_name": "g", "name": "g", "ack_policy": "explicit", "max_ack_pending": -1}
    await link.api(f"CONSUMER.CREATE.{name}.g", {"stream_name": name, "config": config})
    return name, subject


@pytest.fixture
async def window(link: NatsLink) -> AsyncIterator[Window]:
    window = Window(link)
    await window.start()
    yield window
    await window.close()


async def test_every_publish_has_its_sequence(link: NatsLink, window: Window) -> None:
    _, subject = await make(link)
    acks = await asyncio.gather(*(window.send(subject, b"x", f"{n}") for n in range(600)))
    assert sorted(ack.seq for ack in acks) == list(range(1, 601))


async def test_an_id_is_kept_once(link: NatsLink, window: Window) -> None:
    _, subject = await make(link)
    first, second = [await window.send(subject, b"x", "same") for _ in range(2)]
    assert (first.seq, first.duplicate) == (1, False)
    assert (second.seq, second.duplicate) == (1, True)


async def test_a_batch_is_kept_whole_or_not_at_all(link: NatsLink, window: Window) -> None:
    _, subject = await make(link)
    ack = await window.send_batch(subject, [(b"x", f"{n}") for n in range(1000)])
    assert (ack.seq, ack.count) == (1000, 1000)
    with pytest.raises(TrunklineError) as refused:
        await window.send_batch(subject, [(b"x", "new"), (b"x", "7")])
    assert refused.value.code == 10201
    assert (await window.send(subject, b"x", "after")).seq == 1001


async def test_a_publish_without_a_stream_ends_with_a_typed_error(server: Servers) -> None:
    link = NatsLink(parse(server.url), NatsOptions(patience_s=1.0, ack_deadline_s=0.2))
    await link.open()
    window = Window(link)
    await window.start()
    with pytest.raises(ConnectionLost, match="no acknowledgement"):
        await window.send("nobody.listens", b"x", "1")
    await window.close()
    await link.close()


async def test_publishes_and_pulls_go_on_after_a_restart(tmp_path: Path) -> None:
    with Servers(tmp_path, sync="2m") as servers:
        link = NatsLink(parse(servers.url), NatsOptions(heartbeat_s=0.2, ack_deadline_s=0.3))
        await link.open()
        window = Window(link)
        await window.start()
        name, subject = await make(link)
        got: asyncio.Queue[Msg] = asyncio.Queue()
        pull = Pull(link, name, "g", came=got.put_nowait, room=lambda: 10, gone=lambda _: None)
        await pull.start()
        await window.send(subject, b"before", "1")
        assert (await asyncio.wait_for(got.get(), 10)).data == b"before"
        await asyncio.to_thread(servers.nodes[0].kill)
        sending = asyncio.ensure_future(window.send(subject, b"after", "2"))
        await asyncio.sleep(0.5)
        assert not sending.done()
        servers.nodes[0].start()
        assert (await asyncio.wait_for(sending, 20)).seq == 2
        started = time.monotonic()
        while (await asyncio.wait_for(got.get(), 20)).data != b"after":
            pass
        assert time.monotonic() - started < 5
        await pull.stop()
        await window.close()
        await link.close()


async def test_a_publish_may_fail_at_once_while_the_server_is_away(tmp_path: Path) -> None:
    with Servers(tmp_path, sync="2m") as servers:
        link = NatsLink(parse(servers.url), NatsOptions(when_away="raise"))
        await link.open()
        window = Window(link)
        await window.start()
        servers.nodes[0].kill()
        while link.is_up:
            await asyncio.sleep(0.01)
        with pytest.raises(ConnectionLost):
            await window.send("x", b"x", "1")
        await window.close()
        await link.close()


async def test_no_more_is_pulled_than_there_is_room_for(link: NatsLink, window: Window) -> None:
    name, subject = await make(link)
    await window.send_batch(subject, [(b"x", f"{n}") for n in range(100)])
    got: list[Msg] = []
    room = 3
    pull = Pull(link, name, "g", came=got.append, room=lambda: room - len(got), gone=lambda _: None)
    await pull.start()
    await asyncio.sleep(0.4)
    assert len(got) == 3
    room = 80
    pull.refill()
    async with asyncio.timeout(10):
        while len(got) < 80:
            await asyncio.sleep(0.01)
    await pull.stop()
    assert len(got) == 80
