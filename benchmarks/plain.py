"""A client that joins nothing: one event, one frame, one WebSocket message, and one answer to each,
as a client in any language would write it. What batches are measured against.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import msgspec
from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

_encode = msgspec.json.Encoder().encode


class _Answer(msgspec.Struct):
    type: str
    corr: int


_decode = msgspec.json.Decoder(_Answer).decode


class Plain(WSListener):
    def __init__(self) -> None:
        self._transport: WSTransport
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._numbers = count(1)

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        if frame.msg_type != WSMsgType.TEXT:
            return
        told = _decode(frame.get_payload_as_bytes())
        assert told.type == "PUBLISHED", told
        self._waiting.pop(told.corr).set_result(None)

    async def publish(self, topic: str, payload: Any) -> None:
        corr = next(self._numbers)
        said = {"type": "PUBLISH", "corr": corr, "topic": topic, "payload": payload}
        done = self._waiting[corr] = asyncio.get_running_loop().create_future()
        self._transport.send(WSMsgType.TEXT, _encode(said))
        await done

    def close(self) -> None:
        self._transport.disconnect()


@asynccontextmanager
async def plain(url: str) -> AsyncIterator[Plain]:
    _, listener = await ws_connect(Plain, url)
    assert isinstance(listener, Plain)
    try:
        yield listener
    finally:
        listener.close()
