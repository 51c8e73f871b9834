"""What two readers of a request could understand in two ways is refused, at both doors; and a
broker that stood still reads what waits in its sockets before it gives up on a client.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import struct

import pytest

from trunkline.broker.server import Broker
from trunkline.delivery.wakes import DUE, LATE_S, LATE_TURNS, Wakes
from trunkline.testing.clock import ManualClock


async def answer(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(20):
            return await reader.readline()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    "headers",
    [
        "X: " + "x" * 70_000 + "\r\n",
        "".join(f"H{n}: 1\r\n" for n in range(20_000)),
    ],
)
async def test_a_head_that_comes_in_one_piece_is_only_so_long(broker: Broker, headers: str) -> None:
    head = f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n"
    with contextlib.suppress(ConnectionError):
        assert b" 400 " in await answer(broker.port, head.encode())
    assert b" 200 " in await answer(
        broker.port, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    )


@pytest.mark.parametrize("upgrade", ["", "Upgrade: websocket\r\nConnection: Upgrade\r\n"])
async def test_a_request_with_two_hosts_is_refused(broker: Broker, upgrade: str) -> None:
    head = f"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: 127.0.0.1\r\n{upgrade}\r\n"
    assert b" 400 " in await answer(broker.port, head.encode())


@pytest.mark.parametrize("host", ["localhost:evil", "localhost:80:90", "[::1", "[::1]x", "[::1]:x"])
async def test_a_host_whose_port_is_none_is_refused(broker: Broker, host: str) -> None:
    head = f"GET /healthz HTTP/1.1\r\nHost: {host}\r\n\r\n"
    assert b" 421 " in await answer(broker.port, head.encode())


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "[::1]", "[::1]:7070", "LOCALHOST:"])
async def test_a_host_that_is_ours_is_known(broker: Broker, host: str) -> None:
    head = f"GET /healthz HTTP/1.1\r\nHost: {host}\r\n\r\n"
    assert b" 200 " in await answer(broker.port, head.encode())


def frame(text: str, first: int = 0x81) -> bytes:
    """A masked frame of text, by hand."""
    data = text.encode()
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack(">H", len(data))
    return bytes([first]) + size + b"\0\0\0\0" + data


def connected(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), 20)
    key = base64.b64encode(os.urandom(16)).decode()
    made.sendall(
        f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
        f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
        "Sec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    return made


@pytest.mark.parametrize("bit", [0x40, 0x20, 0x10])
async def test_a_frame_of_an_extension_that_nobody_agreed_on_ends_the_connection(
    broker: Broker, bit: int
) -> None:
    with await asyncio.to_thread(connected, broker.port) as made:
        await asyncio.to_thread(made.recv, 4096)
        made.sendall(frame('{"type":"PING"}', 0x81 | bit))
        said = await asyncio.to_thread(made.recv, 4096)
    assert said[:1] == b"\x88"
    assert struct.unpack(">H", said[2:4]) == (1002,)


async def test_a_late_alarm_lets_the_sockets_be_read_first() -> None:
    clock = ManualClock()
    for late_s, turns in ((0.0, 0), (LATE_S * 10, LATE_TURNS)):
        wakes = Wakes(clock)
        waiting = asyncio.ensure_future(wakes.wait(1.0))
        await asyncio.sleep(0)
        wakes.take()
        wakes._alarm_at -= late_s  # it should have rung so long ago
        wakes._ring_alarm()
        seen = 0
        while not wakes.why & DUE:
            await asyncio.sleep(0)
            seen += 1
        assert (seen > 0) is (turns > 0)
        await waiting
