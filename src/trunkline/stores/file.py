"""A store in a folder. Publishers that wait at the same time share one write and one sync.

The loop's thread encodes; a few threads write and sync, one partition at a time each. Reading and
group steps are short and run where they are called, except that waiting for another process's lock
never holds up the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import datetime
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, ParamSpec, TypeVar

from trunkline.clock import Clock
from trunkline.errors import Closed, LockTimeout, StorageError, StorageFull, TrunklineError
from trunkline.event import Event, Receipt, Record, encode_event
from trunkline.group import Group
from trunkline.log import atomic, upkeep
from trunkline.log.folder import Folder
from trunkline.log.inotify import Inotify
from trunkline.options import Limits, StoreOptions, TopicOptions, make
from trunkline.store import Bell, Bounds, Features, GroupKey, pick_partition
from trunkline.topics import DEAD_SUFFIX, check_topic

T = TypeVar("T")
P = ParamSpec("P")
logger = logging.getLogger(__name__)

_THREADS = 4
_SYNC_WEIGHT = 0.1
_TURNS = 4  # of the loop, from a commit to its records being on their way to subscribers,
_TURNS_S = 0.0005  # which takes about as long
_FALSE_RINGS = 20  # polls, until each listener was reminded
_LOCK_S = 0.005  # between two looks at a group that another process has locked


class _Batch:
    """Encoded events that are written together, and who waits for how many of them."""

    __slots__ = ("bodies", "counts", "events", "waiters")

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.events: list[Event] = []
        self.waiters: list[asyncio.Future[list[Receipt]]] = []
        self.counts: list[int] = []

    def add(self, later: _Batch) -> None:
        self.bodies += later.bodies
        self.events += later.events
        self.waiters += later.waiters
        self.counts += later.counts

    def settle(self, receipts: list[Receipt]) -> None:
        end = 0
        for waiter, count in zip(self.waiters, self.counts, strict=True):
            start, end = end, end + count
            if not waiter.done():
                waiter.set_result(receipts[start:end])

    def fail(self, error: BaseException) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)


class _Lane:
    """One partition: the batch that publishers join now, and the one that is being written."""

    __slots__ = (
        "busy",
        "fresh",
        "has_finished",
        "late",
        "limits",
        "next",
        "now",
        "partition",
        "spread",
        "topic",
    )

    def __init__(self, topic: str, partition: int, limits: Limits) -> None:
        self.topic = topic
        self.partition = partition
        self.limits = limits
        self.spread = False  # whether the topic has more partitions than this one
        self.has_finished = False  # a segment
        self.busy = False
        self.fresh = 0.0  # until when what was committed last may still be on its way
        self.next = _Batch()
        self.now = _Batch()
        self.late: deque[_Batch] = deque()  # of who came when as many waited as may wait


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
        self._lanes: dict[str, list[_Lane]] = {}
        self._turn = 0
        self._work: SimpleQueue[_Lane | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._group_locks: dict[GroupKey, asyncio.Lock] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sync_s = 0.0  # what a sync has taken of late
        self._tends_at = 0.0
        self._watching = False
        self._closed = False

    # -- publishing ----------------------------------------------------------------------------

    def append(self, topic: str, events: Sequence[Event]) -> Awaitable[list[Receipt]]:
        if self._closed:
            raise Closed("the bus is closed")
        lane = self._lanes[topic][0] if topic in self._lanes else self._lane(topic, 0)
        if not lane.busy:
            lane.spread = self.folder.topic(topic).partitions != 1
        limits = lane.limits
        if len(events) == 1:  # by far most often, and a comprehension costs as much as an event
            bodies = [encode_event(events[0], limits)]
        else:
            bodies = [encode_event(event, limits) for event in events]
        if lane.spread:
            return self._scatter(topic, bodies, events)
        return self._append(lane, bodies, events)

    async def _scatter(
        self, topic: str, bodies: list[bytes], events: Sequence[Event]
    ) -> list[Receipt]:
        partitions = self.folder.topic(topic).partitions
        parts: dict[int, list[int]] = {}
        for index, event in enumerate(events):
            parts.setdefault(pick_partition(event, partitions, self._turn), []).append(index)
            self._turn += event.key is None
        receipts: dict[int, Receipt] = {}

        async def send(partition: int, indexes: list[int]) -> None:
            lane = self._lane(topic, partition)
            mine = [bodies[i] for i in indexes], [events[i] for i in indexes]
            done = await self._append(lane, *mine)
            receipts.update(zip(indexes, done, strict=True))

        await asyncio.gather(*(send(number, indexes) for number, indexes in parts.items()))
        return [receipts[index] for index in range(len(events))]

    def _lane(self, topic: str, partition: int) -> _Lane:
        check_topic(topic)
        lanes = self._lanes.setdefault(topic, [])
        limits = self._dead_limits if topic.endswith(DEAD_SUFFIX) else self._limits
        while len(lanes) <= partition:
            lanes.append(_Lane(topic, len(lanes), limits))
        return lanes[partition]

    def _append(
        self, lane: _Lane, bodies: list[bytes], events: Sequence[Event]
    ) -> asyncio.Future[list[Receipt]]:
        loop = self._loop or self._start()
        future: asyncio.Future[list[Receipt]] = asyncio.Future(loop=loop)
        batch = lane.next
        if lane.late or len(batch.events) >= self._inflight:
            batch = _Batch()
            lane.late.append(batch)
        batch.bodies += bodies
        batch.events += events
        batch.waiters.append(future)
        batch.counts.append(len(bodies))
        if not lane.busy:
            lane.busy = True
            self._go_on(lane, _TURNS if monotonic() < lane.fresh else 1)
        return future

    def _start(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            tend = partial(upkeep.tend, self.folder)
            self._tends_at = monotonic() + self.options.upkeep_s
            self._spawn(self._every(self.options.upkeep_s, tend, "upkeep"))
        return self._loop

    def _begin(self, lane: _Lane) -> None:
        """Commit what waits. Two switches of threads cost more than a quick disk takes to sync,
        so a commit is done in place as long as syncs have been quick of late; else by a thread.
        """
        lane.now, lane.next = lane.next, _Batch()
        try:
            lane.spread = self.folder.topic(lane.topic).partitions != 1
            if self._sync_s > self.options.inline_commit_s:
                self._hand_over(lane)
                return
            outcome = self._commit(lane, timeout_s=0.0)
        except LockTimeout:
            self._hand_over(lane)
        except OSError as error:
            self._committed(lane, self._told(error))
        except BaseException as error:  # noqa: BLE001 -- a waiter gets it, whatever it is
            self._committed(lane, error)
        else:
            self._committed(lane, outcome)

    def _hand_over(self, lane: _Lane) -> None:
        if not self._threads:
            for number in range(_THREADS):
                name = f"trunkline-write-{number}"
                thread = threading.Thread(target=self._write_loop, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        self._work.put(lane)

    def _write_loop(self) -> None:
        assert self._loop is not None
        while (lane := self._work.get()) is not None:
            outcome: list[Receipt] | BaseException
            try:
                outcome = self._commit(lane, timeout_s=None)
            except OSError as error:
                outcome = self._told(error)
            except BaseException as error:  # noqa: BLE001 -- a waiter gets it, whatever it is
                outcome = error
            with contextlib.suppress(RuntimeError):  # the loop is gone, and with it the waiters
                self._loop.call_soon_threadsafe(self._committed, lane, outcome)

    def _commit(self, lane: _Lane, timeout_s: float | None) -> list[Receipt]:
        topic, partition, events = lane.topic, lane.partition, lane.now.events
        durability = self.folder.topic(topic).durability
        placed = self.folder.append(topic, partition, lane.now.bodies, events, timeout_s)
        writer = self.folder.writer(topic, partition)
        lane.has_finished = writer.has_finished
        self._sync_s += (writer.sync_s - self._sync_s) * _SYNC_WEIGHT
        if placed.duplicates:
            known = self._ids(topic, partition, set(placed.duplicates.values()))
            receipts = []
            for index, (event, offset) in enumerate(zip(events, placed.offsets(), strict=True)):
                name, again = known.get(offset, event.id), index in placed.duplicates
                receipts.append(Receipt(topic, partition, offset, name, again, durability))
            return receipts
        return [
            Receipt(topic, partition, offset, event.id, False, durability)
            for offset, event in enumerate(events, placed.first)
        ]

    def _ids(self, topic: str, partition: int, offsets: set[int]) -> dict[int, str]:
        """The ids of the records at these offsets, without what was removed or is damaged: what
        was published is safe either way. By a reader of its own, as it may run in any thread.
        """
        found: dict[int, str] = {}
        reader = self.folder.fresh_reader(topic, partition)
        with contextlib.closing(reader), contextlib.suppress(StorageError, OSError):
            for offset in sorted(offsets):
                if (name := reader.id_at(offset)) is not None:
                    found[offset] = name
        return found

    def _committed(self, lane: _Lane, outcome: list[Receipt] | BaseException) -> None:
        assert self._loop is not None
        if isinstance(outcome, StorageFull) and self.options.on_full == "wait":
            lane.now.add(lane.next)
            lane.next, lane.now = lane.now, _Batch()
            self._loop.call_later(self.options.poll_s, self._begin, lane)
            self.bell.ring(None)
            return
        batch, lane.now = lane.now, _Batch()
        is_read = self.bell.ring(lane.topic)
        if isinstance(outcome, BaseException):
            batch.fail(outcome)
        else:
            batch.settle(outcome)
        while lane.late and len(lane.next.events) < self._inflight:
            later = lane.late.popleft()
            if not later.waiters[0].done():  # else it was cancelled
                lane.next.add(later)
        if is_read:
            lane.fresh = monotonic() + _TURNS_S
        if lane.next.events:
            self._go_on(lane, _TURNS if is_read else 1)
        else:
            lane.busy = False

    def _go_on(self, lane: _Lane, turns: int) -> None:
        """Commit what waits after some turns of the loop, so that every publisher that is about to
        run may join. A sync holds up the loop: what was committed before goes out before it.
        """
        assert self._loop is not None
        if turns > 1:
            self._loop.call_soon(self._go_on, lane, turns - 1)
        else:
            self._loop.call_soon(self._begin, lane)

    # -- reading and groups --------------------------------------------------------------------

    async def read(self, topic: str, partition: int, start: int, limit: int) -> list[Record]:
        return self._ask(self.folder.read, topic, partition, start, limit)

    async def bounds(self, topic: str, partition: int) -> Bounds:
        return self._ask(self.folder.bounds, topic, partition)

    async def seek(self, topic: str, partition: int, when: datetime) -> int:
        return self._ask(self.folder.seek, topic, partition, when)

    async def trim(self, topic: str, partition: int, before: int) -> Bounds:
        await asyncio.to_thread(self._ask, upkeep.trim, self.folder, topic, partition, before)
        self.folder.forget(topic, partition)
        self.bell.ring(topic)
        return self._ask(self.folder.bounds, topic, partition)

    async def update(self, key: GroupKey, step: Callable[[Group], T] | None) -> T:
        if step is None:
            self._ask(self.folder.remove_group, key)
            self.bell.ring(key.topic)  # or those who worked for it here hear of it by a reminder
            return None  # type: ignore[return-value]
        self._ask(self.folder.join)
        lock = self._group_locks.get(key)
        if lock is None:
            lock = self._group_locks[key] = asyncio.Lock()
        if not lock.locked():
            with contextlib.suppress(LockTimeout):
                return self._step(key, step, 0.02)
        async with lock:
            return await self._step_later(key, step)

    def _step(self, key: GroupKey, step: Callable[[Group], T], timeout_s: float) -> T:
        """Take a step. A pump heeds what it finds; what is found by who else, or behind the step,
        is told to the group's pump, which no file that changed would tell any more.
        """
        result = self._ask(self.folder.step, key, step, timeout_s)
        if self.folder.has_news(key):
            self.bell.tell(key)
        return result

    async def _step_later(self, key: GroupKey, step: Callable[[Group], T]) -> T:
        """Take a step once another process lets it. Not in a thread: a step looks at subscribers
        and the group is looked at by the loop, and neither may change meanwhile.
        """
        wait_s = self.options.lock_timeout_s
        until = monotonic() + wait_s
        while True:
            try:
                return self._step(key, step, 0.0)
            except LockTimeout as error:
                if monotonic() >= until:
                    said = f"{key.group} on {key.topic} has been locked for {wait_s} s"
                    raise LockTimeout(said, hint=error.hint, **error.fields) from None
            await asyncio.sleep(_LOCK_S)

    async def groups(self) -> list[GroupKey]:
        return self._ask(self.folder.groups)

    async def topics(self) -> dict[str, TopicOptions]:
        return self._ask(self.folder.topics)

    async def define(self, topic: str, options: TopicOptions | None) -> None:
        if options is None:
            await asyncio.to_thread(self._ask, self.folder.remove_topic, topic)
            self.folder.forget(topic)
        else:
            await asyncio.to_thread(self._ask, self.folder.define, topic, options)
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
            sync = self.folder.sync_groups
            self._spawn(self._every(self.options.journal_sync_s, sync, "syncing journals"))

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(job))

    async def _watch(self) -> None:
        """Ring for what the kernel tells, for what a look at the files shows, and now and then for
        no reason: nothing depends on a notice.
        """
        places = [
            os.path.join(self.folder.path, p) for p in ("", "wal", "offsets", "members", "dlq")
        ]
        loop = asyncio.get_running_loop()
        watch: Inotify | None = None
        try:
            watch = Inotify(places)
            loop.add_reader(watch.fd, lambda: self._ring(self.folder.heard(watch.changes())))
        except OSError as error:  # no inotify instance left, for example
            logger.debug("polling every %s s: %s", self.options.poll_s, error)
        try:
            for turn in itertools.count(1):
                await asyncio.sleep(self.options.poll_s)
                if watch is None:
                    self.bell.ring(None)
                    continue
                self.bell.remind(turn, _FALSE_RINGS)
                try:
                    self._ring(self.folder.noticed(turn))
                except OSError as error:  # no file can be opened just now, for example
                    logger.debug("not looked: %s", error)
        finally:
            if watch is not None:
                loop.remove_reader(watch.fd)
                watch.close()

    def _ring(self, news: set[str | GroupKey]) -> None:
        for whose in news:
            if isinstance(whose, GroupKey):
                self.bell.tell(whose)
            else:
                self.bell.ring(whose or None)

    async def _every(self, seconds: float, job: Callable[[], object], what: str) -> None:
        """Do a job in a thread now and then; what fails is tried again."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await asyncio.to_thread(job)
            except (TrunklineError, OSError) as error:
                logger.warning("%s failed: %s", what, error)

    def _ask(self, look: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the folder says, where an error of the system is one of the storage."""
        if self._closed:
            raise Closed("the bus is closed")
        try:
            return look(*args, **kwargs)
        except OSError as error:
            raise self._told(error) from error

    def _told(self, error: OSError) -> StorageError:
        return atomic.storage_error(error, error.filename or self.folder.path)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        lanes = [lane for lanes in self._lanes.values() for lane in lanes]
        batches = [batch for lane in lanes for batch in (lane.now, lane.next, *lane.late)]
        waiting = [waiter for batch in batches for waiter in batch.waiters]
        if waiting:
            await asyncio.wait(waiting, timeout=self.options.lock_timeout_s)
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        done = [(lane.topic, lane.partition) for lane in lanes if lane.has_finished]
        if done and monotonic() < self._tends_at:  # where only short scripts are, nobody else does
            try:
                await asyncio.to_thread(upkeep.tend, self.folder, done)
            except (TrunklineError, OSError) as error:
                logger.warning("upkeep failed: %s", error)
        try:
            self.folder.close()
        except OSError as error:
            raise self._told(error) from error
