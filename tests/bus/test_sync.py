"""The bus for scripts: plain calls, no loop in sight."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

import trunkline
from trunkline.errors import Closed, InvalidName, InvalidOption
from trunkline.event import Event
from trunkline.options import GroupOptions


@pytest.fixture(params=["memory:", "file:"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.param if request.param == "memory:" else f"file:{tmp_path / 'bus'}"


def test_a_script_publishes_reads_and_consumes(url: str) -> None:
    with trunkline.open(url) as bus:
        assert bus.publish("orders", {"id": 1}, key="c42").offset == 1
        assert [r.offset for r in bus.publish_many("orders", [2, 3])] == [2, 3]
        assert [record.event.payload for record in bus.read("orders", 2)] == [2, 3]
        assert bus.bounds("orders") == (1, 4)
        bus.define("refunds", partitions=2)
        assert bus.topics()["refunds"].partitions == 2

        seen = []
        for delivery in bus.subscribe("orders", group="billing", timeout_s=0.2):
            seen.append((delivery.topic, delivery.offset, delivery.attempt))
            delivery.in_progress()
            assert delivery.ack() is True
            assert delivery.nack() is False
    assert seen == [("orders", 1, 1), ("orders", 2, 1), ("orders", 3, 1)]


def test_a_loop_that_is_left_gives_back_what_it_has(url: str) -> None:
    policy = GroupOptions(backoff_base_s=0.0)
    with trunkline.open(url) as bus:
        bus.publish_many("orders", [1, 2])
        for delivery in bus.subscribe("orders", group="billing", policy=policy):
            assert delivery.nack(reason="not now") is True
            break
        again = bus.subscribe("orders", group="billing", timeout_s=5.0)
        got = {(d := next(again)).offset: d for _ in range(2)}
        assert (got[1].attempt, got[2].attempt) == (2, 1)
        assert got[1].term("never") is True
        assert got[2].ack() is True
        again.close()  # type: ignore[attr-defined]


def test_a_delivery_says_which_it_is(url: str) -> None:
    with trunkline.open(url) as bus:
        bus.publish("orders", 1)
        delivery = next(bus.subscribe("orders", group="billing", timeout_s=30))
        assert repr(delivery) == "<SyncDelivery orders/0@1 attempt 1 of billing>"
        assert delivery.group == "billing"


def test_a_script_has_handlers_and_waits_for_them(url: str) -> None:
    with trunkline.open(url) as bus:
        bus.publish_many("orders", [1, 2])

        @bus.on("orders", group="billing", workers=2)
        def bill(event: Event) -> None:  # in a thread, so it may use the bus
            bus.publish("bills", event.payload)

        bus.publish("orders", 3)
        assert bus.drain(timeout_s=30) is True
        assert sorted(record.event.payload for record in bus.read("bills")) == [1, 2, 3]


def test_a_handler_that_would_wait_for_itself_is_told(url: str) -> None:
    with trunkline.open(url) as bus:

        @bus.on("orders", group="billing", policy=GroupOptions(max_retries=0))
        async def bill(event: Event) -> None:
            bus.publish("bills", event.payload)

        bus.publish("orders", 1)
        assert bus.drain(timeout_s=30) is True
        assert "plain function" in bus.dead_letters("orders").letters()[0].error


@pytest.mark.parametrize("told_by", ["drain", "close"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_that_exits_is_told_and_nothing_hangs(
    url: str, is_async: bool, told_by: str
) -> None:
    left = threading.Event()

    def leave(_event: Event) -> None:
        left.set()
        raise SystemExit(3)

    async def leave_there(event: Event) -> None:
        leave(event)

    others = set(threading.enumerate())
    bus = trunkline.open(url)
    bus.on("orders", group="billing")(leave_there if is_async else leave)
    bus.publish("orders", 1)
    assert left.wait(10)
    assert bus.publish("orders", 2).offset == 2
    if told_by == "drain":
        with pytest.raises(SystemExit, match="3"):
            bus.drain(10)
    with pytest.raises(SystemExit, match="3"):
        bus.close()
    bus.close()
    ours = [thread.name for thread in set(threading.enumerate()) - others]
    assert "trunkline-sync" not in ours
    with trunkline.open(url) as bus:
        got = [delivery.offset for delivery in bus.subscribe("orders", group="x", timeout_s=0.1)]
    assert got == ([] if url == "memory:" else [1, 2])


def test_a_script_settles_dead_letters(url: str) -> None:
    with trunkline.open(url) as bus:
        bus.publish_many("orders", [1, 2])
        for delivery in bus.subscribe("orders", group="billing", timeout_s=30):
            delivery.term("no such customer")
            if delivery.offset == 2:
                break
        desk = bus.dead_letters("orders")
        assert [letter.origin for letter in desk.letters(group="billing")] == [1, 2]
        assert [letter.origin for letter in desk.drop(offsets={1})] == [1]
        assert [done.letter.origin for done in desk.redrive()] == [2]
        assert desk.letters() == []
        assert desk.letter(1).open is False
        again = next(bus.subscribe("orders", group="billing", timeout_s=30))
        assert (again.offset, again.attempt) == (2, 1)


def test_errors_come_out_as_they_are(url: str) -> None:
    with trunkline.open(url) as bus, pytest.raises(InvalidName):
        bus.publish("a/b", 1)
    with pytest.raises(InvalidOption):
        trunkline.open("carrier-pigeon:")


def test_a_closed_bus_says_so_and_leaves_no_thread(url: str) -> None:
    before = threading.active_count()
    bus = trunkline.open(url)
    bus.publish("orders", 1)
    stream = bus.subscribe("orders", group="billing")
    next(stream)
    bus.close()
    bus.close()
    with pytest.raises(Closed):
        bus.publish("orders", 2)
    del stream
    assert threading.active_count() <= before + 1


def test_several_threads_share_one_bus(url: str) -> None:
    with trunkline.open(url) as bus:
        threads = [
            threading.Thread(target=lambda: [bus.publish("orders", n) for n in range(20)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [record.offset for record in bus.read("orders")] == list(range(1, 81))


def test_after_a_fork_the_child_is_told_and_the_parent_goes_on(tmp_path: Path) -> None:
    with trunkline.open(f"file:{tmp_path}/bus") as bus:
        bus.publish("t", 1)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # were it to wait for a loop that is not there
            try:
                bus.publish("t", 2)
            except Closed:
                bus.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert bus.publish("t", 3).offset == 2
