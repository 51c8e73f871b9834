"""What a client does while its broker is away, or no longer wants it: it says so, and ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from trunkline.access import EVERYTHING
from trunkline.broker.server import Broker
from trunkline.bus.remote import RemoteBus
from trunkline.errors import ConnectionLost, Denied, InvalidOption
from trunkline.options import BrokerOptions

LONG_S = 20  # much longer than anything here takes


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    options = BrokerOptions(url="memory:", port=0, metrics_s=0, auth=True, rights_s=0.05)
    async with Broker(options) as broker:
        yield broker


class TestARevokedToken:
    async def test_ends_a_subscription(self, broker: Broker) -> None:
        text, token = await broker.hub.rights.create("shortly", [EVERYTHING])
        async with (
            RemoteBus(broker.url, token=text) as bus,
            bus.subscribe("t", group="g") as stream,
        ):
            await broker.hub.rights.revoke(token.id)
            with pytest.raises(Denied, match="not authenticated"):
                await asyncio.wait_for(anext(stream), LONG_S)

    async def test_ends_handlers(self, broker: Broker) -> None:
        text, token = await broker.hub.rights.create("shortly", [EVERYTHING])
        bus = RemoteBus(broker.url, token=text)
        began = asyncio.Event()

        @bus.on("t", group="g")
        async def handle(event: Any) -> None:
            began.set()

        running = asyncio.ensure_future(bus.run())
        await bus.publish("t", 1)
        await asyncio.wait_for(began.wait(), LONG_S)
        await broker.hub.rights.revoke(token.id)
        with pytest.raises(Denied, match="not authenticated"):
            await asyncio.wait_for(running, LONG_S)
        await bus.close()

    async def test_ends_what_was_connected_when_the_broker_comes_back(self, broker: Broker) -> None:
        """The connection is gone before it could be told; the next one is refused."""
        text, token = await broker.hub.rights.create("shortly", [EVERYTHING])
        async with (
            RemoteBus(broker.url, token=text, backoff_base_s=0.01) as bus,
            bus.subscribe("t", group="g") as stream,
        ):
            bus.link._transport.underlying_transport.abort()
            await broker.hub.rights.revoke(token.id)
            with pytest.raises(Denied, match="TRUNKLINE_TOKEN"):
                await asyncio.wait_for(anext(stream), LONG_S)

    @pytest.mark.parametrize("token", [None, "tl_wrong"])
    async def test_the_error_says_what_to_do(self, broker: Broker, token: str | None) -> None:
        async with RemoteBus(broker.url, token=token) as bus:
            with pytest.raises(Denied, match=r"token=.*TRUNKLINE_TOKEN.*trunkline token create"):
                await asyncio.wait_for(bus.publish("t", 1), LONG_S)


@pytest.fixture
def port() -> int:
    """Of this machine, where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
    return found


