"""kill -9 at every executed line of the storage code.

A run forks, counts the lines it executes in ``trunkline.log``, ``trunkline.folder``, the file store
and ``trunkline.patterns.outbox`` with a trace function, and kills itself with SIGKILL at the n-th.
What it had promised by then came through a pipe; the parent checks the folder that is left.

Between two lines that leave the same bytes and the same promises there is nothing to tell apart. So
``watch`` first looks at the folder before every line, and ``sweep`` then kills at the first and the
last line of each stretch in which nothing changed; ``sweep(every=True)`` kills at every line.
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
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple

import trunkline.delivery.deadletters
import trunkline.folder
import trunkline.folder.root
import trunkline.log
import trunkline.patterns.outbox
import trunkline.store.committer
import trunkline.store.file

from . import plants
from .promises import Promises, Say
from .scenes import SCENES, Scene

_STORAGE = tuple(
    os.path.dirname(os.path.abspath(str(package.__file__)))
    for package in (trunkline.folder, trunkline.log)
)
_MORE = {
    os.path.abspath(str(module.__file__))
    for module in (
        trunkline.store.file,
        trunkline.store.committer,
        trunkline.patterns.outbox,
        plants,
    )
}
Plant = Callable[[], None]


class Sweep(NamedTuple):
    lines: int
    kills: int
    states: int
    problems: list[str]


def scene_of(name: str) -> Scene:
    if name in SCENES:
        return SCENES[name]
    from .outboxes import OUTBOXES  # a small process forks quickly: not with the others

    return OUTBOXES[name]


def _trace(at_line: Callable[[int], None]) -> None:
    """Call ``at_line`` with a running number before each line of the storage code."""
    lines = itertools.count(1)
    counted: dict[Any, bool] = {}

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        code = frame.f_code
        ours = counted.get(code)
        if ours is None:
            name = code.co_filename
            ours = counted[code] = name.startswith(_STORAGE) or name in _MORE
        if not ours:
            return None
        if what == "line":
            at_line(next(lines))
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


def _steady_names() -> None:
    """Random names become counted ones, so that equal states are equal bytes."""
    names = itertools.count(1)

    def token_hex(nbytes: int | None = None) -> str:
        return f"{next(names):0{2 * (nbytes or 4)}x}"

    secrets.token_hex = token_hex
    for module in (trunkline.folder.root, trunkline.delivery.deadletters):
        module.new_id = lambda: f"id-{next(names)}"  # type: ignore[attr-defined]


def _run(
    scene: Scene, root: str, at_line: Callable[[int, Say], None], plant: Plant
) -> tuple[list[bytes], int]:
    """Play a scene in a child: the lines it told, and how it ended."""
    shutil.rmtree(root, ignore_errors=True)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:

        def say(*what: Any) -> None:
            os.write(writing, json.dumps(what).encode() + b"\n")

        status = 1
        try:
            os.close(reading)
            _steady_names()
            if scene.before is not None:
                scene.before(root, say)
            plant()
            _trace(lambda number: at_line(number, say))
            scene.play(root, say)
            status = 0
        except BaseException as error:  # noqa: BLE001 -- the parent reports it
            sys.settrace(None)
            say("error", repr(error))
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    return told.splitlines(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def image(root: str) -> str:
    """A digest of every byte in a folder."""
    digest = hashlib.blake2b(digest_size=12)
    for place, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files):
            path = os.path.join(place, name)
            digest.update(path.encode() + b"\0")
            with open(path, "rb") as file:
                digest.update(file.read())
    return digest.hexdigest()


def watch(name: str, place: str, plant: Plant = lambda: None) -> tuple[int, list[int]]:
    """How many lines a scene executes, and those at the edges of each stretch without change."""
    root = os.path.join(place, "bus")

    def look(number: int, say: Say) -> None:
        say("at", number, image(root))

    told, ended = _run(scene_of(name), root, look, plant)
    assert ended == 0, told[-1]
    edges: set[int] = set()
    number, last = 1, ""
    for line in told:
        kind, *rest = json.loads(line)
        if kind != "at":
            last = ""  # a new promise
            edges.add(number)
        else:
            if rest[1] != last:
                edges |= {number, rest[0]}
            number, last = rest
    return number, sorted(edges | {number})


def sweep(
    name: str, place: str, plant: Plant = lambda: None, *, every: bool = False, enough: int = 5
) -> Sweep:
    """Kill a scene at its lines; stop early after ``enough`` broken promises."""
    root = os.path.join(place, "bus")
    scene = scene_of(name)
    lines, edges = watch(name, place, plant)
    points: Iterable[int] = range(1, lines + 1) if every else edges
    seen: set[tuple[str, ...]] = set()
    problems: list[str] = []
    kills = 0
    for point in points:

        def die(number: int, _: Say, wanted: int = point) -> None:
            if number == wanted:
                os.kill(os.getpid(), signal.SIGKILL)

        told, ended = _run(scene, root, die, plant)
        assert ended in (0, -signal.SIGKILL), told[-1]
        kills += ended < 0
        state = (image(root), *map(bytes.decode, told))
        if state not in seen:
            seen.add(state)
            found = scene.broken(root, Promises(told))
            problems += [f"killed at line {point}: {one}" for one in found]
        if len(problems) >= enough:
            break
    return Sweep(lines, kills, len(seen), problems)


if __name__ == "__main__":
    print(json.dumps(sweep(sys.argv[1], sys.argv[2], every="every" in sys.argv)))
