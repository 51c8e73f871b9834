"""What real handlers meet: they are slow, they kill their process, and they are told to end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import trunkline
from trunkline import GroupOptions
from trunkline.broker.server import Broker
from trunkline.broker.session import Session
from trunkline.bus import Bus, Delivery
from trunkline.bus.connect import open_local
from trunkline.options import BrokerOptions
from trunkline.wire.frames import Ack

POISON = """
import asyncio, os, sys, trunkline

async def main():
    async with trunkline.connect(sys.argv[1]) as bus:
        @bus.on("orders", group="billing")
        async def handle(event):
            if event.payload == 1:
                os._exit(3)
        await bus.drain(30)

asyncio.run(main())
"""

MORTAL = """
import asyncio, os, sys, trunkline

async def main():
    async with trunkline.connect(sys.argv[1]) as bus:
        @bus.on("orders", group="billing", policy=trunkline.GroupOptions(max_retries=2))
        async def handle(event, delivery):
            print(event.payload, delivery.attempt)
            sys.stdout.flush()
            await asyncio.sleep(0.2)
            os._exit(3)
        await bus.drain(30)

asyncio.run(main())
"""

ENDLESS = """
import asyncio, sys, trunkline

async def main():
    bus = trunkline.connect(f"file:{sys.argv[1]}")

    @bus.on("orders", group="billing")
    async def handle(event):
        print("begun", flush=True)
        await asyncio.sleep(0.5)
        print("done", flush=True)

    await bus.run()
    await bus.close()

