"""The connection to the server: where its collections are, whether we can work with it, what its
errors mean to a caller, and its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, Final, TypeAlias

import pymongo
from pymongo import AsyncMongoClient, WriteConcern
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import (
    CollectionInvalid,
    ConfigurationError,
    ConnectionFailure,
    DuplicateKeyError,
    OperationFailure,
    PyMongoError,
)
from pymongo.read_concern import ReadConcern

from trunkline.clock import Clock, ServerClock
from trunkline.errors import (
    Closed,
    Conflict,
    ConnectionLost,
    Denied,
    InvalidOption,
    NoBus,
    StorageError,
    UnsupportedFormat,
)
from trunkline.features import Promise
from trunkline.options import MongoOptions
from trunkline.store.mongo import names

Document: TypeAlias = dict[str, Any]
Collection: TypeAlias = AsyncCollection[Document]

FORMAT: Final = 1
_VIEW: Final = 1  # the form of the view for people
OLDEST_SERVER: Final = (4, 4)
_SELECT_S: Final = 5.0  # to find a server at the first call
_NOISE: Final = (
    r" \(configured timeouts|, Timeout:|,\S+:\d+: "  # what the driver says beyond the reason
)
_ALLOWED: Final = frozenset({13, 18, 8000})  # codes of errors that mean: you may not
_NO_VIEW: Final = frozenset({26, 48, 165, 166})  # the view is there, or is a view of another kind

# A row for each event, with the fields of the older service. Its times are milliseconds. The server
# reads the JSON of an event only when somebody looks: a copy for people would double the log.
_PARSED: Final[Document] = {
    "$function": {
        "body": """function(body) { return JSON.parse('{"meta":' + body + '}'); }""",
        "args": ["$records.body"],
        "lang": "js",
    }
}
_EVENTS: Final[list[Document]] = [
    {"$unwind": "$records"},
    {
        "$project": {
            "_id": {"$concat": ["$_id", "/", {"$toString": "$records.offset"}]},
            "topic": 1,
            "partition": 1,
            "offset": "$records.offset",
            "event": _PARSED,
        }
    },
    {
        "$project": {
            "topic": 1,
            "partition": 1,
            "offset": 1,
            "ts": {"$toLong": {"$dateFromString": {"dateString": "$event.meta.ts"}}},
            "id": "$event.meta.event_id",
            "key": {"$ifNull": ["$event.meta.key", None]},
            "headers": {"$ifNull": ["$event.meta.headers", {}]},
            "payload_sha256": {"$ifNull": ["$event.meta.headers.payload_sha256", None]},
            "payload": "$event.payload",
            "attempts": {  # of a dead letter
                "$convert": {
                    "input": "$event.meta.headers.dlq-attempts",
                    "to": "int",
                    "onError": None,
                    "onNull": None,
                }
            },
        }
    },
]


class Server:
    """One database on one server or replica set. It connects at the first call."""

    def __init__(
        self, url: str, clock: Clock | None, database: str | None, options: MongoOptions
    ) -> None:
        self.options = options
        self.client, self.db = _open(url, database, options)
        heard = ServerClock(f"mongodb/{self.db.name}")
        self.clock: Clock = clock or heard
        self._heard = heard if clock is None else None
        safe, quick = WriteConcern("majority", j=True), WriteConcern(1)
        self.log = self._collection(names.LOG, safe, ReadConcern("majority"))
        self.counters = self._collection(names.COUNTERS, safe)
        self.quick_counters = self._collection(names.COUNTERS, quick)
        self.configs = self._collection(names.CONFIGS, safe)
        self.groups = self._collection(names.GROUPS, safe)
        self.quick_groups = self._collection(names.GROUPS, quick)
        self.members = self._collection(names.MEMBERS, quick)
        self._about = self._collection(names.ABOUT, safe)
        self.durability: Promise = "fsync"
        self.is_closed = False
        self._underway = 0
        self._opening: asyncio.Future[None] | None = None
        self.opened: Callable[[], Awaitable[None]] | None = None  # called once connected

    def _collection(
        self, name: str, concern: WriteConcern, reads: ReadConcern | None = None
    ) -> Collection:
        found: Collection = self.db.get_collection(name, write_concern=concern, read_concern=reads)
        return found

    # -- connecting ------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Connect at the first call, once for all callers."""
        self.check_open()
        if self.is_ready:
            return
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._connect())
        try:
            await asyncio.shield(self._opening)
        except BaseException:
            if self._opening is not None and self._opening.done():
                self._opening = None  # the next call tries again
            raise

    @property
    def is_ready(self) -> bool:
        opening = self._opening
        if opening is None or not opening.done() or opening.cancelled():
            return False
        return opening.exception() is None

    async def _connect(self) -> None:
        with typed():
            asked = time.monotonic()
            hello = await self.client.admin.command("hello")
            self.hear(hello["localTime"], asked)
            version = (await self.client.server_info())["versionArray"]
            if tuple(version[:2]) < OLDEST_SERVER:
                told, oldest = ".".join(map(str, version[:3])), ".".join(map(str, OLDEST_SERVER))
                raise UnsupportedFormat(
                    f"MongoDB {told} is too old, {oldest} or later is needed", version=told
                )
            self.durability = "replicated" if len(hello.get("hosts", ())) > 1 else "fsync"
            await self._check_format()
            if self.opened is not None:
                await self.opened()

    async def _check_format(self) -> None:
        about = await self._read_about()
        if about is None:
            if not self.options.create:
                raise NoBus(
                    f"there is no bus in the database {self.db.name}",
                    hint="the first event or topic makes one",
                )
            await self._check_ours()
            about = {"_id": "trunkline", "format": FORMAT}
            with contextlib.suppress(DuplicateKeyError):
                await self._about.insert_one(about)
        elif about.get("format", 0) > FORMAT:
            raise UnsupportedFormat(
                f"the database {self.db.name} has format {about['format']}, "
                f"this version reads up to {FORMAT}",
                hint="upgrade trunkline",
                version=about["format"],
            )
        if about.get("view", 0) < _VIEW:  # also after a kill before it was made
            await self._make_view()

    async def _read_about(self) -> Document | None:
        return await self._about.find_one({"_id": "trunkline"})

    async def _check_ours(self) -> None:
        """A database without our mark has none of our names, or they are somebody else's."""
        found = sorted(names.ALL & set(await self.db.list_collection_names()))
        if found and await self._read_about() is None:  # else another member made it meanwhile
            raise Conflict(
                f"the database {self.db.name} has {', '.join(found)} of another program",
                hint="take another database: mongodb://host/other; nothing was changed",
            )

    async def _make_view(self) -> None:
        """Make the view for people, or bring it up to date. Nothing else needs it."""
        try:
            await self.db.create_collection(names.EVENTS, viewOn=names.LOG, pipeline=_EVENTS)
        except CollectionInvalid:  # it is there
            await self.db.command("collMod", names.EVENTS, viewOn=names.LOG, pipeline=_EVENTS)
        except OperationFailure as error:
            if error.code not in _NO_VIEW:
                raise
        await self._about.update_one({"_id": "trunkline"}, {"$max": {"view": _VIEW}})

    def hear(self, server: datetime, asked: float) -> None:
        """The server's time, asked for at ``asked``."""
        if self._heard is not None:
            self._heard.heard(server, asked=asked, answered=time.monotonic())

    @property
    def has_own_time(self) -> bool:
        """Whether times are the server's; else a test passed a clock in."""
        return self._heard is not None

    # -- calls -----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """One call of the store: the server is there, and its errors are ours. While the server
        is away the call waits for as long as ``patience_s`` says.
        """
        self.begin()
        try:
            await self.ready()
            with self.patient():
                yield
        finally:
            self.end()

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        with typed(), pymongo.timeout(max(self.options.patience_s, 1.0)):
            yield

    def begin(self) -> None:
        self.check_open()
        self._underway += 1

    def end(self) -> None:
        self._underway -= 1

    def check_open(self) -> None:
        if self.is_closed:
            raise Closed("the bus is closed")

    async def idle(self) -> bool:
        was_idle = not self._underway
        while self._underway:  # noqa: ASYNC110 -- many calls, one counter
            await asyncio.sleep(0.001)
        return was_idle

    async def close(self) -> None:
        self.is_closed = True
        if self._opening is not None:
            await end_tasks([self._opening])
        await self.client.close()


async def end_tasks(tasks: Iterable[asyncio.Future[None]]) -> None:
    """Cancel tasks until they end: ``wait_for`` of Python 3.11, in pymongo, may lose one cancel."""
    while waiting := [task for task in tasks if not task.done()]:
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting, timeout=0.2)


def _open(url: str, database: str | None, options: MongoOptions) -> tuple[Any, Any]:
    if url in ("mongodb:", "mongodb://"):
        url = os.environ.get("MONGO_URL", "")
        if not url:
            raise InvalidOption(
                "mongodb: needs the address of a server",
                name="url",
                hint="mongodb://host:27017/database, or set MONGO_URL",
            )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # the driver ignores what it warns of
            client: AsyncMongoClient[Document] = AsyncMongoClient(
                url,
                tz_aware=True,
                serverSelectionTimeoutMS=round(1000 * min(max(options.patience_s, 1.0), _SELECT_S)),
                appname="trunkline",
                retryWrites=True,
            )
        other = database or os.environ.get("MONGO_DB") or "trunkline"
        named = database or client.get_default_database(other).name
        return client, client[named]
    except (PyMongoError, ValueError, UserWarning) as error:
        raise InvalidOption(f"not a MongoDB URL: {error}", name="url") from None


@contextlib.contextmanager
def typed() -> Iterator[None]:
    """Errors of the driver as errors of a store."""
    try:
        yield
    except OperationFailure as error:
        told = (error.details or {}).get("errmsg", str(error))
        if error.code in _ALLOWED:
            raise Denied(
                f"MongoDB refuses: {told}", hint="check user, password and roles"
            ) from None
        if error.timeout:
            raise _away(error) from error
        raise StorageError(f"MongoDB: {told}") from error
    except ConnectionFailure as error:
        raise _away(error) from error
    except ConfigurationError as error:  # the driver does not speak to this server
        raise UnsupportedFormat(f"MongoDB: {error}") from None
    except PyMongoError as error:
        if error.timeout:
            raise _away(error) from error
        raise StorageError(f"MongoDB: {error}") from error


def _away(error: Exception) -> ConnectionLost:
    return ConnectionLost(
        f"MongoDB does not answer: {re.split(_NOISE, str(error))[0]}",
        hint="check the address, and that the server runs",
    )
