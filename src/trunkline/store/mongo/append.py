"""Appending: the insert of a batch is the compare-and-append.

The ``_id`` of a batch is the offset where the writer believes the end to be. Every offset that ever
was the end begins a batch, so a writer that is wrong meets a duplicate key. A writer only believes
what a majority has: so when a batch is there all batches before it are there too, also after a
failover took back what a majority did not have.

A batch has a nonce. After a duplicate key or a lost connection the writer asks whose batch is
there, and asks the majority: only then the answer is final.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from pymongo import WriteConcern
from pymongo.errors import (
    ConnectionFailure,
    DocumentTooLarge,
    DuplicateKeyError,
    PyMongoError,
)

from trunkline.errors import InvalidEvent, LockTimeout
from trunkline.event import Event, Receipt
from trunkline.features import Promise
from trunkline.options import TopicOptions
from trunkline.store import append_parts
from trunkline.store.mongo.log import Log
from trunkline.store.mongo.names import LogPlace
from trunkline.store.mongo.rows import micros, to_row
from trunkline.store.mongo.server import Collection, Document, Server
from trunkline.store.mongo.topics import TopicDocuments

BATCH_BYTES: Final = 12 * 1024 * 1024  # a document holds 16 MiB: events, and their keys again
_STALE_S: Final = 60.0  # a writer that knows the end for so long reads it again
_AGAIN_S: Final = 0.02  # a writer that lost a race once tries again after so long, at most
_TURN_S: Final = 0.12  # how long a writer steps aside for each of the others that write
_MOST_ASIDE_S: Final = 0.5  # also for many
_LEAST_S: Final = 10.0  # how long a writer tries while others are first, at least

_FIELDS: Final = {"first": 1, "n": 1, "keys": 1, "nonce": 1}
_WRITER: Final = 8  # characters of a nonce that name the writer

Key = tuple[int, float, str]  # offset, time and id of the first event with an idempotency key


class _Removed(Exception):
    """The topic was removed before its records were kept: they go to its next incarnation."""


class _Job:
    """Events of one append for one partition."""

    __slots__ = ("bodies", "events", "receipts", "size")

    def __init__(self, events: Sequence[Event], bodies: Sequence[bytes]) -> None:
        self.events = events
        self.bodies = bodies
        self.size = sum(map(len, bodies))
        loop = asyncio.get_running_loop()
        self.receipts: asyncio.Future[list[Receipt]] = loop.create_future()


class PartitionEnd:
    """What this process knows of a partition's end, and the appends that wait for it."""

    def __init__(self) -> None:
        self.next = 0  # the end as a majority had it; 0: not known
        self.known_at = 0.0  # 0: others were first since
        self.keys: dict[str, Key] = {}
        self.has_keys = False
        self.lock = asyncio.Lock()
        self.waiting: list[_Job] = []
        self._losses = 0  # since the last append
        self._others = 1  # how many other writers there were when it last stepped aside

    @property
    def is_challenger(self) -> bool:
        return self._losses > 0

    def won(self) -> None:
        self._losses = 0

    def aside_s(self) -> float:
        """How long a writer that lost a race leaves the partition to others. Briefly at first: the
        other may write only now and then. If it loses again, for the turns of all others: each
        insert that meets another one costs both. After a turn it tries twice.
        """
        self._losses += 1
        if self._losses == 1:
            return random.uniform(0, _AGAIN_S)
        if self._losses % 2:
            return 0.0
        turn = min(self._others * _TURN_S, _MOST_ASIDE_S)
        return random.uniform(turn / 2, turn)

    def count_others(self, batches: Sequence[Document]) -> None:
        """What was appended while this writer stepped aside tells how many others there are."""
        self._others = max(1, len({found["nonce"][:_WRITER] for found in batches}))

    def remember(self, keys: dict[str, Key], options: TopicOptions) -> None:
        for key, found in keys.items():
            self.keys.pop(key, None)
            self.keys[key] = found
        while len(self.keys) > options.dedup_keys:
            del self.keys[next(iter(self.keys))]

    def take_in(self, batches: Sequence[Document], options: TopicOptions) -> None:
        """What other writers appended at the end that was known."""
        for found in batches:
            self.next = found["first"] + found["n"]
            self.remember({key: tuple(rest) for key, *rest in found["keys"]}, options)
        self.known_at = time.monotonic()

    def take(self) -> list[_Job]:
        """The jobs that fit into one batch."""
        jobs: list[_Job] = []
        room = BATCH_BYTES
        while self.waiting and (not jobs or self.waiting[0].size <= room):
            jobs.append(self.waiting.pop(0))
            room -= jobs[-1].size
        return jobs


