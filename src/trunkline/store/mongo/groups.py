"""A group as one document, and a transaction on it.

``snapshot`` is the group as of the change ``origin``; ``tail`` holds the changes since, ``past``
those right before it, each with its sequence number and nonce: a member that is some changes behind
needs no snapshot. ``seq`` and ``nonce`` name the last change. A failover may take back a change
that a majority did not have, and another member may then use its number: so nonces are compared,
not numbers alone. ``by`` has locked the document until ``until``; ``queue`` names those that wait.

Members take turns. One that finds the document locked puts its name into the queue; who is done
hands the lock to the first of the queue. It has ``_GRACE_S`` to take it; then anyone may have it.
So no member waits for longer than one turn of each other one, and looks only when it may be next.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from types import TracebackType
from typing import Any, Final

import msgspec
from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError

from trunkline.errors import NotFound, Raced
from trunkline.group import Group, Saved, load
from trunkline.group.changes import AnyOp, Created, Edited, Paused, Redriven, Sought
from trunkline.names import GroupKey, check_group, check_topic
from trunkline.options import GroupOptions
from trunkline.store.mongo.members import Members
from trunkline.store.mongo.names import group_id
from trunkline.store.mongo.server import Document, Server

_TAIL: Final = 32  # changes of a group since its snapshot, and as many before it
_LOCK_S: Final = 2.0
_GRACE_S: Final = 0.25  # for the next in the queue to take the lock that it was handed
_TURN_S: Final = 0.004  # about how long a turn takes, before one was seen
_LEAST_PAUSE_S: Final = 0.001  # before a member that waits looks again
_PAUSE_S: Final = 0.1  # the same, at most

_encode = msgspec.json.encode
_decode_ops = msgspec.json.Decoder(list[AnyOp]).decode
_decode_saved = msgspec.json.Decoder(Saved).decode
_LINE: Final = {"by": 1, "until": 1, "queue": 1}
_AT_ONCE: Final = (Created, Edited, Paused, Redriven, Sought)  # these wait for the majority


class GroupCopy:
    """A group as this process has it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.group: Group | None = None
        self.sequence = 0
        self.nonce = ""
        self.turn_s = _TURN_S  # how long a turn takes, about
        self.tail: list[Any] = []  # as it was when the lock was taken
        self.queue: list[str] = []  # the members that waited when the lock was taken

    def took_turn(self, seconds: float) -> None:
        self.turn_s += (seconds - self.turn_s) / 8

    def take_in(self, document: Document) -> None:
        """Apply the changes since this process last had the group, or read it from its snapshot."""
        tail = self.tail = document["tail"]
        if self.group is not None and self.sequence:
            if (self.sequence, self.nonce) == (document["seq"], document["nonce"]):
                return
            known = [*document.get("past", ()), *tail]
            nonces = {
                document.get("origin"),
                *(nonce for _, _, *nonces in known for nonce in nonces),
            }
            missing = [ops for number, ops, *_ in known if number > self.sequence]
            if self.nonce in nonces and len(missing) == document["seq"] - self.sequence > 0:
                for ops in missing:
                    for op in _decode_ops(ops):
                        self.group.apply(op)
                self.sequence, self.nonce = document["seq"], document["nonce"]
                return
        self.group = _group_of(document)
        self.sequence, self.nonce = document["seq"], document["nonce"]


def _group_of(document: Document) -> Group:
    group = load(_decode_saved(document["snapshot"]))
    for _, ops, *_ in document["tail"]:
        for op in _decode_ops(ops):
            group.apply(op)
    return group


