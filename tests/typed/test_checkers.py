"""What the checkers of a user's editor say: mypy and pyright, both in strict mode."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from trunkline import event, options

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def mypy(name: str) -> dict[int, str]:
    """The errors of a file, by line."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--output=json", name],
        cwd=HERE,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not done.stderr, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {one["line"]: one["message"] for one in found if one["severity"] == "error"}


def pyright(name: str, folder: Path) -> dict[int, str]:
    pytest.importorskip("pyright", reason="pip install 'trunkline[dev]'")
    settings = {
        "include": [name],
        "extraPaths": [str(ROOT / "src")],
        "typeCheckingMode": "strict",
    }
    shutil.copy(HERE / name, folder / name)
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), "utf-8")
    where = ["--project", str(folder), "--pythonpath", sys.executable]
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", *where],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert told["summary"]["filesAnalyzed"] == 1
    found = told["generalDiagnostics"]
    return {
        one["range"]["start"]["line"] + 1: one["message"]
        for one in found
        if one["severity"] == "error"
    }


def marked(name: str) -> set[int]:
    lines = (HERE / name).read_text("utf-8").splitlines()
    return {number for number, line in enumerate(lines, 1) if "# error:" in line}


@pytest.mark.timeout(300)
def test_mypy_accepts_what_is_right_and_refuses_each_mistake() -> None:
    assert mypy("good.py") == {}
    assert mypy("bad.py").keys() == marked("bad.py")


@pytest.mark.timeout(300)
def test_pyright_accepts_what_is_right_and_refuses_each_mistake(tmp_path: Path) -> None:
    assert pyright("good.py", tmp_path) == {}
    assert pyright("bad.py", tmp_path).keys() == marked("bad.py")


@pytest.mark.parametrize(
    ("fields", "struct", "more", "fewer"),
    [
        (event.EventFields, event.Event, {"delay_s"}, {"topic", "payload"}),
        (options.TopicFields, options.TopicOptions, set(), set()),
        (options.GroupFields, options.GroupOptions, set(), set()),
        (options.StoreFields, options.StoreOptions, set(), set()),
        (options.BusFields, options.BusOptions, set(), set()),
        (options.ClientFields, options.ClientOptions, set(), set()),
    ],
)
def test_the_arguments_are_the_fields(
    fields: type, struct: type[msgspec.Struct], more: set[str], fewer: set[str]
) -> None:
    assert fields.__annotations__.keys() == {*struct.__struct_fields__} - fewer | more
