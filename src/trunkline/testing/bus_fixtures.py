"""What the suites for a bus stand on: how a test opens a bus, and how it waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from trunkline.bus import Bus, Delivery
from trunkline.features import Features
from trunkline.options import GroupOptions
from trunkline.testing.clock import ManualClock, PassingClock

AnyClock = ManualClock | PassingClock

PATIENCE_S = 20.0  # of real time: far more than anything here takes


Connect = Callable[..., Bus]


class BusFixtures:
    """Subclass a suite that builds on this, and provide ``connect``."""

    features = Features()
    unit_s = 1.0  # the suites' measure of time; less for a bus whose time is real

    @pytest.fixture
    def clock(self) -> AnyClock:
        return ManualClock()

    @pytest.fixture
    async def bus(self, connect: Connect) -> AsyncIterator[Bus]:
        bus = connect()
        await bus.start()
        yield bus
        await bus.close()

    def need(self, *names: str) -> None:
        """Skip a test of what this bus does not promise."""
        for name in names:
            if not getattr(self.features, name):
                pytest.skip(f"{name} is not promised")

    def policy(self, **options: Any) -> GroupOptions:
        """A policy in units of time: retries come at once unless the test says otherwise."""
        given = {"ack_timeout_s": 30 * self.unit_s, "backoff_base_s": 0.0, **options}
        return GroupOptions(**given)

    async def now(self, stream: Any, count: int = 1) -> list[Delivery]:
        """The next deliveries, without any time passing."""
        async with asyncio.timeout(PATIENCE_S):
            return [await anext(stream) for _ in range(count)]

    async def later(self, stream: Any, clock: AnyClock, within_s: float) -> Delivery:
        """The next delivery, for which time has to pass, but no more than ``within_s``."""
        waiting = asyncio.ensure_future(anext(stream))
        end = clock.monotonic() + within_s
        while not waiting.done() and clock.monotonic() < end:
            await asyncio.wait([waiting], timeout=0.002)
            if not waiting.done():
                await clock.run(self.unit_s / 20)
        await asyncio.wait([waiting], timeout=1)
        if not waiting.done():
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            raise AssertionError(f"no delivery came within {within_s} s")
        delivery: Delivery = waiting.result()
        return delivery

    async def check_quiet(self, stream: Any, clock: AnyClock) -> None:
        """Assert that there is nothing to deliver now."""
        waiting = asyncio.ensure_future(anext(stream))
        await clock.settle()
        await asyncio.wait([waiting], timeout=0.02)
        came = waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not came, f"delivered: {waiting.result()!r}"

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what other tasks are about to bring about."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 -- any condition, of any cause
                await asyncio.sleep(0.001)


def payloads(deliveries: list[Delivery]) -> list[Any]:
    return [delivery.event.payload for delivery in deliveries]
