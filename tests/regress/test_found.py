"""Faults that were found from outside and have no other place: each shows its rule."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

import trunkline
from trunkline.cli import main
from trunkline.errors import StorageError
from trunkline.log import atomic
from trunkline.options import GroupOptions


@pytest.mark.parametrize("place", ["memory", "file"])
async def test_a_late_ack_does_not_free_the_key_of_a_record_in_work(
    place: str, tmp_path: Path
) -> None:
    url = "memory:" if place == "memory" else f"file:{tmp_path / 'bus'}"
    policy = GroupOptions(ack_timeout_s=0.4, backoff_base_s=0)
    async with trunkline.connect(url) as bus:
        await bus.publish_many("t", [1, 2], key="k")
        members = [bus.subscribe("t", group="g", policy=policy) for _ in range(3)]
        for member in members:
            await member.__aenter__()
        waiting = {asyncio.ensure_future(anext(aiter(member))) for member in members}

        async def following(timeout_s: float) -> Any:
            done, _ = await asyncio.wait(
                waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                return None
            waiting.discard(one := done.pop())
            return one.result()

        first = await following(20)
        again = await following(20)  # the first lease ran out
        assert (first.offset, again.offset, again.attempt) == (1, 1, 2)
        await first.ack()
        beside = await following(0.2)
        assert beside is None or beside.offset != 2, "the next of the key, while it is in work"
        await again.ack()
        after = await following(20)
        assert after is not None
        assert after.offset == 2
        await after.ack()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for member in members:
            await member.close()


async def test_after_a_failed_sync_nothing_acknowledged_is_lost_or_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{tmp_path / 'bus'}"

    def broken(_fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    bus = trunkline.connect(url)
    acked = [(await bus.publish("t", n)).offset for n in range(3)]
    with monkeypatch.context() as patched:
        patched.setattr(atomic, "_fdatasync", broken)
        with pytest.raises(StorageError, match="Input/output error"):
            await bus.publish("t", "fails")
    acked += [(await bus.publish("t", n)).offset for n in range(3, 6)]
    async with bus.subscribe("t", group="g") as deliveries:
        await (await anext(aiter(deliveries))).ack()
    with monkeypatch.context() as patched:
        patched.setattr(atomic, "_fdatasync", broken)
        try:
            await bus.close()
        except StorageError as error:  # typed, with the file that could not be synced
            said = str(error)
        else:
            said = "Input/output error"
    assert "Input/output error" in said
    async with trunkline.connect(url) as after:
        records = await after.read("t")
        assert [record.event.payload for record in records] == list(range(6))
        assert [record.offset for record in records] == acked
    assert await asyncio.to_thread(main, ["verify", "--url", url]) == 0
    capsys.readouterr()
