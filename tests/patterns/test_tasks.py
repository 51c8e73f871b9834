from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

import trunkline
from trunkline import GroupOptions
from trunkline.errors import Conflict, InvalidEvent, Reject
from trunkline.names import GroupKey
from trunkline.patterns.replies import Refused
from trunkline.patterns.tasks import Task, TaskQueue
from trunkline.testing.clock import ManualClock

QUICK = GroupOptions(backoff_base_s=0.0, max_retries=2)


@pytest.fixture
async def bus() -> AsyncIterator[Any]:
    async with trunkline.connect("memory:") as bus:
        yield bus


async def test_a_task_is_done_and_its_result_comes_back(bus: Any) -> None:
    async with TaskQueue(bus, "resize") as queue:

        async def resize(task: Task[int]) -> int:
            return task.payload * 2

        await queue.work(resize, workers=3)
        tickets = [await queue.enqueue(n, result=True) for n in range(6)]
        assert [await ticket.result(10) for ticket in tickets] == [0, 2, 4, 6, 8, 10]


async def test_an_object_may_do_tasks(bus: Any) -> None:
    class Resize:
        async def __call__(self, task: Task[int]) -> int:
            return task.payload * 2

    async with TaskQueue(bus, "resize") as queue:
        await queue.work(Resize())
        ticket = await queue.enqueue(4, result=True)
        assert await ticket.result(10) == 8


async def test_the_payload_is_wrapped_as_the_older_service_does(bus: Any) -> None:
    ticket = await TaskQueue(bus, "resize").enqueue({"w": 1}, "k")
    (record,) = await bus.read("resize")
    assert (record.event.payload, record.event.key) == ({"payload": {"w": 1}}, "k")
    assert record.event.id == ticket.id
    with pytest.raises(RuntimeError):
        await ticket.result()


async def test_a_failure_is_tried_again_and_a_reject_is_not(bus: Any) -> None:
    tries: list[tuple[str, int]] = []
    async with TaskQueue(bus, "resize") as queue:

        def work(task: Task[str]) -> str:
            tries.append((task.payload, task.attempt))
            if task.payload == "bad":
                raise Reject("never")
            if task.attempt < 3:
                raise ValueError
            return "done"

        await queue.work(work, policy=QUICK)
        slow = await queue.enqueue("slow", result=True)
        bad = await queue.enqueue("bad", result=True)
        assert await slow.result(10) == "done"
        with pytest.raises(Refused, match="never"):
            await bad.result(10)
        await bus.drain(10)
    assert sorted(tries) == [("bad", 1), ("slow", 1), ("slow", 2), ("slow", 3)]
    letters = [letter async for letter in bus.dead_letters("resize").letters()]
    assert [letter.event.payload for letter in letters] == [{"payload": "bad"}]


@pytest.mark.parametrize("said", [True, False])
async def test_the_last_failure_is_the_answer(bus: Any, said: bool) -> None:
    tries: list[int] = []
    async with bus.subscribe("resize", group="workers", policy=QUICK):
        pass  # the group is older than the worker, which need not know its policy
    async with TaskQueue(bus, "resize") as queue:

        async def work(task: Task[str]) -> None:
            tries.append(task.attempt)
            raise ValueError("no such picture")

        await queue.work(work, policy=QUICK if said else None)
        ticket = await queue.enqueue("x", result=True)
        with pytest.raises(Refused, match="ValueError: no such picture"):
            await ticket.result(30)
        assert await bus.drain(30)
    assert tries == [1, 2, 3]
    assert len([letter async for letter in bus.dead_letters("resize").letters()]) == 1


async def test_a_result_that_does_not_come_in_time_says_which(bus: Any) -> None:
    async with TaskQueue(bus, "resize") as queue:
        ticket = await queue.enqueue("x", result=True)
        with pytest.raises(TimeoutError, match=f"task {ticket.id} on resize has no result"):
            await ticket.result(0.01)


async def test_what_matters_more_and_what_is_delayed() -> None:
    clock = ManualClock()
    order: list[str] = []
    async with trunkline.connect("memory:", clock=clock) as bus, TaskQueue(bus, "resize") as queue:
        await queue.enqueue("low", priority="low")
        await queue.enqueue("later", delay_s=60)
        await queue.enqueue("high", priority=0)

        async def work(task: Task[str]) -> None:
            order.append(task.payload)

        await queue.work(work)
        await clock.run(59)
        assert order == ["high", "low"]
        await clock.run(1)
        assert order == ["high", "low", "later"]


