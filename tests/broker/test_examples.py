"""The examples of the broker and what is beside it run and say what they do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SAYS = {
    "broker_orders": ["published 100, durability fsync", "billed 100, both worked: True"],
    "broker_outbox": ["sent 1, waiting 0", "offset 1: {'id': 1}"],
}


@pytest.mark.parametrize("name", SAYS)
def test_an_example_says_what_it_does(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == SAYS[name]


def test_examples_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    for name in SAYS:
        test_an_example_says_what_it_does(name, tmp_path)
