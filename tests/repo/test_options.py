"""No option without an effect: each is read outside the module that defines it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from trunkline import options

from .sources import PACKAGE, ROOT, at, python, report, tree

DEFINED_IN = PACKAGE / "options.py"
HOLDERS = re.compile(r"option|limits|flow|policy|settings", re.IGNORECASE)


def fields() -> dict[str, tuple[str, int]]:
    """Each option as ``Class.field``, with its name and line."""
    found = {}
    for node in tree(DEFINED_IN).body:
        kind = getattr(options, node.name, None) if isinstance(node, ast.ClassDef) else None
        if not (isinstance(kind, type) and issubclass(kind, options.Options)):
            continue
        assert isinstance(node, ast.ClassDef)
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                found[f"{node.name}.{line.target.id}"] = (line.target.id, line.lineno)
    return found


def holders(path: Path) -> set[str]:
    """Names that a file annotates as options: ``def roll(topic: TopicOptions)``."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.arg) and node.annotation:
            name, kind = node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            name, kind = (
                getattr(node.target, "attr", getattr(node.target, "id", "")),
                node.annotation,
            )
        else:
            continue
        if re.search(r"\b(\w*Options|Limits|Flow)\b", ast.unparse(kind)):
            found.add(name)
    return found


def reads() -> set[str]:
    """Names read from something that is, or is called after, options: ``self.options.poll_s``."""
    found = set()
    for path in python("src"):
        if path == DEFINED_IN:
            continue
        known = holders(path)
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                holder = node.value
                name = getattr(holder, "attr", getattr(holder, "id", ""))
                if name in known or HOLDERS.search(name):
                    found.add(node.attr)
    return found


def test_each_option_is_read_somewhere() -> None:
    read = reads()
    problems = [
        f"{at(DEFINED_IN, line)}: nobody reads {full}"
        for full, (name, line) in fields().items()
        if name not in read
    ]
    assert not problems, report(problems)


def test_each_option_is_set_in_a_test() -> None:
    here = ROOT / "tests" / "test_options.py"
    text = "\n".join(
        path.read_text("utf-8")
        for path in python("tests", "src")
        if path != here and (path.is_relative_to(ROOT / "tests") or "testing" in path.parts)
    )
    problems = [
        f"{at(DEFINED_IN, line)}: no test sets {full}"
        for full, (name, line) in fields().items()
        if not re.search(rf"\b{name}\b[\"']?\s*[=:]", text)
    ]
    assert not problems, report(problems)
