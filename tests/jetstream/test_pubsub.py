"""The same program of publishers and consumers on the engine in memory and on JetStream."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

import trunkline
from trunkline.bus import Bus
from trunkline.errors import ConnectionLost, InvalidEvent, InvalidName, InvalidOption, NotFound
from trunkline.options import GroupOptions
from trunkline.pubsub import Consumer, FatalError, Message, Publisher

QUICK = GroupOptions(ordering="none", backoff_base_s=0.0, max_retries=3)


@pytest.fixture(params=["memory", "jetstream"])
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    url = "memory:" if request.param == "memory" else request.getfixturevalue("url")
    async with trunkline.connect(url) as bus:
        yield bus


class Running:
    """A consumer that runs until the block ends."""

    def __init__(self, consumer: Consumer, handler: Any) -> None:
        self._consumer = consumer
        self._handler = handler

    async def __aenter__(self) -> asyncio.Task[None]:
        self._task = asyncio.ensure_future(self._consumer.run(self._handler))
        return self._task

    async def __aexit__(self, *_: object) -> None:
        self._consumer.stop()
        await asyncio.wait_for(self._task, 30)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def letters(bus: Bus) -> list[Any]:
    return [letter async for letter in bus.dead_letters("TRIGGERS").letters()]


async def test_bytes_stay_bytes(bus: Bus) -> None:
    sent = [b"", b"text", "ä€".encode(), b"\x00\xff\xfe", os.urandom(200), b'{"a": 1}', b"\r\n"]
    publisher = Publisher(bus, "TRIGGERS", prefix="TRIGGERS")
    for data in sent:
        await publisher.publish("db1.users.doc123", data)
    got: list[Message] = []
    async with Running(Consumer(bus, "TRIGGERS", "worker", workers=1), got.append):
        await until(lambda: len(got) == len(sent))
    assert [message.data for message in got] == sent
    about = got[0].metadata
    assert about.subject == got[0].subject == "TRIGGERS.db1.users.doc123"
    assert (about.stream, about.consumer, about.deliveries) == ("TRIGGERS", "worker", 1)


async def test_an_event_that_was_published_otherwise_comes_as_json(bus: Bus) -> None:
    await bus.publish("TRIGGERS", {"a": [1, "x"]})
    got: list[Message] = []
    async with Running(Consumer(bus, "TRIGGERS", "worker"), got.append):
        await until(lambda: got)
    assert (got[0].data, got[0].subject) == (b'{"a":[1,"x"]}', "TRIGGERS")


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("T.*.users.>", ["T.db1.users.a", "T.db1.users.a.b"]),
        ("T.db1.*.a", ["T.db1.users.a"]),
        ("T.>", ["T.db1.users.a", "T.db1.users.a.b", "T.db1.orders"]),
        ("T.db1.orders", ["T.db1.orders"]),
        ("T.*", []),
    ],
)
async def test_wildcards_mean_the_same_everywhere(
    bus: Bus, pattern: str, wanted: list[str]
) -> None:
    publisher = Publisher(bus, "TRIGGERS")
    for subject in ("T.db1.users.a", "T.db1.users.a.b", "T.db1.orders", "U.db1.users.a"):
        await publisher.publish(subject, b"x")
    got: list[str] = []
    consumer = Consumer(bus, "TRIGGERS", "worker", filter=pattern, workers=1)
    async with Running(consumer, lambda message: got.append(message.subject)):
        await until(lambda: len(got) >= len(wanted))
        await asyncio.sleep(0.1)
    assert got == wanted


async def test_an_error_naks_and_the_message_comes_again(bus: Bus) -> None:
    tries: list[int] = []

    async def handle(message: Message) -> None:
        tries.append(message.metadata.deliveries)
        if len(tries) < 3:
            raise ValueError("not yet")

    await Publisher(bus, "TRIGGERS").publish("a", b"x")
    async with Running(Consumer(bus, "TRIGGERS", "worker", policy=QUICK), handle):
        await until(lambda: len(tries) == 3)
    assert (tries, await letters(bus)) == ([1, 2, 3], [])


@pytest.mark.parametrize("wrapped", ["bare", "cause", "group", "cause of a group"])
async def test_a_fatal_error_leaves_a_dead_letter(bus: Bus, wrapped: str) -> None:
    tries: list[bytes] = []

    async def handle(message: Message) -> None:
        tries.append(message.data)
        if wrapped == "bare":
            raise FatalError("broken")
        if wrapped == "group":
            raise ExceptionGroup("two", [ValueError(), FatalError("broken")])
        if wrapped == "cause of a group":
            raise ExceptionGroup("one", [ValueError()]) from FatalError("broken")
        raise RuntimeError("outer") from FatalError("broken")

    await Publisher(bus, "TRIGGERS").publish("a", b"x")
    async with Running(Consumer(bus, "TRIGGERS", "worker", policy=QUICK), handle):
        await until(lambda: tries)
        async with asyncio.timeout(20):
            while not (found := await letters(bus)):
                await asyncio.sleep(0.02)
    assert (len(tries), found[0].error, found[0].group) == (1, "broken", "worker")


async def test_a_handler_may_settle_by_itself(bus: Bus) -> None:
    tries: list[int] = []

    async def handle(message: Message) -> None:
        tries.append(message.metadata.deliveries)
        await message.in_progress()
        if len(tries) == 1:
            assert await message.nak(0.1)

    await Publisher(bus, "TRIGGERS").publish("a", b"x")
    async with Running(Consumer(bus, "TRIGGERS", "worker", policy=QUICK), handle):
        await until(lambda: len(tries) == 2)
    assert tries == [1, 2]


async def test_messages_of_one_number_go_to_one_worker_in_order(bus: Bus) -> None:
    publisher = Publisher(bus, "TRIGGERS")
    for number in range(60):
        await publisher.publish("a", f"{number % 3}:{number}".encode())
    seen: dict[str, list[int]] = {}
    workers: dict[str, set[str]] = {}

    async def handle(message: Message) -> None:
        key, _, number = message.data.decode().partition(":")
        task = asyncio.current_task()
        assert task is not None
        workers.setdefault(key, set()).add(task.get_name())
        await asyncio.sleep(0.001 * (int(number) % 2))
        seen.setdefault(key, []).append(int(number))

    consumer = Consumer(bus, "TRIGGERS", "worker", partitioner=lambda data: data[0], workers=4)
    async with Running(consumer, handle):
        await until(lambda: sum(map(len, seen.values())) == 60)
    assert all(len(names) == 1 for names in workers.values())
    assert seen == {str(rest): list(range(rest, 60, 3)) for rest in range(3)}


async def test_sixteen_workers_work_at_once(bus: Bus) -> None:
    publisher = Publisher(bus, "TRIGGERS")
    for _ in range(16):
        await publisher.publish("a", b"x")
    barrier = threading.Barrier(16, timeout=15)
    done: list[int] = []

    def handle(_: Message) -> None:
        barrier.wait()
        done.append(1)

    async with Running(Consumer(bus, "TRIGGERS", "worker"), handle):
        await until(lambda: len(done) == 16)
    assert barrier.broken is False


async def test_hooks_hear_every_attempt(bus: Bus) -> None:
    sent: list[tuple[str, str]] = []
    handled: list[tuple[str, str]] = []

    def on_publish(subject: str, error: BaseException | None, latency_s: float) -> None:
        assert latency_s >= 0
        sent.append((subject, type(error).__name__))

    def on_message(subject: str, error: BaseException | None, latency_s: float) -> None:
        handled.append((subject, type(error).__name__))

    async def handle(message: Message) -> None:
        if message.metadata.deliveries == 1:
            raise ValueError

    publisher = Publisher(bus, "TRIGGERS", prefix="T", on_publish=on_publish)
    with pytest.raises(InvalidEvent):
        await publisher.publish("a", "text")  # type: ignore[arg-type]
    await publisher.publish("a", b"x")
    consumer = Consumer(bus, "TRIGGERS", "worker", policy=QUICK, on_message=on_message)
    async with Running(consumer, handle):
        await until(lambda: len(handled) == 2)
    assert sent == [("T.a", "InvalidEvent"), ("T.a", "NoneType")]
    assert handled == [("T.a", "ValueError"), ("T.a", "NoneType")]


async def test_an_error_of_a_hook_stops_nobody(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    def broken(subject: str, error: BaseException | None, latency_s: float) -> None:
        raise RuntimeError("no metrics")

    publisher = Publisher(bus, "TRIGGERS", on_publish=broken)
    for _ in range(20):
        assert (await publisher.publish("a", b"x")).offset
    got: list[Message] = []
    consumer = Consumer(bus, "TRIGGERS", "worker", workers=2, buffer=1, on_message=broken)
    async with Running(consumer, got.append):
        await until(lambda: len(got) == 20)
    raised = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert raised.count("no metrics") == 40


@pytest.mark.parametrize("cause", ["handler", "partitioner"])
async def test_no_worker_ends_by_what_a_message_does(bus: Bus, cause: str) -> None:
    """A handler whose own wait was cancelled failed, and so did a message that a partitioner cannot
    read: both are tried again, then they are dead letters, and the others are handled.
    """
    publisher = Publisher(bus, "TRIGGERS")
    for number in range(12):
        await publisher.publish("a", b"bad" if number in (0, 1) else str(number).encode())
    got: list[bytes] = []

    async def handle(message: Message) -> None:
        if message.data == b"bad":
            raise asyncio.CancelledError
        got.append(message.data)

    consumer = Consumer(
        bus,
        "TRIGGERS",
        "worker",
        workers=2,
        buffer=1,
        partitioner=int if cause == "partitioner" else None,
        policy=QUICK,
    )
    async with Running(consumer, handle):
        await until(lambda: len(got) == 10)
        async with asyncio.timeout(20):
            while len(await letters(bus)) < 2:
                await asyncio.sleep(0.02)


async def test_a_consumer_keeps_its_messages_by_the_timeout_that_the_group_has(bus: Bus) -> None:
    """A consumer without a policy of its own joins a group whose timeout is short."""
    await Publisher(bus, "TRIGGERS").publish("a", b"x")
    short = GroupOptions(ordering="none", ack_timeout_s=0.5, backoff_base_s=0.0)
    async with bus.subscribe("TRIGGERS", group="worker", policy=short):
        pass
    tries: list[int] = []

    async def handle(message: Message) -> None:
        tries.append(message.metadata.deliveries)
        await asyncio.sleep(2.5)

    async with Running(Consumer(bus, "TRIGGERS", "worker"), handle):
        await until(lambda: tries)
        await asyncio.sleep(2.0)
    assert len(tries) == 1
    assert await bus.lag("TRIGGERS", "worker") == 0


async def test_a_stop_before_the_run_ends_it(bus: Bus) -> None:
    consumer = Consumer(bus, "TRIGGERS", "worker")
    running = asyncio.ensure_future(consumer.run(lambda _: None))
    consumer.stop()
    await asyncio.wait({running}, timeout=20)
    assert running.done()
    assert running.exception() is None


def test_the_numbers_that_are_promised() -> None:
    default = inspect.signature(Consumer).parameters
    names = ("workers", "buffer", "drain_timeout_s", "shutdown_timeout_s", "partitioner")
    assert [default[name].default for name in names] == [16, 100, 5.0, 30.0, None]


async def test_a_stop_works_off_the_buffer_and_gives_back_the_rest(bus: Bus) -> None:
    publisher = Publisher(bus, "TRIGGERS")
    for number in range(10):
        await publisher.publish("a", str(number).encode())
    begun, go, done = asyncio.Event(), asyncio.Event(), []

    async def handle(message: Message) -> None:
        begun.set()
        await go.wait()
        done.append(message.data)

    consumer = Consumer(
        bus, "TRIGGERS", "worker", workers=1, buffer=5, drain_timeout_s=0.2, policy=QUICK
    )
    task = asyncio.ensure_future(consumer.run(handle))
    await begun.wait()
    consumer.stop()
    await asyncio.sleep(0.5)
    assert not task.done(), "a running handler may end within the time for a shutdown"
    go.set()
    await asyncio.wait_for(task, 20)
    assert done == [b"0"]
    rest: list[bytes] = []
    async with Running(
        Consumer(bus, "TRIGGERS", "worker"), lambda message: rest.append(message.data)
    ):
        await until(lambda: len(rest) == 9)
    assert sorted(rest) == [str(number).encode() for number in range(1, 10)]


async def test_a_shutdown_ends_a_handler_that_takes_too_long(bus: Bus) -> None:
    await Publisher(bus, "TRIGGERS").publish("a", b"x")
    begun = asyncio.Event()

    async def handle(_: Message) -> None:
        begun.set()
        await asyncio.Event().wait()

    consumer = Consumer(
        bus, "TRIGGERS", "worker", drain_timeout_s=0.05, shutdown_timeout_s=0.05, policy=QUICK
    )
    task = asyncio.ensure_future(consumer.run(handle))
    await begun.wait()
    consumer.stop()
    await asyncio.wait_for(task, 20)
    got: list[int] = []
    async with Running(
        Consumer(bus, "TRIGGERS", "worker"),
        lambda message: got.append(message.metadata.deliveries),
    ):
        await until(lambda: got)
    assert got == [2]


async def test_a_stream_is_made_once_and_not_narrowed_by_a_consumer(bus: Bus) -> None:
    with pytest.raises(NotFound):
        await Publisher(bus, "TRIGGERS", create=False).publish("a", b"x")
    await Publisher(bus, "TRIGGERS", options={"partitions": 2}).publish("a", b"x")
    consumer = Consumer(bus, "TRIGGERS", "worker", options={"partitions": 1})
    got: list[bytes] = []
    async with Running(consumer, lambda message: got.append(message.data)):
        await until(lambda: got)
    assert (await bus.topics())["TRIGGERS"].partitions == 2


async def test_bad_input_is_refused(bus: Bus) -> None:
    for subject in ("", "a..b", "a b", "a.*", "a.>"):
        with pytest.raises(InvalidName):
            await Publisher(bus, "TRIGGERS").publish(subject, b"x")
    for pattern in ("a.>.b", "", "a b"):
        with pytest.raises(InvalidName):
            Consumer(bus, "TRIGGERS", "worker", filter=pattern)
    for options in ({"workers": 0}, {"buffer": 0}, {"drain_timeout_s": -1}, {"partitioner": 3}):
        with pytest.raises(InvalidOption):
            Consumer(bus, "TRIGGERS", "worker", **options)  # type: ignore[arg-type]
    assert "TRIGGERS" not in await bus.topics()


async def test_the_bus_stays_open_when_a_publisher_closes(bus: Bus) -> None:
    async with Publisher(bus, "TRIGGERS") as publisher:
        await publisher.publish("a", b"x")
    assert (await bus.publish("TRIGGERS", 1)).offset == 2


async def test_an_error_of_the_server_reaches_the_caller() -> None:
    bus = trunkline.connect("nats://127.0.0.1:1", connect_timeout_s=0.2)
    with pytest.raises(ConnectionLost):
        await Publisher(bus, "TRIGGERS").publish("a", b"x")
    await bus.close()