async def test_tasks_that_wait_can_be_cancelled_before_any_worker_is_there(bus: Any) -> None:
    done: list[int] = []
    async with TaskQueue(bus, "resize") as queue:
        tickets = [await queue.enqueue(n, result=True) for n in range(300)]
        for ticket in tickets[:-1]:
            await ticket.cancel()

        async def work(task: Task[int]) -> None:
            done.append(task.payload)

        await queue.work(work, workers=8)
        for ticket in tickets[:-1]:
            with pytest.raises(Refused, match="cancelled"):
                await ticket.result(30)
        await tickets[-1].result(30)
    assert done == [299]


async def test_a_delayed_task_that_is_cancelled_answers_at_once() -> None:
    clock = ManualClock()
    done: list[str] = []
    async with trunkline.connect("memory:", clock=clock) as bus, TaskQueue(bus, "resize") as queue:

        async def work(task: Task[str]) -> None:
            done.append(task.payload)

        await queue.work(work)
        ticket = await queue.enqueue("later", delay_s=60, result=True)
        at = await queue.enqueue("at", not_before=clock.now() + timedelta(hours=1), result=True)
        for one in (ticket, at):
            await one.cancel()
            with pytest.raises(Refused, match="cancelled"):
                await one.result(10)
        await clock.run(3600)
        assert await bus.drain(10)
    assert done == []


async def test_many_that_are_cancelled_later_do_not_bring_one_back(bus: Any) -> None:
    done: list[int] = []
    async with TaskQueue(bus, "resize") as queue:
        ticket = await queue.enqueue(1, result=True)
        await ticket.cancel()
        await bus.publish_many("resize.cancel", [{"id": f"other-{n}"} for n in range(20_000)])

        async def work(task: Task[int]) -> None:
            done.append(task.payload)

        await queue.work(work)
        with pytest.raises(Refused, match="cancelled"):
            await ticket.result(10)
    assert done == []


async def test_a_task_that_runs_can_be_cancelled(bus: Any) -> None:
    begun = asyncio.Event()
    async with TaskQueue(bus, "resize") as queue:

        async def work(task: Task[int]) -> None:
            begun.set()
            await asyncio.Event().wait()

        await queue.work(work)
        ticket = await queue.enqueue(1, result=True)
        await begun.wait()
        await ticket.cancel()
        with pytest.raises(Refused, match="cancelled"):
            await ticket.result(10)
        assert await bus.drain(10)


async def test_nothing_is_left_of_a_worker_that_ended(bus: Any) -> None:
    async with TaskQueue(bus, "resize") as queue:
        await queue.work(lambda task: task.payload)
    assert [key.group for key in await bus.store.groups()] == ["workers"]


@pytest.mark.parametrize("behind_a_broker", [False, True])
async def test_groups_of_killed_users_do_not_stay(behind_a_broker: bool) -> None:
    from trunkline.broker.server import Broker
    from trunkline.options import BrokerOptions

    clock = ManualClock()
    async with contextlib.AsyncExitStack() as stack:
        bus: Any = await stack.enter_async_context(trunkline.connect("memory:", clock=clock))
        local = bus
        if behind_a_broker:
            broker = Broker(BrokerOptions(port=0, metrics_s=0), bus=local)
            await stack.enter_async_context(broker)
            bus = await stack.enter_async_context(trunkline.connect(broker.url, clock=clock))

        async def groups() -> set[str]:
            return {key.group for key in await local.store.groups()}

        killed = {f"replies-{0:016x}": "resize.results", f"cancel-{0:016x}": "resize.cancel"}
        for group, topic in {**killed, "replies-kept": "resize.results"}.items():
            async with local.subscribe(topic, group=group):
                pass  # and it ends here, before it could forget its group
        idle = await stack.enter_async_context(TaskQueue(bus, "resize"))
        await idle.work(lambda task: task.payload)
        lives = await groups() - killed.keys()
        for _ in range(2):
            for topic in ("resize.results", "resize.cancel"):
                await local.publish(topic, {"id": "x"})
            await clock.run(timedelta(days=8).total_seconds())
        for topic in ("resize.results", "resize.cancel"):
            await local.store.trim(topic, 0, 2)
        async with TaskQueue(bus, "resize") as queue:
            await queue.work(lambda task: task.payload)
            assert lives < await groups()
            assert not killed.keys() & await groups()
        assert await groups() == {*lives, "workers"}


async def test_workers_share_over_a_broker() -> None:
    from trunkline.broker.server import Broker
    from trunkline.bus.remote import RemoteBus
    from trunkline.options import BrokerOptions

    async with (
        Broker(BrokerOptions(url="memory:", port=0)) as broker,
        RemoteBus(broker.url) as here,
        RemoteBus(broker.url) as there,
        TaskQueue(here, "resize") as mine,
        TaskQueue(there, "resize") as theirs,
    ):

        async def work(task: Task[int]) -> int:
            return task.payload + 1

        await mine.work(work)
        await theirs.work(work)
        tickets = [await mine.enqueue(n, result=True) for n in range(10)]
        assert [await ticket.result(10) for ticket in tickets] == list(range(1, 11))


