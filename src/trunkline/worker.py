"""Run a handler over any subscription: what it returns or raises becomes the delivery's outcome."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sysconfig
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

from trunkline.bus import Delivery, Outcome, Subscription
from trunkline.clock import Clock
from trunkline.errors import InvalidOption, Reject, Retry
from trunkline.middleware import compose
from trunkline.options import GroupOptions

_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    os.path.dirname(__file__),
    "<frozen",
)
_THREADS = 10_000  # no bound: that is the workers, and one that hangs shall not hold up the next
logger = logging.getLogger(__name__)

Handler = Callable[..., Any]
OnMessage = Callable[[str, BaseException | None, float], None]


def check_handler(handler: Handler) -> bool:
    """Whether a handler takes the event and the delivery, or (False) the event alone;
    ``InvalidOption`` for what takes neither, which would fail for every event.
    """
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        # Calling it does nothing yet, and so it would never fail either.
        raise InvalidOption(f"a handler does not yield: {handler!r}", name="handler")
    try:
        signature = inspect.signature(handler)
        needed = [
            p
            for p in signature.parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        ]
        both = len(needed) > 1
        signature.bind(*((None, None) if both else (None,)))
    except ValueError:  # a builtin that does not say what it takes
        return False
    except TypeError as error:
        raise InvalidOption(
            f"not a handler: {handler!r}: {error}",
            name="handler",
            hint="a handler takes the event, or the event and the delivery",
        ) from None
    return both


def awaited(handler: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """A function as something to await. A plain one runs in a thread, so that it may block: one of
    its own, for the loop's few are those by which the bus itself gets on.
    """
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004 -- a callable object may be async
    ):
        return handler
    threads = ThreadPoolExecutor(_THREADS, "trunkline-handler")  # they end with it

    def run_there(*args: Any) -> Any:
        try:
            return handler(*args)
        except StopIteration as error:  # no future can hold it: who waits would do so for ever
            told = RuntimeError("the handler raised StopIteration")
            raise told.with_traceback(error.__traceback__) from error

    async def call(*args: Any) -> Any:
        job = partial(copy_context().run, run_there, *args)
        result = await asyncio.get_running_loop().run_in_executor(threads, job)
        return await result if inspect.isawaitable(result) else result

    return call


def adapt(handler: Handler) -> Callable[[Delivery], Awaitable[Any]]:
    """A handler takes the event, or the event and the delivery."""
    both = check_handler(handler)
    handle = awaited(handler)

    async def call(delivery: Delivery) -> Any:
        return await (handle(delivery.event, delivery) if both else handle(delivery.event))

    return call


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
        elif delivery.topic not in self._timeouts or delivery.lease.until < self._kept_from:
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
    subscription: Subscription,
    handler: Handler,
    workers: int,
    middleware: Sequence[object] = (),
    on_message: OnMessage | None = None,
    keeper: Keeper | None = None,
) -> None:
    """Handle deliveries with ``workers`` at a time, until cancelled."""
    call = compose(middleware, "handle", adapt(handler))

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


def _failed(delivery: Delivery, error: BaseException) -> BaseException:
    logger.warning("%r failed: %r at %s", delivery, error, _place(error))
    delivery.finish(Outcome.NACK, None, f"{type(error).__name__}: {error}".removesuffix(": "))
    return error


def _place(error: BaseException) -> str:
    """Where in the user's code it happened: the innermost line that is of no library, if any."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    found = (own or frames)[-1]
    return f"{found.filename}:{found.lineno}"
