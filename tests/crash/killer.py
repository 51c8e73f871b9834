"""kill -9 at every executed line of the storage code.

Each run forks, counts the lines it executes in ``trunkline.log`` and ``trunkline.stores.file`` with a
trace function, and kills itself with SIGKILL at the n-th. What it had promised by then came through
a pipe. The parent checks the folder, and goes on with n + 1 until a run reaches its end.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import trunkline.dead
import trunkline.log.folder
import trunkline.stores.file
from trunkline.log import upkeep  # noqa: F401 -- loaded before the lines are counted

from .promises import Promises, Say, broken
from .scenes import SCENES, Scene

_LOG = os.path.dirname(os.path.abspath(trunkline.log.__file__ or ""))
_STORE = os.path.abspath(trunkline.stores.file.__file__ or "")


class Sweep(NamedTuple):
    points: int
    states: int
    problems: list[str]


def _kill_at(count: int) -> None:
    lines = itertools.count(1)
    counted: dict[Any, bool] = {}
    pid = os.getpid()

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        code = frame.f_code
        ours = counted.get(code)
        if ours is None:
            name = code.co_filename
            ours = counted[code] = name.startswith(_LOG) or name == _STORE
        if not ours:
            return None
        if what == "line" and next(lines) == count:
            os.kill(pid, signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


def _steady_names() -> None:
    """Random names become counted ones, so that equal states are equal bytes."""
    names = itertools.count(1)
    secrets.token_hex = lambda size=None: f"{next(names):0{2 * (size or 4)}x}"
    for module in (trunkline.log.folder, trunkline.dead):
        module.new_id = lambda: f"id-{next(names)}"


def _teller(fd: int) -> Say:
    def say(*what: Any) -> None:
        os.write(fd, json.dumps(what).encode() + b"\n")

    return say


def _run(scene: Scene, root: str, count: int, plant: Callable[[], None]) -> tuple[bytes, int]:
    """One run that dies at line ``count``: what it promised, and how it ended."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            _steady_names()
            say = _teller(writing)
            if scene.before is not None:
                scene.before(root, say)
            plant()
            _kill_at(count)
            scene.play(root, say)
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            say("end")
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 -- the parent reports it
            sys.settrace(None)
            os.write(writing, json.dumps(["error", repr(error)]).encode() + b"\n")
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    return told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def image(root: str) -> bytes:
    """A digest of every byte in a folder."""
    digest = hashlib.blake2b()
    for place, folders, files in sorted(os.walk(root)):
        folders.sort()
        for name in sorted(files):
            path = os.path.join(place, name)
            digest.update(path.encode() + b"\0")
            with open(path, "rb") as file:
                digest.update(file.read())
    return digest.digest()


def sweep(
    name: str,
    place: str,
    plant: Callable[[], None] = lambda: None,
    first: int = 1,
    step: int = 1,
    enough: int = 5,
) -> Sweep:
    """Kill at every ``step``-th line of a scene; stop early after ``enough`` broken promises."""
    scene = SCENES[name]
    seen: set[bytes] = set()
    problems: list[str] = []
    for count in itertools.count(first, step):
        root = os.path.join(place, "bus")
        shutil.rmtree(root, ignore_errors=True)
        told, ended = _run(scene, root, count, plant)
        if ended == 1:
            return Sweep(count, len(seen), [f"line {count}: the scene itself failed: {told!r}"])
        state = image(root) + told
        if state not in seen:
            seen.add(state)
            found = broken(root, Promises(told.splitlines()))
            problems += [f"line {count}: {one}" for one in found]
        if ended == 0 or len(problems) >= enough:
            return Sweep(count, len(seen), problems)
    raise AssertionError


if __name__ == "__main__":
    print(json.dumps(sweep(sys.argv[1], sys.argv[2], step=int(sys.argv[3]) if sys.argv[3:] else 1)))
