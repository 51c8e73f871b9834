"""A member of a group that is killed with -9: its records are delivered to the others."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from kit.mongod import fresh_database
from trunkline.bus.connect import open_local

MEMBER = Path(__file__).with_name("member.py")
AGAIN_S = 3.0  # without load


async def kill_a_member(url: str) -> float:
    """How long its ten records took to come again."""
    async with open_local(url) as bus:
        await bus.publish_many("orders", list(range(10)))
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(MEMBER), url, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            taken = {int(await process.stdout.readline()) for _ in range(10)}
        async with bus.subscribe("orders", group="billing") as stream:
            nothing = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.5)
            assert not nothing.done(), "a record came that another member has"
            killed = time.monotonic()
            process.kill()
            await process.wait()
            async with asyncio.timeout(60):
                delivery = await nothing
                again = {delivery.offset}
                while again != taken:
                    await delivery.ack()  # what a dead process had in hand comes one by one
                    delivery = await anext(stream)
                    again.add(delivery.offset)
            return time.monotonic() - killed


@pytest.mark.timeout(150)
async def test_the_records_of_a_killed_member_come_again(mongo_url: str) -> None:
    took_s = await kill_a_member(fresh_database(mongo_url))
    assert took_s < 10 * AGAIN_S


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_records_of_a_killed_member_come_again_within_three_seconds(
    mongo_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    times = [await kill_a_member(fresh_database(mongo_url)) for _ in range(5)]
    with capsys.disabled():
        print("\nagain after", " ".join(f"{took_s:.2f} s" for took_s in sorted(times)))
    assert max(times) <= AGAIN_S