class Groups:
    def __init__(self, server: Server, member: str, members: Members) -> None:
        self.server = server
        self.member = member
        self.members = members
        self._held: dict[GroupKey, GroupCopy] = {}

    def transaction(self, key: GroupKey) -> Transaction:
        return Transaction(self, key)

    def held(self, key: GroupKey) -> GroupCopy:
        return self._held.setdefault(key, GroupCopy())

    def known(self) -> list[GroupKey]:
        return list(self._held)

    def leased(self) -> list[GroupKey]:
        """The groups in which this member has a lease."""
        return [
            key
            for key, held in self._held.items()
            if held.group is not None
            and any(lease.by == self.member for lease in held.group.leases.values())
        ]

    def new_nonce(self) -> str:
        """A name for a change; it begins with the member's own, see ``ChangeFeed``."""
        return f"{self.member}-{secrets.token_hex(4)}"

    async def keys(self) -> list[GroupKey]:
        fields = {"topic": 1, "partition": 1, "group": 1}
        found = self.server.groups.find({"removed": {"$ne": True}}, fields)
        return sorted(
            [GroupKey(one["topic"], one["partition"], one["group"]) async for one in found]
        )

    async def remove(self, key: GroupKey) -> None:
        """What is left says which era comes next, and with which policy its members go on."""
        held = self.held(key)
        async with held.lock:
            document = await self.server.groups.find_one({"_id": group_id(key)})
            if document is None or document.get("removed"):
                raise NotFound(f"there is no group {key.group} on {key.topic}", group=key.group)
            group = _group_of(document)
            await self.server.groups.replace_one(
                {"_id": group_id(key)},
                {
                    "removed": True,
                    "era": group.era + 1,
                    "was": _encode(group.options).decode(),
                    "seq": document["seq"] + 1,
                    "nonce": self.new_nonce(),
                    "until": 0.0,
                    "topic": key.topic,
                    "partition": key.partition,
                    "group": key.group,
                },
            )
            held.group = None


