"""Quotas per producer and per space."""

from __future__ import annotations

import asyncio

import pytest

from trunkline.bus.local import LocalBus
from trunkline.errors import InvalidOption, QuotaExceeded
from trunkline.middleware.quota import Quota, Rate
from trunkline.store.memory import MemoryStore
from trunkline.testing import ManualClock


def make_bus(clock: ManualClock, quota: Quota) -> LocalBus:
    bus = LocalBus(MemoryStore(clock=clock), clock=clock)
    bus.use(quota)
    return bus


async def test_a_producer_over_its_quota_is_refused_and_the_others_are_not() -> None:
    clock = ManualClock()
    quota = Quota(producer=Rate(events_s=2.0), over="raise", clock=clock)
    async with make_bus(clock, quota) as bus:
        for n in range(2):
            await bus.publish("t", n, actor="a")
        with pytest.raises(QuotaExceeded, match="producer a") as refused:
            await bus.publish("t", 2, actor="a")
        assert refused.value.retry_after_s == pytest.approx(0.5)
        await bus.publish("t", 3, actor="b")
        clock.advance(0.5)
        await bus.publish("t", 4, actor="a")
        payloads = [record.event.payload for record in await bus.read("t")]
    assert payloads == [0, 1, 3, 4]
    assert quota.throttled == {("producer", "a"): 1}


async def test_a_space_over_its_bytes_waits() -> None:
    clock = ManualClock()
    quota = Quota(space=Rate(bytes_s=10.0), clock=clock)
    async with make_bus(clock, quota) as bus:
        await bus.publish("t", "x" * 28, space="home")  # 30 bytes: a debt of two seconds
        late = asyncio.create_task(bus.publish("t", "y", space="home"))
        other = await bus.publish("t", "z", space="work")
        await clock.run(2.0)
        assert not late.done()
        await clock.run(0.2)
        assert (other.offset, (await late).offset) == (2, 3)
    assert quota.throttled["space", "home"] == 1


def test_a_quota_says_how_much_and_of_whom() -> None:
    with pytest.raises(InvalidOption):
        Rate()
    with pytest.raises(InvalidOption):
        Rate(events_s=0)
    with pytest.raises(InvalidOption):
        Quota()
