"""A power cut at any moment: every disk that it may leave keeps every promise. See ``disk``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from .disk import State, Step, record, states
from .plants import PLANTS
from .promises import Promises, broken

TESTS = str(Path(__file__).parents[1])


@pytest.fixture
def place() -> Iterator[str]:
    if shutil.which("strace") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("strace is missing: make tools")
        pytest.skip("strace is missing: make tools")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = tempfile.mkdtemp(prefix="trunkline-", dir=memory)
    yield path
    shutil.rmtree(path)


def recorded(place: str, rounds: int = 0, plant: str = "") -> tuple[list[Step], str]:
    """The workload's calls, and the folder in which it worked."""
    root, told = os.path.join(place, "bus"), os.path.join(place, "told")
    command = [sys.executable, "-m", "crash.powered", root, told, str(rounds)]
    return record([*command, plant], root, told, os.path.join(place, "trace"), TESTS), root


def put(state: State, root: str) -> None:
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(root)
    for name, data in state.files.items():
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)


def check(found: Iterable[State], place: str, enough: int = 5) -> tuple[int, list[str]]:
    """How many disks were looked at, and the promises that some of them break."""
    problems: list[str] = []
    count = 0
    image = os.path.join(place, "image")
    for state in found:
        count += 1
        put(state, image)
        kept = Promises(state.told.splitlines())
        problems += [f"{state.label}: {one}" for one in broken(image, kept)]
        if len(problems) >= enough:
            break
    return count, problems


@pytest.mark.timeout(180)
@pytest.mark.parametrize("share", range(2))
def test_a_promise_survives_a_power_cut(share: int, place: str) -> None:
    """Every second disk of each half of the workload."""
    steps, root = recorded(place)
    every = list(states(steps, root))
    mine = every[: len(every) // 2] if share == 0 else every[len(every) // 2 :]
    count, problems = check(mine[::2], place)
    print(f"{len(steps)} calls, {len(every)} disks, {count} looked at")
    assert not problems, "\n".join(problems)
    assert count > 800


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("share", range(2))
def test_more_than_twenty_thousand_disks(share: int, place: str) -> None:
    steps, root = recorded(place, rounds=3)
    count, problems = check(islice(states(steps, root), share, None, 2), place)
    print(f"{len(steps)} calls, {count} disks")
    assert not problems, "\n".join(problems)
    assert count >= 10_000


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found(plant: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if plant == "torn tail kept":  # a mistake of whoever opens the folder afterwards
        steps, root = recorded(place)
        for module in ("trunkline.log.writer.survey", "trunkline.log.recover.survey"):
            name, _, attribute = module.rpartition(".")
            monkeypatch.setattr(module, getattr(sys.modules[name], attribute))  # put back later
        PLANTS[plant]()
    else:
        steps, root = recorded(place, plant=plant)
    count, problems = check(islice(states(steps, root), 0, None, 3), place, enough=1)
    assert problems, f"{plant} went unnoticed on {count} disks"


def test_a_failed_recording_is_an_error(place: str) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        record([sys.executable, "-c", "raise SystemExit(3)"], place, place, f"{place}/trace")
