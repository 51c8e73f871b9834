"""What ``import trunkline`` gives, and what it needs for that."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import trunkline
from trunkline.bus.local import LocalBus
from trunkline.bus.remote import RemoteBus

FIXED = {"connect", "Event", "Retry", "Reject", "FatalError"}
SURFACE = trunkline.__all__

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


def test_the_surface_is_what_it_says() -> None:
    assert set(SURFACE) >= FIXED
    assert len(SURFACE) == len(set(SURFACE))
    assert [name for name in SURFACE if not hasattr(trunkline, name)] == []


def test_nothing_is_public_by_accident() -> None:
    extra = [
        name
        for name, value in vars(trunkline).items()
        if not name.startswith("_")
        and name not in SURFACE
        and not isinstance(value, types.ModuleType)
        and str(getattr(value, "__module__", "")).startswith("trunkline")
    ]
    assert extra == []


def test_what_is_public_says_what_it_is() -> None:
    silent = [
        name
        for name in SURFACE
        if isinstance(value := getattr(trunkline, name), type | types.FunctionType)
        and not value.__doc__
    ]
    assert silent == []


def test_the_core_imports_msgspec_and_nothing_else(tmp_path: Path) -> None:
    loaded = run(BARE + "import trunkline\n" + LOADED, tmp_path).split()
    assert [name for name in loaded if not name.startswith("_")] == []


def test_a_bus_in_memory_needs_msgspec_and_nothing_else(tmp_path: Path) -> None:
    loaded = run(BARE + MEMORY + LOADED, tmp_path).split()
    assert [name for name in loaded if not name.startswith("_")] == []


def test_a_bus_in_a_folder_needs_msgspec_and_nothing_else(tmp_path: Path) -> None:
    loaded = run(BARE + MEMORY.replace("memory:", "file:bus") + LOADED, tmp_path).split()
    assert [name for name in loaded if not name.startswith("_")] == []


def calls(plug: type) -> list[str]:
    return [name for name, value in vars(plug).items() if name[0] != "_" and callable(value)]


def test_the_store_stays_small() -> None:
    given = (
        *("change", "update", "edit", "compact", "room", "watch", "idle", "in_hand"),
        *("marked_by", "announce", "members"),
    )
    assert set(given) <= set(calls(trunkline.Store)), "a store that leaves these out works"
    assert 0 < len(calls(trunkline.Store)) - len(given) <= 11


def test_a_bus_names_every_call_and_every_bus_has_them() -> None:
    assert {*calls(trunkline.Bus)} == {
        *("publish", "publish_many", "publish_again", "fire", "flush", "use"),
        *("subscribe", "on", "every", "handlers", "start", "ready", "stop", "drain", "run"),
        *("topics", "define", "remove", "trim", "bounds", "read", "dead_letters"),
        *("groups", "members", "lag", "seek", "pause", "resume", "edit", "forget", "policy_of"),
        *("health", "at_stop", "at_close", "close"),
    }
    assert issubclass(LocalBus, trunkline.Bus)
    assert issubclass(RemoteBus, trunkline.Bus)
