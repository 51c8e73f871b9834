"""Consume bytes by subject, with a pool of workers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from trunkline.bus import Bus, Delivery, Subscription
from trunkline.check import check_count, check_span
from trunkline.delivery.worker import awaited
from trunkline.errors import Closed, FatalError, InvalidOption
from trunkline.event import Event
from trunkline.names import check_group, check_topic
from trunkline.options import WORKERS_MAX, GroupOptions, OnConflict, TopicFields
from trunkline.pubsub.hooks import Hook, tell
from trunkline.pubsub.message import Message, check_subjects, is_wanted, subject_of
from trunkline.pubsub.streams import ensure_stream

logger = logging.getLogger(__name__)

MessageHandler = Callable[[Message], Awaitable[None]] | Callable[[Message], None]
WORKERS = 16
BUFFER = 100
DRAIN_S = 5.0
SHUTDOWN_S = 30.0


class Consumer:
    """A member of the consumer ``name`` on one stream; the members share its messages.

    A handler that returns acks. ``FatalError``, also as the cause of another error, terminates the
    message and leaves a dead letter. Any other error naks with backoff. ``partitioner`` maps the
    data to a number: messages of one number go to one worker, in order. Without it workers take
    turns.
    """

    def __init__(
        self,
        bus: Bus,
        stream: str,
        name: str,
        *,
        filter: str | None = None,
        workers: int = WORKERS,
        buffer: int = BUFFER,
        drain_timeout_s: float = DRAIN_S,
        shutdown_timeout_s: float = SHUTDOWN_S,
        partitioner: Callable[[bytes], int] | None = None,
        on_message: Hook | None = None,
        policy: GroupOptions | None = None,
        create: bool = True,
        options: TopicFields | None = None,
    ) -> None:
        check_count("workers", workers, 1, WORKERS_MAX)
        check_count("buffer", buffer, 1)
        check_span(drain_timeout_s, "drain_timeout_s")
        check_span(shutdown_timeout_s, "shutdown_timeout_s")
        if partitioner is not None and not callable(partitioner):
            raise InvalidOption("a partitioner is a function of the data", name="partitioner")
        self._bus = bus
        self._stream = check_topic(stream)
        self._name = check_group(name)
        self._filter = None if filter is None else check_subjects(filter)
        self._buffer = buffer
        self._drain_s = drain_timeout_s
        self._shutdown_s = shutdown_timeout_s
        self._partitioner = partitioner
        self._on_message = on_message
        self._policy = policy or GroupOptions(ordering="none")
        # Without a policy of its own a consumer takes that of the members before it.
        self._on_conflict: OnConflict = "keep" if policy is None else "raise"
        self._create = create
        self._options = options
        self._queues: list[asyncio.Queue[Message]] = [asyncio.Queue(buffer) for _ in range(workers)]
        self._turns = itertools.count()
        self._open: dict[Message, Delivery] = {}
        self._ack_timeout_s = self._policy.ack_timeout_s
        self._begun = asyncio.Event()  # the first message is there
        self._running = False
        self._stop = asyncio.Event()

    async def run(self, handler: MessageHandler) -> None:
        """Handle messages until ``stop`` or until cancelled. Then no new message is taken: buffered
        messages are worked off for ``drain_timeout_s``, running handlers may end within
        ``shutdown_timeout_s``. The other messages are delivered again.
        """
        if self._running:
            raise Closed("the consumer runs already")
        self._running = True
        call: Callable[[Message], Awaitable[Any]] = awaited(handler)
        try:
            await ensure_stream(self._bus, self._stream, self._create, self._options)
            async with self._subscribe() as stream:
                await self._work(stream, call)
        finally:
            self._running = False
            self._stop.clear()

    def stop(self) -> None:
        """Let ``run`` end, also one that is about to begin."""
        self._stop.set()

    def _subscribe(self) -> Subscription:
        wanted = self._filter

        def match(event: Event) -> bool:
            return wanted is None or is_wanted(wanted, subject_of(event))

        return self._bus.subscribe(
            self._stream,
            group=self._name,
            policy=self._policy,
            on_conflict=self._on_conflict,
            max_inflight=len(self._queues) + self._buffer,
            where=None if wanted is None else match,
        )

    async def _work(self, stream: Subscription, call: Callable[[Message], Awaitable[Any]]) -> None:
        loop = asyncio.get_running_loop()
        workers = [loop.create_task(self._handle(queue, call)) for queue in self._queues]
        keeping = loop.create_task(self._keep())
        reading = loop.create_task(self._read(stream))
        stopping = loop.create_task(self._stop.wait())
        try:
            ends = {reading, stopping, keeping, *workers}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await self._end(workers)
            keeping.cancel()
            await asyncio.gather(*workers, keeping, return_exceptions=True)
        for task in (reading, keeping, *workers):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _read(self, stream: Subscription) -> None:
        async for delivery in stream:
            message = Message(delivery)
            self._open[message] = delivery
            self._begun.set()
            try:
                number = self._worker(message)
            except Exception as failure:  # noqa: BLE001 -- a partitioner may fail in any way
                await self._failed(message, failure)
                self._open.pop(message)
                self._tell(message, failure, 0.0)
                continue
            await self._queues[number].put(message)

    def _worker(self, message: Message) -> int:
        if self._partitioner is None:
            return next(self._turns) % len(self._queues)
        return int(self._partitioner(message.data)) % len(self._queues)

    async def _end(self, workers: list[asyncio.Task[None]]) -> None:
        """Work off the buffers, then let running handlers end. The subscription gives back the
        messages that are not settled then.
        """
        working = [asyncio.ensure_future(queue.join()) for queue in self._queues]
        _, late = await asyncio.wait(working, timeout=self._drain_s)
        for queue in self._queues:
            while not queue.empty():
                message = queue.get_nowait()
                self._open.pop(message, None)
                queue.task_done()
        if late:
            await asyncio.wait(late, timeout=self._shutdown_s)
        for task in [*working, *workers]:
            task.cancel()

    async def _handle(
        self, queue: asyncio.Queue[Message], call: Callable[[Message], Awaitable[Any]]
    ) -> None:
        while True:
            message = await queue.get()
            try:
                await self._one(message, call)
            finally:
                self._open.pop(message, None)
                queue.task_done()

    async def _one(self, message: Message, call: Callable[[Message], Awaitable[Any]]) -> None:
        started = time.perf_counter()
        error: BaseException | None = None
        try:
            await call(message)
        except asyncio.CancelledError as failure:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error = failure  # what the handler waited for was cancelled, not the worker
        except Exception as failure:  # noqa: BLE001 -- a handler may fail in any way
            error = failure
        if error is None:
            await message.ack()
        else:
            await self._failed(message, error)
        self._tell(message, error, time.perf_counter() - started)

    async def _failed(self, message: Message, error: BaseException) -> None:
        fatal = fatal_of(error)
        if fatal is not None:
            await message.term(str(fatal))
        else:
            logger.warning("%r failed: %r", message, error)
            await message.nak()

    def _tell(self, message: Message, error: BaseException | None, latency_s: float) -> None:
        tell(self._on_message, message.subject, error, latency_s)

    async def _keep(self) -> None:
        """Messages in buffers and in handlers stay this consumer's."""
        await self._begun.wait()
        while True:
            await asyncio.sleep(await self._timeout_s() / 4)
            for message in list(self._open):
                if not message.is_settled:
                    await message.in_progress()

    async def _timeout_s(self) -> float:
        """The ack timeout of the group: members before may have set another one."""
        for delivery in list(self._open.values())[:1]:
            try:
                self._ack_timeout_s = (await self._bus.policy_of(delivery)).ack_timeout_s
            except Exception as error:  # noqa: BLE001 -- the next look asks again
                logger.warning("how long messages may take cannot be told: %s", error)
        return self._ack_timeout_s


def fatal_of(error: BaseException | None) -> FatalError | None:
    """The ``FatalError`` that an error is, or was raised from, or holds."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, FatalError):
            return error
        if isinstance(error, BaseExceptionGroup):
            held = next(filter(None, map(fatal_of, error.exceptions)), None)
            if held is not None:
                return held
        error = error.__cause__
    return None
