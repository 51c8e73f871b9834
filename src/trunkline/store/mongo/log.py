"""Reading the log, and removing its beginning."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from pymongo.errors import DuplicateKeyError

from trunkline.errors import OutOfRange
from trunkline.event import Bounds, Record
from trunkline.store.mongo.names import LogPlace
from trunkline.store.mongo.rows import from_body, micros
from trunkline.store.mongo.server import Collection, Server

_YOUNG_S: Final = 600.0  # no younger batch is removed
_MOST_BATCHES: Final = 20  # that one query asks for
_FIELDS: Final = {"first": 1, "n": 1, "records.offset": 1, "records.body": 1}


class Log:
    """Batches of a partition in the order of their offsets. ``counters`` has the offset at which
    a partition begins, for people also the one that comes next.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._batches = server.log
        self._last: dict[LogPlace, tuple[int, int]] = {}  # first and next offset of a batch we read

    async def first(self, place: LogPlace) -> int:
        found = await self._server.counters.find_one(
            {"_id": place.counter, "incarnation": place.incarnation}, {"first": 1}
        )
        return 1 if found is None else int(found.get("first", 1))

    async def end(self, place: LogPlace) -> int:
        """The offset that comes next: always the end of a batch, any other could overlap one."""
        last = await self._batches.find_one(
            {"_id": place.since()}, {"first": 1, "n": 1}, sort=[("_id", -1)]
        )
        return 1 if last is None else int(last["first"] + last["n"])

    async def bounds(self, place: LogPlace) -> Bounds:
        return Bounds(await self.first(place), await self.end(place))

    async def read(self, place: LogPlace, start: int, limit: int) -> list[Record]:
        first = await self.first(place)
        if start < first:
            end = await self.end(place)
            raise OutOfRange(
                f"{place.topic}/{place.partition} begins at offset {first}, not {start}",
                offset=start,
                first=first,
                next=end,
            )
        found: list[Record] = []
        start_at = await self._base(place, start)
        while True:
            count, got = self._count_for(place, limit - len(found)), 0
            span = {"_id": place.since(start_at)}
            async for batch in self._batches.find(span, _FIELDS).sort("_id", 1).limit(count):
                got += 1
                start_at = batch["first"] + batch["n"]
                self._last[place] = (batch["first"], start_at)
                for row in batch["records"]:
                    if row["offset"] >= start:
                        found.append(Record(from_body(row["body"]), place.partition, row["offset"]))
                        if len(found) == limit:
                            return found
            if got < count:
                return found

    def _count_for(self, place: LogPlace, limit: int) -> int:
        """How many batches to ask for, if each is as long as the batch that was read last.
        One more, as the first may be read already, up to its last records.
        """
        first, following = self._last.get(place, (0, limit))
        return min(limit // max(following - first, 1) + 2, _MOST_BATCHES)

    async def _base(self, place: LogPlace, start: int) -> int:
        """The first offset of the batch that holds ``start``. Most often the last one we read."""
        known = self._last.get(place)
        if known is not None and known[0] <= start <= known[1]:
            return known[1] if start == known[1] else known[0]
        base = await self._batches.find_one(
            {"_id": place.until(start)}, {"first": 1}, sort=[("_id", -1)]
        )
        return start if base is None else int(base["first"])

    async def seek(self, place: LogPlace, when: datetime) -> int:
        first = await self.first(place)
        span = {"_id": place.since(), "newest": {"$gte": micros(when)}}
        async for batch in self._batches.find(span, _FIELDS).sort("_id", 1):
            for row in batch["records"]:
                if row["offset"] >= first and from_body(row["body"]).ts >= when:
                    return int(row["offset"])
        return await self.end(place)

    async def trim(self, place: LogPlace, before: int) -> Bounds:
        first, end = await self.bounds(place)
        before = max(first, min(before, end))
        if before > first:
            await self._count(self._server.counters, place, {"first": before, "nextOffset": end})
            await self.sweep(place, before)
        return Bounds(before, end)

    async def tell(self, place: LogPlace, end: int) -> None:
        """Write the offset that comes next where people look for it. No reader relies on it."""
        await self._count(self._server.quick_counters, place, {"nextOffset": end})

    async def _count(self, counters: Collection, place: LogPlace, least: dict[str, int]) -> None:
        """Raise the counters of a partition, of this incarnation of its topic."""
        named = {"topic": place.topic, "partition": place.partition}
        mine = {"_id": place.counter, "incarnation": place.incarnation}
        for _ in range(2):
            try:
                await counters.update_one(mine, {"$max": least, "$set": named}, upsert=True)
            except DuplicateKeyError:  # of an incarnation before
                other = {"_id": place.counter, "incarnation": {"$ne": place.incarnation}}
                await counters.delete_one(other)
            else:
                return

    async def sweep(self, place: LogPlace, before: int) -> None:
        """Delete batches that lie below the first offset. The last batch says where the end is, and
        a young one may be in the way of a writer that is about to find out.
        """
        below = await self._batches.find_one(
            {"_id": place.until(before)}, {"_id": 1}, sort=[("_id", -1)]
        )
        if below is not None:
            young = self._server.clock.now().timestamp() - _YOUNG_S
            span = {"$gte": place.batch(0), "$lt": below["_id"]}
            await self._batches.delete_many({"_id": span, "at": {"$lt": young}})

    def forget(self, topic: str) -> None:
        for place in [place for place in self._last if place.topic == topic]:
            del self._last[place]
