"""What ``import trunkline`` gives, and what it needs for that."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

import trunkline

from .sources import PACKAGE, at, report, tree

FIXED = {"connect", "Event", "Retry", "Reject", "FatalError"}
CEILINGS = {"store.py": ("Store", 10), "bus.py": ("Bus", 3)}

BARE = """
import importlib.abc, sys

ALLOWED = {"trunkline", "msgspec"} | set(sys.stdlib_module_names)

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ALLOWED and not top.startswith("_"):
            raise ModuleNotFoundError(f"{name} is not part of the core", name=name)

sys.meta_path.insert(0, Refuse())
"""

MEMORY = """
import asyncio
import trunkline

async def main():
    async with trunkline.connect("memory:") as bus:
        receipt = await bus.publish("orders", {"id": 1}, key="c42")
        assert (receipt.topic, receipt.offset, receipt.duplicate) == ("orders", 1, False)
        async with bus.subscribe("orders", group="billing") as deliveries:
            async for delivery in deliveries:
                assert delivery.event.payload == {"id": 1}
                await delivery.ack()
                break

asyncio.run(asyncio.wait_for(main(), 20))
"""

LOADED = """
print(*sorted({name.partition(".")[0] for name in sys.modules} - ALLOWED))
"""


def run(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def surface() -> list[str]:
    if not (PACKAGE / "buses" / "local.py").exists():
        pytest.fail("there is no local bus")
    return list(trunkline.__all__)


def test_the_surface_is_what_it_says(surface: list[str]) -> None:
    assert set(surface) >= FIXED
    assert len(surface) == len(set(surface))
    assert [name for name in surface if not hasattr(trunkline, name)] == []


def test_nothing_is_public_by_accident(surface: list[str]) -> None:
    extra = [
        name
        for name, value in vars(trunkline).items()
        if not name.startswith("_")
        and name not in surface
        and not isinstance(value, types.ModuleType)
        and str(getattr(value, "__module__", "")).startswith("trunkline")
    ]
    assert extra == []


def test_what_is_public_says_what_it_is(surface: list[str]) -> None:
    silent = [
        name
        for name in surface
        if isinstance(value := getattr(trunkline, name), type | types.FunctionType)
        and not value.__doc__
    ]
    assert silent == []


def test_the_core_imports_msgspec_and_nothing_else(tmp_path: Path) -> None:
    loaded = run(BARE + "import trunkline\n" + LOADED, tmp_path).split()
    assert [name for name in loaded if not name.startswith("_")] == []


@pytest.mark.usefixtures("surface")
def test_a_bus_in_memory_needs_msgspec_and_nothing_else(tmp_path: Path) -> None:
    loaded = run(BARE + MEMORY + LOADED, tmp_path).split()
    assert [name for name in loaded if not name.startswith("_")] == []


@pytest.mark.usefixtures("surface")
def test_a_bus_in_a_folder_needs_msgspec_and_nothing_else(tmp_path: Path) -> None:
    loaded = run(BARE + MEMORY.replace("memory:", "file:bus") + LOADED, tmp_path).split()
    assert [name for name in loaded if not name.startswith("_")] == []


def test_a_plug_stays_small() -> None:
    problems = []
    for file, (name, ceiling) in CEILINGS.items():
        path = PACKAGE / file
        if not path.exists():
            continue
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                methods = [
                    item.name
                    for item in node.body
                    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
                    and not item.name.startswith("_")
                ]
                if len(methods) > ceiling:
                    problems.append(f"{at(path, node.lineno)}: {name} has {', '.join(methods)}")
    assert not problems, report(problems)
