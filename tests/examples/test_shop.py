"""The shop of ``examples/shop`` with workers and a broker that are killed: nothing is lost, and
after the inbox nothing is doubled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import trunkline

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ORDERS = 30
LONG_S = 120.0


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def children_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The worker processes of ``trunkline run``."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text("ascii").split()]


class Shop:
    """The web application, its workers and, for ``ws``, the broker."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self._port, self._bus_port = free_port(), free_port()
        self._bus = f"file:{folder}/bus"
        self.url = self._bus if kind == "file" else f"ws://127.0.0.1:{self._bus_port}"
        self._clients: list[subprocess.Popen[bytes]] = []
        self._broker: subprocess.Popen[bytes] | None = None
        self.web = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=60)

    def _start(self, *args: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {"SHOP_BUS": self.url, "SHOP_DB": str(self.folder / "shop.db"), "PYTHONPATH": path}
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *args],
                cwd=self.folder,
                env={**os.environ, **env},
                stdout=log,
                stderr=log,
            )

    def serve(self) -> None:
        """Start the broker."""
        bus, port = self._bus, str(self._bus_port)
        self._broker = self._start("trunkline", "serve", "--url", bus, "--port", port)

    def kill_broker(self) -> None:
        assert self._broker is not None
        self._broker.kill()
        self._broker.wait()

    def work(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """Start workers."""
        self._clients.append(self._start("trunkline", "run", f"shop.workers:{name}", *options))
        return self._clients[-1]

    def kill_workers(self, command: subprocess.Popen[bytes]) -> None:
        """Kill each process of a command, and wait until it is said that a new one starts."""
        pids = children_of(command)
        assert pids, self.log()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        said = [f"process {pid} was ended by SIGKILL; a new one starts" for pid in pids]
        self.until(lambda: all(line in self.log() for line in said))

    def deliver_again(self, topic: str, group: str) -> None:
        """Give a group every event once more, and wait until all are settled."""
        with trunkline.open(self.url) as bus:
            bus.seek(topic, group, "earliest")
            self.until(lambda: bus.lag(topic, group) == 0)

    def open_web(self) -> None:
        options = ("--port", str(self._port), "--no-access-log")
        self._clients.append(self._start("uvicorn", "--factory", "shop.web:make", *options))
        self.until(lambda: self.web.get("/counts").status_code == 200)

    def log(self) -> str:
        return (self.folder / "log").read_text("utf-8")

    def counts(self) -> dict[str, Any]:
        found: dict[str, Any] = self.web.get("/counts").raise_for_status().json()
        return found

    def until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + LONG_S
        while time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError):
                if done():
                    return
            time.sleep(0.1)
        with contextlib.suppress(httpx.HTTPError):
            raise AssertionError(f"{self.counts()}\n{self.log()[-5000:]}")
        raise AssertionError(self.log()[-5000:])

    def order(self, number: int) -> None:
        order = {"id": number, "customer": f"c{number % 5}", "cents": 100}
        self.until(lambda: self.web.post("/orders", json=order).is_success)

    def close(self) -> None:
        """End the web application and the workers, then the broker that they need."""
        self.web.close()
        self._end(self._clients)
        if self._broker is not None:
            self._end([self._broker])

    def _end(self, processes: list[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                for pid in (*children_of(process), process.pid):
                    os.kill(pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(params=["file", pytest.param("ws", marks=pytest.mark.slow)])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path, request.param)
    yield shop
    shop.close()


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for processes in /proc")
@pytest.mark.timeout(600)
def test_nothing_is_lost_or_doubled_when_workers_and_broker_are_killed(shop: Shop) -> None:
    has_broker = shop.url.startswith("ws")
    if has_broker:
        shop.serve()
    shop.open_web()
    billing = shop.work("billing", "--processes", "2")
    shipping = shop.work("shipping")
    for number in range(ORDERS):
        shop.order(number)
        if number == ORDERS // 3:
            shop.until(lambda: shop.counts()["charges"]["all"] > 0)
            shop.kill_workers(billing)
        if number == ORDERS // 2:
            shop.until(lambda: shop.counts()["parcels"]["all"] > 0)
            shop.kill_workers(shipping)
        if number == ORDERS * 2 // 3 and has_broker:
            shop.kill_broker()
            shop.order(ORDERS)  # an order is taken while the broker is away
            shop.serve()
    shop.order(0)  # asked for twice, placed once
    placed = ORDERS + has_broker
    once = {"all": placed, "orders": placed}
    wanted = {"charges": once, "parcels": once, "labels": once, "outbox": 0}
    shop.until(lambda: shop.counts() == wanted)
    for topic, group in (("orders", "billing"), ("payments", "shipping"), ("labels", "workers")):
        shop.deliver_again(topic, group)
    assert shop.counts() == wanted
    quoted = {"id": 1, "customer": "c", "cents": 10}
    shop.until(lambda: shop.web.post("/quote", json=quoted).json() == {"cents": 500})
    assert shop.web.post("/orders", json={"id": "no number"}).status_code == 422
    figures = shop.web.get("/metrics").text
    assert 'trunkline_published_total{topic="orders"}' in figures
    assert "replies-" not in figures
