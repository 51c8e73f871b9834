"""``trunkline run``: the worker processes of an application, started, started again, and ended."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

import trunkline

APP = """
import os, time
import trunkline
from trunkline import GroupOptions

bus = trunkline.connect("file:.bus")


@bus.on("orders", group="billing", workers=2, policy=GroupOptions(max_retries=9), timeout_s=50)
async def bill(event):
    print("handled", event.payload, os.getpid(), flush=True)
"""

Start = Callable[..., "Running"]


class Running:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: queue.Queue[str] = queue.Queue()
        self.said: list[str] = []
        self._readers: list[threading.Thread] = []
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._lines.put(line.strip())

    def wait_for(self, text: str) -> str:
        """The next line with ``text`` in it."""
        until = time.monotonic() + 40
        while time.monotonic() < until:
            try:
                line = self._lines.get(timeout=0.5)
            except queue.Empty:
                continue
            self.said.append(line)
            if text in line:
                return line
        raise AssertionError(f"no {text!r} in {self.said}")

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(40)
        for reader in self._readers:
            reader.join(40)
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Running] = []

    def begin(*options: str, app: str = APP, name: str = "app:bus") -> Running:
        (tmp_path / "app.py").write_text(app, "utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "trunkline", "run", name, *options],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        running.append(Running(process))
        return running[-1]

    yield begin
    for one in running:
        one.end()


def publish(folder: Path, payload: str) -> None:
    with trunkline.open(f"file:{folder / '.bus'}") as bus:
        bus.publish("orders", payload)


@pytest.mark.timeout(150)
def test_processes_handle_events_and_a_killed_one_is_started_again(
    start: Start, tmp_path: Path
) -> None:
    worker = start("--processes", "2")
    line = worker.wait_for("topic orders")
    assert line.split("  ") == [
        "bill",
        "topic orders",
        "group billing",
        "workers 2",
        "policy max_retries=9",
        "timeout 50 s",
    ]
    publish(tmp_path, "one")
    pid = int(worker.wait_for("handled one").split()[-1])
    os.kill(pid, signal.SIGKILL)
    worker.wait_for(f"process {pid} was ended by SIGKILL; a new one starts")
    publish(tmp_path, "two")
    worker.wait_for("handled two")
    assert worker.end() == 0
    assert not any("topic orders" in line for line in worker.said[1:]), "it is said once"


FIRST_START_HANGS = (
    """
import os, pathlib, time

if not pathlib.Path("started").exists():
    pathlib.Path("started").touch()
    print("hangs", os.getpid(), flush=True)
    time.sleep(600)
"""
    + APP
)

SECOND_START_FAILS = (
    """
import pathlib

starts = pathlib.Path("starts")
with starts.open("a") as file:
    file.write("x")
if starts.stat().st_size == 2:
    raise SystemExit(7)
"""
    + APP
)


@pytest.mark.timeout(150)
def test_a_process_that_is_killed_before_its_handlers_begin_is_started_again(
    start: Start, tmp_path: Path
) -> None:
    worker = start(app=FIRST_START_HANGS)
    pid = int(worker.wait_for("hangs").split()[-1])
    os.kill(pid, signal.SIGKILL)
    worker.wait_for(f"process {pid} was ended by SIGKILL; a new one starts")
    worker.wait_for("topic orders")
    publish(tmp_path, "one")
    worker.wait_for("handled one")
    assert worker.end() == 0


@pytest.mark.timeout(150)
def test_a_failed_restart_is_tried_again_when_the_handlers_had_begun_before(
    start: Start, tmp_path: Path
) -> None:
    worker = start(app=SECOND_START_FAILS)
    for payload in ("one", "two"):  # with the second event the command knows of the first
        publish(tmp_path, payload)
        pid = int(worker.wait_for(f"handled {payload}").split()[-1])
    os.kill(pid, signal.SIGKILL)
    worker.wait_for("ended with exit code 7; a new one starts")
    publish(tmp_path, "three")
    worker.wait_for("handled three")
    assert worker.end() == 0


@pytest.mark.timeout(100)
def test_an_application_without_a_handler_is_warned_of(start: Start) -> None:
    worker = start(app='import trunkline\nbus = trunkline.connect("memory:")\n')
    worker.wait_for("warning: app:bus has no handler")
    assert worker.end() == 0


@pytest.mark.timeout(100)
def test_a_plain_bus_runs_too(start: Start, tmp_path: Path) -> None:
    plain = APP.replace("trunkline.connect", "trunkline.open").replace("async def", "def")
    worker = start(app=plain)
    worker.wait_for("topic orders")
    publish(tmp_path, "one")
    worker.wait_for("handled one")
    assert worker.end() == 0


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("app", "name", "code", "said"),
    [
        (APP, "app:other", 4, "there is no other in app"),
        (APP, "nowhere:bus", 4, "there is no module nowhere"),
        (APP, "app", 4, "not MODULE:BUS"),
        ("bus = 5\n", "app:bus", 4, "is no bus but int"),
        ("class bus:\n    def __init__(self, n): ...\n", "app:bus", 4, "cannot be called"),
        ("import missing_part\n", "app:bus", 1, "No module named 'missing_part'"),
    ],
)
def test_an_application_that_cannot_start_ends_the_command(
    start: Start, app: str, name: str, code: int, said: str
) -> None:
    worker = start(app=app, name=name)
    worker.wait_for(said)
    assert worker.process.wait(40) == code


@pytest.mark.timeout(100)
def test_a_policy_that_conflicts_ends_the_command(start: Start, tmp_path: Path) -> None:
    with trunkline.open(f"file:{tmp_path / '.bus'}") as bus:
        bus.publish("orders", 1)
        next(iter(bus.subscribe("orders", group="billing", timeout_s=20)))
    worker = start()
    worker.wait_for("has another policy: max_retries 5 -> 9")
    assert worker.process.wait(40) == 1


@pytest.mark.timeout(150)
def test_a_changed_file_starts_the_processes_anew(start: Start, tmp_path: Path) -> None:
    worker = start("--reload")
    worker.wait_for("topic orders")
    (tmp_path / "app.py").write_text(APP.replace("billing", "shipping"), "utf-8")
    worker.wait_for("app.py changed")
    worker.wait_for("group shipping")
    assert worker.end() == 0
