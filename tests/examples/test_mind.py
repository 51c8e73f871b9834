"""The mind of ``examples/mind`` runs, ends by itself, and says what happened."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trunkline.cli import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mind" / "household.py"
SAYS = (
    "denied: publish on payroll in home",
    "topic hippo: 9 events",
    "topic affect: 9 events",
    "topic cortex: 9 events",
    "topic temporal: 9 events",
    "memory alice: {'likes': 'tea', 'friend': 'write to [email]', 'paid': 'with [card]'} active",
    "memory door: {'state': 'open'} superseded",
    "memory door: {'state': 'shut'} active",
    "to review: 1",
    "denials on record: 1",
    "metric events_dlq_total: 1",
    "files that hold bob@canary.example: 0",
)


def run(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(120)
def test_the_mind_comes_to_rest_and_accounts_for_every_event(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run(tmp_path / "house")
    assert [line for line in SAYS if line not in said] == [], said
    broadcasts = int(re.findall(r"topic workspace: (\d+)", said)[0])
    gate = dict(re.findall(r"'(\w+)': (\d+)", re.findall(r"^gate: (.*)$", said, re.M)[0]))
    deferred, dropped = int(gate.get("defer", 0)), int(gate.get("drop", 0))
    admitted = int(gate.get("admit", 0)) + int(gate.get("boost", 0))
    # A deferred event is decided twice: once deferred, once admitted when it comes back.
    assert admitted + dropped == broadcasts
    actions = re.findall(r"^actions: (.*)$", said, re.M)[0]
    assert actions.startswith("['danger: smoke'") or "danger: smoke" in actions
    assert actions.count("', '") + 1 == admitted
    longest = int(re.findall(r"longest trace (\d+)", said)[0])
    assert longest >= 6, "one trace runs from what was heard to what was done"

    url = f"file:{tmp_path / 'house' / 'bus'}"
    assert main(["gate", "replay", "--thresholds", "0.2,0.6,0.8", "--url", url]) == 0
    assert f"{broadcasts} events:" in (shown := capsys.readouterr().out)
    assert f"{deferred} defer" in shown
    assert "; 0 change" in shown
    assert main(["verify", "--url", url]) == 0