@pytest.mark.parametrize("newer", [True, False])
@pytest.mark.parametrize("said", [True, False])
async def test_the_last_failure_is_the_answer_over_a_broker_too(
    said: bool, newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trunkline.broker.rpc import OPS
    from trunkline.broker.server import Broker
    from trunkline.bus.remote import RemoteBus
    from trunkline.options import BrokerOptions

    policy = OPS["policy"]

    async def with_more(session: Any, args: dict[str, Any]) -> Any:
        return msgspec.to_builtins(await policy(session, args)) | {"hedge_s": 1.0}

    if newer:
        monkeypatch.setitem(OPS, "policy", with_more)
    tries: list[int] = []
    async with Broker(BrokerOptions(url="memory:", port=0)) as broker, RemoteBus(broker.url) as bus:
        async with bus.subscribe("resize", group="workers", policy=QUICK):
            pass
        async with TaskQueue(bus, "resize") as queue:

            async def work(task: Task[str]) -> None:
                tries.append(task.attempt)
                raise ValueError("no such picture")

            await queue.work(work, policy=QUICK if said else None)
            ticket = await queue.enqueue("x", result=True)
            with pytest.raises(Refused, match="ValueError: no such picture"):
                await ticket.result(30)
            assert await bus.drain(30)
    assert tries == [1, 2, 3]


async def test_the_last_try_is_the_last_of_the_policy_as_it_is_now(bus: Any) -> None:
    tries: list[int] = []
    key = GroupKey("resize", 0, "workers")
    async with TaskQueue(bus, "resize") as queue:

        async def work(task: Task[str]) -> None:
            tries.append(task.attempt)
            fewer = GroupOptions(backoff_base_s=0.0, max_retries=1)
            await bus.store.update(key, lambda group: group.edit(fewer))
            raise ValueError("no such picture")

        await queue.work(work, policy=QUICK)
        ticket = await queue.enqueue("x", result=True)
        with pytest.raises(Refused, match="no such picture"):
            await ticket.result(30)
        assert await bus.drain(30)
    assert tries == [1, 2]


async def test_nothing_waits_for_the_result_of_a_task_that_was_refused(bus: Any) -> None:
    async with TaskQueue(bus, "resize") as queue:
        with pytest.raises(InvalidEvent):
            await queue.enqueue(object(), result=True)
        await asyncio.sleep(0)
        assert not queue._results._waiting


async def test_a_function_is_a_task_by_its_name(bus: Any) -> None:
    done: list[Any] = []

    class Order(msgspec.Struct):
        id: int

    async with TaskQueue(bus, "mails") as queue:

        @queue.task
        async def send(order: Order, copies: int = 1) -> int:
            done.append((order, copies))
            return copies

        @queue.task
        def plain(text: str) -> str:
            return text.upper()

        await queue.work(workers=2)
        assert await send(Order(1)) == 1, "a call is a call"
        ticket = await send.options(result=True, key="c1").delay(Order(2), copies=3)
        assert await ticket.result(20) == 3
        assert await (await plain.options(result=True).delay("a")).result(20) == "A"
        await queue.enqueue({"args": [{"id": "x"}], "kwargs": {}}, type="send")
        await queue.enqueue({"args": [], "kwargs": {}}, type="send")
        await queue.enqueue(5, type="unknown")
        assert await bus.drain(20)
        errors = [one.error async for one in bus.dead_letters("mails").letters()]
    assert done == [(Order(1), 1), (Order(2), 3)]
    assert sorted(errors) == [
        "the arguments do not fit send: missing a required argument: 'order'",
        'the payload is not Order: id must be a whole number, not "x"',
        "there is no task 'unknown' on mails (tasks: plain, send)",
    ]


async def test_two_tasks_of_one_name_are_refused(bus: Any) -> None:
    queue = TaskQueue(bus, "mails")

    async def send() -> None: ...

    queue.task(send)
    with pytest.raises(Conflict):
        queue.task(send)


async def test_a_closed_bus_leaves_no_group_of_a_queue_behind(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/bus"
    bus = trunkline.connect(url)
    queue = TaskQueue(bus, "mails")
    queue.serve(lambda task: None)
    await bus.start()
    await queue.enqueue(1)
    assert await bus.drain(20)
    await bus.close()  # as bus.run() does, without leaving the queue
    async with trunkline.connect(url) as again:
        assert [one.group for one in await again.groups()] == ["workers"]
