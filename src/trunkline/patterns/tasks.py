"""A task queue over any bus: a task is an event, its workers are a group.

Results and cancellations are events too: ``<topic>.results`` and ``<topic>.cancel``. A task is done
when its worker returns; it is tried again, with the group's backoff, when the worker raises; when
no try is left it is a dead letter.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, ParamSpec, Self, TypedDict, TypeVar, Unpack

import msgspec

from trunkline.bus import Bus, Delivery
from trunkline.check import check_count, check_delay
from trunkline.delivery.arguments import check_handler, readers_of
from trunkline.delivery.worker import awaited
from trunkline.errors import Conflict, Denied, InvalidEvent, Reject, TrunklineError
from trunkline.event import Event, Priority, new_id
from trunkline.names import check_topic
from trunkline.options import WORKERS_MAX, GroupOptions
from trunkline.patterns.replies import (
    ERROR,
    REPLY_TO,
    Opened,
    Refused,
    Replies,
    check_bus,
    define_short_lived,
    forget_group,
    forget_left,
    guarded_as,
    own_group,
)

logger = logging.getLogger(__name__)

P = TypeVar("P")
R = TypeVar("R")
A = ParamSpec("A")
_CANCELLED = "cancelled"
_PREFIX = "cancel-"
_REMEMBERED = 1_000_000  # what is forgotten is done after all
_KEPT_S = 7 * 86_400.0
_HEARD_IN = timedelta(seconds=1)  # a cancellation, by every worker


class Task(msgspec.Struct, Generic[P], frozen=True):
    """A task in a worker's hands."""

    id: str
    topic: str
    payload: P
    priority: str = "normal"
    attempt: int = 1
    name: str | None = None  # of a function that was made a task


class Ticket:
    """A task that was handed in."""

    __slots__ = ("_due", "_queue", "_result", "id")

    def __init__(
        self,
        queue: TaskQueue,
        id_: str,
        result: asyncio.Future[Event] | None,
        due: datetime | None = None,
    ) -> None:
        self.id = id_
        self._queue = queue
        self._result = result
        self._due = due

    async def result(self, timeout_s: float | None = None) -> Any:
        """What the worker returned; ``Refused`` if it rejected the task, if the last try failed or
        if it was cancelled.
        """
        check_delay(timeout_s, "timeout_s")
        if self._result is None:
            raise RuntimeError("enqueue(result=True) to wait for a result")
        try:
            async with asyncio.timeout(timeout_s):
                event = await asyncio.shield(self._result)
        except TimeoutError:
            said = f"task {self.id} on {self._queue.topic} has no result after {timeout_s} s"
            raise TimeoutError(said) from None
        if ERROR in event.headers:
            raise Refused(event.headers[ERROR])
        return event.payload

    async def cancel(self) -> None:
        """As of the queue. One whose time is still to come has its answer at once."""
        await self._queue.cancel(self.id)
        result = self._result
        if result is not None and not result.done() and self._queue.is_ahead(self._due):
            headers = {ERROR: _CANCELLED}
            result.set_result(Event(topic=self._queue.topic, cause=self.id, headers=headers))


class NamedTask(Generic[A, R]):
    """A function that is a task of a queue. Call it, or hand it in with ``delay``."""

    def __init__(
        self,
        queue: TaskQueue,
        function: Callable[A, R],
        name: str,
        options: EnqueueFields | None = None,
    ) -> None:
        self._queue = queue
        self._function = function
        self.name = name
        self._options: EnqueueFields = options or {}
        inspect.signature(function)

    def __call__(self, *args: A.args, **kwargs: A.kwargs) -> R:
        return self._function(*args, **kwargs)

    def options(self, **options: Unpack[EnqueueFields]) -> NamedTask[A, R]:
        """The same task, handed in with a key, a priority, a delay, or to give its result."""
        return NamedTask(self._queue, self._function, self.name, {**self._options, **options})

    async def delay(self, *args: A.args, **kwargs: A.kwargs) -> Ticket:
        """Hand it in with these arguments; returns once it is durable."""
        payload = {"args": list(args), "kwargs": kwargs}
        return await self._queue.enqueue(payload, type=self.name, **self._options)


def _called_by(function: Callable[..., Any]) -> Callable[[dict[str, Any]], Awaitable[Any]]:
    """A function as one of the payload that ``delay`` makes of its arguments."""
    signature = inspect.signature(function)
    readers = readers_of(function)
    call = awaited(function)

    async def with_payload(payload: Any) -> Any:
        try:
            bound = signature.bind(*payload["args"], **payload["kwargs"])
        except (TypeError, KeyError) as error:
            raise Reject(f"the arguments do not fit {function.__name__}: {error}") from None
        for name in bound.arguments.keys() & readers.keys():
            bound.arguments[name] = readers[name](bound.arguments[name])
        return await call(*bound.args, **bound.kwargs)

    return with_payload


