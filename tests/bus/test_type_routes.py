"""Several handlers of one group, each for the events of its types."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import trunkline
from trunkline.broker.server import Broker
from trunkline.errors import Conflict, InvalidOption
from trunkline.event import Event
from trunkline.filters.event_types import compile_types, condition
from trunkline.filters.where import compile_where
from trunkline.options import BrokerOptions, GroupOptions

QUICK = GroupOptions(max_retries=1, backoff_base_s=0.0)


async def publish(bus: trunkline.Bus, *types: str | None) -> None:
    for number, kind in enumerate(types):
        await bus.publish("orders", number, type=kind)


async def check_routes(bus: trunkline.Bus) -> None:
    found: dict[str, list[int]] = {"placed": [], "ended": []}

    @bus.on("orders", group="billing", type="placed", workers=2)
    async def placed(event: Event) -> None:
        found["placed"].append(event.payload)

    @bus.on("orders", group="billing", type=["cancelled", "returned"])
    async def ended(event: Event) -> None:
        found["ended"].append(event.payload)

    async with bus:
        await publish(bus, "placed", "cancelled", "viewed", None, "returned", "placed")
        assert await bus.drain(30)
        assert {name: sorted(seen) for name, seen in found.items()} == {
            "placed": [0, 5],
            "ended": [1, 4],
        }
        (info,) = await bus.groups("orders", "billing")
        assert (info.lag, info.filtered) == (0, 2)
        assert info.policy.where == "type IN ('cancelled', 'placed', 'returned')"
        assert [one.types for one in bus.handlers()] == [("placed",), ("cancelled", "returned")]


async def test_each_handler_gets_its_types_and_the_rest_is_counted(tmp_path: Path) -> None:
    await check_routes(trunkline.connect(f"file:{tmp_path}"))
    async with trunkline.connect(f"file:{tmp_path}") as bus:  # the figure outlives the process
        (info,) = await bus.groups("orders", "billing")
        assert info.filtered == 2


async def test_the_same_through_a_broker() -> None:
    async with Broker(BrokerOptions(url="memory:", port=0, metrics_s=0)) as broker:
        await check_routes(trunkline.connect(broker.url))


@pytest.mark.parametrize("default_first", [True, False])
async def test_a_handler_without_a_type_gets_the_rest(default_first: bool) -> None:
    bus = trunkline.connect("memory:")
    rest: list[int] = []
    placed: list[int] = []

    def on_rest() -> None:
        @bus.on("orders", group="billing")
        async def handle(event: Event) -> None:
            rest.append(event.payload)

    if default_first:
        on_rest()

    @bus.on("orders", group="billing", type="placed")
    async def handle_placed(event: Event) -> None:
        placed.append(event.payload)

    if not default_first:
        on_rest()
    async with bus:
        await publish(bus, "placed", "viewed", None)
        assert await bus.drain(30)
        assert (placed, sorted(rest)) == ([0], [1, 2])
        (info,) = await bus.groups()
        assert (info.filtered, info.policy.where or None) == (0, None)


async def handle(event: Event) -> None: ...


async def test_what_cannot_be_a_route_is_refused_where_it_is_registered() -> None:
    bus = trunkline.connect("memory:")
    bus.on("orders", group="billing", type="placed")(handle)
    with pytest.raises(Conflict, match="a handler of type placed already"):
        bus.on("orders", group="billing", type=["ended", "placed"])(handle)
    with pytest.raises(Conflict, match="different values of policy"):
        bus.on("orders", group="billing", type="ended", policy=QUICK)(handle)
    with pytest.raises(InvalidOption, match="no where"):
        bus.on("orders", group="billing", type="ended", where="payload > 1")(handle)
    for wrong in ("", [], [1]):
        with pytest.raises(InvalidOption, match="not a type of events"):
            bus.on("orders", group="billing", type=wrong)(handle)  # type: ignore[arg-type]
    async with bus:
        with pytest.raises(Conflict, match="has begun"):
            bus.on("orders", group="billing", type="ended")(handle)


@pytest.mark.parametrize("kind", ["placed", "it's", "a, b", "('", "x') OR ('"])
def test_a_condition_means_the_same_with_and_without_the_library(kind: str) -> None:
    text = condition([kind, "other"])
    own = compile_types(text)
    assert own is not None
    for value in (kind, "other", "third", None):
        event = Event(topic="t", type=value)
        assert own(event) == bool(compile_where(text)(event)) == (value in (kind, "other"))
    assert compile_types("type IN ('a') OR key = 'b'") is None


MEMBER = """
import asyncio, sys, trunkline
from trunkline.options import GroupOptions
bus = trunkline.connect(sys.argv[1])
for kind in sys.argv[3:]:
    @bus.on("orders", group="billing", type=kind, on_conflict=sys.argv[2],
            policy=GroupOptions(backoff_base_s=0.01, max_retries=30))
    async def handle(event, kind=kind):
        print(kind, event.payload, flush=True)
async def main():
    async with bus:
        await bus.ready()
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
asyncio.run(main())
"""


def start(url: str, on_conflict: str, *types: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MEMBER, url, on_conflict, *types],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def test_a_rolling_change_of_the_routes_loses_no_event(tmp_path: Path) -> None:
    """An old and a new process, side by side: the old one fails what it does not know, and the new
    one gets it.
    """
    url = f"file:{tmp_path}"
    old = start(url, "raise", "placed")
    assert old.stdout is not None
    assert old.stdout.readline() == "ready\n"
    other = start(url, "raise", "placed", "cancelled")
    _, said = await asyncio.to_thread(other.communicate)
    assert other.returncode != 0
    assert "Conflict" in said
    assert "type IN ('cancelled', 'placed')" in said
    new = start(url, "update", "placed", "cancelled")
    assert new.stdout is not None
    assert new.stdout.readline() == "ready\n"
    async with trunkline.connect(url) as bus:
        for number in range(40):
            await bus.publish("orders", number, type=["placed", "cancelled"][number % 2])
        async with asyncio.timeout(60):
            while await bus.lag("orders", "billing"):
                await asyncio.sleep(0.05)
        assert [one async for one in bus.dead_letters("orders").letters()] == []
        (info,) = await bus.groups("orders", "billing")
        assert info.filtered == 0
    found = []
    for process in (old, new):
        out, _ = await asyncio.to_thread(process.communicate, "\n")
        found += [line.split() for line in out.splitlines()]
    assert sorted(int(number) for _, number in found) == list(range(40))
    assert all(kind == ["placed", "cancelled"][int(number) % 2] for kind, number in found)
