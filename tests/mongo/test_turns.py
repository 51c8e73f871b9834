"""Members of a group take turns on its document, and keep what they know of it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from kit.mongod import fresh_database
from trunkline.bus.connect import open_local
from trunkline.names import GroupKey
from trunkline.options import GroupOptions
from trunkline.store.mongo import MongoStore

KEY = GroupKey("orders", 0, "billing")
TURNS = 100


@pytest.mark.timeout(120)
async def test_no_member_gets_most_of_the_turns(mongo_url: str) -> None:
    """A member that was done took the lock again before the others looked: of eight processes
    one got 10 records, another one 2,772.
    """
    place = fresh_database(mongo_url)
    stores = [MongoStore(place) for _ in range(4)]
    try:
        await stores[0].change(KEY, lambda group: group.define(GroupOptions(), 0))
        left, shares = TURNS, [0] * len(stores)

        async def take_turns(number: int, store: MongoStore) -> None:
            nonlocal left
            await store.change(KEY, lambda _: None)  # it is connected
            await ready.wait()
            while left > 0:
                left -= 1
                await store.change(KEY, lambda group: group.pause(not group.paused))
                shares[number] += 1

        ready = asyncio.Barrier(len(stores))
        await asyncio.gather(*(take_turns(*one) for one in enumerate(stores)))
        assert min(shares) >= max(shares) / 2, shares
    finally:
        for store in stores:
            await store.close()


@pytest.mark.timeout(120)
async def test_a_member_that_waits_and_dies_holds_up_the_others_for_a_moment_only(
    mongo_url: str,
) -> None:
    place = fresh_database(mongo_url)
    one, two, gone = (MongoStore(place) for _ in range(3))
    try:
        await one.change(KEY, lambda group: group.define(GroupOptions(), 0))
        await two.change(KEY, lambda _: None)
        await gone.change(KEY, lambda _: None)
        async with AsyncExitStack() as held:  # a slow holder: a transaction never awaits
            group = await held.enter_async_context(one.group(KEY))
            waiting = asyncio.ensure_future(gone.change(KEY, lambda _: None))
            line = one._server.groups
            while not (await line.find_one({}) or {}).get("queue"):
                await asyncio.sleep(0.01)
            await gone.abandon()
            waiting.cancel()
            group.pause(True)
        async with asyncio.timeout(1.5):  # the lock of a dead holder would last for 2 s
            for _ in range(3):  # one of them is done before the lock of the dead member
                assert await two.change(KEY, lambda group: group.paused)
        await asyncio.gather(waiting, return_exceptions=True)
    finally:
        for store in (one, two, gone):
            await store.close()


@pytest.mark.timeout(120)
async def test_a_member_that_was_behind_keeps_the_records_that_it_read(mongo_url: str) -> None:
    """Each snapshot made the members that were some changes behind read the log from the floor."""
    place = fresh_database(mongo_url)
    async with open_local(place) as one, open_local(place) as two:
        await one.store.change(KEY, lambda group: group.define(GroupOptions(), 0))
        before = await two.store.change(KEY, lambda group: group)
        for _ in range(12):
            await one.store.change(KEY, lambda group: group.pause(not group.paused))
            for _ in range(7):
                await one.store.change(KEY, lambda group: group.pause(not group.paused))
            assert await two.store.change(KEY, lambda group: group) is before