asyncio.run(main())
"""


@pytest.fixture(params=["file", "ws"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """The same folder, opened by each process or by a broker for all."""
    if request.param == "file":
        yield f"file:{tmp_path}"
        return
    async with Broker(BrokerOptions(url=f"file:{tmp_path}", port=0, metrics_s=0)) as broker:
        yield broker.url


async def test_a_slow_handler_loses_no_try_on_what_it_has_not_seen(url: str) -> None:
    await _see_each_once(url)


async def test_nor_does_one_in_memory() -> None:
    await _see_each_once("memory:")


async def _see_each_once(url: str) -> None:
    tries: list[tuple[int, int]] = []
    async with trunkline.connect(url) as bus:
        await bus.publish_many("orders", list(range(12)))
        policy = GroupOptions(ack_timeout_s=1.0, max_retries=0)

        @bus.on("orders", group="billing", policy=policy)
        async def handle(event: trunkline.Event, delivery: trunkline.Delivery) -> None:
            tries.append((event.payload, delivery.attempt))
            await asyncio.sleep(0.2)

        assert await bus.drain(60)
    assert tries == [(number, 1) for number in range(12)]


async def test_a_record_that_kills_its_worker_takes_no_other_with_it(url: str) -> None:
    async with trunkline.connect(url) as bus:
        await bus.publish_many("orders", list(range(1, 121)))
    tries = GroupOptions().max_retries + 1
    command = [sys.executable, "-c", POISON, url]
    codes = [
        (await asyncio.to_thread(subprocess.run, command)).returncode for _ in range(tries + 1)
    ]
    assert codes == [3] * tries + [0]
    async with trunkline.connect(url) as bus:
        letters = await bus.read("orders.DLQ")
        assert [letter.event.payload for letter in letters] == [1]


def _said(command: list[str]) -> str:
    return subprocess.run(command, stdout=-1, text=True).stdout


async def test_a_process_that_dies_at_work_takes_only_the_records_that_it_began(url: str) -> None:
    async with trunkline.connect(url) as bus:
        await bus.publish_many("orders", list(range(20)))
    command = [sys.executable, "-c", MORTAL, url]
    seen = [await asyncio.to_thread(_said, command) for _ in range(7)]
    assert seen == [f"{n} {attempt}\n" for n in range(3) for attempt in (1, 2, 3)][:7]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_run_lets_handlers_finish_when_told_to_end(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with trunkline.connect(f"file:{tmp_path}") as bus:
        await bus.publish("orders", 1)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENDLESS, os.fspath(tmp_path), stdout=-1, stderr=-1
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    process.send_signal(number)
    said, complaints = await process.communicate()
    assert (process.returncode, said, complaints) == (0, b"done\n", b"")
    async with trunkline.connect(f"file:{tmp_path}") as bus:
        groups = await bus.groups()
    assert [one.lag for one in groups] == [0]


async def test_what_cannot_work_is_refused_at_once() -> None:
    async with trunkline.connect("memory:") as bus:
        with pytest.raises(TypeError, match="polcy"):
            bus.on("orders", group="billing", polcy=1)  # type: ignore[call-arg]
        with pytest.raises(trunkline.InvalidOption, match="policy"):
            bus.on("orders", group="billing", policy=1)  # type: ignore[arg-type]
        with pytest.raises(trunkline.InvalidOption):
            bus.on("orders", group="billing")(5)  # type: ignore[type-var]
        with pytest.raises(trunkline.InvalidEvent, match="delay_s"):
            await bus.publish("orders", 1, delay_s=-1)


async def test_the_time_of_what_lay_unread_begins_when_it_is_read(tmp_path: Path) -> None:
    tries: list[tuple[int, int]] = []
    async with trunkline.connect(f"file:{tmp_path}") as bus:
        await bus.publish_many("orders", [1, 2, 3])
        policy = GroupOptions(ack_timeout_s=1.0, max_retries=0)
        async with bus.subscribe("orders", group="billing", policy=policy) as stream:
            async for delivery in stream:
                await asyncio.sleep(0.6)  # that it waited and was handled takes longer than 1 s
                tries.append((delivery.event.payload, delivery.attempt))
                await delivery.ack()
                if len(tries) == 3:
                    break
        assert [letter async for letter in bus.dead_letters("orders").letters()] == []
    assert tries == [(1, 1), (2, 1), (3, 1)]


async def test_a_subscription_that_was_shut_opens_again() -> None:
    async with open_local("memory:") as bus:
        await bus.publish_many("orders", [1, 2, 3])
        async with bus.subscribe("orders", group="billing") as stream:
            first = await asyncio.wait_for(anext(stream), 10)
            await asyncio.sleep(0)
            stream.resize(0)
            for delivery in [first, *stream.take(3)]:
                await delivery.ack()
            stream.resize(10)
            assert (await asyncio.wait_for(anext(stream), 10)).attempt == 1


async def test_a_pattern_that_matches_nothing_yet_sees_what_another_process_makes(
    tmp_path: Path,
) -> None:
    async with (
        trunkline.connect(f"file:{tmp_path}") as bus,
        trunkline.connect(f"file:{tmp_path}") as other,
        bus.subscribe("made.>", group="billing") as stream,
    ):
        await other.publish("made.later", 1)
        assert (await asyncio.wait_for(anext(stream), 10)).event.payload == 1


async def test_a_process_that_may_not_write_is_told_so_when_it_subscribes(tmp_path: Path) -> None:
    async with trunkline.connect(f"file:{tmp_path}") as bus:
        await bus.publish("orders", 1)
        (tmp_path / "members").rmdir()
        (tmp_path / "members").write_text("in the way")
        with pytest.raises(trunkline.errors.StorageError, match="members"):
            async with bus.subscribe("orders", group="billing"):
                pass


async def test_a_quick_reader_gets_all_it_may_hold(url: str) -> None:
    async with trunkline.connect(url) as bus:
        await bus.publish_many("orders", list(range(40)))
        async with bus.subscribe("orders", group="billing", max_inflight=25) as stream:
            held = [await asyncio.wait_for(anext(stream), 10) for _ in range(25)]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.2)
            for delivery in held:
                await delivery.ack()
            more = [await asyncio.wait_for(anext(stream), 10) for _ in range(15)]
        assert [d.event.payload for d in held + more] == list(range(40))


async def test_acks_that_nobody_waits_for_go_out_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[Ack] = []
    ack = Session._ack

    def note(session: Session, frame: Ack) -> None:
        frames.append(frame)
        ack(session, frame)

    monkeypatch.setattr(Session, "_ack", note)

    async def settle(bus: trunkline.Bus, count: int) -> None:
        async with bus.subscribe("orders", group="billing") as stream:
            for _ in range(count):
                await (await asyncio.wait_for(anext(stream), 10)).ack()
                await asyncio.sleep(0)  # each ack has a turn of the loop of its own

    options = BrokerOptions(url=f"file:{tmp_path}", port=0, metrics_s=0)
    async with Broker(options) as broker, trunkline.connect(broker.url) as bus:
        await bus.publish_many("orders", list(range(40)))
        await settle(bus, 40)  # leaving sends what is left
        assert len(frames) < 40
        assert sum(1 + len(frame.offsets or ()) for frame in frames) == 40
        frames.clear()
        for number in range(5):
            await bus.publish("orders", number, key="k")
        await settle(bus, 5)
        assert len(frames) == 5  # the next of the key comes when the one before is settled
        groups = await broker.hub.bus.store.groups()
        assert await broker.hub.bus.store.update(groups[0], lambda group: group.lag(46)) == 0


async def test_a_bus_that_closes_beside_subscriptions_that_leave_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[Delivery] = []

    async def work(bus: Bus, topic: str) -> None:
        async with bus.subscribe(topic, group="g") as stream:
            async for delivery in stream:
                got.append(delivery)
                await delivery.ack()

    async with trunkline.connect(f"file:{tmp_path}", reserve_bytes=0) as bus:
        works = [asyncio.ensure_future(work(bus, topic)) for topic in ("one", "two", "three")]
        for topic in ("one", "two", "three"):
            await bus.publish(topic, 1)
        while len(got) < 3:
            await asyncio.sleep(0.01)
        for one in works:
            one.cancel()
    await asyncio.gather(*works, return_exceptions=True)
    assert caplog.messages == []