class BatchDocument:
    """The records of one document, made from the jobs that wait."""

    def __init__(
        self, partition: PartitionEnd, options: TopicOptions, now: float, writer: str
    ) -> None:
        self._partition = partition
        self._window = options.dedup_window_s
        self._now = now
        self.nonce = writer + secrets.token_hex(6)
        self.records: list[Document] = []
        self.keys: dict[str, Key] = {}
        self._times: list[datetime] = []

    def add(self, job: _Job, place: LogPlace, durability: Promise) -> list[Receipt]:
        events, topic, number = job.events, place.topic, place.partition
        if self._window and any(event.idem_key is not None for event in events):
            return [
                self._add_once(event, body, place, durability)
                for event, body in zip(events, job.bodies, strict=True)
            ]
        start = self._partition.next + len(self.records)
        numbered = enumerate(zip(events, job.bodies, strict=True), start)
        self.records += [to_row(event, offset, body) for offset, (event, body) in numbered]
        self._times += [event.ts for event in events]
        return [
            Receipt(topic, number, offset, event.id, False, durability)
            for offset, event in enumerate(events, start)
        ]

    def _add_once(self, event: Event, body: bytes, place: LogPlace, durability: Promise) -> Receipt:
        topic, number = place.topic, place.partition
        known = self._known(event)
        if known is not None:
            return Receipt(topic, number, known[0], known[2], True, durability)
        offset = self._partition.next + len(self.records)
        self.records.append(to_row(event, offset, body))
        self._times.append(event.ts)
        if event.idem_key is not None:
            self.keys[event.idem_key] = (offset, self._now, event.id)
        return Receipt(topic, number, offset, event.id, False, durability)

    def _known(self, event: Event) -> Key | None:
        if not self._window or event.idem_key is None:
            return None
        known = self.keys.get(event.idem_key) or self._partition.keys.get(event.idem_key)
        if known is None or self._now - known[1] >= self._window:
            return None
        return known

    def document(self, place: LogPlace) -> Document:
        return {
            "_id": place.batch(self._partition.next),
            "topic": place.topic,
            "partition": place.partition,
            "first": self._partition.next,
            "n": len(self.records),
            "at": self._now,
            "nonce": self.nonce,
            "keys": [[key, *found] for key, found in self.keys.items()],
            "oldest": micros(min(self._times)),
            "newest": micros(max(self._times)),
            "records": self.records,
        }


