"""Handlers that take batches: by count, by bytes, and by time.

::

    @batched(bus, "readings", group="store", count=100, wait_s=0.2)
    async def store(events): ...

The handler gets a list of events. When it returns, all of them are settled. A part may fail: the
handler raises ``PartialFailure({index: error})``, or returns a list with an exception in the place
of each event that failed. The rest is settled; each failed event is tried again, or becomes a dead
letter, by the policy of the group. ``Retry`` and ``Reject`` mean what they mean elsewhere. When the
handler raises anything else, the whole batch failed; each event of it then comes in a batch of its
own, so one bad event does not take the others along.

A group that orders by key hands out one event of a key at a time: for large batches of one key use
``GroupOptions(ordering="none")``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from trunkline.batcher import Batcher
from trunkline.bus import Bus, Delivery
from trunkline.check import check_count, check_span
from trunkline.clock import Clock
from trunkline.codec import encode_value
from trunkline.delivery.worker import awaited
from trunkline.errors import InvalidOption
from trunkline.event import Event
from trunkline.options import WORKERS_MAX

H = TypeVar("H", bound=Callable[[list[Event]], Any])


class PartialFailure(Exception):
    """Raised by a batch handler: these events failed, the others are done."""

    def __init__(self, failures: Mapping[int, BaseException]) -> None:
        super().__init__(f"{len(failures)} events of the batch failed")
        self.failures = dict(failures)


def batched(
    bus: Bus,
    topic: str,
    *,
    group: str,
    count: int = 100,
    bytes: int | None = None,
    wait_s: float = 0.1,
    workers: int = 1,
    **options: Any,
) -> Callable[[H], H]:
    """Make a function the handler of batches. A batch is complete with ``count`` events, with
    ``bytes`` of payloads, or ``wait_s`` after its first event. ``workers`` batches are handled at a
    time. ``options`` are those of ``bus.on``.
    """
    check_count("count", count, 1, WORKERS_MAX)
    check_count("workers", workers, 1, max(1, WORKERS_MAX // count))
    check_span(wait_s, "wait_s")
    if bytes is not None:
        check_count("bytes", bytes, 1)

    def register(handler: H) -> H:
        if not callable(handler):
            raise InvalidOption(f"not a handler: {handler!r}", name="handler")
        collector = _Collector(bus.clock, awaited(handler), count, bytes, wait_s, workers)
        options.setdefault("max_inflight", count * workers * 2)
        bus.on(topic, group=group, workers=count * workers, **options)(collector.take)
        return handler

    return register


class _Entry:
    __slots__ = ("done", "event", "size")

    def __init__(self, event: Event, size: int) -> None:
        self.event = event
        self.size = size
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Collector:
    def __init__(
        self,
        clock: Clock,
        handle: Callable[[list[Event]], Awaitable[Any]],
        count: int,
        size: int | None,
        wait_s: float,
        workers: int,
    ) -> None:
        self._handle = handle
        self._counts_bytes = size is not None
        self._wait_s = wait_s
        self._turns = asyncio.Semaphore(workers)
        most = float("inf") if size is None else size
        later = clock.call_later
        self._open: Batcher[_Entry] = Batcher(
            self._begin, count_max=count, size_max=most, call_later=later
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, event: Event, delivery: Delivery) -> None:
        """Handle one delivery as a part of a batch."""
        size = len(encode_value(event.payload)) if self._counts_bytes else 0
        entry = _Entry(event, size)
        if delivery.attempt > 1:
            self._begin([entry], size)  # it may be what made its batch fail
        else:
            self._open.add(entry, size, self._wait_s)
        try:
            await entry.done
        except asyncio.CancelledError:
            self._open.remove(entry, size)
            entry.done.cancel()
            raise

    def _begin(self, batch: list[_Entry], _size: int) -> None:
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: list[_Entry]) -> None:
        async with self._turns:
            batch = [entry for entry in batch if not entry.done.done()]
            if not batch:
                return
            failures: dict[int, BaseException] = {}
            try:
                failures = _failures(await self._handle([one.event for one in batch]), len(batch))
            except PartialFailure as partial:
                failures = _checked(partial.failures, len(batch))
            except Exception as error:  # noqa: BLE001 -- a handler may fail in any way
                failures = dict.fromkeys(range(len(batch)), error)
            for at, entry in enumerate(batch):
                if entry.done.done():
                    continue
                if at in failures:
                    entry.done.set_exception(failures[at])
                else:
                    entry.done.set_result(None)


def _checked(failures: dict[int, BaseException], count: int) -> dict[int, BaseException]:
    """The failures, if each is one of the batch: nobody knows else which event has failed."""
    if all(at in range(count) for at in failures):
        return failures
    error = InvalidOption(f"a batch of {count} events has failures {list(failures)[:10]}")
    return dict.fromkeys(range(count), error)


def _failures(returned: Any, count: int) -> dict[int, BaseException]:
    """The failures in what a handler returned: nothing, or a list with an entry for each event."""
    if not isinstance(returned, list | tuple):
        return {}
    if len(returned) != count:
        error = InvalidOption(f"a batch handler returned {len(returned)} results for {count}")
        return dict.fromkeys(range(count), error)
    return {at: one for at, one in enumerate(returned) if isinstance(one, BaseException)}
