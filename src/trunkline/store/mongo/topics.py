"""Topics: one document each, with the options and the name of the incarnation."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import Any, Final

from pymongo.errors import DuplicateKeyError

from trunkline.errors import NotFound
from trunkline.options import TopicOptions, changed, make
from trunkline.store.mongo import names
from trunkline.store.mongo.names import LogPlace
from trunkline.store.mongo.server import Document, Server

FRESH_S: Final = 0.1  # what is known of a topic may be used for so long
_OURS: Final = frozenset({"_id", "topic", "retentionMs", "incarnation"})


class TopicDocuments:
    """A process uses what it read of a topic for ``FRESH_S``, and a removal returns only after
    that: so no record and no reader is left behind in a topic that is gone.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known: dict[str, tuple[float, Document]] = {}  # when it was read, and the document

    def forget(self, topic: str) -> None:
        self._known.pop(topic, None)

    async def options(self, topic: str) -> tuple[TopicOptions, str]:
        """Options and incarnation; a topic that is not there is made."""
        found = self._fresh(topic) or await self._read(topic)
        while found is None:
            made = {"_id": topic, "topic": topic, "partitions": 1}
            with contextlib.suppress(DuplicateKeyError):  # another member was first
                await self._server.configs.insert_one({**made, "incarnation": secrets.token_hex(4)})
            found = await self._read(topic)
        return options_of(found), found["incarnation"]

    async def place(self, topic: str, partition: int) -> LogPlace:
        found = self._fresh(topic) or await self._read(topic)
        return LogPlace(topic, partition, "" if found is None else found["incarnation"])

    async def is_current(self, place: LogPlace) -> bool:
        """Whether the topic was there just now: a record in a removed one would be lost."""
        found = self._fresh(place.topic) or await self._read(place.topic)
        return found is not None and found["incarnation"] == place.incarnation

    def _fresh(self, topic: str) -> Document | None:
        known = self._known.get(topic)
        if known is not None and time.monotonic() - known[0] < FRESH_S:
            return known[1]
        return None

    async def _read(self, topic: str) -> Document | None:
        asked = time.monotonic()
        found = await self._server.configs.find_one({"_id": topic})
        if found is None:
            self._known.pop(topic, None)
        else:
            self._known[topic] = (asked, found)
        return found

    async def all(self) -> dict[str, tuple[TopicOptions, str]]:
        return {
            found["_id"]: (options_of(found), found["incarnation"])
            async for found in self._server.configs.find().sort("_id", 1)
        }

    async def find(self, topic: str) -> Document | None:
        """The document as it is now."""
        return await self._read(topic)

    async def swap(self, topic: str, was: Document | None, options: TopicOptions) -> bool:
        """Write the options of a topic whose document was ``was``; False if it is another one now.
        The incarnation stays: a new one would lose what others published meanwhile.
        """
        values: dict[str, Any] = {
            "_id": topic,
            "topic": topic,
            "partitions": options.partitions,
            **changed(options),
        }
        if options.retention_age_s is not None:
            values["retentionMs"] = round(options.retention_age_s * 1000)
        self.forget(topic)
        if was is None:
            try:
                await self._server.configs.insert_one(
                    {**values, "incarnation": secrets.token_hex(4)}
                )
            except DuplicateKeyError:
                return False
            return True
        done = await self._server.configs.replace_one(
            {"_id": topic, "$expr": {"$eq": ["$$ROOT", {"$literal": was}]}},
            {**values, "incarnation": was["incarnation"]},
        )
        self.forget(topic)
        return bool(done.matched_count)

    async def remove(self, topic: str) -> str:
        """Its incarnation. When this returns no process works with it any more."""
        gone = await self._server.configs.find_one_and_delete({"_id": topic})
        self.forget(topic)
        if gone is None:
            raise NotFound(f"there is no topic {topic}", topic=topic)
        await asyncio.sleep(2 * FRESH_S)
        return str(gone["incarnation"])

    async def sweep(self, topic: str, incarnation: str) -> None:
        """Remove the batches and counters of an incarnation."""
        await self._server.log.delete_many({"_id": names.of_topic(topic, incarnation)})
        await self._server.counters.delete_many({"topic": topic, "incarnation": incarnation})

    async def sweep_orphans(self) -> None:
        """Remove what a killed removal left: batches whose incarnation is no more."""
        log, after = self._server.log, ""
        while found := await log.find_one({"_id": {"$gt": after}}, {"topic": 1}, sort=[("_id", 1)]):
            topic, incarnation, _ = found["_id"].split(":", 2)
            now = await self._read(topic)
            if now is None or now["incarnation"] != incarnation:
                await self.sweep(topic, incarnation)
            after = f"{topic}:{incarnation};"


def options_of(found: Document) -> TopicOptions:
    return make(TopicOptions, {k: v for k, v in found.items() if k not in _OURS})
