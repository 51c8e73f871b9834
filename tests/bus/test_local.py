"""What the local bus adds to the contract of a bus."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import trunkline
from trunkline.bus.local import LocalBus
from trunkline.delivery.pump import Pump
from trunkline.errors import (
    Closed,
    Conflict,
    InvalidEvent,
    InvalidFilter,
    InvalidOption,
    OutOfRange,
    TrunklineError,
)
from trunkline.event import Event, Receipt
from trunkline.log import atomic
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, TopicOptions
from trunkline.store.memory import MemoryStore
from trunkline.testing import ManualClock

from .conftest import soon

AT_ONCE = GroupOptions(backoff_base_s=0.0)


async def test_connect_opens_a_folder_or_memory(tmp_path: Path) -> None:
    async with trunkline.connect(f"file:{tmp_path / 'bus'}", drain_timeout_s=1.0) as bus:
        assert (await bus.publish("orders", 1)).durability == "fsync"
        assert isinstance(bus, LocalBus)
        assert bus.options.drain_timeout_s == 1.0
    async with trunkline.connect("memory:") as bus:
        assert (await bus.publish("orders", 1)).durability == "none"
    with pytest.raises(InvalidOption):
        trunkline.connect("memory:", colour="red")  # type: ignore[call-arg]


@pytest.mark.parametrize("url", [7, Path("bus"), "", "file:", "file:bus?create=1", "nats:"])
def test_what_names_no_bus_is_refused(
    url: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidOption):
        trunkline.connect(url)
    assert not list(tmp_path.iterdir())


async def test_a_whole_event_is_not_changed_on_its_way(bus: LocalBus) -> None:
    with pytest.raises(InvalidEvent, match="and ttl_s besides"):
        await bus.publish_many("orders", [Event(topic="orders")], ttl_s=1)
    with pytest.raises(InvalidEvent, match="and delay_s besides"):
        await bus.publish(Event(topic="orders"), delay_s=1)


@pytest.mark.parametrize("start", [-1, True, None, "first", 1.5])
async def test_what_is_no_start_is_refused(bus: LocalBus, start: Any) -> None:
    with pytest.raises(InvalidOption):
        bus.subscribe("orders", group="g", start=start)


class Stamp:
    async def publish(self, events: list[Event], call_next: Any) -> list[Receipt]:
        stamped = [Event(topic=e.topic, payload=e.payload, actor="stamp") for e in events]
        receipts: list[Receipt] = await call_next(stamped)
        return receipts


async def test_middleware_counts_however_it_was_given(clock: ManualClock) -> None:
    makers = [
        LocalBus(MemoryStore(clock=clock), clock=clock, middleware=[Stamp()]),
        trunkline.connect("memory:", clock=clock, middleware=[Stamp()]),
    ]
    for bus in makers:
        async with bus:
            await bus.publish("orders", 1)
            await bus.publish_many("orders", [2])
            assert [r.event.actor for r in await bus.read("orders")] == ["stamp", "stamp"]


async def test_a_batch_has_one_topic_even_after_middleware(bus: LocalBus) -> None:
    class Astray:
        async def publish(self, events: list[Event], call_next: Any) -> Any:
            return await call_next([*events, Event(topic="elsewhere")])

    bus.use(Astray())
    with pytest.raises(InvalidEvent):
        await bus.publish("orders", 1)
    assert await bus.topics() == {}


@pytest.mark.parametrize("kept_back", [None, [], [1]])
async def test_a_middleware_answers_for_every_event(bus: LocalBus, kept_back: Any) -> None:
    class Keeps:
        async def publish(self, events: list[Event], call_next: Any) -> Any:
            passed = [event for event in events if event.payload in (kept_back or ())]
            return await call_next(passed) if kept_back is not None else None

    bus.use(Keeps())
    for publishing in (bus.publish("orders", 2), bus.publish_many("orders", [1, 2])):
        with pytest.raises(TrunklineError, match="a middleware gave"):
            await publishing


async def test_publishing_is_reported(clock: ManualClock) -> None:
    seen: list[tuple[str, str]] = []

    def report(topic: str, error: BaseException | None, seconds: float) -> None:
        seen.append((topic, type(error).__name__))

    async with LocalBus(MemoryStore(clock=clock), clock=clock, on_publish=report) as bus:
        await bus.publish("orders", 1)
        with pytest.raises(InvalidEvent):
            await bus.publish("orders", float("nan"))
    assert seen == [("orders", "NoneType"), ("orders", "InvalidEvent")]


async def test_priority_may_be_given_as_a_number(bus: LocalBus) -> None:
    await bus.publish("orders", 1, priority=0)
    (record,) = await bus.read("orders")
    assert record.event.priority == "critical"


async def test_what_is_fired_is_waited_for_by_flush(bus: LocalBus) -> None:
    task = bus.fire("orders", 1)
    bus.fire("orders", 2)
    await bus.flush()
    assert (await task).offset == 1
    assert len(await bus.read("orders")) == 2

    bus.fire("orders", float("nan"))
    with pytest.raises(InvalidEvent):
        await bus.flush()
    await bus.flush()


async def test_a_stream_must_be_entered_and_only_once(bus: LocalBus) -> None:
    stream = bus.subscribe("orders", group="billing")
    with pytest.raises(Closed):
        await anext(stream)
    async with stream:
        with pytest.raises(Closed):
            await stream.__aenter__()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_subscription_that_fails_to_begin_holds_nothing(bus: LocalBus) -> None:
    await bus.publish("orders.a", 1)
    await bus.publish("orders.b", 2)
    async with bus.subscribe("orders.b", group="billing", policy=GroupOptions(max_retries=1)):
        pass
    with pytest.raises(Conflict):
        async with bus.subscribe("orders.*", group="billing", policy=AT_ONCE):
            pass
    async with bus.subscribe("orders.a", group="billing") as stream:
        assert (await soon(stream)).event.payload == 1


async def test_subscribers_come_and_go_and_nothing_is_lost(bus: LocalBus) -> None:
    await bus.publish_many("orders", list(range(200)))
    done: set[int] = set()

    async def visit(count: int) -> None:
        for _ in range(count):
            async with bus.subscribe("orders", group="billing", max_inflight=3) as stream:
                for _ in range(2):
                    try:
                        delivery = await asyncio.wait_for(anext(stream), 0.05)
                    except TimeoutError:
                        return
                    await delivery.ack()
                    done.add(delivery.event.payload)

    for _ in range(20):
        await asyncio.gather(*(visit(10) for _ in range(4)))
        if len(done) == 200:
            break
    assert done == set(range(200))


async def test_drain_waits_for_topics_that_a_pattern_has_just_taken_in(bus: LocalBus) -> None:
    seen: list[Any] = []

    @bus.on("orders.>", group="billing")
    async def bill(event: Event) -> None:
        seen.append(event.payload)

    await bus.drain()
    for number in range(3):
        await bus.publish(f"orders.t{number}", number)
        await bus.drain()
        assert seen == list(range(number + 1))


async def find_after(
    bus: LocalBus, monkeypatch: pytest.MonkeyPatch, errors: Sequence[Exception]
) -> trunkline.Delivery:
    """The first delivery of a topic that is found after these errors."""
    topics, failures = bus.store.topics, iter(errors)

    async def failing() -> dict[str, TopicOptions]:
        for error in failures:
            raise error
        return await topics()

    async with bus.subscribe("orders.>", group="billing") as deliveries:
        monkeypatch.setattr(bus.store, "topics", failing)
        await bus.publish("orders.new", 1)
        found: trunkline.Delivery = await soon(deliveries)
    assert next(failures, None) is None
    return found


async def test_a_pattern_goes_on_looking_after_an_error_of_the_system(
    bus: LocalBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.EMFILE, "too many open files")
    errors = [error, atomic.storage_error(error, "wal")]
    assert (await find_after(bus, monkeypatch, errors)).event.payload == 1


async def test_trouble_that_lasts_is_told_once_and_so_is_its_end(
    bus: LocalBus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trunkline.bus.subscription._FIND_S", 0.0)
    errors = [OSError(errno.EMFILE, "too many")] * 3 + [OSError(errno.EACCES, "no right")] * 3
    await find_after(bus, monkeypatch, errors)
    said = [entry.getMessage() for entry in caplog.records]
    assert ["too many" in text for text in said] == [True, False, False]
    assert "no right" in said[1]
    assert said[2] == "topics are found again"


@pytest.mark.parametrize("batch", ["abc", b"abc", {"a": 1}, {1, 2}, (n for n in range(3)), 7])
async def test_what_is_no_list_is_no_batch(bus: LocalBus, batch: Any) -> None:
    with pytest.raises(InvalidEvent, match="a batch is a list"):
        await bus.publish_many("orders", batch)
    assert await bus.read("orders") == []


@pytest.mark.parametrize("fields", [{"id": "mine"}, {"ts": 0}, {"ts": None}], ids=str)
async def test_a_batch_ignores_no_field(bus: LocalBus, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidEvent):
        await bus.publish_many("orders", [1, 2], **fields)
    assert await bus.topics() == {}


async def test_reading_begins_with_the_first_there_is(bus: LocalBus) -> None:
    await bus.publish_many("orders", [1, 2, 3, 4])
    await bus.store.trim("orders", 0, 3)
    assert [record.offset for record in await bus.read("orders")] == [3, 4]
    assert await bus.bounds("orders") == (3, 5)
    with pytest.raises(OutOfRange):
        await bus.read("orders", 1)


@pytest.mark.parametrize("place", ["memory:", "file:"])
async def test_a_partition_that_is_not_there_is_told_and_not_empty(
    place: str, tmp_path: Path
) -> None:
    async with trunkline.connect(f"{place}{tmp_path if place == 'file:' else ''}") as bus:
        await bus.define("orders", partitions=2)
        assert (await bus.read("orders", partition=1), await bus.bounds("orders", 1)) == (
            [],
            (1, 1),
        )
        assert await bus.read("unknown") == []
        for read in (bus.read("orders", partition=2), bus.read("orders", 1, partition=2)):
            with pytest.raises(OutOfRange, match="no partition 2 in orders"):
                await read
        with pytest.raises(OutOfRange, match="no partition 9 in orders"):
            await bus.bounds("orders", 9)
        for wrong in (-1, "0", None, 1.5, True):
            with pytest.raises(InvalidOption, match="partition is a whole"):
                await bus.bounds("orders", wrong)  # type: ignore[arg-type]


async def test_run_handles_until_it_is_cancelled(bus: LocalBus) -> None:
    seen = asyncio.Event()

    @bus.on("orders", group="billing")
    async def bill(event: Event) -> None:
        seen.set()

    running = asyncio.create_task(bus.run())
    await bus.publish("orders", 1)
    await asyncio.wait_for(seen.wait(), 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_bus_that_only_runs_is_closed_at_its_end() -> None:
    bus = trunkline.connect("memory:")
    seen: list[Any] = []

    @bus.on("orders", group="billing")
    async def bill(event: Event) -> None:
        seen.append(event.payload)

    await bus.publish("orders", 1)
    with pytest.raises(Closed, match="were not started"):
        await bus.drain(5)
    running = asyncio.create_task(bus.run())
    await asyncio.sleep(0)
    assert await bus.drain(10)
    assert seen == [1]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(Closed):
        await bus.publish("orders", 2)


@pytest.mark.parametrize("late_s", [0.0, 0.05])
async def test_drain_tells_of_a_handler_that_ends_at_that_moment(
    bus: LocalBus, monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    """Before its group is let go of, while that is done, and after it."""
    leave = Pump.close

    async def leave_late(pump: Pump) -> None:
        await asyncio.sleep(late_s)
        await leave(pump)

    monkeypatch.setattr(Pump, "close", leave_late)

    def fail(_event: Event) -> bool:
        raise LookupError

    bus.on("orders", group="billing", where=fail)(lambda event: None)
    await bus.start()
    await bus.publish("orders", 1)
    with pytest.raises(InvalidFilter):
        await bus.drain(10)
    with pytest.raises(InvalidFilter):
        await bus.stop()


async def test_drain_tells_of_a_handler_that_ended_while_it_looked(
    bus: LocalBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look_late() -> int:
        await asyncio.wait(bus._workers)
        return 0

    def fail(_event: Event) -> bool:
        raise LookupError

    bus.on("orders", group="billing", where=fail)(lambda event: None)
    await bus.start()
    await bus.publish("orders", 1)
    monkeypatch.setattr(bus, "_unsettled", look_late)
    with pytest.raises(InvalidFilter):
        await bus.drain(10)
    with pytest.raises(InvalidFilter):
        await bus.stop()


async def test_health_tells_of_a_handler_that_could_not_begin(bus: LocalBus) -> None:
    assert (await bus.health())["ok"] is True
    async with bus.subscribe("orders", group="billing", policy=GroupOptions(max_retries=1)):
        pass
    bus.on("orders", group="billing", policy=AT_ONCE)(lambda event: None)
    with pytest.raises(Conflict):
        await bus.drain(5)
    health = await bus.health()
    assert health["ok"] is False
    assert "group billing on orders" in health["failed"][0]
    assert "another policy: max_retries 1 -> " in health["failed"][0]
    with pytest.raises(Conflict):
        await bus.stop()


async def test_a_group_ahead_of_its_log_is_told(bus: LocalBus) -> None:
    await bus.publish_many("orders", [1, 2])
    async with bus.subscribe("orders", group="billing") as stream:
        for _ in range(2):
            await (await soon(stream)).ack()
    store = bus.store
    assert isinstance(store, MemoryStore)
    del store._partitions["orders", 0]  # the log was lost, the group was not
    with pytest.raises(Conflict, match=r"settled offset 2.*group seek orders billing --to N"):
        async with bus.subscribe("orders", group="billing"):
            pass


async def test_a_member_joins_while_others_publish_and_settle(
    bus: LocalBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bus.publish("orders", 1)
    async with bus.subscribe("orders", group="billing") as stream:
        await (await soon(stream)).ack()
    update, others = bus.store.update, [2, 3]

    async def late(key: GroupKey, step: Any) -> Any:
        if others:  # are quick, while the new member waits for its turn
            await bus.publish_many("orders", others)
            await update(key, lambda group: group.settle([2, 3]))
            others.clear()
        return await update(key, step)

    monkeypatch.setattr(bus.store, "update", late)
    async with bus.subscribe("orders", group="billing") as stream:
        await bus.publish("orders", 4)
        assert (await soon(stream)).event.payload == 4


async def test_a_handler_that_hangs_is_ended_after_the_drain_timeout(clock: ManualClock) -> None:
    bus = LocalBus(MemoryStore(clock=clock), clock=clock, drain_timeout_s=0.01)
    await bus.start()
    begun = asyncio.Event()

    @bus.on("orders", group="billing")
    async def bill(event: Event) -> None:
        begun.set()
        await asyncio.Event().wait()

    await bus.publish("orders", 1)
    await begun.wait()
    await asyncio.wait_for(bus.close(), 10)
    with pytest.raises(Closed):
        await bus.start()


async def test_what_was_given_wrong_is_named_and_nothing_else(bus: LocalBus) -> None:
    for fields, told in (
        ({"priority": "urgent"}, r"^unknown priority: 'urgent' \(priorities: [a-z, ]+\)$"),
        ({"delay_s": 1, "not_before": bus.clock.now()}, "delay_s and not_before both"),
    ):
        with pytest.raises(InvalidEvent, match=told):
            await bus.publish("orders", 1, **fields)
    with pytest.raises(InvalidOption, match=r"no option colour .*audit.*drain_timeout_s"):
        trunkline.connect("memory:", colour="red")  # type: ignore[call-arg]
    with pytest.raises(InvalidOption, match="ws://"):
        trunkline.connect("redis://x")


async def test_a_dead_letter_topic_takes_letters_alone(bus: LocalBus) -> None:
    letter = {"dlq-reason": "rejected"}
    for publish in (
        lambda: bus.publish("orders.DLQ", 1),
        lambda: bus.publish("orders.DLQ", 1, key="k"),
        lambda: bus.publish(Event(topic="orders.DLQ", payload=1)),
        lambda: bus.publish_many("orders.DLQ", [1, 2]),
        lambda: bus.publish_many("orders.DLQ", [Event(topic="orders.DLQ", payload=1)]),
    ):
        with pytest.raises(InvalidEvent, match="not a dead letter"):
            await publish()
    assert await bus.topics() == {}
    await bus.publish_many("orders.DLQ", [Event(topic="orders.DLQ", headers=letter)])
    await bus.publish("orders.DLQ", 1, headers=letter)
    with pytest.raises(InvalidEvent, match="not a dead letter"):
        await bus.publish("orders.DLQ", 1)
    assert len(await bus.read("orders.DLQ")) == 2


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_partitions_that_were_added_meanwhile_are_new_from_their_first_record(
    kind: str, tmp_path: Path
) -> None:
    async with trunkline.connect("memory:" if kind == "memory" else f"file:{tmp_path}") as bus:
        await bus.define("orders", partitions=2)
        await bus.publish_many("orders", [-1, -2, -3, -4])
        async with bus.subscribe("orders", group="billing", start="latest"):
            pass
        await bus.define("orders", partitions=4)
        await bus.publish_many("orders", list(range(8)))
        async with bus.subscribe("orders", group="billing", start="latest") as stream:
            got = [(await soon(stream)).event.payload for _ in range(8)]
    assert sorted(got) == list(range(8))


async def test_a_member_that_has_too_many_takes_no_room_from_the_others(bus: LocalBus) -> None:
    await bus.publish_many("orders", list(range(10)))
    async with (
        bus.subscribe("orders", group="billing") as first,
        bus.subscribe("orders", group="billing") as second,
    ):
        held = [await soon(first) for _ in range(3)]
        first.resize(1)
        assert (await soon(second)).offset not in {delivery.offset for delivery in held}


@pytest.mark.parametrize(
    "wrong",
    [{"drain_timeout_s": "x"}, {"poll_s": "x"}, {"middleware": [object()]}],
    ids=["bus", "store", "middleware"],
)
def test_what_is_wrong_is_refused_before_a_folder_is_made(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(InvalidOption):
        trunkline.connect(f"file:{tmp_path / 'bus'}", **wrong)
    assert not list(tmp_path.iterdir())
