"""Run a handler over any subscription: what it returns or raises becomes the delivery's outcome."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sysconfig
import time
import traceback
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, Self

from trunkline.bus import Delivery, Handler, Outcome
from trunkline.clock import Clock
from trunkline.delivery.arguments import arguments_of, check_handler
from trunkline.delivery.deadletters import TRACEBACK
from trunkline.errors import Reject, Retry
from trunkline.middleware import compose
from trunkline.options import GroupOptions

_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    os.path.dirname(__file__),
    "<frozen",
)
__all__ = ["Call", "Keeper", "OnMessage", "adapt", "awaited", "check_handler", "run"]
_THREADS = 10_000  # no bound: that is the workers, and one that hangs shall not hold up the next
_FRAMES = 12  # of a traceback that a letter keeps
logger = logging.getLogger(__name__)

OnMessage = Callable[[str, BaseException | None, float], None]
Call = Callable[[Delivery], Awaitable[Any]]


def awaited(handler: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """A function as something to await. A plain function runs in a thread, so that it may block. It
    has a pool of its own: the loop's default pool is small, and the bus itself needs it.
    """
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004 -- a callable object may be async
    ):
        return handler
    threads = ThreadPoolExecutor(_THREADS, "trunkline-handler")  # they end with it

    def run_there(*args: Any, **named: Any) -> Any:
        try:
            return handler(*args, **named)
        except StopIteration as error:  # a future cannot hold it: the worker would wait for ever
            told = RuntimeError("the handler raised StopIteration")
            raise told.with_traceback(error.__traceback__) from error

    async def call(*args: Any, **named: Any) -> Any:
        job = partial(copy_context().run, partial(run_there, *args, **named))
        result = await asyncio.get_running_loop().run_in_executor(threads, job)
        return await result if inspect.isawaitable(result) else result

    return call


def adapt(handler: Handler, timeout_s: float | None = None) -> Call:
    """A handler as a function of the delivery: its annotations say what it is called with. A call
    that takes longer than ``timeout_s`` raises ``TimeoutError``; the thread of a plain function
    goes on, and its result counts for nothing.
    """
    arguments = arguments_of(handler)
    handle = awaited(handler)

    async def call(delivery: Delivery) -> Any:
        return await handle(*arguments(delivery))

    async def call_in_time(delivery: Delivery) -> Any:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await handle(*arguments(delivery))
        except TimeoutError as error:
            if not limit.expired():
                raise
            said = f"the handler took longer than {timeout_s:g} s"
            where = (error.__cause__ or error).__traceback__  # where it was when time was up
            raise TimeoutError(said).with_traceback(where) from None

    return call if timeout_s is None else call_in_time


class Keeper:
    """As long as a handler runs its delivery is its own: this begins the ack timeout anew of what
    takes long, so that it counts from the moment at which the process hangs or dies.
    """

    def __init__(
        self, workers: int, clock: Clock, policy_of: Callable[[Delivery], Awaitable[GroupOptions]]
    ) -> None:
        self._hands: list[Delivery | None] = [None] * workers
        self._clock = clock
        self._policy_of = policy_of
        self._timeouts: dict[str, float] = {}  # of the topics that were met so far
        self._look = asyncio.Event()
        self._kept_from = 0.0  # what is leased until then would end before it is kept
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None

    def begin(self, worker: int, delivery: Delivery) -> None:
        self._hands[worker] = delivery
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep())
        elif (
            delivery.record.event.topic not in self._timeouts
            or delivery.lease.until < self._kept_from
        ):
            self._look.set()  # its timeout may be shorter than the others', or than it was

    async def _keep(self) -> None:
        """Until nothing is at work: what is quick costs next to nothing so."""
        before: set[Delivery] = set()
        while at_work := {d for d in self._hands if d is not None and d.outcome is None}:
            for delivery in at_work & before:
                delivery.extend()
            before = at_work
            self._look.clear()
            await self._ask(at_work)
            pause_s = min(self._timeouts.values()) / 4
            self._kept_from = self._clock.monotonic() + 2 * pause_s
            alarm = self._clock.call_later(pause_s, self._look.set)
            try:
                await self._look.wait()
            finally:
                alarm.cancel()
        self._task = None

    async def _ask(self, at_work: set[Delivery]) -> None:
        """Learn how long the deliveries of these groups may take: that may have been edited."""
        found: dict[str, float] = {}
        trouble = ""
        for delivery in {(d.topic, d.partition): d for d in at_work}.values():
            topic, timeout_s = delivery.topic, GroupOptions().ack_timeout_s
            try:
                timeout_s = (await self._policy_of(delivery)).ack_timeout_s
            except Exception as error:  # noqa: BLE001 -- the next look asks again
                trouble = str(error)
                timeout_s = self._timeouts.get(topic, timeout_s)
            found[topic] = min(timeout_s, found.get(topic, timeout_s))
        self._timeouts |= found
        if trouble and trouble != self._trouble:  # it is asked again soon, and may last
            logger.warning("how long deliveries may take cannot be told: %s", trouble)
        self._trouble = trouble

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


async def run(
    subscription: AsyncIterable[Delivery],
    handle: Call,
    workers: int,
    middleware: Sequence[object] = (),
    on_message: OnMessage | None = None,
    keeper: Keeper | None = None,
) -> None:
    """Handle deliveries with ``workers`` at a time, until cancelled."""
    call = compose(middleware, "handle", handle)

    async def work(number: int) -> None:
        async for delivery in subscription:
            if keeper is not None:
                keeper.begin(number, delivery)
            started = time.perf_counter() if on_message else 0.0
            error = await _handle(call, delivery)
            if on_message is not None:
                on_message(delivery.topic, error, time.perf_counter() - started)

    try:
        async with asyncio.TaskGroup() as tasks:
            for number in range(workers):
                tasks.create_task(work(number))
    finally:
        if keeper is not None:
            await keeper.close()


async def _handle(
    call: Callable[[Delivery], Awaitable[Any]], delivery: Delivery
) -> BaseException | None:
    try:
        await call(delivery)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            delivery.finish(Outcome.NACK, 0.0, "the worker was stopped")
            raise
        return _failed(delivery, error)  # what the handler waited for was cancelled, not the worker
    except Retry as signal:
        delivery.finish(Outcome.NACK, signal.delay_s, str(signal))
        return signal
    except Reject as signal:
        delivery.finish(Outcome.TERM, None, signal.reason)
        return signal
    except Exception as error:  # noqa: BLE001 -- a handler may fail in any way
        return _failed(delivery, error)
    delivery.finish(Outcome.ACK)
    return None


class _Failure(str):
    """Why a handler failed, with its traceback. In this process it has the error itself besides."""

    cause: BaseException

    @classmethod
    def of(cls, error: BaseException) -> Self:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        frames = _frames(error)
        failure = cls(text + TRACEBACK + "".join(traceback.format_list(frames)) if frames else text)
        failure.cause = error
        return failure


def _failed(delivery: Delivery, error: BaseException) -> BaseException:
    logger.warning("%r failed: %r at %s", delivery, error, _place(error))
    logger.debug("%r failed", delivery, exc_info=error)
    delivery.finish(Outcome.NACK, None, _Failure.of(error))
    return error


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The innermost frames, from the handler's first one on."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [at for at, frame in enumerate(frames) if not frame.filename.startswith(_LIBRARIES)]
    return frames[own[0] if own else 0 :][-_FRAMES:]


def _place(error: BaseException) -> str:
    """Where in the user's code it happened: the innermost line that is of no library, if any."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    found = (own or frames)[-1]
    return f"{found.filename}:{found.lineno}"
