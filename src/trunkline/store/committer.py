"""Group commit: publishers that wait at the same time share one write and one sync.

The loop's thread encodes events and collects them in a batch for each partition. While a batch is
being committed the next one fills. A commit runs in the loop's thread as long as syncs are quick,
else in one of a few threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Sequence
from enum import Enum
from queue import SimpleQueue
from time import monotonic

from trunkline.codec import encode_event
from trunkline.errors import LockTimeout, StorageError, StorageFull
from trunkline.event import Event, Receipt
from trunkline.folder import Folder
from trunkline.names import check_topic
from trunkline.options import Limits
from trunkline.store import Bell, append_parts, limits_of
from trunkline.store.spans import Spans

_THREADS = 4
_SYNC_WEIGHT = 0.1  # of the last sync in the average
_DELIVERY_TURNS = 4  # turns of the loop until committed records are on their way to subscribers,
_DELIVERY_S = 0.0005  # and about how long those turns take


class Stage(Enum):
    IDLE = "idle"  # nothing waits
    COLLECTING = "collecting"  # a commit is planned, and publishers may join it
    COMMITTING = "committing"  # a batch is being written, and publishers join the next one


_IDLE, _COLLECTING, _COMMITTING = Stage.IDLE, Stage.COLLECTING, Stage.COMMITTING


class _Batch:
    """Encoded events that are written together, and the publishers that wait for them."""

    __slots__ = ("bodies", "counts", "events", "waiters")

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.events: list[Event] = []
        self.waiters: list[asyncio.Future[list[Receipt]]] = []
        self.counts: list[int] = []  # how many of the events are each waiter's

    def add(self, later: _Batch) -> None:
        self.bodies += later.bodies
        self.events += later.events
        self.waiters += later.waiters
        self.counts += later.counts

    def answer(self, receipts: list[Receipt]) -> None:
        end = 0
        for waiter, count in zip(self.waiters, self.counts, strict=True):
            start, end = end, end + count
            if not waiter.done():
                waiter.set_result(receipts[start:end])

    def fail(self, error: BaseException) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)


class _Partition:
    """One partition: the batch that publishers join, and the batch that is being committed."""

    __slots__ = (
        "committing",
        "delivering_until",
        "joining",
        "limits",
        "number",
        "overflow",
        "partitions",
        "stage",
        "topic",
    )

    def __init__(self, topic: str, number: int, limits: Limits) -> None:
        self.topic = topic
        self.number = number
        self.limits = limits
        self.partitions = 1  # of the topic, when the last commit began
        self.stage = _IDLE
        self.delivering_until = 0.0  # committed records may be on their way until then
        self.joining = _Batch()
        self.committing = _Batch()
        self.overflow: deque[_Batch] = deque()  # of publishers beyond publish_inflight

    def batches(self) -> list[_Batch]:
        return [self.committing, self.joining, *self.overflow]


class Committer:
    def __init__(self, folder: Folder, bell: Bell) -> None:
        self.finished: set[tuple[str, int]] = set()  # partitions in which a segment was finished
        self.syncs = Spans()
        self.appended_bytes = 0
        self._folder = folder
        self._bell = bell
        self._options = folder.options
        self._topics: dict[str, list[_Partition]] = {}
        self._round_robin = 0
        self._sync_s = 0.0  # what a sync took lately, on average
        self._work: SimpleQueue[_Partition | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def append(self, topic: str, events: Sequence[Event]) -> Awaitable[list[Receipt]]:
        """Encode the events and commit them with all others of this moment."""
        known = self._topics.get(topic)
        first = known[0] if known is not None else self._partition(topic, 0)
        if first.stage is _IDLE:
            first.partitions = self._folder.topic(topic).partitions
        limits = first.limits
        if len(events) == 1:  # by far most often, and a comprehension costs as much as an event
            bodies = [encode_event(events[0], limits)]
        else:
            bodies = [encode_event(event, limits) for event in events]
        if first.partitions != 1:
            return self._scatter(topic, bodies, events)
        return self._join(first, bodies, events)

    async def _scatter(
        self, topic: str, bodies: list[bytes], events: Sequence[Event]
    ) -> list[Receipt]:
        partitions = self._folder.topic(topic).partitions

        async def send(number: int, indexes: list[int]) -> list[Receipt]:
            partition = self._partition(topic, number)
            mine = [bodies[i] for i in indexes], [events[i] for i in indexes]
            return await self._join(partition, *mine)

        turn, self._round_robin = self._round_robin, self._round_robin + len(events)
        return await append_parts(events, partitions, turn, send)

    def _partition(self, topic: str, number: int) -> _Partition:
        check_topic(topic)
        partitions = self._topics.setdefault(topic, [])
        limits = limits_of(topic, self._options.limits)
        while len(partitions) <= number:
            partitions.append(_Partition(topic, len(partitions), limits))
        return partitions[number]

    def _join(
        self, partition: _Partition, bodies: list[bytes], events: Sequence[Event]
    ) -> asyncio.Future[list[Receipt]]:
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Receipt]] = asyncio.Future(loop=loop)
        batch = partition.joining
        if partition.overflow or len(batch.events) >= self._options.publish_inflight:
            batch = _Batch()
            partition.overflow.append(batch)
        batch.bodies += bodies
        batch.events += events
        batch.waiters.append(future)
        batch.counts.append(len(bodies))
        if partition.stage is _IDLE:
            delivering = monotonic() < partition.delivering_until
            self._plan(partition, _DELIVERY_TURNS if delivering else 1)
        return future

    def _plan(self, partition: _Partition, turns: int) -> None:
        """Commit after some turns of the loop, so that every publisher that is about to run may
        join. A sync holds up the loop, so committed records go out before it.
        """
        partition.stage = _COLLECTING
        self._wait(partition, turns)

    def _wait(self, partition: _Partition, turns: int) -> None:
        assert self._loop is not None
        if turns > 1:
            self._loop.call_soon(self._wait, partition, turns - 1)
        else:
            self._loop.call_soon(self._begin, partition)

    def _begin(self, partition: _Partition) -> None:
        """Commit what waits. Two switches of threads cost more than a quick disk takes to sync,
        so a commit is done in place as long as syncs have been quick of late; else by a thread.
        """
        partition.stage = _COMMITTING
        partition.committing, partition.joining = partition.joining, _Batch()
        try:
            partition.partitions = self._folder.topic(partition.topic).partitions
            if self._sync_s > self._options.inline_commit_s:
                self._hand_over(partition)
                return
            outcome = self._commit(partition, timeout_s=0.0)
        except LockTimeout:
            self._hand_over(partition)
        except OSError as error:
            self._committed(partition, self._folder.storage_error(error))
        except BaseException as error:  # noqa: BLE001 -- a waiter gets it, whatever it is
            self._committed(partition, error)
        else:
            self._committed(partition, outcome)

    def _hand_over(self, partition: _Partition) -> None:
        if not self._threads:
            for number in range(_THREADS):
                name = f"trunkline-write-{number}"
                thread = threading.Thread(target=self._commit_in_thread, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        self._work.put(partition)

    def _commit_in_thread(self) -> None:
        assert self._loop is not None
        while (partition := self._work.get()) is not None:
            outcome: list[Receipt] | BaseException
            try:
                outcome = self._commit(partition, timeout_s=None)
            except OSError as error:
                outcome = self._folder.storage_error(error)
            except BaseException as error:  # noqa: BLE001 -- a waiter gets it, whatever it is
                outcome = error
            with contextlib.suppress(RuntimeError):  # the loop is gone, and with it the waiters
                self._loop.call_soon_threadsafe(self._committed, partition, outcome)

    def _commit(self, partition: _Partition, timeout_s: float | None) -> list[Receipt]:
        topic, number, batch = partition.topic, partition.number, partition.committing
        events = batch.events
        durability = self._folder.topic(topic).durability
        placed = self._folder.append(topic, number, batch.bodies, events, timeout_s)
        writer = self._folder.writer(topic, number)
        if writer.has_finished:
            self.finished.add((topic, number))
        self._sync_s += (writer.sync_s - self._sync_s) * _SYNC_WEIGHT
        self.syncs.add(writer.sync_s)
        self.appended_bytes += sum(map(len, batch.bodies))
        if placed.duplicates:
            known = self._ids(topic, number, set(placed.duplicates.values()))
            receipts = []
            for index, (event, offset) in enumerate(zip(events, placed.offsets(), strict=True)):
                name, again = known.get(offset, event.id), index in placed.duplicates
                receipts.append(Receipt(topic, number, offset, name, again, durability))
            return receipts
        return [
            Receipt(topic, number, offset, event.id, False, durability)
            for offset, event in enumerate(events, placed.first)
        ]

    def _ids(self, topic: str, partition: int, offsets: set[int]) -> dict[int, str]:
        """The ids of the records at these offsets, without records that were removed or are
        damaged: the first publish is safe either way. By a reader of its own, as it may run in any
        thread.
        """
        found: dict[int, str] = {}
        reader = self._folder.fresh_reader(topic, partition)
        with contextlib.closing(reader), contextlib.suppress(StorageError, OSError):
            for offset in sorted(offsets):
                if (name := reader.id_at(offset)) is not None:
                    found[offset] = name
        return found

    def _committed(self, partition: _Partition, outcome: list[Receipt] | BaseException) -> None:
        assert self._loop is not None
        if isinstance(outcome, StorageFull) and self._options.on_full == "wait":
            partition.committing.add(partition.joining)
            partition.joining, partition.committing = partition.committing, _Batch()
            partition.stage = _COLLECTING
            self._loop.call_later(self._options.poll_s, self._begin, partition)
            self._bell.ring(None)
            return
        batch, partition.committing = partition.committing, _Batch()
        is_read = self._bell.ring(partition.topic)
        if isinstance(outcome, StorageError):
            batch.fail(self._folder.explain(outcome))
        elif isinstance(outcome, BaseException):
            batch.fail(outcome)
        else:
            batch.answer(outcome)
        joining, most = partition.joining, self._options.publish_inflight
        while partition.overflow and len(joining.events) < most:
            later = partition.overflow.popleft()
            if not later.waiters[0].done():  # else it was cancelled
                joining.add(later)
        if is_read:
            partition.delivering_until = monotonic() + _DELIVERY_S
        if joining.events:
            self._plan(partition, _DELIVERY_TURNS if is_read else 1)
        else:
            partition.stage = _IDLE

    async def close(self) -> None:
        """Wait until everything that was appended is committed, and end the threads."""
        partitions = [one for found in self._topics.values() for one in found]
        waiting = [w for one in partitions for batch in one.batches() for w in batch.waiters]
        if waiting:
            await asyncio.wait(waiting, timeout=self._options.lock_timeout_s)
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