class EnqueueFields(TypedDict, total=False):
    """What ``enqueue`` takes besides the payload, and is the same for each call of a task."""

    key: str | None
    priority: Priority | Literal[0, 1, 2, 3]
    delay_s: float | None
    result: bool


class TaskQueue:
    """Enter it to wait for results or to work; ``enqueue`` alone needs neither. ``opened`` opens
    sealed results and cancellations, such as ``vault.open``.
    """

    def __init__(
        self, bus: Bus, topic: str, group: str = "workers", *, opened: Opened | None = None
    ) -> None:
        self._bus = check_bus(bus, "TaskQueue")
        self.topic = check_topic(topic)
        self.group = group
        self._opened: Opened = opened or (lambda event: event)
        self._results = Replies(bus, f"{topic}.results", opened=opened)
        self._cancel_topic = f"{topic}.cancel"
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._watch_group = own_group(_PREFIX)
        self._starting = asyncio.Lock()
        self._named: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {}
        self._stack = contextlib.AsyncExitStack()
        self._entered = False

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._results)
        self._entered = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._entered = False
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        await self._stack.aclose()
        if watcher is not None:  # a member that leaves would make the group anew
            await forget_group(self._bus, self._cancel_topic, self._watch_group)

    async def enqueue(
        self,
        payload: Any,
        key: str | None = None,
        *,
        priority: Priority | Literal[0, 1, 2, 3] = "normal",
        delay_s: float | None = None,
        result: bool = False,
        **fields: Any,
    ) -> Ticket:
        """Hand in a task; returns once it is durable. Tasks of one key are done one by one."""
        id_ = fields.pop("id", None) or new_id()
        waiting = None
        headers = fields.pop("headers", {})
        if not isinstance(headers, Mapping):
            raise InvalidEvent("headers is a mapping of text to text", field="headers")
        headers = dict(headers)
        if result:
            if not self._entered:
                raise RuntimeError("enter the queue to wait for results")
            headers[REPLY_TO] = self._results.topic
            waiting = self._results.expect(id_)
        if delay_s is not None:
            fields["delay_s"] = delay_s
        now = self._bus.clock.now()
        try:
            await self._bus.publish(
                self.topic,
                {"payload": payload},
                key=key,
                priority=priority,
                id=id_,
                headers=headers,
                **fields,
            )
        except BaseException:
            if waiting is not None:
                waiting.cancel()
            raise
        due = fields.get("not_before") if delay_s is None else now + timedelta(seconds=delay_s)
        return Ticket(self, id_, waiting, due)

    def is_ahead(self, due: datetime | None) -> bool:
        """Whether workers hear of a cancellation before that time."""
        return due is not None and due - self._bus.clock.now() > _HEARD_IN

    async def cancel(self, id_: str) -> None:
        """Ask that a task is not done: one that waits is passed over, one that runs is stopped.
        Workers know of the last million of the last 7 days.
        """
        await define_short_lived(self._bus, self._cancel_topic, _KEPT_S)
        await self._bus.publish(self._cancel_topic, {"id": id_}, key=id_)

    def task(self, function: Callable[A, R]) -> NamedTask[A, R]:
        """Make a function a task of this queue, by its name. ``await function.delay(x)`` hands it
        in; workers of ``work`` without a handler do it. Its annotations decide what its arguments
        are, as those of a handler do.
        """
        name = getattr(function, "__name__", "")
        if not name or name in self._named:
            raise Conflict(f"a second task {name!r} on {self.topic}", topic=self.topic)
        self._named[name] = _called_by(function)
        return NamedTask(self, function, name)

    async def _do_named(self, task: Task[Any]) -> Any:
        call = self._named.get(task.name or "")
        if call is None:
            known = ", ".join(sorted(self._named)) or "none"
            raise Reject(f"there is no task {task.name!r} on {self.topic} (tasks: {known})")
        return await call(task.payload)

    async def work(
        self,
        handler: Callable[[Task[Any]], Any] | None = None,
        *,
        workers: int = 1,
        policy: GroupOptions | None = None,
        max_inflight: int = 16,
    ) -> None:
        """Do tasks, ``workers`` at a time, from the moment the bus is started. A handler takes the
        task; without one the functions of ``task`` are called. ``Reject`` gives a task up, any
        other error has it tried again, and the last one is told to the caller that
        waits for the result.
        """
        check_handler(self._do_named if handler is None else handler)
        check_count("workers", workers, 1, WORKERS_MAX)
        check_count("max_inflight", max_inflight, 1)
        await self._hear_cancels()
        self.serve(handler, workers=workers, policy=policy, max_inflight=max_inflight)

    def serve(
        self,
        handler: Callable[[Task[Any]], Any] | None = None,
        *,
        workers: int = 1,
        policy: GroupOptions | None = None,
        max_inflight: int = 16,
    ) -> None:
        """``work`` without the await, for a module that ``trunkline run`` imports."""
        handler = self._do_named if handler is None else handler
        check_handler(handler)
        check_count("workers", workers, 1, WORKERS_MAX)
        check_count("max_inflight", max_inflight, 1)
        call = awaited(handler)

        async def handle(event: Event, delivery: Delivery) -> Any:
            await self._hear_cancels()
            return await self._handle(call, event, delivery)

        handle.__qualname__ = getattr(handler, "__qualname__", "task")

        self._bus.on(
            self.topic,
            group=self.group,
            workers=workers,
            policy=policy,
            max_inflight=max(workers, max_inflight),
        )(handle)

    async def _handle(
        self, call: Callable[..., Awaitable[Any]], event: Event, delivery: Delivery
    ) -> None:
        if event.id in self._cancelled:
            await self._reply(event, None, _CANCELLED)
            return
        payload = event.payload
        if isinstance(payload, dict) and payload.keys() == {"payload"}:
            payload = payload["payload"]
        task = Task(event.id, event.topic, payload, event.priority, delivery.attempt, event.type)
        job = asyncio.ensure_future(call(task))
        self._running[event.id] = job
        try:
            result = await job
        except asyncio.CancelledError:
            if event.id not in self._cancelled:
                job.cancel()
                raise
            await self._reply(event, None, _CANCELLED)
        except Reject as signal:
            await self._reply(event, None, signal.reason)
            raise
        except Exception as error:
            if REPLY_TO in event.headers and await self._is_last(delivery):
                await self._reply(event, None, f"{type(error).__name__}: {error}")
            raise
        else:
            await self._reply(event, result)
        finally:
            self._running.pop(event.id, None)

    async def _is_last(self, delivery: Delivery) -> bool:
        """Whether no try is left after this one; False if that cannot be told. The group is asked:
        it may be older than this worker, and its policy may have been edited.
        """
        try:
            policy: GroupOptions = await self._bus.policy_of(delivery)
        except TrunklineError as error:
            logger.warning("whether %s is tried again cannot be told: %s", delivery.event.id, error)
            return False
        return delivery.attempt > policy.max_retries

    async def _reply(self, event: Event, result: Any, error: str | None = None) -> None:
        where = event.headers.get(REPLY_TO)
        if where is not None:
            headers = {} if error is None else {ERROR: error[:1000]}
            guarded = guarded_as(event)
            await self._bus.publish(
                where, result, cause=event.id, type="result", headers=headers, **guarded
            )

    async def _hear_cancels(self) -> None:
        if self._watcher is None:
            async with self._starting:
                if self._watcher is None:
                    await self._watch()
                    self._bus.at_close(self.__aexit__)  # a bus may be closed before it is left

    async def _watch(self) -> None:
        """Know what is cancelled, also what was before this worker began."""
        await define_short_lived(self._bus, self._cancel_topic, _KEPT_S)
        await forget_left(self._bus, self._cancel_topic, _PREFIX)
        stream = self._bus.subscribe(self._cancel_topic, group=self._watch_group, start="earliest")
        await stream.__aenter__()
        self._stack.push_async_callback(stream.close)
        mark, caught_up = new_id(), asyncio.Event()

        async def watch() -> None:
            try:
                async for delivery in stream:
                    self._note(self._opened(delivery.event).payload)
                    await delivery.ack()
                    if delivery.event.id == mark:
                        caught_up.set()
            except TrunklineError as error:
                logger.warning("cancellations are not heard any more: %s", error)
            finally:
                caught_up.set()

        self._watcher = asyncio.get_running_loop().create_task(watch())
        with contextlib.suppress(Denied):  # a worker that may not cancel hears of it even so
            await self._bus.publish(self._cancel_topic, {"id": None}, id=mark)
            await caught_up.wait()

    def _note(self, payload: Any) -> None:
        id_ = payload.get("id") if isinstance(payload, dict) else None
        if not isinstance(id_, str):
            return
        self._cancelled[id_] = None
        while len(self._cancelled) > _REMEMBERED:
            self._cancelled.popitem(last=False)
        running = self._running.get(id_)
        if running is not None:
            running.cancel()
