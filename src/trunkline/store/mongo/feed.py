"""Notices of what other members do: a change stream, or polling where the server has none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from pymongo.errors import ConnectionFailure, OperationFailure, PyMongoError

from trunkline.errors import TrunklineError
from trunkline.names import GroupKey
from trunkline.store import Bell
from trunkline.store.mongo import names
from trunkline.store.mongo.server import Server
from trunkline.store.mongo.topics import TopicDocuments

logger = logging.getLogger(__name__)

_PAUSE_S: Final = 0.2
_NONE_HERE: Final = frozenset({40573, 115, 59, 13})  # the server has no change streams for us


def _wanted(member: str) -> list[dict[str, Any]]:
    """A group's document also changes when it is locked and unlocked: nobody needs to hear of
    that, and no member of its own changes, whose nonces begin with its name.
    """
    nonce = "updateDescription.updatedFields.nonce"
    others = {nonce: {"$exists": True, "$not": {"$regex": f"^{member}-"}}}
    return [
        {
            "$match": {
                "$or": [
                    {"ns.coll": {"$in": [names.LOG, names.CONFIGS]}},
                    {"ns.coll": names.GROUPS, "operationType": {"$ne": "update"}},
                    {"ns.coll": names.GROUPS, **others},
                ]
            }
        },
        {"$project": {"documentKey": 1, "ns": 1}},
    ]


class ChangeFeed:
    """Rings the bell. A change stream tells of a change once a majority has it, so a reader that is
    woken finds it.
    """

    def __init__(
        self,
        server: Server,
        member: str,
        bell: Bell,
        topics: TopicDocuments,
        known: Callable[[], Iterable[GroupKey]],
    ) -> None:
        self._server = server
        self._wanted = _wanted(member)
        self._bell = bell
        self._topics = topics
        self._known = known

    async def follow(self) -> None:
        while True:
            try:
                await self._server.ready()
                await self._stream()
            except OperationFailure as error:
                if error.code in _NONE_HERE:
                    logger.info("no change streams here, polling instead: %s", error)
                    await self._poll()
                await self._again(error)
            except (ConnectionFailure, PyMongoError, TrunklineError) as error:
                await self._again(error)
            self._bell.ring(None)  # something may have happened in between

    async def _again(self, error: Exception) -> None:
        logger.debug("the change stream ended: %s", error)
        await asyncio.sleep(_PAUSE_S)

    async def _stream(self) -> None:
        async with await self._server.db.watch(self._wanted, max_await_time_ms=500) as stream:
            self._bell.ring(None)
            async for change in stream:
                self._tell(change)

    def _tell(self, change: Mapping[str, Any]) -> None:
        name = str(change.get("documentKey", {}).get("_id", ""))
        kind = change["ns"]["coll"]
        if kind == names.LOG:
            self._bell.ring(name.partition(":")[0])
        elif kind == names.GROUPS:
            self._bell.tell(names.group_key(name))
        else:
            self._topics.forget(name)
            self._bell.ring(None)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._server.options.poll_s)
            self._bell.ring(None)
            for key in self._known():
                self._bell.tell(key)
