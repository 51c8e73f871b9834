"""The patterns without asyncio: for scripts, Django and Flask, on the bus of ``trunkline.open``.

::

    with trunkline.open("file:.bus") as bus, SyncTaskQueue(bus, "labels") as queue:
        queue.enqueue({"order": 1}, result=True).result(timeout_s=5)

Each one runs its counterpart on the loop of the bus. Handlers are plain functions, in threads.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Literal, ParamSpec, Self, TypeVar

from trunkline.bus.sync import SyncBus
from trunkline.event import Priority
from trunkline.options import GroupOptions
from trunkline.patterns.outbox import Drainer, OutboxStorage
from trunkline.patterns.replies import REPLIES, Requests, respond
from trunkline.patterns.tasks import Task, TaskQueue, Ticket

H = TypeVar("H", bound=Callable[..., Any])
A = ParamSpec("A")
T = TypeVar("T")


def _check(bus: SyncBus, name: str) -> SyncBus:
    if not isinstance(bus, SyncBus):
        raise TypeError(
            f"{name} takes the bus of trunkline.open, not {type(bus).__name__}; "
            f"{name.removeprefix('Sync')} is for the bus of trunkline.connect"
        )
    return bus


class _Entered:
    """Enters and leaves its asynchronous counterpart."""

    _bus: SyncBus

    def _part(self) -> Any:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._bus.call(self._part().__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bus.call(self._part().__aexit__(kind, error, trace))


class SyncTicket:
    """A task that was handed in."""

    def __init__(self, bus: SyncBus, ticket: Ticket) -> None:
        self.id = ticket.id
        self._bus = bus
        self._ticket = ticket

    def result(self, timeout_s: float | None = None) -> Any:
        """What the worker returned; see ``trunkline.patterns.tasks.Ticket``."""
        return self._bus.call(self._ticket.result(timeout_s))

    def cancel(self) -> None:
        self._bus.call(self._ticket.cancel())


class SyncNamedTask(Generic[A, T]):
    """A function that is a task of a queue. Call it, or hand it in with ``delay``."""

    def __init__(self, queue: SyncTaskQueue, function: Callable[A, T], name: str) -> None:
        self._queue = queue
        self._function = function
        self.name = name

    def __call__(self, *args: A.args, **kwargs: A.kwargs) -> T:
        return self._function(*args, **kwargs)

    def delay(self, *args: A.args, **kwargs: A.kwargs) -> SyncTicket:
        """Hand it in with these arguments."""
        payload = {"args": list(args), "kwargs": kwargs}
        return self._queue.enqueue(payload, type=self.name)


class SyncTaskQueue(_Entered):
    """``TaskQueue`` without asyncio. Enter it to wait for results or to work."""

    def __init__(self, bus: SyncBus, topic: str, group: str = "workers") -> None:
        self._bus = _check(bus, "SyncTaskQueue")

        async def make() -> TaskQueue:
            return TaskQueue(bus.bus, topic, group)

        self._queue = bus.call(make())

    def _part(self) -> TaskQueue:
        return self._queue

    def enqueue(
        self,
        payload: Any,
        key: str | None = None,
        *,
        priority: Priority | Literal[0, 1, 2, 3] = "normal",
        delay_s: float | None = None,
        result: bool = False,
        **fields: Any,
    ) -> SyncTicket:
        """Hand in a task; returns once it is durable."""
        job = self._queue.enqueue(
            payload, key, priority=priority, delay_s=delay_s, result=result, **fields
        )
        return SyncTicket(self._bus, self._bus.call(job))

    def task(self, function: Callable[A, T]) -> SyncNamedTask[A, T]:
        """Make a function a task of this queue, by its name."""
        named = self._queue.task(function)
        return SyncNamedTask(self, function, named.name)

    def cancel(self, id_: str) -> None:
        self._bus.call(self._queue.cancel(id_))

    def work(
        self,
        handler: Callable[[Task[Any]], Any] | None = None,
        *,
        workers: int = 1,
        policy: GroupOptions | None = None,
        max_inflight: int = 16,
    ) -> None:
        """Do tasks from now on, in ``workers`` threads; without a handler those of ``task``."""

        async def begin() -> None:
            await self._bus.bus.start()
            await self._queue.work(
                handler, workers=workers, policy=policy, max_inflight=max_inflight
            )

        self._bus.call(begin())


class SyncRequests(_Entered):
    """``Requests`` without asyncio."""

    def __init__(self, bus: SyncBus, replies: str = REPLIES) -> None:
        self._bus = _check(bus, "SyncRequests")

        async def make() -> Requests:
            return Requests(bus.bus, replies)

        self._requests = bus.call(make())

    def _part(self) -> Requests:
        return self._requests

    def request(
        self,
        topic: str,
        payload: Any = None,
        *,
        timeout_s: float = 30.0,
        **fields: Any,
    ) -> Any:
        """The payload of the answer; see ``trunkline.patterns.replies.Requests``."""
        return self._bus.call(self._requests.request(topic, payload, timeout_s=timeout_s, **fields))


def sync_respond(bus: SyncBus, topic: str, *, group: str, **options: Any) -> Callable[[H], H]:
    """Make a plain function the one that answers. It begins at once."""
    _check(bus, "sync_respond")

    def register(handler: H) -> H:
        async def begin() -> None:
            await bus.bus.start()
            respond(bus.bus, topic, group=group, **options)(handler)

        bus.call(begin())
        return handler

    return register


class SyncDrainer(_Entered):
    """``Drainer`` without asyncio: ``drain`` once, or enter it to drain all the time."""

    def __init__(self, storage: OutboxStorage, bus: SyncBus, **options: Any) -> None:
        self._bus = _check(bus, "SyncDrainer")

        async def make() -> Drainer:
            return Drainer(storage, bus.bus, **options)

        self._drainer = bus.call(make())

    def _part(self) -> Drainer:
        return self._drainer

    def drain(self) -> int:
        """Publish the rows that are there now; how many were sent."""
        return self._bus.call(self._drainer.drain())
