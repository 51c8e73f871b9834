"""What a handler returns or raises becomes the delivery's outcome."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from trunkline.bus import Delivery, Outcome
from trunkline.bus.connect import open_local
from trunkline.delivery.deadletters import TRACEBACK
from trunkline.delivery.worker import Keeper, adapt, check_handler, run
from trunkline.errors import Denied, FatalError, InvalidOption, Reject, Retry
from trunkline.event import Event, Record
from trunkline.group import Lease
from trunkline.names import GroupKey
from trunkline.options import GroupOptions
from trunkline.testing import ManualClock

Settled = tuple[int, Outcome, float | None, str]


class Fixed:
    """A subscription with these deliveries and no more."""

    def __init__(self, count: int) -> None:
        self.settled: list[Settled] = []
        self._left = [self._delivery(offset) for offset in range(1, count + 1)]

    def _delivery(self, offset: int) -> Delivery:
        record = Record(Event(topic="orders", payload=offset), 0, offset)

        def settle(d: Delivery, outcome: Outcome, delay_s: float | None, reason: str) -> None:
            told = reason.partition(TRACEBACK)[0]
            self.settled.append((d.offset, outcome, delay_s, told))

        return Delivery(record, Lease(offset, 1, 0.0, "me"), "billing", settle, lambda _: None)

    async def __aenter__(self) -> Fixed:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def __aiter__(self) -> Fixed:
        return self

    async def __anext__(self) -> Delivery:
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop(0)


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        (None, (Outcome.ACK, None, "")),
        (Retry(2.5, "busy"), (Outcome.NACK, 2.5, "busy")),
        (Retry(), (Outcome.NACK, None, "retry asked for")),
        (Reject("broken"), (Outcome.TERM, None, "broken")),
        (FatalError("broken"), (Outcome.TERM, None, "broken")),
        (ValueError("no"), (Outcome.NACK, None, "ValueError: no")),
    ],
    ids=repr,
)
async def test_what_a_handler_says(raised: Exception | None, wanted: Any) -> None:
    async def handler(event: Event) -> None:
        if raised is not None:
            raise raised

    stream = Fixed(1)
    await run(stream, adapt(handler), workers=1)
    assert stream.settled == [(1, *wanted)]


async def test_a_signal_is_not_logged_and_a_failure_is(caplog: pytest.LogCaptureFixture) -> None:
    for error in (Retry(), Reject()):

        async def signal(event: Event, error: Exception = error) -> None:
            raise error

        await run(Fixed(1), adapt(signal), workers=1)
    assert caplog.records == []

    async def fail(event: Event) -> None:
        raise ValueError("no")

    with caplog.at_level(logging.WARNING):
        await run(Fixed(1), adapt(fail), workers=1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "orders/0@1" in caplog.text
    assert re.search(rf" at {re.escape(__file__)}:\d+$", caplog.records[0].getMessage())


async def test_a_handler_that_is_cancelled_gives_its_record_back() -> None:
    begun = asyncio.Event()

    async def handler(event: Event) -> None:
        begun.set()
        await asyncio.Event().wait()

    stream = Fixed(1)
    task = asyncio.create_task(run(stream, adapt(handler), workers=1))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stream.settled == [(1, Outcome.NACK, 0.0, "the worker was stopped")]


async def test_a_worker_outlives_what_its_handler_waits_for() -> None:
    async def handler(event: Event) -> None:
        if event.payload == 1:
            job = asyncio.create_task(asyncio.sleep(3600))
            job.cancel()
            await job

    stream = Fixed(2)
    await run(stream, adapt(handler), workers=1)
    assert stream.settled == [
        (1, Outcome.NACK, None, "CancelledError"),
        (2, Outcome.ACK, None, ""),
    ]


async def test_a_plain_function_may_fail_in_any_way(caplog: pytest.LogCaptureFixture) -> None:
    stream = Fixed(1)
    async with asyncio.timeout(10):
        await run(stream, adapt(lambda _: next(iter(()))), workers=1)
    said = "RuntimeError: the handler raised StopIteration"
    assert stream.settled == [(1, Outcome.NACK, None, said)]
    assert re.search(rf" at {re.escape(__file__)}:\d+$", caplog.records[0].getMessage())


async def test_plain_functions_block_each_in_a_thread_of_its_own() -> None:
    """However few the loop has, which are there for the bus itself."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    all_of_them = threading.Barrier(5, timeout=10)

    def handler(event: Event) -> None:
        all_of_them.wait()

    stream = Fixed(4)
    running = asyncio.create_task(run(stream, adapt(handler), workers=4))
    await asyncio.to_thread(all_of_them.wait)
    await running
    assert {outcome for _, outcome, _, _ in stream.settled} == {Outcome.ACK}


class Method:
    async def handle(self, event: Event) -> Any:
        return event.payload

    async def __call__(self, event: Event, delivery: Delivery) -> Any:
        return (event.payload, delivery.offset)


async def both(event: Event, delivery: Delivery, extra: int = 0) -> Any:
    return (event.payload, delivery.offset, extra)


