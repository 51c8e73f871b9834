"""Whatever arrives without end and matters more: what matters less is not starved."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import trunkline.bus.sync
from trunkline.folder import Folder
from trunkline.options import GroupOptions, TopicOptions

from .flood import KEY, TOPIC, WAITING
from .test_processes import TESTS, wait_until

_STEPS = 3  # from low to critical
_AGING_S = 0.2
_SLACK_S = 5.0  # until a process has seen what another published, on a busy machine


class Told(NamedTuple):
    """A delivery: when its event was published, and when it came."""

    priority: str
    published: float
    came: float


class Flood:
    """Two processes that publish critical events without end, and two members of one group."""

    def __init__(self, folder: str, aging_s: float) -> None:
        self.told: list[Told] = []
        self._folder = folder
        self._threads: list[threading.Thread] = []
        self.processes = [self._start("consume", str(aging_s)) for _ in range(2)]
        self.publishers = [self._start("publish") for _ in range(2)]

    def _start(self, what: str, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "crash.flood", what, self._folder, *words]
        process = subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True)
        thread = threading.Thread(target=self._listen, args=[process])
        thread.start()
        self._threads.append(thread)
        return process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line.endswith("\n"):  # else it was killed in the middle
                    priority, published, came = line.split()
                    self.told.append(Told(priority, float(published), float(came)))

    def low(self) -> list[Told]:
        return [one for one in list(self.told) if one.priority == "low"]

    def since(self, moment: float) -> int:
        """How many critical events came that were published after a moment."""
        return sum(one.published > moment for one in list(self.told) if one.priority != "low")

    def end(self) -> None:
        for process in (*self.publishers, *self.processes):
            process.kill()
        for process in (*self.publishers, *self.processes):
            process.wait(30)
        for thread in self._threads:
            thread.join(30)


@contextlib.contextmanager
def flood(folder: str, aging_s: float) -> Iterator[Flood]:
    """As soon as critical events are waiting and being delivered."""
    with contextlib.closing(Folder(folder)) as bus:
        bus.define(TOPIC, TopicOptions(durability="os"))  # no disk holds up the flood
        bus.step(KEY, lambda group: group.define(GroupOptions(aging_s=aging_s), 0))
    running = Flood(folder, aging_s)
    try:
        wait_until("nothing is delivered", lambda: running.since(0) > 20, 60)
        yield running
    finally:
        running.end()


def publish_low(folder: str) -> float:
    with trunkline.bus.sync.open(f"file:{folder}") as bus:
        now = time.monotonic()
        bus.publish(TOPIC, now, priority="low")
    return now


def test_a_low_priority_is_delivered_while_critical_events_arrive_without_end(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "bus")
    with flood(folder, _AGING_S) as running:
        now = publish_low(folder)
        wait_until("the low one is starved", running.low, 60)
        (low,) = running.low()
        wait_until("the flood ended", lambda: running.since(low.came) > 20, 60)

    # No event that is so many steps above it, and was published more than as many agings after it,
    # went before it.
    before = [one for one in running.told if one.priority != "low" and one.came < low.came]
    latest = max(one.published for one in before)
    assert latest < now + _STEPS * _AGING_S + _SLACK_S, latest - now


def test_without_aging_it_waits_for_the_end_of_the_flood(tmp_path: Path) -> None:
    folder = str(tmp_path / "bus")
    with flood(folder, 3600.0) as running:
        now = publish_low(folder)
        wait_until("the flood ended", lambda: running.since(now) > WAITING, 60)
        assert running.low() == []

        for publisher in running.publishers:
            publisher.kill()
        wait_until("it never came", running.low, 60)
