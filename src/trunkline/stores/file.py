"""A store in a folder. Publishers that wait at the same time share one write and one sync.

The loop's thread encodes; a few threads write and sync, one partition at a time each. Reading and
group steps are short and run where they are called, except that waiting for another process's lock
never holds up the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from trunkline.clock import Clock
from trunkline.errors import Closed, LockTimeout, StorageFull, TrunklineError
from trunkline.event import Event, Receipt, Record, encode_event
from trunkline.group import Group
from trunkline.log import upkeep
from trunkline.log.folder import Folder
from trunkline.log.writer import Placed
from trunkline.options import Limits, StoreOptions, TopicOptions, make
from trunkline.store import Bell, Bounds, Features, GroupKey, pick_partition
from trunkline.topics import DEAD_SUFFIX, check_topic

T = TypeVar("T")
logger = logging.getLogger(__name__)

_THREADS = 4
_BATCH_RECORDS = 10_000
_SYNC_WEIGHT = 0.1


# What one publisher wants written, one event or several, and how it gets to know the first offset;
# the whole ``Placed`` where some of it had been published before.
_Waiting = tuple[bytes | list[bytes], Event | Sequence[Event], "asyncio.Future[int | Placed]"]


class _Lane:
    """The publishers that wait for one partition."""

    __slots__ = ("busy", "partition", "room", "topic", "waiting")

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.busy = False
        self.room = asyncio.Event()
        self.waiting: deque[_Waiting] = deque()


class FileStore:
    features = Features()

    def __init__(self, path: str, clock: Clock | None = None, **options: Any) -> None:
        self.folder = Folder(path, make(StoreOptions, options), clock)
        self.member = self.folder.member
        self.options = self.folder.options
        self.bell = Bell()
        self._limits = self.options.limits
        self._inflight = self.options.publish_inflight
        # A dead letter is its record and the reason: it may be a little larger.
        self._dead_limits = Limits(
            record_bytes=self._limits.record_bytes + 64 * 1024, depth=self._limits.depth
        )
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._turn = 0
        self._work: SimpleQueue[_Lane | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._group_locks: dict[GroupKey, asyncio.Lock] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sync_s = 0.0  # what a sync has taken of late
        self._watching = False
        self._closed = False

    # -- publishing ----------------------------------------------------------------------------

    async def append(self, topic: str, events: Sequence[Event]) -> list[Receipt]:
        self._check()
        limits = self._dead_limits if topic.endswith(DEAD_SUFFIX) else self._limits
        options = self.folder.topic(topic)
        if options.partitions != 1:
            bodies = [encode_event(event, limits) for event in events]
            return await self._scatter(topic, bodies, events, options)
        lane = self._lanes.get((topic, 0)) or self._lane(topic, 0)
        if len(lane.waiting) >= self._inflight:
            await self._room(lane)
        if len(events) == 1:
            event = events[0]
            placed = await self._enqueue(lane, encode_event(event, limits), event)
            if type(placed) is int:
                return [Receipt(topic, 0, placed, event.id, False, options.durability)]
        else:
            bodies = [encode_event(event, limits) for event in events]
            placed = await self._enqueue(lane, bodies, events)
        return _receipts(topic, 0, events, placed, options.durability)

    async def _scatter(
        self, topic: str, bodies: list[bytes], events: Sequence[Event], options: TopicOptions
    ) -> list[Receipt]:
        parts: dict[int, list[int]] = {}
        for index, event in enumerate(events):
            parts.setdefault(pick_partition(event, options.partitions, self._turn), []).append(
                index
            )
            self._turn += event.key is None
        receipts: dict[int, Receipt] = {}

        async def send(partition: int, indexes: list[int]) -> None:
            mine = [events[i] for i in indexes]
            lane = self._lane(topic, partition)
            await self._room(lane)
            placed = await self._enqueue(lane, [bodies[i] for i in indexes], mine)
            done = _receipts(topic, partition, mine, placed, options.durability)
            receipts.update(zip(indexes, done, strict=True))

        await asyncio.gather(*(send(number, indexes) for number, indexes in parts.items()))
        return [receipts[index] for index in range(len(events))]

    def _lane(self, topic: str, partition: int) -> _Lane:
        lane = self._lanes.get((topic, partition))
        if lane is None:
            lane = self._lanes[topic, partition] = _Lane(check_topic(topic), partition)
        return lane

    async def _room(self, lane: _Lane) -> None:
        while len(lane.waiting) >= self._inflight:
            lane.room.clear()
            await lane.room.wait()

    def _enqueue(
        self, lane: _Lane, bodies: bytes | list[bytes], events: Event | Sequence[Event]
    ) -> asyncio.Future[int | Placed]:
        loop = self._loop or self._start()
        future: asyncio.Future[int | Placed] = loop.create_future()
        lane.waiting.append((bodies, events, future))
        if not lane.busy:
            lane.busy = True
            loop.call_soon(self._begin, lane)  # after every publisher that is about to run now
        return future

    def _start(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._spawn(self._every(self.options.upkeep_s, partial(upkeep.tend, self.folder)))
        return self._loop

    def _begin(self, lane: _Lane) -> None:
        """Commit what waits. Two switches of threads cost more than a quick disk takes to sync,
        so a commit is done in place as long as syncs have been quick of late; else by a thread.
        """
        if self._sync_s > self.options.inline_commit_s:
            self._hand_over(lane)
            return
        batch = _drained(lane)
        try:
            outcome: Placed | BaseException = self._commit(lane, batch, timeout_s=0.0)
        except LockTimeout:
            lane.waiting.extendleft(reversed(batch))
            self._hand_over(lane)
            return
        except BaseException as error:  # noqa: BLE001 -- a waiter gets it, whatever it is
            outcome = error
        self._committed(lane, batch, outcome, more=False)

    def _hand_over(self, lane: _Lane) -> None:
        if not self._threads:
            for number in range(_THREADS):
                name = f"trunkline-write-{number}"
                thread = threading.Thread(target=self._write_loop, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        self._work.put(lane)

    def _write_loop(self) -> None:
        while (lane := self._work.get()) is not None:
            # Go on while publishers arrive: they did so during the last sync. The loop's thread
            # alone decides that the lane is idle, so none is forgotten between the two.
            while self._write(lane):
                pass

    def _write(self, lane: _Lane) -> bool:
        """Commit what waits; True if the same thread shall go on with the lane."""
        batch = _drained(lane)
        outcome: Placed | BaseException
        try:
            outcome = self._commit(lane, batch, timeout_s=None)
        except BaseException as error:  # noqa: BLE001 -- a waiter gets it, whatever it is
            outcome = error
        more = bool(lane.waiting) and not isinstance(outcome, BaseException)
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it the waiters
            self._loop.call_soon_threadsafe(self._committed, lane, batch, outcome, more)
        return more

    def _commit(self, lane: _Lane, batch: list[_Waiting], timeout_s: float | None) -> Placed:
        bodies: list[bytes] = []
        events: list[Event] = []
        for body, event, _ in batch:
            if isinstance(body, bytes):
                bodies.append(body)
                events.append(cast(Event, event))
            else:
                bodies += body
                events += cast(Sequence[Event], event)
        placed = self.folder.append(lane.topic, lane.partition, bodies, events, timeout_s)
        took_s = self.folder.writer(lane.topic, lane.partition).sync_s
        self._sync_s += (took_s - self._sync_s) * _SYNC_WEIGHT
        return placed

    def _committed(
        self,
        lane: _Lane,
        batch: list[_Waiting],
        outcome: Placed | BaseException,
        more: bool,
    ) -> None:
        assert self._loop is not None
        if isinstance(outcome, StorageFull) and self.options.on_full == "wait":
            lane.waiting.extendleft(reversed(batch))
            self._loop.call_later(self.options.poll_s, self._begin, lane)
            self.bell.ring(None)
            return
        if isinstance(outcome, BaseException):
            for _, _, future in batch:
                if not future.done():
                    future.set_exception(outcome)
        elif outcome.duplicates:
            self._split(batch, outcome)
        else:
            first = outcome.first
            for bodies, _, future in batch:
                if not future.done():
                    future.set_result(first)
                first += 1 if isinstance(bodies, bytes) else len(bodies)
        lane.room.set()
        if not more:
            if lane.waiting:
                self._loop.call_soon(self._begin, lane)
            else:
                lane.busy = False
        self.bell.ring(lane.topic)

    def _split(
        self,
        batch: list[_Waiting],
        outcome: Placed,
    ) -> None:
        """Give each publisher its share of a batch that held repeated events."""
        first, start = outcome.first, 0
        for bodies, _, future in batch:
            count = 1 if isinstance(bodies, bytes) else len(bodies)
            mine = {
                index - start: offset
                for index, offset in outcome.duplicates.items()
                if start <= index < start + count
            }
            if not future.done():
                future.set_result(Placed(first, count, mine))
            first += count - len(mine)
            start += count

    # -- reading and groups --------------------------------------------------------------------

    async def read(self, topic: str, partition: int, start: int, limit: int) -> list[Record]:
        self._check()
        return self.folder.read(topic, partition, start, limit)

    async def bounds(self, topic: str, partition: int) -> Bounds:
        self._check()
        return self.folder.bounds(topic, partition)

    async def seek(self, topic: str, partition: int, when: datetime) -> int:
        self._check()
        return self.folder.seek(topic, partition, when)

    async def trim(self, topic: str, partition: int, before: int) -> Bounds:
        self._check()
        await asyncio.to_thread(upkeep.trim, self.folder, topic, partition, before)
        self.folder.forget(topic, partition)
        self.bell.ring(topic)
        return self.folder.bounds(topic, partition)

    async def update(self, key: GroupKey, step: Callable[[Group], T] | None) -> T:
        self._check()
        if step is None:
            self.folder.remove_group(key)
            return None  # type: ignore[return-value]
        self.folder.join()
        lock = self._group_locks.get(key)
        if lock is None:
            lock = self._group_locks[key] = asyncio.Lock()
        async with lock:
            try:
                return self.folder.step(key, step, timeout_s=0.02)
            except LockTimeout:
                return await asyncio.to_thread(self.folder.step, key, step)

    async def groups(self) -> list[GroupKey]:
        self._check()
        return self.folder.groups()

    async def topics(self) -> dict[str, TopicOptions]:
        self._check()
        return self.folder.topics()

    async def define(self, topic: str, options: TopicOptions | None) -> None:
        self._check()
        if options is None:
            await asyncio.to_thread(self.folder.remove_topic, topic)
        else:
            self.folder.define(topic, options)
        self.bell.ring(topic)

    # -- other processes -----------------------------------------------------------------------

    def watch(self) -> None:
        """Ring the bell when another process changes something, and sync the journals at times.
        Subscribers need it; a store that only publishes does without.
        """
        if not self._watching:
            self._watching = True
            self._start()
            self._spawn(self._watch())
            self._spawn(self._every(self.options.journal_sync_s, self.folder.sync_groups))

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(job))

    async def _watch(self) -> None:
        try:
            await self._watch_files()
        except ImportError:
            logger.debug("watchfiles is not installed: polling every %s s", self.options.poll_s)
        except (OSError, RuntimeError) as error:  # no inotify instance left, for example
            logger.warning("cannot watch the folder, polling it instead: %s", error)
        while True:
            await asyncio.sleep(self.options.poll_s)
            self.bell.ring(None)

    async def _watch_files(self) -> None:
        from watchfiles import awatch

        places = [os.path.join(self.folder.path, p) for p in ("wal", "offsets", "members", "dlq")]
        async for _ in awatch(
            *places,
            watch_filter=None,
            debounce=10,
            step=2,
            recursive=False,
            rust_timeout=int(self.options.poll_s * 1000),
            yield_on_timeout=True,
        ):
            self.bell.ring(None)  # whatever it was: to look costs less than to tell apart

    async def _every(self, seconds: float, job: Callable[[], object]) -> None:
        """Do a job in a thread now and then; what fails is tried again."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await asyncio.to_thread(job)
            except (TrunklineError, OSError) as error:
                logger.warning("%s failed: %s", job, error)

    def _check(self) -> None:
        if self._closed:
            raise Closed("the bus is closed")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        waiting = [item[2] for lane in self._lanes.values() for item in lane.waiting]
        if waiting:
            await asyncio.wait(waiting, timeout=self.options.lock_timeout_s)
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self.folder.close()


def _drained(lane: _Lane) -> list[_Waiting]:
    batch: list[_Waiting] = []
    records = 0
    while lane.waiting and records < _BATCH_RECORDS:
        item = lane.waiting.popleft()
        batch.append(item)
        records += 1 if isinstance(item[0], bytes) else len(item[0])
    return batch


def _receipts(
    topic: str, partition: int, events: Sequence[Event], placed: int | Placed, durability: str
) -> list[Receipt]:
    if isinstance(placed, int):
        return [
            Receipt(topic, partition, offset, event.id, False, durability)
            for offset, event in enumerate(events, placed)
        ]
    return [
        Receipt(topic, partition, offset, event.id, index in placed.duplicates, durability)
        for index, (event, offset) in enumerate(zip(events, placed.offsets(), strict=True))
    ]
