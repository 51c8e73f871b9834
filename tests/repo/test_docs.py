"""The docs say what the code does."""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from trunkline.bus import Bus
from trunkline.cli import VERBS, Parser, main

from .sources import PACKAGE, ROOT, at, files, report, tree

DOCS = ROOT / "docs"
TEST_ID = re.compile(r"(?:tests|src/trunkline/testing)/[\w/.-]+\.py(?:::\w+)+")
PROMISE = re.compile(r"^(?:\d+\.\s|\|(?!\s*:?-))")
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
NOT_RUN = re.compile(r"<!-- not run: .+ -->")


def pages() -> list[Path]:
    return [path for path in files() if path.suffix == ".md"]


def promises(page: Path) -> Iterator[tuple[int, str]]:
    """Each numbered item and each table row below the header, with the lines that continue it."""
    lines = page.read_text("utf-8").splitlines()
    for index, line in enumerate(lines):
        header = index + 1 < len(lines) and re.match(r"^\|\s*:?-", lines[index + 1])
        if not PROMISE.match(line) or header:
            continue
        end = index + 1
        while line[0] != "|" and end < len(lines) and re.match(r"^\s+\S", lines[end]):
            end += 1
        yield index + 1, "\n".join(lines[index:end])


def classes_by_name() -> dict[str, ast.ClassDef]:
    shipped = (path for path in files() if PACKAGE / "testing" in path.parents)
    return {
        node.name: node
        for path in shipped
        if path.suffix == ".py"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    }


def defines(scope: ast.Module | ast.ClassDef, name: str) -> ast.AST | None:
    named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = (node for node in scope.body if isinstance(node, named) and node.name == name)
    return next(found, None)


def exists(test_id: str) -> bool:
    """Whether a test id names a test, written in its file or inherited from a shipped suite."""
    file, *names = test_id.split("::")
    path = ROOT / file
    if not path.is_file():
        return False
    scope: ast.AST | None = tree(path)
    for name in names:
        inner = defines(scope, name) if isinstance(scope, ast.Module | ast.ClassDef) else None
        if inner is None and isinstance(scope, ast.ClassDef):
            shipped = classes_by_name()
            bases = [shipped.get(ast.unparse(base).rpartition(".")[2]) for base in scope.bases]
            inner = next((found for base in bases if base and (found := defines(base, name))), None)
        scope = inner
    return isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)


def test_each_promise_names_a_test() -> None:
    page = DOCS / "guarantees.md"
    found = list(promises(page))
    problems = [
        f"{at(page, line)}: a promise without a test"
        for line, text in found
        if not TEST_ID.search(text)
    ]
    assert found, f"{at(page)}: no promise, neither a numbered item nor a table row"
    assert not problems, report(problems)


def test_a_test_named_anywhere_in_the_docs_exists() -> None:
    problems = [
        f"{at(page, number)}: there is no {test_id}"
        for page in pages()
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1)
        for test_id in TEST_ID.findall(line)
        if not exists(test_id)
    ]
    assert not problems, report(problems)


def test_links_between_pages_lead_somewhere() -> None:
    problems = [
        f"{at(page, number)}: {target}"
        for page in pages()
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1)
        for target in LINK.findall(re.sub(r"`[^`]*`", "", line))
        if "://" not in target
        and not target.startswith("mailto:")
        and not (page.parent / target).exists()
    ]
    assert not problems, report(problems)


class Block(NamedTuple):
    page: Path
    line: int
    code: str

    @property
    def place(self) -> str:
        return at(self.page, self.line)


def blocks(page: Path) -> list[Block]:
    """The Python blocks of a page, except those marked ``<!-- not run: … -->``."""
    found = []
    lines = page.read_text("utf-8").splitlines()
    for index, line in enumerate(lines):
        before = [text for text in lines[max(0, index - 2) : index] if text.strip()]
        if line.rstrip() != "```python" or (before and NOT_RUN.search(before[-1])):
            continue
        end = lines.index("```", index)
        found.append(Block(page, index + 1, "\n".join(lines[index + 1 : end])))
    return found


RUNNER = """
import ast, asyncio, inspect, sys
code = compile(sys.stdin.read(), sys.argv[1], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
names = {"__name__": "__main__"}
async def main():
    done = eval(code, names)
    if inspect.isawaitable(done):
        await asyncio.wait_for(done, 40)
if code.co_flags & inspect.CO_COROUTINE:
    asyncio.run(main())
else:
    exec(code, names)
"""


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.stem) for p in pages() if p.parent == DOCS and blocks(p)]
)
@pytest.mark.timeout(180)
def test_a_page_of_the_docs_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    """In one folder, where the README was followed before, as a reader does it; what the quickstart
    shows is run again, too.
    """
    times = 2 if page.stem == "quickstart" else 1
    for block in (*blocks(ROOT / "README.md"), *blocks(page) * times):
        done = subprocess.run(
            [sys.executable, "-c", RUNNER, block.place],
            input=block.code,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=50,
            env={**os.environ, "TRUNKLINE_URL": "file:.bus"},
        )
        assert done.returncode == 0, f"{block.place}\n{done.stderr}"


def commands(verb: str) -> list[str]:
    """``topic``, ``topic ls``, ``topic create``, … as the parser knows them."""
    parser = Parser(prog="trunkline")
    below = parser.add_subparsers(dest="verb")
    import_module(f"trunkline.cli.{VERBS[verb][0]}").register(below)
    found = [verb]
    for action in below.choices[verb]._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [f"{verb} {name}" for name in action.choices]
    return found


def test_each_call_of_a_bus_and_of_a_delivery_is_in_the_quickstart() -> None:
    page = (DOCS / "quickstart.md").read_text("utf-8")
    section = page.partition("## What a bus offers")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)\(", section)) - {"letters", "redrive", "drop"}
    calls = {name for name in dir(Bus) if name[0] != "_" and callable(getattr(Bus, name))}
    assert named == calls | {"ack", "nack", "term", "in_progress"}


@pytest.mark.parametrize("verb", VERBS)
def test_each_command_is_documented(verb: str) -> None:
    page = DOCS / "cli.md"
    text = page.read_text("utf-8")
    problems = [
        f"{at(page)}: trunkline {command} is not there"
        for command in commands(verb)
        if not re.search(rf"\btrunkline {command}\b", text)
    ]
    assert not problems, report(problems)


@pytest.mark.parametrize("verb", VERBS)
def test_each_command_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    problems = []
    for command in commands(verb):
        try:
            code = main([*command.split(), "--help"])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        shown = capsys.readouterr()
        if code != 0 or "usage:" not in shown.out.lower():
            problems.append(f"trunkline {command} --help: {code} {shown.err}")
    assert not problems, report(problems)
