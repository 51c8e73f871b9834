"""Real processes, and processes that are killed at a chosen line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import trunkline

SOURCE = str(Path(trunkline.__file__).parent.parent)
ENV = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("TRUNKLINE_", "NBS_", "GIT_"))},
    "PYTHONPATH": SOURCE,
    # As installed: compiled once. Where the tree is read-only, or shall stay clean, elsewhere.
    "PYTHONPYCACHEPREFIX": os.path.join(tempfile.gettempdir(), f"trunkline-pyc-{os.getuid()}"),
}
ENV.pop("PYTHONDONTWRITEBYTECODE", None)
NBS_BUS = [
    sys.executable,
    "-c",
    "import sys; from trunkline.files.nbs_bus import main; sys.exit(main())",
]
TRUNKLINE = [sys.executable, "-m", "trunkline.cli"]


@dataclass(frozen=True)
class Done:
    code: int
    out: bytes
    err: bytes


Run = Callable[..., Done]


def runner(base: list[str], cwd: Path) -> Run:
    def run(*args: str | bytes | Path, env: dict[str, str] | None = None) -> Done:
        words = [os.fsencode(arg) for arg in args]
        done = subprocess.run(
            [os.fsencode(word) for word in base] + words,
            capture_output=True,
            env={**ENV, **(env or {})},
            cwd=cwd,
            timeout=50,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@contextmanager
def memory_dir() -> Iterator[Path]:
    """A folder in memory where the machine has one: a killed process takes nothing from either
    kind, and hundreds of syncs cost nothing here.
    """
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as name:
        yield Path(name)


def _fork(action: Callable[[], None], trace: Callable[..., Any]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sys.settrace(trace)
            action()
            sys.settrace(None)
            code = 0
        finally:
            os._exit(code)
    return pid


def steps(action: Callable[[], None], files: tuple[str, ...]) -> list[tuple[str, int]]:
    """The source lines of ``files`` that ``action`` runs through, in a child process."""
    read, write = os.pipe()
    seen: list[str] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            seen.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return trace

    def told() -> None:
        action()
        sys.settrace(None)
        os.write(write, "\n".join(seen).encode())

    # The lines fit no pipe buffer for sure: read while the child writes.
    pid = _fork(told, trace)
    os.close(write)
    data = b""
    while chunk := os.read(read, 65536):
        data += chunk
    os.close(read)
    assert os.waitpid(pid, 0)[1] == 0
    pairs = (line.rpartition(":") for line in data.decode().split("\n"))
    return [(path, int(number)) for path, _, number in pairs]


def killed_at(step: int, action: Callable[[], None], files: tuple[str, ...]) -> bool:
    """Run ``action`` in a child that is killed with SIGKILL before its ``step``-th line, counted
    from 1. False when the action was over before.
    """
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    pid = _fork(action, trace)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def kill_points(action: Callable[[], None], files: tuple[str, ...]) -> list[int]:
    """Steps to be killed at: the first and the last time each line is run."""
    seen = steps(action, files)
    first: dict[tuple[str, int], int] = {}
    last: dict[tuple[str, int], int] = {}
    for number, line in enumerate(seen, 1):
        first.setdefault(line, number)
        last[line] = number
    return sorted({*first.values(), *last.values()})


@dataclass(frozen=True)
class Crash:
    steps: Callable[[Callable[[], None], tuple[str, ...]], list[tuple[str, int]]] = steps
    points: Callable[[Callable[[], None], tuple[str, ...]], list[int]] = kill_points
    at: Callable[[int, Callable[[], None], tuple[str, ...]], bool] = killed_at
