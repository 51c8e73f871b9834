"""Each example runs as a program of its own and says what it says it does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SAYS = {
    "1_embedded": [
        "embedded.orders offset 1, durability fsync",
        "billing got {'id': 1, 'price': 12}, attempt 1",
    ],
    "2_handlers": [
        "billed order 1",
        "billing finished offset 2, attempt 2",
        "mailed order 2",
        "dead letter of billing: {'id': 3, 'price': -1} (a negative price)",
    ],
    "3_many_processes": ["published 400, handled 400", "offsets 1 to 400"],
    "4_dead_letters": [
        "dead: payment 2 in billing after 3 attempts: KeyError: 'CHF'",
        "redriven: offset 2 of payments",
        "billed 11.0 EUR",
        "left: []",
    ],
    "5_script": ["critical: page", "low: resize", "2 records stay in the log"],
}


def run(name: str, *args: str, cwd: Path, path: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": str(path or "")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(path.read_text("utf-8") for path in EXAMPLES.parent.glob("tests/**/*.py"))
    assert [path.name for path in EXAMPLES.glob("*.py") if path.stem not in tests] == []
    assert [path.name for path in EXAMPLES.glob("*.sh") if path.name not in tests] == []


@pytest.mark.timeout(240)
def test_the_examples_say_what_they_do_in_one_folder_and_again(tmp_path: Path) -> None:
    for name in SAYS:
        said = run(name, cwd=tmp_path)
        assert [line for line in SAYS[name] if line not in said] == [], said
    assert (tmp_path / ".bus" / "bus.json").is_file()
    for name in SAYS:
        said = run(name, cwd=tmp_path)
        moved = ("offset", "records stay")  # the log has grown since
        same = [line for line in SAYS[name] if not any(word in line for word in moved)]
        assert [line for line in same if line not in said] == [], said


def test_an_audit_group_does_not_see_what_was_redriven_to_billing(tmp_path: Path) -> None:
    assert run("4_dead_letters", cwd=tmp_path).count("audited payment 2") == 1


@pytest.mark.parametrize(
    "option", ["--trunkline-duplicate", "--trunkline-crash=ack", "--trunkline-shuffle=7", "-q"]
)
def test_the_handlers_under_test_are_idempotent(option: str, tmp_path: Path) -> None:
    """In a folder without settings, not under those of this repository."""
    copy = shutil.copy(EXAMPLES / "6_testing.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", copy, option],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert "2 passed" in done.stdout, done.stdout


def test_the_tour_shows_the_life_of_an_event(tmp_path: Path) -> None:
    started = time.perf_counter()
    said = run("tour", "--url", "file:bus", cwd=tmp_path)
    took_s = time.perf_counter() - started

    wanted = [
        "one event: offset 1, durability fsync",
        "a batch, all or nothing: offsets 2 to 6",
        "billing   offset 2 attempt 2: billed 7",
        "warehouse offset 3 attempt 4: fails, there is no pot",
        "redrive letter",
        "warehouse offset 3 attempt 1: packed pot",
        "letters left open: 0",
        "holds offsets 1 to 50 of readings",
        "killed: all were delivered again within",
        "offsets/orders__billing.json",
        '{"offset":1,"meta":{"event_id":',
    ]
    assert [line for line in wanted if line not in said] == []
    assert took_s < 30
    log = (tmp_path / "bus" / "wal" / "orders.00000001.jsonl").read_text()
    assert log.splitlines()[0] in said


def test_the_tour_can_be_taken_twice_on_one_folder(tmp_path: Path) -> None:
    run("tour", "--url", "file:bus", cwd=tmp_path)
    again = run("tour", "--url", "file:bus", cwd=tmp_path)
    assert "a batch, all or nothing: offsets 8 to 12" in again
    assert "letters left open: 0" in again


def test_the_tour_leaves_its_folder_behind(tmp_path: Path) -> None:
    assert "The tour took" in run("tour", cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".tour"]
    assert (tmp_path / ".tour" / "bus" / "wal" / "orders.00000001.jsonl").is_file()


def test_the_tour_needs_no_rich(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ImportError")
    said = run("tour", cwd=tmp_path, path=tmp_path)
    assert "letter  group      offset  attempts  reason    error" in said