async def one(event: Event, extra: int = 5) -> Any:
    return (event.payload, extra)


@pytest.mark.parametrize(
    ("handler", "result"),
    [
        (one, (1, 5)),
        (both, (1, 1, 0)),
        (partial(both, extra=7), (1, 1, 7)),
        (Method().handle, 1),
        (Method(), (1, 1)),
        (lambda event: event.payload, 1),
        (lambda event, delivery: delivery.offset, 1),
        (lambda event: one(event), (1, 5)),
    ],
)
async def test_handlers_come_in_many_shapes(handler: Any, result: Any) -> None:
    (delivery,) = [d async for d in Fixed(1)]
    assert await adapt(handler)(delivery) == result


async def none() -> None: ...


async def three(event: Event, delivery: Delivery, bank: object) -> None: ...


async def named(event: Event, *, bank: object) -> None: ...


async def stream(event: Event) -> Any:
    yield event


def steps(event: Event) -> Any:
    yield event


@pytest.mark.parametrize("handler", [none, three, named, stream, steps, 5, None, "bill"])
def test_what_cannot_handle_an_event_is_refused(handler: Any) -> None:
    with pytest.raises(InvalidOption, match="handler"):
        check_handler(handler)


def test_a_builtin_takes_the_event() -> None:
    assert check_handler([].append) is False
    assert check_handler(dict) is False, "it does not say what it takes"
    assert check_handler(lambda *anything: None) is False


async def test_each_message_is_reported_with_its_error() -> None:
    seen: list[tuple[str, str | None, bool]] = []

    async def handler(event: Event) -> None:
        if event.payload == 2:
            raise ValueError("no")

    def report(topic: str, error: BaseException | None, seconds: float) -> None:
        seen.append((topic, None if error is None else str(error), seconds >= 0))

    await run(Fixed(2), adapt(handler), workers=1, on_message=report)
    assert seen == [("orders", None, True), ("orders", "no", True)]


async def test_what_begins_while_the_keeper_sleeps_is_kept_by_its_own_timeout() -> None:
    """The groups of a pattern may have other policies."""
    clock, tries, done = ManualClock(), list[str](), asyncio.Event()
    async with open_local("memory:", clock=clock) as bus:
        policy = GroupOptions(ack_timeout_s=1.0)
        async with bus.subscribe("orders.paid", group="billing", policy=policy):
            pass

        @bus.on("orders.*", group="billing", workers=3)
        async def bill(event: Event) -> None:
            tries.append(event.topic)
            await done.wait()

        for topic in ("orders.made", "orders.paid"):
            await bus.publish(topic, 1)
            await clock.run()
        for _ in range(12):
            await clock.run(0.25)
        done.set()
        assert await bus.drain(30) is True
    assert tries == ["orders.made", "orders.paid"]


@pytest.mark.parametrize("timeout_s", [1.0, 8.0, 14.0])
async def test_what_begins_while_the_keeper_sleeps_is_kept_by_an_edited_policy(
    timeout_s: float,
) -> None:
    clock, tries, done = ManualClock(), list[int](), asyncio.Event()
    async with open_local("memory:", clock=clock) as bus:

        @bus.on("orders", group="billing", workers=3)
        async def bill(event: Event) -> None:
            tries.append(event.payload)
            await done.wait()

        await bus.publish("orders", 1)
        await clock.run()
        edited = GroupOptions(ack_timeout_s=timeout_s)
        await bus.store.update(GroupKey("orders", 0, "billing"), lambda group: group.edit(edited))
        await bus.publish("orders", 2)
        for _ in range(160):
            await clock.run(0.25)
        done.set()
        assert await bus.drain(30) is True
    assert tries == [1, 2]


async def test_a_keeper_of_many_workers_holds_up_nobody() -> None:
    asked, extended, clock = 0, list[Delivery](), ManualClock()

    class Compared(Delivery):
        def __eq__(self, other: object) -> bool:
            nonlocal asked
            asked += 1
            return self is other

        __hash__ = object.__hash__

    async def policy_of(_: Delivery) -> GroupOptions:
        return GroupOptions()

    keeper = Keeper(1000, clock, policy_of)
    record = Record(Event(topic="orders"), 0, 1)
    for number in range(1000):
        lease = Lease(number, 1, 0.0, "me")
        keeper.begin(number, Compared(record, lease, "billing", print, extended.append))
    await clock.run()
    await clock.run(10.0)
    await keeper.close()
    assert len(extended) == 1000
    assert asked < 10_000


async def test_what_keeps_a_policy_from_being_told_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, asked = ManualClock(), list[Delivery]()

    async def policy_of(delivery: Delivery) -> GroupOptions:
        asked.append(delivery)
        raise Denied("access denied")

    keeper = Keeper(1, clock, policy_of)
    keeper.begin(0, Fixed(0)._delivery(1))
    for _ in range(3):
        await clock.run(10.0)
    await keeper.close()
    assert len(asked) > 2
    assert caplog.text.count("cannot be told: access denied") == 1
