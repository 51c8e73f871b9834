"""kill -9 at every executed line of the storage code: no promise is broken. See ``killer``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .killer import Sweep, sweep
from .outboxes import OUTBOXES, PLANTS
from .plants import KILLED
from .scenes import SCENES

TESTS = Path(__file__).parents[1]


@pytest.fixture
def place() -> Iterator[str]:
    """A folder in memory where there is one: a killed process loses nothing that it wrote."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = tempfile.mkdtemp(prefix="trunkline-", dir=memory)
    yield path
    shutil.rmtree(path)


def run(scene: str, place: str, *words: str) -> Sweep:
    """In a process of its own: a small one forks quickly."""
    command = [sys.executable, "-m", "crash.killer", scene, place, *words]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = Sweep(*json.loads(done.stdout))
    print(f"{scene}: {found.lines} lines, {found.kills} kills, {found.states} states")
    return found


@pytest.mark.parametrize("scene", [*SCENES, *OUTBOXES])
def test_a_promise_survives_kill_at_any_line(scene: str, place: str) -> None:
    found = run(scene, place)
    assert not found.problems, "\n".join(found.problems)
    assert found.lines > 500
    assert found.kills > 20


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scene", [*SCENES, *OUTBOXES])
def test_every_line_is_killed_for_real(scene: str, place: str) -> None:
    found = run(scene, place, "every")
    assert not found.problems, "\n".join(found.problems)
    assert found.kills > 0.9 * found.lines  # a loop that polls runs a few lines more or less


@pytest.mark.parametrize(
    ("scene", "plant"),
    PLANTED := [*KILLED, *PLANTS],
    ids=[f"{scene}: {plant.__name__}" for scene, plant in PLANTED],
)
def test_a_planted_bug_is_found(scene: str, plant: Callable[[], None], place: str) -> None:
    found = sweep(scene, place, plant, enough=1)
    assert found.problems, f"{plant.__name__} went unnoticed in {found.kills} kills"
