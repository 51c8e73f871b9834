"""A client that says exactly what a test wants, by the ``websockets`` library, which is
not the broker's. And a broker in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import websockets
from websockets.asyncio.client import ClientConnection

PATIENCE_S = 10.0


class Peer:
    """One connection. Frames that come while another is waited for are kept."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.kept: list[dict[str, Any]] = []

    async def say(self, type_: str, **members: Any) -> None:
        await self.socket.send(json.dumps({"type": type_, **members}))

    async def hear(self, type_: str | None = None, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The next frame, or the next of this type."""
        for index, frame in enumerate(self.kept):
            if type_ is None or frame["type"] == type_:
                return self.kept.pop(index)
        async with asyncio.timeout(timeout_s):
            while True:
                found = json.loads(await self.socket.recv())
                self.kept += found if isinstance(found, list) else [found]
                for index, frame in enumerate(self.kept):
                    if type_ is None or frame["type"] == type_:
                        return self.kept.pop(index)

    async def silent(self, seconds: float = 0.15, type_: str = "MESSAGE") -> bool:
        """Whether no such frame comes."""
        try:
            frame = await self.hear(type_, seconds)
        except TimeoutError:
            return True
        self.kept.insert(0, frame)
        return False

    async def ask(self, type_: str, **members: Any) -> dict[str, Any]:
        """Say something and give the answer."""
        await self.say(type_, corr="ask", **members)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for index, frame in enumerate(self.kept):
                    if frame.get("corr") == "ask":
                        return self.kept.pop(index)
                found = json.loads(await self.socket.recv())
                self.kept += found if isinstance(found, list) else [found]

    async def subscribe(self, topic: str, group: str, **members: Any) -> dict[str, Any]:
        members.setdefault("from", {"kind": "offset", "value": 0})
        return await self.ask("SUBSCRIBE", topic=topic, group=group, **members)

    async def ack(self, message: dict[str, Any], **members: Any) -> None:
        place = {name: message[name] for name in ("topic", "partition", "group", "offset")}
        await self.say("ACK", **place, **members)

    async def nack(self, message: dict[str, Any], **members: Any) -> None:
        place = {name: message[name] for name in ("topic", "partition", "group", "offset")}
        await self.say("NACK", **place, **members)


@asynccontextmanager
async def peer(
    url: str, token: str | None = None, client: str | None = None, **options: Any
) -> AsyncIterator[Peer]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if client is not None:
        headers["Trunkline-Client"] = client
    async with websockets.connect(
        url, additional_headers=headers, compression=None, proxy=None, **options
    ) as socket:
        yield Peer(socket)


class Process:
    """``python -m trunkline.broker``, to be killed."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url
        self.http = url.replace("ws", "http", 1)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    async def end(self, timeout_s: float = PATIENCE_S) -> int:
        """SIGTERM, and the exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), timeout_s)


Launch = Callable[..., Awaitable[Process]]


async def start(
    place: Path | str, *flags: str, port: int = 0, env: dict[str, str] | None = None
) -> Process:
    """A broker of the bus in a folder, or at a URL."""
    url = place if isinstance(place, str) else f"file:{place}"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("BUS_", "TRUNKLINE_"))}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trunkline.broker", "--json", "--url", url),
        *("--port", str(port), *flags),
        stdout=asyncio.subprocess.PIPE,
        env=inherited | (env or {}),
    )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 30)
    if not line:
        raise RuntimeError(f"the broker ended with {await process.wait()}")
    return Process(process, json.loads(line)["url"])


@asynccontextmanager
async def running(place: Path | str, *flags: str) -> AsyncIterator[Process]:
    broker = await start(place, *flags)
    try:
        yield broker
    finally:
        if broker.process.returncode is None:
            broker.kill()
            await broker.process.wait()


async def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """Wait for what others are about to bring about; what the condition, or its coroutine, gave."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.01)


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)
