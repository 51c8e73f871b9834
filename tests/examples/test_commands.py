"""The examples that use the bus by its commands alone: a shell script and the loop of an agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trunkline

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """``trunkline`` on the path is the program under test."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "trunkline"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trunkline.cli "$@"\n')
    program.chmod(0o755)
    given = {k: v for k, v in os.environ.items() if not k.startswith(("TRUNKLINE_", "NBS_"))}
    source = str(Path(trunkline.__file__).parent.parent)
    return {**given, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": source}


def start(env: dict[str, str], cwd: Path, *words: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out


def left(cwd: Path, env: dict[str, str], group: str) -> tuple[int, int]:
    """How many events the group has yet to do, and how many of them are leased."""
    out = finish(start(env, cwd, "trunkline", "group", "ls", "--group", group, "--json"))
    [row] = map(json.loads, out.splitlines())
    return row["lag"], row["leases"]


@pytest.mark.timeout(240)
def test_shell_workers_share_the_jobs_and_the_file(tmp_path: Path, env: dict[str, str]) -> None:
    with trunkline.open(f"file:{tmp_path / '.bus'}") as bus:
        for n in range(3):
            bus.publish("jobs", {"n": n, "text": 'it\'s "quoted"\n'})
    workers = [start(env, tmp_path, str(EXAMPLES / "worker.sh"), "1s") for _ in range(2)]
    for worker in workers:
        finish(worker)

    rows = [json.loads(line) for line in (tmp_path / "done.ndjson").read_text().splitlines()]
    assert sorted(row["payload"]["n"] for row in rows) == [0, 1, 2]
    assert left(tmp_path, env, "workers") == (0, 0)


@pytest.mark.timeout(240)
def test_an_agent_does_what_is_urgent_first_and_gives_back_what_fails(
    tmp_path: Path, env: dict[str, str]
) -> None:
    with trunkline.open(f"file:{tmp_path / '.bus'}") as bus:
        bus.publish("edits", {"file": "a.md", "text": "later"}, priority="low")
        bus.publish("edits", {"file": "b.md", "text": "now"}, priority="critical")
        bus.publish("edits", {"file": "no/such/folder.md", "text": "never"})
    agent = start(env, tmp_path, sys.executable, str(EXAMPLES / "agent.py"), "0")

    said = finish(agent).splitlines()
    assert said[:3] == ["ack b.md", "nack no/such/folder.md", "ack a.md"]
    assert set(said[3:]) <= {"nack no/such/folder.md"}  # what failed comes again after a pause
    assert [(tmp_path / name).read_text() for name in ("a.md", "b.md")] == ["later\n", "now\n"]
    lag, leases = left(tmp_path, env, "agents")
    letters = finish(start(env, tmp_path, "trunkline", "dlq", "ls", "edits", "--json")).splitlines()
    assert (lag + len(letters), leases) == (1, 0)  # a slow machine may see its last attempt


def test_a_worker_without_a_bus_ends_with_the_code_of_the_command(
    tmp_path: Path, env: dict[str, str]
) -> None:
    process = start(env, tmp_path, str(EXAMPLES / "worker.sh"), "0")
    _, err = process.communicate(timeout=100)
    assert (process.returncode, "no bus" in err) == (2, True)
