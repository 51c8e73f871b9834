"""Members: each writes a sign of life, and frees what silent ones had leased."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec
from pymongo import ReturnDocument
from pymongo.errors import PyMongoError

from trunkline.group.members import MemberInfo
from trunkline.names import is_handle
from trunkline.store.mongo.server import Server

logger = logging.getLogger(__name__)


class _Sign(NamedTuple):
    at: datetime  # by the server
    seen: float  # when this process saw it first, by its monotonic clock


class Members:
    """A member is gone once its last sign of life is older than ``timeout_s``. While the server was
    away nobody could write one: the time that this process did not see does not count.
    """

    def __init__(self, server: Server, member: str, timeout_s: float) -> None:
        self._server = server
        self._member = member
        self._timeout_s = timeout_s
        self._signs: dict[str, _Sign] = {}
        self._gone: set[str] = set()
        self._heard = 0.0  # when this process last read the signs
        self.told: Sequence[MemberInfo] = ()  # what this process is subscribed to
        self.on_gone: Callable[[], object] = lambda: None

    async def keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._timeout_s / 4)
            try:
                await self.beat()
            except PyMongoError as error:  # the server may be away for a while
                logger.debug("no sign of life could be written: %s", error)

    async def beat(self) -> None:
        """Write a sign of life, and read those of the others and the server's time."""
        asked = time.monotonic()
        written = await self._server.members.find_one_and_update(
            {"_id": self._member},
            {
                "$currentDate": {"at": True},
                "$set": {
                    "pid": os.getpid(),
                    "host": os.uname().nodename,
                    "told": msgspec.to_builtins(self.told),
                },
            },
            upsert=True,
            return_document=ReturnDocument.AFTER,
        )
        assert written is not None
        self._server.hear(written["at"], asked)
        found = {one["_id"]: one["at"] async for one in self._server.members.find({}, {"at": 1})}
        self._look(found, written["at"])

    def _look(self, found: dict[str, datetime], server: datetime) -> None:
        now = time.monotonic()
        was_away = self._heard and now - self._heard > self._timeout_s
        self._heard = now
        signs: dict[str, _Sign] = {}
        for member, at in found.items():
            known = self._signs.get(member)
            if known is None:
                signs[member] = _Sign(at, now - (server - at).total_seconds())
            elif was_away:
                signs[member] = _Sign(at, now)
            elif known.at != at:
                age_s = (server - at).total_seconds()  # a new primary may have another time
                signs[member] = _Sign(at, now - min(max(age_s, 0.0), self._timeout_s / 4))
            else:
                signs[member] = known
        self._signs = signs
        gone = {name for name, sign in signs.items() if now - sign.seen >= self._timeout_s}
        if gone - self._gone:
            self.on_gone()
        self._gone = gone

    async def listening(self) -> list[MemberInfo]:
        """What the living members are subscribed to."""
        await self.beat()
        found: list[MemberInfo] = []
        async for one in self._server.members.find({}, {"told": 1}):
            if self._is_alive(one["_id"]):
                found += msgspec.convert(one.get("told", []), list[MemberInfo])
        return found

    async def gone(self, members: set[str]) -> list[str]:
        """Which of these members are gone. One that is not known may be new: look again."""
        missing = [member for member in members if not self._is_alive(member)]
        if missing:
            await self.beat()
        return [member for member in missing if not self._is_alive(member)]

    def is_gone(self, member: str) -> bool:
        """Whether this process saw it become silent."""
        return member in self._gone

    def _is_alive(self, member: str) -> bool:
        if member == self._member or is_handle(member):
            return True
        return member in self._signs and member not in self._gone

    async def leave(self) -> None:
        await self._server.members.delete_one({"_id": self._member})

    async def sweep(self) -> None:
        """Remove members that are long gone."""
        if self._server.has_own_time:
            long_ago = self._server.clock.now() - timedelta(hours=1)
            await self._server.members.delete_many({"at": {"$lt": long_ago}})
