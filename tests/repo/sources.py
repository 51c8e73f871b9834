"""The files of the repository, as the tests about them see it."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "trunkline"


def _listed(*options: str) -> tuple[Path, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *options], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    paths = (ROOT / name for name in sorted(set(listed.split("\0"))) if name)
    return tuple(path for path in paths if path.is_file())


@cache
def files() -> tuple[Path, ...]:
    """What is tracked, and what would be if it were added now."""
    return _listed("--cached", "--others", "--exclude-standard")


@cache
def tracked() -> tuple[Path, ...]:
    return _listed("--cached")


def python(*folders: str) -> list[Path]:
    return [
        path
        for path in files()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in folders
    ]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def at(path: Path, line: int = 1) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def module(path: Path) -> str:
    """The dotted name of a file of the package, without the package: ``log.atomic``. What lies
    beside the package, for Spark to find, has none.
    """
    if not path.is_relative_to(PACKAGE):
        return ""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def report(problems: list[str]) -> str:
    return "\n" + "\n".join(problems)
