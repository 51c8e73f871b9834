"""Fixtures of the file-native doors."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import NBS_BUS, TRUNKLINE, Crash, Run, memory_dir, runner


@pytest.fixture
def nbs_bus(tmp_path: Path) -> Run:
    return runner(NBS_BUS, tmp_path)


@pytest.fixture
def trunkline_cli(tmp_path: Path) -> Run:
    return runner(TRUNKLINE, tmp_path)


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    path = tmp_path / "events"
    path.mkdir()
    return path


@pytest.fixture
def crash() -> Crash:
    return Crash()


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Popen objects put here are ended at the end of the test."""
    running: list[subprocess.Popen[bytes]] = []
    yield running
    for process in running:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def fast_dir() -> Iterator[Path]:
    with memory_dir() as path:
        yield path
