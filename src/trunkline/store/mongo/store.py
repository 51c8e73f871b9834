"""The store: its parts, put together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, Final

import msgspec
import pymongo
from pymongo.errors import PyMongoError

from trunkline.clock import Clock
from trunkline.codec import encode_event
from trunkline.errors import Conflict, TrunklineError
from trunkline.event import Bounds, Event, Receipt, Record
from trunkline.features import Features
from trunkline.group import Group
from trunkline.group.members import MemberInfo
from trunkline.names import GroupKey, check_topic
from trunkline.options import MongoOptions, TopicOptions, make, merged
from trunkline.store import Bell, Store, limits_of
from trunkline.store.mongo.append import BATCH_BYTES, Appender
from trunkline.store.mongo.feed import ChangeFeed
from trunkline.store.mongo.groups import Groups
from trunkline.store.mongo.log import Log
from trunkline.store.mongo.members import Members
from trunkline.store.mongo.names import LogPlace
from trunkline.store.mongo.server import Server, end_tasks
from trunkline.store.mongo.topics import TopicDocuments, options_of
from trunkline.store.mongo.upkeep import Upkeep

logger = logging.getLogger(__name__)

FEATURES: Final = Features(batch_bytes=BATCH_BYTES, member_timeout_s=2.0)
_COUNT_S: Final = 0.5  # how late a person may find a partition's end in ``counters``
_CLOSE_S: Final = 2.0  # how long ``close`` waits for a server that is away


class MongoStore(Store):
    """``mongodb://host:port/database``; the database is else ``MONGO_DB``, else ``trunkline``.
    ``mongodb:`` alone is the address in ``MONGO_URL``.
    """

    def __init__(
        self, url: str, clock: Clock | None = None, database: str | None = None, **options: Any
    ) -> None:
        self.options = make(MongoOptions, options)
        self.limits = self.options.limits
        self.bell = Bell()
        self.member = secrets.token_hex(6)
        self.features = FEATURES
        self._server = Server(url, clock, database, self.options)
        self.clock = self._server.clock
        self._topics = TopicDocuments(self._server)
        self._log = Log(self._server)
        self._appender = Appender(self._server, self._topics, self._log)
        self._members = Members(self._server, self.member, self.features.member_timeout_s)
        self._groups = Groups(self._server, self.member, self._members)
        self._upkeep = Upkeep(self._server, self._topics, self._log, self._groups, self._members)
        self._feed = ChangeFeed(
            self._server, self.member, self.bell, self._topics, self._groups.known
        )
        self._members.on_gone = self.bell.ring
        self._server.opened = self._begin
        self._tasks: list[asyncio.Task[None]] = []
        self._is_watching = False

    async def _begin(self) -> None:
        """Once the server answers."""
        self.features = msgspec.structs.replace(self.features, durability=self._server.durability)
        await self._members.beat()
        for work in (self._members.keep_alive(), self._upkeep.keep_up(), self._keep_counters()):
            self._tasks.append(asyncio.ensure_future(work))

    # -- the log -----------------------------------------------------------------------------------

    def append(self, topic: str, events: Sequence[Event]) -> Awaitable[list[Receipt]]:
        return self._append(topic, list(events))

    async def _append(self, topic: str, events: list[Event]) -> list[Receipt]:
        check_topic(topic)
        limits = limits_of(topic, self.limits)
        bodies = [encode_event(event, limits) for event in events]
        async with self._server.call():
            receipts = await self._appender.append(topic, events, bodies)
        self.bell.ring(topic)
        return receipts

    async def read(self, topic: str, partition: int, start: int, limit: int) -> list[Record]:
        check_topic(topic)
        async with self._server.call():
            return await self._log.read(await self._topics.place(topic, partition), start, limit)

    async def bounds(self, topic: str, partition: int) -> Bounds:
        check_topic(topic)
        async with self._server.call():
            return await self._log.bounds(await self._topics.place(topic, partition))

    async def seek(self, topic: str, partition: int, when: datetime) -> int:
        check_topic(topic)
        async with self._server.call():
            return await self._log.seek(await self._topics.place(topic, partition), when)

    async def trim(self, topic: str, partition: int, before: int) -> Bounds:
        check_topic(topic)
        async with self._server.call():
            return await self._log.trim(await self._topics.place(topic, partition), before)

    # -- members -----------------------------------------------------------------------------------

    def announce(self, told: Sequence[MemberInfo]) -> None:
        self._members.told = told  # the next sign of life says it

    async def members(self) -> list[MemberInfo]:
        async with self._server.call():
            return await self._members.listening()

    # -- topics ------------------------------------------------------------------------------------

    async def topics(self) -> dict[str, TopicOptions]:
        async with self._server.call():
            found = await self._topics.all()
            return {topic: options for topic, (options, _) in found.items()}

    async def define(self, topic: str, options: TopicOptions | None) -> None:
        check_topic(topic)
        if options is not None:
            await self._change(topic, lambda _: options)
            return
        async with self._server.call():
            await self._remove(topic)
        self.bell.ring(None)

    async def edit(self, topic: str, values: dict[str, Any]) -> TopicOptions:
        check_topic(topic)
        return await self._change(topic, lambda have: merged(have, values))

    async def _change(
        self, topic: str, change: Callable[[TopicOptions], TopicOptions]
    ) -> TopicOptions:
        """Set a topic's options, once what they were made from is still what is there."""
        async with self._server.call():
            while True:
                was = await self._topics.find(topic)
                have = TopicOptions() if was is None else options_of(was)
                options = change(have)
                if options.partitions < have.partitions:
                    raise Conflict(
                        f"{topic} has {have.partitions} partitions, they cannot be reduced",
                        topic=topic,
                    )
                if options.partitions > have.partitions:
                    await self._spread(topic, range(have.partitions, options.partitions))
                if await self._topics.swap(topic, was, options):
                    break
        self.bell.ring(None)
        return options

    async def _spread(self, topic: str, partitions: range) -> None:
        """Give the groups of a topic the partitions that are added."""
        for key in [k for k in await self._groups.keys() if (k.topic, k.partition) == (topic, 0)]:
            async with self.group(key) as group:
                policy = group
            for number in partitions:

                def spread(later: Group, policy: Group = policy) -> None:
                    policy.spread(later)

                await self.change(key._replace(partition=number), spread)

    async def _remove(self, topic: str) -> None:
        """Readers miss it as soon as its configuration is gone; the rest is swept after that."""
        incarnation = await self._topics.remove(topic)
        for key in [key for key in await self._groups.keys() if key.topic == topic]:
            await self.remove_group(key)
        self._appender.forget(topic)
        self._log.forget(topic)
        await self._topics.sweep(topic, incarnation)

    # -- groups ------------------------------------------------------------------------------------

    def group(self, key: GroupKey) -> AbstractAsyncContextManager[Group]:
        return self._groups.transaction(key)

    async def groups(self) -> list[GroupKey]:
        async with self._server.call():
            return await self._groups.keys()

    async def remove_group(self, key: GroupKey) -> None:
        async with self._server.call():
            await self._groups.remove(key)
        self.bell.ring(None)

    # -- life --------------------------------------------------------------------------------------

    def watch(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            self._tasks.append(asyncio.ensure_future(self._feed.follow()))

    async def upkeep(self) -> None:
        """Retention and compaction, now."""
        await self._upkeep.run()

    async def idle(self) -> bool:
        return await self._server.idle()

    async def _keep_counters(self) -> None:
        """Write the ends of partitions where people look for them. No reader relies on it."""
        told: dict[LogPlace, int] = {}
        while True:
            await asyncio.sleep(_COUNT_S)
            try:
                await self._count(told)
            except PyMongoError as error:
                logger.debug("no counter could be written: %s", error)

    async def _count(self, told: dict[LogPlace, int]) -> None:
        for place, end in self._appender.ends().items():
            if told.get(place) != end:
                await self._log.tell(place, end)
                told[place] = end

    async def close(self) -> None:
        if self._server.is_closed:
            return
        try:
            if self._server.is_ready:
                with contextlib.suppress(PyMongoError), pymongo.timeout(_CLOSE_S):
                    await self._free_own()
                    await self._count({})
                    await self._members.leave()
        finally:
            await self._let_go()

    async def _free_own(self) -> None:
        for key in self._groups.leased():
            with contextlib.suppress(TrunklineError):
                await self.change(key, lambda group: group.free(self.member))

    async def abandon(self) -> None:
        """Stop as a killed process would: no lease is given back, no sign of life is written."""
        await self._let_go()

    async def _let_go(self) -> None:
        self._server.is_closed = True
        await end_tasks(self._tasks)
        await self._server.close()