class Transaction:
    """The lock of a group's document, from entry to exit."""

    __slots__ = ("_began", "_groups", "_held", "_is_new", "_key", "_server")

    def __init__(self, groups: Groups, key: GroupKey) -> None:
        self._groups = groups
        self._server = groups.server
        self._key = key
        self._held: GroupCopy
        self._is_new = False
        self._began = 0.0  # when the lock was there

    async def __aenter__(self) -> Group:
        server, key = self._server, self._key
        check_topic(key.topic)
        check_group(key.group)
        server.begin()
        try:
            await server.ready()
            self._held = self._groups.held(key)
            await self._held.lock.acquire()
            try:
                with server.patient():
                    return await self._enter()
            except BaseException:
                self._held.lock.release()
                raise
        except BaseException:
            server.end()
            raise

    async def _enter(self) -> Group:
        held = self._held
        document = await self._lock()
        self._is_new = document is None or bool(document.get("removed"))
        if document is None:
            held.group, held.sequence, held.nonce = Group(era=0), 0, ""
        elif document.get("removed"):
            held.group = Group(era=document["era"])
            held.group.was = msgspec.json.decode(document["was"], type=GroupOptions)
            held.sequence, held.nonce = document["seq"], document["nonce"]
        else:
            held.take_in(document)
        group = held.group
        assert group is not None
        group.ops.clear()
        holders = {lease.by for lease in group.leases.values()}
        for member in await self._groups.members.gone(holders):
            group.free(member)
        return group

    async def _lock(self) -> Document | None:
        """The document, locked for this member; None if there is none. A lock whose holder is
        silent for longer than its lease is taken over.
        """
        heads, name, me = self._server.quick_groups, group_id(self._key), self._groups.member
        while True:
            now = self._now()
            document = await heads.find_one_and_update(
                {"_id": name, "$or": [{"until": {"$lt": now}}, {"by": me}]},
                {"$set": {"until": now + _LOCK_S, "by": me}, "$pull": {"queue": me}},
                return_document=ReturnDocument.AFTER,
            )
            if document is not None:
                self._held.queue = document.get("queue", [])
                self._began = time.monotonic()
                return document
            if not await self._wait_in_line(name):
                self._held.queue = []
                return None

    async def _wait_in_line(self, name: str) -> bool:
        """Wait until the lock may be this member's; False if there is no document."""
        heads, me, line = self._server.quick_groups, self._groups.member, None
        turn_s = self._held.turn_s
        while True:
            if line is None or me not in line.get("queue", ()):
                line = await heads.find_one_and_update(
                    {"_id": name},
                    {"$addToSet": {"queue": me}},
                    projection=_LINE,
                    return_document=ReturnDocument.AFTER,
                )
            if line is None:
                return False
            if line.get("by") == me or line["until"] < self._now():
                return True
            ahead = line["queue"].index(me)
            pause_s = (ahead + random.uniform(0.3, 0.6)) * turn_s
            await asyncio.sleep(min(max(pause_s, _LEAST_PAUSE_S), _PAUSE_S))
            turn_s *= 1.5  # it takes longer than it did
            line = await heads.find_one({"_id": name}, _LINE)
            if line is None:
                return False

    def _now(self) -> float:
        if self._server.has_own_time:
            return self._server.clock.now().timestamp()
        return time.time()  # noqa: TID251 -- a lock's lease is real time, also in a test

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        held = self._held
        leaving = asyncio.ensure_future(self._leave(held, error is not None))
        try:
            await asyncio.shield(leaving)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await leaving  # all of it happens, or nothing
            raise
        finally:
            held.lock.release()
            self._server.end()

    async def _leave(self, held: GroupCopy, failed: bool) -> None:
        group = held.group
        assert group is not None
        try:
            with self._server.patient():
                if failed or not group.created or not group.ops:
                    if failed and group.ops:
                        held.group = None  # taken back: the next entry reads it anew
                    await self._unlock()
                else:
                    await self._commit(held, group)
        except BaseException:
            held.group = None
            raise

    async def _unlock(self) -> None:
        if not self._is_new or self._held.sequence:
            await self._server.quick_groups.update_one(
                {"_id": group_id(self._key), "by": self._groups.member}, self._hand_over()
            )
            self._held.took_turn(time.monotonic() - self._began)

    def _hand_over(self) -> Document:
        """Give the lock to the first member of the queue that is alive, or to nobody."""
        queue, members = self._held.queue, self._groups.members
        for place, member in enumerate(queue, 1):
            if not members.is_gone(member):
                return {
                    "$set": {"until": self._now() + _GRACE_S, "by": member},
                    "$pull": {"queue": {"$in": queue[:place]}},
                }
        update: Document = {"$set": {"until": 0.0}}
        if queue:
            update["$pull"] = {"queue": {"$in": queue}}
        return update

    async def _commit(self, held: GroupCopy, group: Group) -> None:
        key, sequence, nonce = self._key, held.sequence + 1, self._groups.new_nonce()
        update = self._hand_over()
        values = update["$set"]
        values |= {
            "seq": sequence,
            "nonce": nonce,
            "topic": key.topic,
            "partition": key.partition,
            "group": key.group,
            "lastCommitted": group.floor,
            "updatedTs": round(self._server.clock.now().timestamp() * 1000),
        }
        change = [sequence, _encode(group.ops).decode(), nonce]
        if self._is_new or sequence % _TAIL == 0:
            values["snapshot"] = _encode(group.dump()).decode()
            values["tail"] = []
            values["past"] = [] if self._is_new else [*held.tail[1 - _TAIL :], change]
            values["origin"] = nonce
            update["$unset"] = {"removed": "", "era": "", "was": ""}
        else:
            update["$push"] = {"tail": change}
        at_once = any(isinstance(op, _AT_ONCE) for op in group.ops)
        heads = self._server.groups if at_once else self._server.quick_groups
        wanted: dict[str, Any] = {"_id": group_id(key)}
        if held.sequence:
            wanted |= {"seq": held.sequence, "nonce": held.nonce, "by": self._groups.member}
        else:
            wanted |= {"seq": 0}
        try:
            done = await heads.update_one(wanted, update, upsert=not held.sequence)
        except DuplicateKeyError:
            raise Raced(f"another member made {key.group}") from None
        if not done.matched_count and done.upserted_id is None:
            raise Raced(f"the lock of {key.group} ran out")
        held.sequence, held.nonce = sequence, nonce
        held.took_turn(time.monotonic() - self._began)
