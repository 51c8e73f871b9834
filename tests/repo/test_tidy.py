"""Style that a linter does not know, each failure with its file and line."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from .sources import PACKAGE, ROOT, at, files, python, report, tracked, tree

BLOB_BYTES = 256 * 1024
CODE = ("src", "tests", "benchmarks", "examples", "compat")
MARKERS = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}
ARTEFACTS = {".pyc", ".db", ".sqlite", ".log", ".bak", ".orig", ".backup", ".tmp"}
BANNER = re.compile(r"^\s*#\s*[-=#*~_─═]{4,}")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def text_files() -> list[Path]:
    kinds = {".py", ".md", ".toml", ".txt", ".sh", ".yml", ".yaml", ".json", ".cfg", ""}
    return [path for path in files() if path.suffix in kinds and path.name != "LICENSE"]


def functions(path: Path) -> list[Function]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, Function)]


def test_no_reminder_is_left_in_a_file() -> None:
    problems = [
        f"{at(path, number)}: {found[0]}"
        for path in text_files()
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1)
        if (found := MARKERS.search(line))
    ]
    assert not problems, report(problems)


def test_a_file_is_named_after_what_it_holds() -> None:
    problems = [
        f"{at(path)}: says nothing about its content"
        for path in files()
        if BANNED_NAMES & {part.removesuffix(".py") for part in path.relative_to(ROOT).parts}
        and not path.is_relative_to(ROOT / "compat")  # there the names are those of old programs
    ]
    assert not problems, report(problems)


def test_a_public_class_name_has_one_meaning() -> None:
    places = defaultdict(list)
    for path in python("src"):
        if "pubsub" in path.parts:  # its names are those of its own contract: Message, Publisher
            continue
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(at(path, node.lineno))
    problems = [f"{', '.join(where)}: {name}" for name, where in places.items() if len(where) > 1]
    assert not problems, report(problems)


def calls(node: ast.AST) -> set[str]:
    """The last names of what is called below ``node``."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            called = inner.func
            found.add(
                called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            )
    return found


def asserting(path: Path) -> set[str]:
    """Functions of a file that assert, themselves or through another one of the same file."""
    known = {"raises", "warns", "fail", "run_state_machine_as_test"}
    everything = functions(path)
    grew = True
    while grew:
        grew = False
        for node in everything:
            plain = any(isinstance(inner, ast.Assert | ast.Raise) for inner in ast.walk(node))
            through = any(
                name in known or name.startswith(("assert_", "check_", "expect_"))
                for name in calls(node)
            )
            if node.name not in known and (plain or through):
                known.add(node.name)
                grew = True
    return known


def test_every_test_can_fail() -> None:
    shipped = [path for path in python("src") if PACKAGE / "testing" in path.parents]
    problems = []
    for path in [*python("tests"), *shipped]:
        known = asserting(path)
        problems += [
            f"{at(path, node.lineno)}: {node.name} asserts nothing"
            for node in functions(path)
            if node.name.startswith("test_") and node.name not in known
        ]
    assert not problems, report(problems)


def test_two_tests_of_a_file_do_not_share_a_name() -> None:
    problems = []
    for path in python("tests", "src"):
        scopes: list[ast.Module | ast.ClassDef] = [tree(path)]
        scopes += [node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
        for scope in scopes:
            seen: set[str] = set()
            for node in scope.body:
                if isinstance(node, Function) and node.name.startswith("test_"):
                    if node.name in seen:
                        problems.append(f"{at(path, node.lineno)}: {node.name} hides another")
                    seen.add(node.name)
    assert not problems, report(problems)


def test_comments_are_sentences_not_banners() -> None:
    problems = [
        f"{at(path, number)}: {line.strip()[:40]}"
        for path in python(*CODE)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if BANNER.match(line)
    ]
    assert not problems, report(problems)


def test_nothing_large_and_nothing_generated_is_kept() -> None:
    problems = []
    for path in tracked():
        if path.stat().st_size > BLOB_BYTES:
            problems.append(f"{at(path)}: {path.stat().st_size} bytes")
        if path.suffix in ARTEFACTS or "__pycache__" in path.parts:
            problems.append(f"{at(path)}: made by a program")
    assert not problems, report(problems)


def test_constraints_pin_every_version_and_name_no_address() -> None:
    path = ROOT / "constraints.txt"
    lines = path.read_text("utf-8").splitlines()
    problems = [
        f"{at(path, number)}: {line}"
        for number, line in enumerate(lines, 1)
        if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)
    ]
    assert not problems, report(problems)
    assert lines == sorted(lines, key=lambda line: line.lower().partition("==")[0])
