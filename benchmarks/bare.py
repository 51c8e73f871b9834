"""A broker with nothing in it: frames in, one write and one ``fdatasync`` for all that wait, frames
out. No checks, no groups, no leases, no acknowledgements, no rights, one topic.

It speaks to the same client with the same frames, so what it reaches is what this machine, the
event loop, the WebSocket library and the JSON codec allow; the lines named ``-sketch`` stand beside
it. ``python -m benchmarks.bare FOLDER`` prints its address as one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import uvloop
from picows import (
    WSFrame,
    WSListener,
    WSMsgType,
    WSTransport,
    WSUpgradeRequest,
    WSUpgradeResponse,
    WSUpgradeResponseWithListener,
    ws_create_server,
)

from benchmarks.harness import TOPIC
from trunkline.codec import encode_event
from trunkline.event import Event
from trunkline.log.line import frame_batch
from trunkline.options import Limits
from trunkline.wire.frames import (
    SUBPROTOCOL,
    Message,
    Ok,
    Publish,
    Published,
    Subscribe,
    dump,
    join,
    read_asked,
)


class Log:
    """What waits for the next sync, and who hears of it."""

    def __init__(self, folder: Path) -> None:
        self.readers: list[tuple[Connection, Subscribe]] = []
        self._fd = os.open(folder / "bare", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._limits = Limits()
        self._waiting: list[tuple[Connection, Any, list[Event]]] = []
        self._offset = 1
        self._size = 0

    def add(self, connection: Connection, corr: Any, events: list[Event]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._commit)
        self._waiting.append((connection, corr, events))

    def _commit(self) -> None:
        waiting, self._waiting = self._waiting, []
        events = [event for _, _, mine in waiting for event in mine]
        bodies = [encode_event(event, self._limits) for event in events]
        data = b"".join(frame_batch(self._offset, bodies, self._size, 0))
        os.write(self._fd, data)
        os.fdatasync(self._fd)
        self._size += len(data)
        self._deliver(events)
        self._answer(waiting)
        self._offset += len(events)

    def _deliver(self, events: list[Event]) -> None:
        for connection, asked in self.readers:
            connection.tell(
                dump(
                    Message(
                        topic=TOPIC,
                        partition=0,
                        group=asked.group,
                        offset=offset,
                        attempt=1,
                        sub=asked.sub,
                        event=event,
                    )
                )
                for offset, event in enumerate(events, self._offset)
            )

    def _answer(self, waiting: list[tuple[Connection, Any, list[Event]]]) -> None:
        at = self._offset
        first, corr, _ = waiting[0]
        if len(waiting) > 1 and all(who is first and len(its) == 1 for who, _, its in waiting):
            corrs = [corr for _, corr, _ in waiting]
            first.tell([dump(Published(topic=TOPIC, partition=0, offset=at, corrs=corrs))])
            return
        answers: dict[Connection, list[bytes]] = {}
        for connection, corr, its in waiting:
            told = Published(corr=corr, topic=TOPIC, partition=0, offset=at, count=len(its))
            answers.setdefault(connection, []).append(dump(told))
            at += len(its)
        for connection, frames in answers.items():
            connection.tell(frames)


class Connection(WSListener):
    def __init__(self, log: Log) -> None:
        self._log = log
        self._transport: WSTransport

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        if frame.msg_type == WSMsgType.CLOSE:
            transport.disconnect()
        elif frame.msg_type == WSMsgType.TEXT:
            for asked in read_asked(frame.get_payload_as_bytes()):
                self._take(asked)

    def _take(self, asked: Any) -> None:
        if isinstance(asked, Publish):
            for corr, event in zip(asked.corrs or (), asked.events or (), strict=False):
                self._log.add(self, corr, [event])
            if asked.corrs is None:
                self._log.add(self, asked.corr, asked.events or [asked.event])  # type: ignore[list-item]
        elif isinstance(asked, Subscribe):
            self._log.readers.append((self, asked))
            self.tell([dump(Ok(corr=asked.corr))])
        elif asked.corr is not None:
            self.tell([dump(Ok(corr=asked.corr))])

    def tell(self, frames: Iterable[bytes]) -> None:
        self._transport.send(WSMsgType.TEXT, join(list(frames)))


async def serve(folder: Path) -> None:
    log = Log(folder)

    def answer(_: WSUpgradeRequest) -> WSUpgradeResponseWithListener:
        chosen = {"Sec-WebSocket-Protocol": SUBPROTOCOL}
        return WSUpgradeResponseWithListener(
            WSUpgradeResponse.create_101_response(extra_headers=chosen), Connection(log)
        )

    server = await ws_create_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print(json.dumps({"url": f"ws://127.0.0.1:{port}"}), flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