async def test_a_broker_that_is_away_is_told_once_and_so_is_its_return(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trunkline.bus.link")
    url = f"ws://127.0.0.1:{port}"
    tries = 0

    def draw() -> float:
        nonlocal tries
        tries += 1
        return 1.0

    async with RemoteBus(url, backoff_base_s=0.01, backoff_max_s=0.01) as bus:
        bus.link._draw = draw
        async with asyncio.timeout(LONG_S):
            while tries < 5:
                await asyncio.sleep(0.01)
        away = f"{url} cannot be reached: connection refused; trying again"
        assert [record.getMessage() for record in caplog.records] == [away]
        async with Broker(BrokerOptions(url="memory:", port=port, metrics_s=0)):
            await bus.publish("t", 1)
            back = f"{url} is back"
            assert [record.getMessage() for record in caplog.records] == [away, back]
        tries = 0
        async with asyncio.timeout(LONG_S):
            while tries < 5:
                await asyncio.sleep(0.01)
    assert [record.getMessage() for record in caplog.records] == [away, back, away]


@pytest.mark.parametrize(
    ("where", "told"),
    [("127.0.0.1:{}/other", "the path is /"), ("0.0.0.0:{}", "--name")],
)
async def test_an_address_that_a_broker_does_not_answer_to_is_told_with_what_to_do(
    where: str, told: str
) -> None:
    async with Broker(BrokerOptions(url="memory:", port=0, metrics_s=0)) as broker:
        url = f"ws://{where.format(broker.port)}"
        async with RemoteBus(url, patience_s=0) as bus:  # as long as the first attempt takes
            with pytest.raises(ConnectionLost, match=told):
                await bus.publish("t", 1)


async def test_a_token_is_taken_from_a_file_with_the_newline_at_its_end(broker: Broker) -> None:
    text, _ = await broker.hub.rights.create("shop", [EVERYTHING])
    async with RemoteBus(broker.url, token=f"{text}\n", patience_s=0) as bus:
        assert (await bus.publish("t", 1)).offset == 1


@pytest.mark.parametrize(
    "wrong", ["tl_1\r\nX-Other: 1", "two words", "t\0", "tökén", b"tl_1", 7, "\n"]
)
def test_what_cannot_be_a_token_is_refused_and_not_shown(wrong: Any) -> None:
    with pytest.raises(InvalidOption, match="a token is one word") as told:
        RemoteBus("ws://127.0.0.1:1", token=wrong)
    assert str(wrong).strip() == "" or str(wrong) not in str(told.value)


async def test_an_address_where_nothing_listens_is_told_the_usual_port(port: int) -> None:
    """Without a port it is that of the web, which is easily forgotten."""
    url = f"ws://127.0.0.1:{port}"
    async with RemoteBus(url, patience_s=0) as bus:
        with pytest.raises(ConnectionLost, match="7070"):
            await bus.publish("t", 1)


_FORKED = """
import asyncio, os, sys
from trunkline import connect

async def main():
    async with bus:
        for n in range(20):
            await bus.publish("t", n)
            await asyncio.sleep(0.02)

bus = connect(sys.argv[1], backoff_base_s=0.01)
child = os.fork()
asyncio.run(main())
if child and os.waitpid(child, 0)[1]:
    sys.exit("the child failed")
"""


async def test_a_bus_that_was_made_before_a_fork_is_two_clients() -> None:
    """Neither takes the place of the other's connection."""
    async with Broker(BrokerOptions(url="memory:", port=0, metrics_s=0)) as broker:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", _FORKED, broker.url)
        assert await asyncio.wait_for(process.wait(), 3 * LONG_S) == 0
        assert broker.hub.counts.connected == 2
        assert await broker.hub.bus.bounds("t") == (1, 41)


class TestPatience:
    async def test_is_not_prolonged_by_a_pause_between_attempts(self, port: int) -> None:
        slow: dict[str, Any] = {"backoff_base_s": 600, "backoff_max_s": 600}
        async with RemoteBus(f"ws://127.0.0.1:{port}", patience_s=0.3, **slow) as bus:
            bus.link._draw = lambda: 1.0
            for _ in range(2):  # also one that begins when there was no broker for long
                with pytest.raises(ConnectionLost, match=r"no connection.*refused") as told:
                    await asyncio.wait_for(bus.publish("t", 1), LONG_S)
                assert "trunkline serve" in told.value.hint

    async def test_is_not_prolonged_by_an_attempt_that_hangs(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:  # it connects, and nobody answers
            url = f"ws://127.0.0.1:{silent.getsockname()[1]}"
            async with RemoteBus(url, patience_s=0.3, connect_timeout_s=600) as bus:
                with pytest.raises(ConnectionLost, match="no connection"):
                    await asyncio.wait_for(bus.publish("t", 1), 4)  # an attempt takes 5

    async def test_is_had_with_each_publish(self, port: int) -> None:
        """One that comes late waits as long as one that came early."""
        clock = asyncio.get_running_loop().time
        async with RemoteBus(f"ws://127.0.0.1:{port}", patience_s=0.6, backoff_base_s=600) as bus:
            early = asyncio.ensure_future(bus.publish("t", 1))
            await asyncio.sleep(0.4)
            began = clock()
            late = asyncio.ensure_future(bus.publish("t", 2))
            await asyncio.wait([early, late])
            assert clock() - began >= 0.55
            assert isinstance(early.exception(), ConnectionLost)
            assert isinstance(late.exception(), ConnectionLost)

    async def test_none_is_one_attempt(self, broker: Broker, port: int) -> None:
        text, _ = await broker.hub.rights.create("me", [EVERYTHING])
        async with RemoteBus(broker.url, token=text, patience_s=0) as bus:
            assert (await bus.publish("t", 1)).offset == 1
        async with RemoteBus(f"ws://127.0.0.1:{port}", patience_s=0) as bus:
            with pytest.raises(ConnectionLost, match="no connection"):
                await asyncio.wait_for(bus.publish("t", 1), LONG_S)


async def test_a_client_that_pings_often_stays_connected(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    text, _ = await broker.hub.rights.create("idle", [EVERYTHING])
    async with RemoteBus(broker.url, token=text, ping_s=0.02) as bus:
        await bus.publish("t", 1)
        link = bus.link._transport
        await asyncio.sleep(0.3)  # many pings, and no frame
        await bus.publish("t", 2)
        assert bus.link._transport is link
    assert caplog.messages == []
