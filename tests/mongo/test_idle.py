"""Members of a group that have nothing to do let the server rest."""

from __future__ import annotations

import asyncio
from typing import Any

import pymongo
import pytest

from kit.mongod import fresh_database
from trunkline.bus.connect import open_local

WATCHED_S = 1.5
QUIET = 5  # updates while nothing happens


@pytest.mark.timeout(60)
async def test_the_steps_of_one_member_do_not_wake_the_others_for_ever(mongo_url: str) -> None:
    """A lock is a change of the group's document too. Told to the other members, it made each of
    them take the lock, and so on without end.
    """
    place = fresh_database(mongo_url)
    client: pymongo.MongoClient[dict[str, Any]]

    with pymongo.MongoClient(mongo_url) as client:

        def updates() -> int:
            return int(client.admin.command("serverStatus")["opcounters"]["update"])

        async with (
            open_local(place) as one,
            open_local(place) as two,
            one.subscribe("orders", group="billing") as first,
            two.subscribe("orders", group="billing") as second,
        ):
            await one.publish_many("orders", [1, 2, 3])
            got = [asyncio.ensure_future(anext(stream)) for stream in (first, second)]
            done, left = await asyncio.wait(got, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task.result().ack()
            spent: list[int] = []
            while len(spent) < 10 and (not spent or spent[-1] > QUIET):
                before = updates()
                await asyncio.sleep(WATCHED_S)
                spent.append(updates() - before)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
    assert spent[-1] <= QUIET, spent
