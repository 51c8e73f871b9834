"""The command line, in this process and as a process of its own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trunkline.cli import main

ENV = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("TRUNKLINE_") and name != "NO_COLOR"
}
PROGRAM = [sys.executable, "-m", "trunkline"]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The JSON objects it printed, one a line."""
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Done]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory: the bus is ``.bus`` in it."""
    for name in list(os.environ):
        if name.startswith("TRUNKLINE_") or name == "NO_COLOR":
            monkeypatch.delenv(name)
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / ".home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process."""

    def call(*words: str | Path, stdin: str | bytes = "") -> Done:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        shown = capsys.readouterr()
        return Done(code, shown.out, shown.err)

    return call


@pytest.fixture
def program(home: Path) -> Run:
    """Run a command as a process."""

    def call(*words: str | Path, stdin: str = "", env: dict[str, str] | None = None) -> Done:
        done = subprocess.run(
            [*PROGRAM, *map(str, words)],
            input=stdin,
            capture_output=True,
            text=True,
            cwd=home,
            env={**ENV, **(env or {})},
            timeout=40,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return call


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(home: Path) -> Any:
    """Start a command; it is ended with the test."""
    begun: list[subprocess.Popen[str]] = []

    def call(*words: str, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*PROGRAM, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=home,
            env=ENV,
            **options,
        )
        begun.append(process)
        return process

    yield call
    for process in begun:
        if process.poll() is None:
            process.kill()
        process.communicate()


def lines(count: int, start: int = 1) -> str:
    """NDJSON: one object a line with its number."""
    return "".join(f'{{"n":{n}}}\n' for n in range(start, start + count))
