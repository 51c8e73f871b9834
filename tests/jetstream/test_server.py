"""Real servers of the pinned program, and ``trunkline nats up``."""

from __future__ import annotations

import asyncio
import hashlib
import json
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import trunkline
from trunkline.bus.nats.connection import NatsLink
from trunkline.bus.nats.place import MONITOR, parse
from trunkline.bus.nats.server import Servers, free_ports, is_free, program
from trunkline.errors import Conflict, ConnectionLost, Denied, NoBus, ProtocolError
from trunkline.options import NatsOptions

PINNED = {"x86_64": "dd9b8a99f78955e35108355176d2fe61269efb909698eb9fce3d5d81a70e2bda"}


@pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in PINNED,
    reason="the hash is that of the wheel for Linux on x86-64",
)
def test_the_server_is_the_pinned_one() -> None:
    digest = hashlib.sha256(Path(program()).read_bytes()).hexdigest()
    assert digest == PINNED[platform.machine()]


def test_nats_up_runs_a_server_until_it_is_told_to_end(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    words = ["nats", "up", "--port", str(port), "--folder", str(tmp_path / "n"), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trunkline", *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        about = json.loads(process.stdout.readline())
        assert about["url"] == f"nats://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        process.stdout.close()
    assert (tmp_path / "n" / "n0" / "jetstream").is_dir()


def ports_apart() -> int:
    """A free port whose usual monitoring port is free as well."""
    while not is_free("127.0.0.1", (port := free_ports(1)[0]) + MONITOR):
        pass
    return port


async def durability(url: str) -> str:
    async with trunkline.connect(url) as bus:
        return (await bus.publish("orders", 1)).durability


def test_receipts_of_nats_up_say_that_every_write_is_synced(tmp_path: Path) -> None:
    port = ports_apart()
    words = ["nats", "up", "--port", str(port), "--folder", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "trunkline", *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        told = process.stdout.readline()
        assert "every write synced" in told
        assert f"monitor http://127.0.0.1:{port + MONITOR}" in told
        assert asyncio.run(durability(f"nats://127.0.0.1:{port}")) == "fsync"
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        process.stdout.close()


async def test_a_server_that_does_not_sync_is_believed(tmp_path: Path) -> None:
    with Servers(tmp_path, port=ports_apart(), sync="2m") as servers:
        assert servers.is_usual
        assert await durability(servers.url) == "os"


async def test_the_monitoring_port_of_another_server_says_nothing(tmp_path: Path) -> None:
    port = ports_apart()
    usual = f"http: 127.0.0.1:{port + MONITOR}"
    synced = Servers(tmp_path / "synced")
    config = tmp_path / "synced" / "n0" / "nats.conf"
    config.write_text(re.sub(r"http: .*", usual, config.read_text("utf-8")), "utf-8")
    with synced, Servers(tmp_path / "other", port=port, sync="2m") as other:
        assert not other.is_usual
        assert await durability(other.url) == "os"


def test_nats_up_has_one_node_or_three(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "trunkline", "nats", "up", "--nodes", "2"]
    found = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (found.returncode, found.stderr.count("\n")) == (4, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_told(server: Servers, tmp_path: Path) -> None:
    other = Servers(tmp_path, port=server.nodes[0].port)
    with pytest.raises(Conflict, match="is taken"):
        other.start()


async def test_no_server_is_one_clear_error() -> None:
    (port,) = free_ports(1)
    link = NatsLink(parse(f"nats://127.0.0.1:{port}"), NatsOptions(connect_timeout_s=0.3))
    with pytest.raises(ConnectionLost, match=f"no NATS server at nats://127.0.0.1:{port}"):
        await link.open()
    await link.close()


async def test_wrong_credentials_are_told_without_the_password(tmp_path: Path) -> None:
    more = 'authorization { user: "ann", password: "right" }\n'
    with Servers(tmp_path, sync="2m", more=more) as servers:
        wrong = servers.url.replace("//", "//ann:wrong@")
        link = NatsLink(parse(wrong), NatsOptions())
        with pytest.raises(Denied) as told:
            await link.open()
        assert "wrong" not in str(told.value)
        await link.close()
        right = NatsLink(parse(servers.url.replace("//", "//ann:right@")), NatsOptions())
        await right.open()
        await right.close()


async def test_a_server_without_jetstream_is_no_bus(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = Servers(tmp_path, sync="2m")
    config = tmp_path / "n0" / "nats.conf"
    lines = config.read_text("utf-8").splitlines()
    config.write_text("\n".join(line for line in lines if "jetstream" not in line), "utf-8")
    with servers:
        link = NatsLink(parse(servers.url), NatsOptions())
        with pytest.raises(NoBus, match="JetStream"):
            await link.open()
        await link.close()
    assert "lost" not in caplog.text  # the error is the one line


async def test_the_server_says_whether_it_syncs(tmp_path: Path, server: Servers) -> None:
    with Servers(tmp_path, sync="always") as synced:
        for servers, syncs in ((server, False), (synced, True)):
            link = NatsLink(parse(servers.url), NatsOptions(monitor=servers.monitor))
            await link.open()
            assert link.syncs is syncs
            await link.close()


async def test_a_server_that_is_too_old_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The greeting of nats-server 2.9.10, as Debian 12 has it."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        about = {"server_id": "x", "version": "2.9.10", "proto": 1, "max_payload": 1048576}
        writer.write(b"INFO " + json.dumps({**about, "headers": True}).encode() + b"\r\n")
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    old = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = old.sockets[0].getsockname()[1]
    link = NatsLink(parse(f"nats://127.0.0.1:{port}"), NatsOptions())
    with pytest.raises(ProtocolError, match=r"2\.9\.10 is too old"):
        await link.open()
    await link.close()
    old.close()
    assert "lost" not in caplog.text  # the error is the one line
