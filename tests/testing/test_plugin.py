"""The pytest plugin, seen from a project that uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = """
import pytest
from trunkline import Retry

class Shop:
    def __init__(self):
        self.total = 0
        self.seen = set()

def naive(shop, bus):
    async def bill(event):
        shop.total += event.payload
        await bus.publish("bills", event.payload)
    return bill

def careful(shop, bus):
    async def bill(event):
        if event.id not in shop.seen:
            shop.total += event.payload
            shop.seen.add(event.id)
        await bus.publish("bills", event.payload, idem_key=event.id)
    return bill

@pytest.mark.parametrize("make", [naive, careful])
async def test_every_order_is_billed_once(trunkline_bus, make):
    await trunkline_bus.define("bills", dedup_window_s=3600)
    shop = Shop()
    trunkline_bus.on("orders", group="billing", workers=2)(make(shop, trunkline_bus))
    await trunkline_bus.publish_many("orders", [1, 20, 300])
    await trunkline_bus.drain()
    assert shop.total == 321
    assert len(await trunkline_bus.read("bills")) == 3

@pytest.mark.parametrize("how", ["arrival", "key"])
async def test_the_last_price_counts(trunkline_bus, how):
    prices = {}
    keys = {"key": "apple"} if how == "key" else {}
    async def note(event):
        prices["apple"] = event.payload
    trunkline_bus.on("prices", group="shop")(note)
    await trunkline_bus.publish_many("prices", list(range(20)), **keys)
    await trunkline_bus.drain()
    assert prices == {"apple": 19}

@pytest.mark.asyncio
async def test_time_passes_when_told(trunkline_bus, trunkline_clock):
    times = []
    async def later(event):
        times.append(trunkline_clock.monotonic())
        if times[-1] == times[0]:
            raise Retry(60)
    trunkline_bus.on("orders", group="billing")(later)
    await trunkline_bus.publish("orders", 1)
    await trunkline_clock.run(120)
    await trunkline_bus.drain()
    assert times[-1] - times[0] == 60
"""


def run(
    folder: Path, *options: str, mode: str = "auto", installed: bool = False
) -> tuple[dict[str, str], str]:
    """What became of each test of the project. Other plugins only take time, so they are left out
    unless the entry point itself is to be seen.
    """
    (folder / "test_shop.py").write_text(PROJECT, "utf-8")
    (folder / "pytest.ini").write_text(f"[pytest]\nasyncio_mode = {mode}\n", "utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    given = ["-rA", "--tb=no", "-p", "no:cacheprovider"]
    if not installed:
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        given += ["-p", "pytest_asyncio.plugin", "-p", "trunkline.testing.plugin"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *given, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=50,
        env=environment,
    )
    words = [line.split() for line in done.stdout.splitlines()]
    outcome = {
        line[1].removeprefix("test_shop.py::test_"): line[0]
        for line in words
        if line and line[0] in ("PASSED", "FAILED", "ERROR")
    }
    return outcome, done.stdout + done.stderr


BILLED = "every_order_is_billed_once"
PRICE = "the_last_price_counts"


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_a_kind_bus_forgives(tmp_path: Path, mode: str) -> None:
    outcome, output = run(tmp_path, mode=mode, installed=mode == "auto")
    assert len(outcome) == 5, output
    assert set(outcome.values()) == {"PASSED"}, output


@pytest.mark.parametrize(
    "option",
    ["duplicate", "crash=append", "crash=ack", "crash=commit"],
)
def test_a_handler_that_is_not_idempotent_is_found(tmp_path: Path, option: str) -> None:
    outcome, output = run(tmp_path, f"--trunkline-{option}")
    assert outcome[f"{BILLED}[naive]"] == "FAILED", output
    assert outcome[f"{BILLED}[careful]"] == "PASSED", output
    assert outcome[f"{PRICE}[key]"] == "PASSED", output
    assert f"trunkline: {option}" in output


def test_a_handler_that_relies_on_arrival_is_found(tmp_path: Path) -> None:
    outcome, output = run(tmp_path, "--trunkline-shuffle=7")
    assert outcome[f"{PRICE}[arrival]"] == "FAILED", output
    assert outcome[f"{PRICE}[key]"] == "PASSED", output
    assert outcome[f"{BILLED}[careful]"] == "PASSED", output
    assert outcome[f"{BILLED}[naive]"] == "PASSED", output


def test_it_says_in_one_line_that_pytest_asyncio_is_missing(tmp_path: Path) -> None:
    (tmp_path / "pytest_asyncio.py").write_text("raise ImportError", "utf-8")
    (tmp_path / "test_shop.py").write_text("async def test_it(trunkline_bus): ...", "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "trunkline.testing.plugin"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    said = [line for line in done.stdout.splitlines() if "pytest-asyncio" in line]
    wanted = "trunkline_bus needs pytest-asyncio: pip install 'trunkline[testing]'"
    assert said[0] == wanted, done.stdout
    assert "fixtures.py" not in done.stdout, "where it was found out says nothing"


def test_the_plugin_costs_nothing_where_it_is_not_used(tmp_path: Path) -> None:
    program = (
        "import sys, pytest\n"
        "before = set(sys.modules)\n"
        "import trunkline.testing.plugin\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["trunkline", "trunkline.testing", "trunkline.testing.plugin"]
