"""What a command imports: the time it takes to start, in a form that does not depend on load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ENV, Run

HEAVY = ("asyncio", "ssl", "sqlglot", "shutil", "subprocess", "inspect", "http", "email", "logging")
SOURCE = str(Path(__file__).parents[2] / "src")
# Nothing but msgspec is installed, as where the core alone is.
BARE = """
import sys
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("typing_extensions", "attrs", "attr"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Bare())
from trunkline.cli import main
code = main(sys.argv[1:])
sys.stderr.write("MODULES " + " ".join(sorted(sys.modules)) + "\\n")
raise SystemExit(code)
"""


def loaded(home: Path, *words: str) -> set[str]:
    """The modules that a command has imported when it ends."""
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path[:0] = {paths()!r}\n{BARE}",
            *words,
        ],
        cwd=home,
        env={**ENV, "TRUNKLINE_ACTOR": "me"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stderr.splitlines() if line.startswith("MODULES"))
    return set(line.split()[1:])


def paths() -> list[str]:
    """The source, and a folder that holds msgspec."""
    import msgspec

    return [SOURCE, str(Path(msgspec.__file__).parents[1])]


@pytest.mark.parametrize(
    "command",
    [
        "claim b.py",
        "claims",
        "claims a.py",
        "release a.py",
        "sub orders --from start --count 1",
        "tail orders",
        "get orders 1",
        "pub orders 2",
        "topic ls",
        "group ls",
        "dlq ls",
        "token ls",
        "doctor",
        "bridge file:.bus ndjson:x.ndjson",
        "ndjson status",
    ],
)
def test_a_short_command_imports_no_event_loop_and_no_parser_of_sql(
    run: Run, home: Path, command: str
) -> None:
    run("pub", "orders", "1")
    run("claim", "a.py", "--actor", "me")
    found = loaded(home, *command.split())
    heavy = sorted(set(HEAVY) & found)
    allowed = {"logging"}  # of the journal of a group: 2 ms
    assert set(heavy) <= allowed, heavy
    assert len(found) < 250, len(found)  # asyncio alone brings 60


@pytest.mark.skipif(os.name != "posix", reason="git")
def test_the_guard_of_a_commit_starts_git_and_no_event_loop(run: Run, home: Path) -> None:
    subprocess.run(["git", "init", "-q", "."], cwd=home, check=True)
    assert not {"asyncio", "ssl", "sqlglot"} & loaded(home, "claims", "guard")


def test_a_condition_is_all_that_loads_the_parser_of_sql(run: Run, home: Path) -> None:
    run("pub", "orders", "1")
    assert "trunkline.filters.where" not in loaded(home, "get", "orders", "1")
