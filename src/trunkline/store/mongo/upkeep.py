"""Retention, compaction, and what killed members left behind."""

from __future__ import annotations

import asyncio
import logging
import random
from datetime import timedelta

from pymongo.errors import PyMongoError

from trunkline.errors import TrunklineError
from trunkline.options import TopicOptions
from trunkline.store.mongo.groups import Groups
from trunkline.store.mongo.log import Log
from trunkline.store.mongo.members import Members
from trunkline.store.mongo.names import LogPlace
from trunkline.store.mongo.rows import micros
from trunkline.store.mongo.server import Document, Server
from trunkline.store.mongo.topics import TopicDocuments

logger = logging.getLogger(__name__)


class Upkeep:
    def __init__(
        self, server: Server, topics: TopicDocuments, log: Log, groups: Groups, members: Members
    ) -> None:
        self._server = server
        self._topics = topics
        self._log = log
        self._groups = groups
        self._members = members

    async def keep_up(self) -> None:
        while True:
            await asyncio.sleep(self._server.options.upkeep_s * random.uniform(0.9, 1.1))
            try:
                await self.run()
            except (PyMongoError, TrunklineError) as error:
                logger.warning("upkeep of the database failed: %s", error)

    async def run(self) -> None:
        async with self._server.call():
            await self._members.sweep()
            await self._topics.sweep_orphans()
            for topic, (options, incarnation) in (await self._topics.all()).items():
                for number in range(options.partitions):
                    place = LogPlace(topic, number, incarnation)
                    await self._retain(place, options)
                    if options.compact:
                        await self._compact(place, options)

    async def _retain(self, place: LogPlace, options: TopicOptions) -> None:
        first, end = await self._log.bounds(place)
        before = first
        if options.retention_records is not None:
            before = max(before, end - options.retention_records)
        if options.retention_age_s is not None:
            before = max(before, await self._younger(place, options.retention_age_s, before))
        if options.retention_bytes is not None:
            before = max(before, await self._within(place, options.retention_bytes, end))
        before = await self._settled(place, before, options)
        if before > first:
            await self._log.trim(place, before)
        else:
            await self._log.sweep(place, first)

    async def _younger(self, place: LogPlace, age_s: float, before: int) -> int:
        """The offset before which all batches are older than ``age_s``."""
        oldest = self._server.clock.now() - timedelta(seconds=age_s)
        span = {"_id": place.since(), "newest": {"$lt": micros(oldest)}}
        async for found in self._server.log.find(span, {"first": 1, "n": 1}).sort("_id", 1):
            if found["first"] > before:
                break
            before = max(before, found["first"] + found["n"])
        return before

    async def _within(self, place: LogPlace, room: int, end: int) -> int:
        """The offset from which on the batches fit into ``room``."""
        sizes: list[Document] = [
            {"$match": {"_id": place.since()}},
            {"$project": {"first": 1, "size": {"$sum": {
                "$map": {"input": "$records", "in": {"$strLenBytes": "$$this.body"}}}}}},
            {"$sort": {"_id": -1}},
        ]  # fmt: skip
        before = end
        async for found in await self._server.log.aggregate(sizes):
            room -= found["size"]
            if room < 0:
                break
            before = found["first"]
        return before

    async def _settled(self, place: LogPlace, before: int, options: TopicOptions) -> int:
        """``before``, or less where a group has not settled that far."""
        if not options.retain_unsettled:
            return before
        for key in await self._groups.keys():
            if (key.topic, key.partition) == place[:2]:
                async with self._groups.transaction(key) as group:
                    before = min([before, group.floor + 1, *group.again])
        return before

    async def _compact(self, place: LogPlace, options: TopicOptions) -> None:
        """Keep the latest record of each key, records without one, and unsettled records."""
        free = await self._settled(place, await self._log.end(place), options)
        latest: dict[str, int] = {}
        fields = {"records.offset": 1, "records.key": 1, "records.tombstone": 1}
        async for found in self._server.log.find({"_id": place.since()}, fields).sort("_id", 1):
            for row in found["records"]:
                if row.get("key") is not None:
                    latest[row["key"]] = row["offset"]
        async for found in self._server.log.find({"_id": place.since()}, fields).sort("_id", 1):
            old = [
                row["offset"]
                for row in found["records"]
                if row.get("key") is not None
                and row["offset"] < free
                and (latest[row["key"]] != row["offset"] or row.get("tombstone"))
            ]
            if old:
                await self._server.log.update_one(
                    {"_id": found["_id"]}, {"$pull": {"records": {"offset": {"$in": old}}}}
                )