class Appender:
    """The appends of this process. Those that wait for one partition share a batch."""

    def __init__(self, server: Server, topics: TopicDocuments, log: Log) -> None:
        self._server = server
        self._topics = topics
        self._log = log
        self._partitions: dict[LogPlace, PartitionEnd] = {}
        self._turn = 0
        self._writer = secrets.token_hex(_WRITER // 2)

    async def append(
        self, topic: str, events: Sequence[Event], bodies: Sequence[bytes]
    ) -> list[Receipt]:
        while True:
            with contextlib.suppress(_Removed):
                return await self._append(topic, events, bodies)

    async def _append(
        self, topic: str, events: Sequence[Event], bodies: Sequence[bytes]
    ) -> list[Receipt]:
        options, incarnation = await self._topics.options(topic)

        async def keep(
            number: int, events: Sequence[Event], bodies: Sequence[bytes]
        ) -> list[Receipt]:
            job = _Job(events, bodies)
            if job.size > BATCH_BYTES:
                raise InvalidEvent(
                    f"the batch has {job.size} bytes, {BATCH_BYTES} are allowed",
                    hint="publish it in parts",
                )
            return await self._join(LogPlace(topic, number, incarnation), options, job)

        if options.partitions == 1:
            return await keep(0, events, bodies)
        turn = self._turn
        self._turn += len(events)

        async def keep_share(number: int, indexes: list[int]) -> list[Receipt]:
            return await keep(number, [events[i] for i in indexes], [bodies[i] for i in indexes])

        return await append_parts(events, options.partitions, turn, keep_share)

    async def _join(self, place: LogPlace, options: TopicOptions, job: _Job) -> list[Receipt]:
        """The append that gets the lock writes for all that wait."""
        partition = self._partitions.setdefault(place, PartitionEnd())
        partition.waiting.append(job)
        try:
            async with partition.lock:
                if not job.receipts.done():
                    # Shielded: others wait for it, also when this caller is cancelled.
                    jobs = partition.take()
                    writing = asyncio.ensure_future(self._write(place, partition, options, jobs))
                    try:
                        await asyncio.shield(writing)
                    except asyncio.CancelledError:
                        with contextlib.suppress(Exception):
                            await writing
                        raise
        except asyncio.CancelledError:
            if job in partition.waiting:
                partition.waiting.remove(job)
            raise
        return await job.receipts

    async def _write(
        self, place: LogPlace, partition: PartitionEnd, options: TopicOptions, jobs: list[_Job]
    ) -> None:
        try:
            results = await self._insert(place, partition, options, jobs)
        except BaseException as error:
            partition.known_at = 0.0
            for job in jobs:
                if not job.receipts.done():
                    job.receipts.set_exception(error)
                    job.receipts.exception()  # one that was cancelled asks for none
            if not isinstance(error, Exception):
                raise
            return
        for job, receipts in zip(jobs, results, strict=True):
            if not job.receipts.done():
                job.receipts.set_result(receipts)

    async def _insert(
        self, place: LogPlace, partition: PartitionEnd, options: TopicOptions, jobs: list[_Job]
    ) -> list[list[Receipt]]:
        log, durability = self._concern(options)
        started = time.monotonic()
        give_up = started + max(self._server.options.patience_s, _LEAST_S)
        while True:
            await self._catch_up(place, partition, options)
            now = self._server.clock.now().timestamp()
            batch = BatchDocument(partition, options, now, self._writer)
            results = [batch.add(job, place, durability) for job in jobs]
            if not batch.records:
                return results
            others = await self._place(log, batch, place, partition, give_up)
            if not others:
                break
            partition.take_in(others, options)
            if time.monotonic() > give_up:
                raise LockTimeout(
                    f"{place.topic}/{place.partition}: other writers were first for "
                    f"{time.monotonic() - started:.0f} s",
                    hint="more partitions let more writers in",
                )
        partition.next += len(batch.records)
        partition.known_at = time.monotonic()
        partition.won()
        partition.remember(batch.keys, options)
        if not await self._topics.is_current(place):
            raise _Removed
        return results

    async def _place(
        self,
        log: Collection,
        batch: BatchDocument,
        place: LogPlace,
        partition: PartitionEnd,
        give_up: float,
    ) -> list[Document]:
        """Insert the batch. Empty if it is there, else the batches that others have in its place
        and behind it.
        """
        document = batch.document(place)
        while True:
            found: list[Document] = []
            try:
                there = await self._try(log, document, partition.is_challenger)
            except DuplicateKeyError:  # another writer was first, or this one was sent twice
                found = await self._since(place, document["first"])
            except DocumentTooLarge as error:
                raise InvalidEvent(f"MongoDB cannot hold this batch: {error}") from None
            except PyMongoError as error:
                if not _is_unsure(error) or time.monotonic() > give_up:
                    raise
            else:
                if there is None:
                    return []
                found = [there]
            if not found or found[0]["_id"] != document["_id"]:
                # A batch is there that a majority does not have yet: it may go, or come to stay.
                await asyncio.sleep(random.uniform(0, _AGAIN_S))
                found = await self._since(place, document["first"])
            if found and found[0]["_id"] == document["_id"]:
                if found[0]["nonce"] == batch.nonce:
                    return []
                if aside_s := partition.aside_s():
                    await asyncio.sleep(aside_s)
                    found = await self._since(place, document["first"])
                    partition.count_others(found)
                return found

    async def _try(
        self, log: Collection, document: Document, is_challenger: bool
    ) -> Document | None:
        """Insert a batch. None if it is there, else, or by ``DuplicateKeyError``, another one is.

        A challenger is told the other batch by the same command, so it knows the end as soon as the
        writer of that batch does. The server answers it, too, once a majority has that batch: with
        a lesser write concern it would not.
        """
        if not is_challenger or log.write_concern.document.get("w") != "majority":
            await log.insert_one(document)
            return None
        name, rest = {"_id": document["_id"]}, {**document}
        del rest["_id"]
        return await log.find_one_and_update(name, {"$setOnInsert": rest}, _FIELDS, upsert=True)

    async def _since(self, place: LogPlace, start: int) -> list[Document]:
        """The batches that a majority has, from an offset on, without their records."""
        found = self._server.log.find({"_id": place.since(start)}, _FIELDS)
        return [document async for document in found.sort("_id", 1)]

    def _concern(self, options: TopicOptions) -> tuple[Collection, Promise]:
        """The log with the write concern that a topic's durability asks for."""
        if options.durability == "fsync":
            return self._server.log, self._server.durability
        level: Promise = "os" if options.durability == "os" else "none"
        return self._server.log.with_options(write_concern=WriteConcern(1)), level

    async def _catch_up(
        self, place: LogPlace, partition: PartitionEnd, options: TopicOptions
    ) -> None:
        """Read what other writers appended: their idempotency keys, and the end."""
        window = options.dedup_window_s
        is_known = partition.next and time.monotonic() - partition.known_at < _STALE_S
        if is_known and (partition.has_keys or not window):
            return
        if not partition.next or (window and not partition.has_keys):
            partition.next = await self._log.end(place)
            if window:
                await self._read_keys(place, partition, options)
        partition.take_in(await self._since(place, partition.next), options)

    async def _read_keys(
        self, place: LogPlace, partition: PartitionEnd, options: TopicOptions
    ) -> None:
        """The idempotency keys of the window, below the end that is known."""
        since = self._server.clock.now().timestamp() - options.dedup_window_s
        span = {"$gte": place.batch(0), "$lt": place.batch(partition.next)}
        wanted = {"_id": span, "at": {"$gte": since}, "keys": {"$ne": []}}
        async for found in self._server.log.find(wanted, {"keys": 1}).sort("_id", 1):
            partition.remember({key: tuple(rest) for key, *rest in found["keys"]}, options)
        partition.has_keys = True

    def ends(self) -> dict[LogPlace, int]:
        """The ends of the partitions that this process wrote to."""
        return {place: one.next for place, one in self._partitions.items() if one.next}

    def forget(self, topic: str) -> None:
        for place in [place for place in self._partitions if place.topic == topic]:
            del self._partitions[place]


def _is_unsure(error: PyMongoError) -> bool:
    """Whether the write may have happened, or may happen on another server."""
    return isinstance(error, ConnectionFailure) or error.timeout
