"""A process that was stopped holds the lock of a group: subscriptions wait, none of them ends."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trunkline.bus.local import LocalBus
from trunkline.store.file import FileStore


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """As a member holds it that was stopped in the middle of a transaction."""
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


async def test_a_stopped_process_ends_no_subscription(tmp_path: Path) -> None:
    place = os.fspath(tmp_path / "bus")
    async with (
        LocalBus(FileStore(place, lock_timeout_s=0.2)) as bus,
        LocalBus(FileStore(place, lock_timeout_s=0.2)) as other,
    ):
        await bus.publish("t.a", 1)
        async with bus.subscribe("t.a", group="g") as first:
            await (await anext(first)).ack()
            await asyncio.sleep(0.1)
            with locked(tmp_path / "bus" / "offsets" / "t.a__g.lock"):
                async with asyncio.timeout(20):
                    by_name = await other.subscribe("t.a", group="g").__aenter__()
                    by_pattern = await other.subscribe("t.*", group="g").__aenter__()
                    await bus.publish("t.b", 2)
                    found = await anext(by_pattern)
                    assert found.topic == "t.b"
                    await found.ack()
                    await asyncio.sleep(0.5)
            await first.close()
            await by_pattern.close()
            await bus.publish("t.a", 3)
            async with asyncio.timeout(20):
                delivery = await anext(by_name)
            assert delivery.event.payload == 3
            await delivery.ack()
            await by_name.close()
