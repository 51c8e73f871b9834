"""What of the plugin is asynchronous, and so needs pytest-asyncio."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from trunkline.testing.chaos import ChaosBus
    from trunkline.testing.clock import ManualClock


async def _bus(
    trunkline_clock: ManualClock, request: pytest.FixtureRequest
) -> AsyncIterator[ChaosBus]:
    """A bus in memory, started, that does to its handlers what the command line asks for."""
    from trunkline.store.memory import MemoryStore
    from trunkline.testing.chaos import Chaos, ChaosBus

    option = request.config.getoption
    bus = ChaosBus(
        MemoryStore(clock=trunkline_clock),
        clock=trunkline_clock,
        draw=lambda: 0.0,  # no time passes by itself, so a retry must not need any
        chaos=Chaos(
            duplicate=option("trunkline_duplicate"),
            shuffle=option("trunkline_shuffle"),
            crash=option("trunkline_crash"),
        ),
    )
    async with bus:
        yield bus


def _without() -> None:
    """Stands in for the bus where pytest-asyncio is missing."""
    pytest.fail("trunkline_bus needs pytest-asyncio: pip install 'trunkline[testing]'", False)


def _fixture() -> Any:
    try:
        import pytest_asyncio
    except ImportError:
        return pytest.fixture(name="trunkline_bus")(_without)
    return pytest_asyncio.fixture(name="trunkline_bus")(_bus)


trunkline_bus = _fixture()


@pytest.hookimpl(hookwrapper=True, trylast=True)  # pytest-asyncio's own looks at what this did
def pytest_pycollect_makeitem() -> Generator[None, Any, None]:
    """An async test on our fixtures is pytest-asyncio's, whatever its mode."""
    found = (yield).get_result()
    for item in found if isinstance(found, list) else [found]:
        if (
            isinstance(item, pytest.Function)
            and inspect.iscoroutinefunction(item.function)
            and {"trunkline_bus", "trunkline_clock"}.intersection(item.fixturenames)
            and item.get_closest_marker("asyncio") is None
            and any(mark.startswith("asyncio:") for mark in item.config.getini("markers"))
        ):
            item.add_marker("asyncio")
