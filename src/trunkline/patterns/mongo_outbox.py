"""An outbox that is a MongoDB collection.

A row is written in the caller's transaction, beside the data it speaks of. Rows belong to lanes, by
topic and key: a drainer leases lanes, not rows, and takes the rows of a lane in their order. So
many drainers share an outbox, and the rows of one key are published in the order in which they were
added. A row is ``sent`` only after the bus acknowledged it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final
from zlib import crc32

import msgspec
from pymongo import UpdateOne, WriteConcern
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import DuplicateKeyError
from pymongo.read_concern import ReadConcern

from trunkline.check import check_span
from trunkline.clock import Clock, SystemClock
from trunkline.event import Event, Receipt
from trunkline.options import Limits
from trunkline.patterns.outbox import OutboxRow, outgoing

_LANES: Final = 64


class RowState(StrEnum):
    WAITING = "waiting"
    SENT = "sent"
    GIVEN_UP = "given up"


class MongoOutbox:
    """``collection`` is one of pymongo's async API. Leases of lanes are beside it, in
    ``<collection>.lanes``.

    A drainer that dies keeps its lanes until their lease ends (``OutboxOptions.lease_s``).
    """

    def __init__(
        self,
        collection: AsyncCollection[dict[str, Any]],
        *,
        limits: Limits = Limits(),
        clock: Clock | None = None,
    ) -> None:
        safe = WriteConcern("majority", j=True)
        self.rows = collection
        self._rows = collection.with_options(
            write_concern=safe, read_concern=ReadConcern("majority")
        )
        self._lanes = collection.database.get_collection(
            f"{collection.name}.lanes", write_concern=safe
        )
        self._limits = limits
        self._clock: Clock = clock or SystemClock()
        self._last = 0
        self._open: dict[str, tuple[str, int]] = {}  # claimed rows: the claim, and the lane

    async def create(self) -> None:
        """Make the indexes if there are none."""
        await self._rows.create_index([("state", 1), ("lane", 1), ("at", 1), ("_id", 1)])
        await self._rows.create_index([("state", 1), ("sentAt", 1)])

    async def add(
        self,
        topic: str | Event,
        payload: Any = None,
        *,
        session: AsyncClientSession | None = None,
        **fields: Any,
    ) -> str:
        """Write an event in the transaction of ``session``; the id it will have."""
        now = self._clock.now()
        event, data = outgoing(topic, payload, fields, now, self._limits)
        self._last = max(self._last + 1, round(now.timestamp() * 1_000_000))
        row = {
            "_id": event.id,
            "state": RowState.WAITING,
            "lane": _lane(event),
            "at": self._last,
            "topic": event.topic,
            "key": event.key,
            "event": data.decode(),
            "attempts": 0,
        }
        await self.rows.insert_one(row, session=session)
        return event.id

    async def claim(self, by: str, limit: int, lease_s: float) -> list[OutboxRow]:
        mark = f"{by[:16]}-{secrets.token_hex(6)}"  # of this claim and no other
        lanes = await self._lease(mark, lease_s)
        if not lanes:
            return []
        waiting = {"state": RowState.WAITING, "lane": {"$in": lanes}}
        found = await self._rows.find(waiting).sort([("at", 1), ("_id", 1)]).to_list(limit)
        self._open |= {row["_id"]: (mark, row["lane"]) for row in found}
        idle = set(lanes) - {row["lane"] for row in found}
        await self._free(mark, idle)
        # From here on nobody knows how far they come, until they are marked as sent.
        await self._rows.update_many(
            {"_id": {"$in": [row["_id"] for row in found]}}, {"$inc": {"attempts": 1}}
        )
        return [
            OutboxRow(msgspec.json.decode(row["event"], type=Event), row["attempts"] > 0)
            for row in found
        ]

    async def _lease(self, mark: str, lease_s: float) -> list[int]:
        """The lanes with waiting rows that no other drainer has."""
        lanes: list[int] = await self._rows.distinct("lane", {"state": RowState.WAITING})
        now = self._clock.now().timestamp()
        mine = []
        for lane in lanes:
            try:
                done = await self._lanes.update_one(
                    {"_id": lane, "until": {"$lte": now}},
                    {"$set": {"by": mark, "until": now + lease_s}},
                    upsert=True,
                )
            except DuplicateKeyError:
                continue  # another drainer has it
            if done.matched_count or done.upserted_id is not None:
                mine.append(lane)
        return mine

    async def _free(self, mark: str, lanes: set[int]) -> None:
        if lanes:
            await self._lanes.update_many(
                {"_id": {"$in": list(lanes)}, "by": mark}, {"$set": {"until": 0.0}}
            )

    async def sent(self, rows: Sequence[OutboxRow], receipts: Sequence[Receipt]) -> None:
        now = self._clock.now()
        await self._rows.bulk_write(
            [
                UpdateOne(
                    {"_id": row.event.id},
                    {
                        "$set": {
                            "state": RowState.SENT,
                            "sentAt": now,
                            "partition": receipt.partition,
                            "offset": receipt.offset,
                        },
                        "$unset": {"error": ""},
                    },
                )
                for row, receipt in zip(rows, receipts, strict=True)
            ],
            ordered=False,
        )
        await self._done(rows)

    async def failed(self, rows: Sequence[OutboxRow], error: str, max_attempts: int | None) -> None:
        waiting = {"_id": {"$in": [row.event.id for row in rows]}, "state": RowState.WAITING}
        await self._rows.update_many(waiting, {"$set": {"error": error}})
        if max_attempts is not None:
            tired = {**waiting, "attempts": {"$gte": max_attempts}}
            await self._rows.update_many(tired, {"$set": {"state": RowState.GIVEN_UP}})
        await self._done(rows)

    async def _done(self, rows: Sequence[OutboxRow]) -> None:
        """Free the lanes of which every claimed row has its answer."""
        done = {place for row in rows if (place := self._open.pop(row.event.id, None))}
        left = set(self._open.values())
        for mark in {mark for mark, _ in done - left}:
            await self._free(mark, {lane for own, lane in done - left if own == mark})

    async def retry(self) -> int:
        """Let rows that were given up be tried again; how many there are."""
        done = await self._rows.update_many(
            {"state": RowState.GIVEN_UP}, {"$set": {"state": RowState.WAITING, "attempts": 1}}
        )
        return done.modified_count

    async def waiting(self) -> int:
        """How many rows are neither sent nor given up."""
        return await self._rows.count_documents({"state": RowState.WAITING})

    async def prune(self, older_than_s: float) -> int:
        """Remove rows that were sent so long ago."""
        check_span(older_than_s, "older_than_s")
        before = self._clock.now() - timedelta(seconds=older_than_s)
        old = {"state": RowState.SENT, "sentAt": {"$lt": before}}
        return (await self._rows.delete_many(old)).deleted_count


def _lane(event: Event) -> int:
    """Rows of one key are in one lane; rows without a key are in any."""
    name = event.id if event.key is None else f"{event.topic}\0{event.key}"
    return crc32(name.encode()) % _LANES
