"""The patterns without asyncio, and the errors for the wrong kind of bus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

import trunkline
from trunkline.patterns.outbox import Drainer, SqlOutbox
from trunkline.patterns.replies import Refused, Requests, respond
from trunkline.patterns.sync import SyncDrainer, SyncRequests, SyncTaskQueue, sync_respond
from trunkline.patterns.tasks import Task, TaskQueue


class Label(msgspec.Struct):
    order: int


def test_a_task_queue_works_without_asyncio() -> None:
    with trunkline.open("memory:") as bus, SyncTaskQueue(bus, "labels") as queue:

        def work(task: Task[int]) -> int:
            return task.payload * 2

        queue.work(work, workers=2)
        assert queue.enqueue(21, result=True).result(timeout_s=20) == 42


def test_named_tasks_work_without_asyncio() -> None:
    done: list[Any] = []
    with trunkline.open("memory:") as bus, SyncTaskQueue(bus, "mails") as queue:

        @queue.task
        def send(label: Label, copies: int = 1) -> None:
            done.append((label, copies))

        queue.work()
        send.delay(Label(7), copies=2)
        assert bus.drain(20)
    assert done == [(Label(7), 2)]


def test_questions_are_answered_without_asyncio() -> None:
    with trunkline.open("memory:") as bus, SyncRequests(bus) as requests:

        @sync_respond(bus, "prices", group="pricing")
        def price(label: Label) -> int:
            if label.order < 0:
                raise trunkline.Reject("no such order")
            return label.order * 3

        assert requests.request("prices", Label(5), timeout_s=20) == 15
        with pytest.raises(Refused, match="no such order"):
            requests.request("prices", Label(-5), timeout_s=20)
        with pytest.raises(TimeoutError):
            requests.request("nobody", 1, timeout_s=0.05)


def test_an_outbox_is_drained_without_asyncio(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    outbox = SqlOutbox(engine)
    outbox.create()
    with engine.begin() as connection:
        outbox.add(connection, "orders", Label(1), delay_s=0.0, priority=0, key="c1")
    with trunkline.open("memory:") as bus:
        assert SyncDrainer(outbox, bus).drain() == 1
        (record,) = bus.read("orders")
    assert (record.event.payload, record.event.priority) == ({"order": 1}, "critical")
    engine.dispose()


def test_fire_and_flush_without_asyncio() -> None:
    with trunkline.open("memory:") as bus:
        told = bus.fire("orders", 1)
        bus.fire("orders", 2)
        bus.flush()
        assert told.result(20).offset == 1
        assert bus.bounds("orders").next == 3
        bus.fire("orders", object())
        with pytest.raises(trunkline.InvalidEvent):
            bus.flush()


async def test_the_wrong_kind_of_bus_is_a_type_error(tmp_path: Path) -> None:
    plain = trunkline.open("memory:")
    loop = trunkline.connect("memory:")
    engine = sa.create_engine("sqlite://")
    wrong: Any
    try:
        for wrong in (
            lambda: TaskQueue(plain, "labels"),  # type: ignore[arg-type]
            lambda: Requests(plain),  # type: ignore[arg-type]
            lambda: respond(plain, "prices", group="g"),  # type: ignore[arg-type]
            lambda: Drainer(SqlOutbox(engine), plain),  # type: ignore[arg-type]
            lambda: SyncTaskQueue(loop, "labels"),  # type: ignore[arg-type]
            lambda: SyncRequests(loop),  # type: ignore[arg-type]
            lambda: sync_respond(loop, "prices", group="g"),  # type: ignore[arg-type]
            lambda: SyncDrainer(SqlOutbox(engine), loop),  # type: ignore[arg-type]
        ):
            with pytest.raises(TypeError, match=r"trunkline\.(connect|open)"):
                wrong()
    finally:
        plain.close()
        engine.dispose()
