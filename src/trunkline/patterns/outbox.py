"""The outbox: events that are written in one transaction with the data they speak of, and published
afterwards.

A row becomes exactly one record, whenever the drainer is killed. Each row is the event, with its
id. Before it is published the row says so; if it still says so later, nobody knows how far it came,
and the log is asked for the id before it is published again. A row is marked as sent only after the
receipt is there.

While the bus cannot be reached rows wait, for as long as it takes. A row that the bus refuses is
tried ``max_attempts`` times, then given up and kept.

Where rows live is a seam, ``OutboxStorage``; ``SqlOutbox`` is one in any database that SQLAlchemy
knows, ``mongo_outbox.MongoOutbox`` one in MongoDB.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import secrets
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol, TypedDict, TypeVar, Unpack

import msgspec

from trunkline.bus.app import fields_of
from trunkline.check import check_event, check_span, load_extra
from trunkline.clock import Clock, SystemClock
from trunkline.codec import encode_value
from trunkline.errors import Denied, Invalid, InvalidEvent, TrunklineError
from trunkline.event import Event, EventFields, Receipt
from trunkline.options import Limits, OutboxOptions, make

T = TypeVar("T")
logger = logging.getLogger(__name__)

_ERROR_CHARS = 1000
_ID_CHARS = 255
_REFUSED = (Invalid, Denied)  # the event is at fault; anything else is the bus, and will pass


class OutboxRow(msgspec.Struct, frozen=True):
    """An event that is to be published. ``tried`` says that it may have been."""

    event: Event
    tried: bool = False


class OutboxStorage(Protocol):
    """Where the rows of an outbox live. A row is claimed by one drainer at a time."""

    async def claim(self, by: str, limit: int, lease_s: float) -> list[OutboxRow]:
        """The oldest rows that are not sent, given up or claimed. From here on they are tried."""

    async def sent(self, rows: Sequence[OutboxRow], receipts: Sequence[Receipt]) -> None:
        """They are published, there."""

    async def failed(self, rows: Sequence[OutboxRow], error: str, max_attempts: int | None) -> None:
        """They are not published: let them be claimed again, or give those up that were claimed
        ``max_attempts`` times; None for never.
        """


class OutboxTableFields(TypedDict, total=False):
    """Of the table: its name, how large an event may be, and the clock."""

    table: str
    limits: Limits
    clock: Clock | None


class OutboxTarget(Protocol):
    """The calls of a bus that a drainer needs."""

    async def publish_many(self, topic: str, payloads: Sequence[Event], /) -> list[Receipt]: ...

    async def publish_again(self, topic: str, events: Sequence[Event], /) -> list[Receipt]: ...


class Drainer:
    """Publishes what is in an outbox: what is there now by ``drain``, or all the time while it is
    entered.
    """

    def __init__(self, storage: OutboxStorage, bus: OutboxTarget, **options: Any) -> None:
        self.options = make(OutboxOptions, options)
        self._storage = storage
        if not inspect.iscoroutinefunction(getattr(bus, "publish_many", None)):
            raise TypeError(
                f"a Drainer takes the bus of trunkline.connect, not {type(bus).__name__}; "
                "trunkline.patterns.sync has one without asyncio"
            )
        self._bus = bus
        self._by = secrets.token_hex(8)
        self._task: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    async def drain(self) -> int:
        """Publish what is there now; how many rows were sent. Raises what the bus raises, except
        for rows that it refuses; those that were not sent wait.
        """
        total = 0
        while not self._ending.is_set():
            until = asyncio.get_running_loop().time() + self.options.lease_s
            rows = await self._storage.claim(self._by, self.options.batch, self.options.lease_s)
            sent = await self._publish(rows, until)
            total += sent
            if not sent:
                break
        return total

    async def _publish(self, rows: Sequence[OutboxRow], until: float) -> int:
        count = 0
        clock = asyncio.get_running_loop().time
        runs = _runs(rows)
        for index, (topic, mine) in enumerate(runs):
            try:
                # When the lease has ended, another drainer may have published them.
                again = mine[0].tried or clock() >= until
                receipts = await _send(self._bus, topic, mine, again=again)
            except _REFUSED as error:
                if len(mine) > 1:  # one of them is bad: let the others not suffer from it
                    for row in mine:
                        one = msgspec.structs.replace(row, tried=True)
                        count += await self._publish([one], until)
                    continue
                text = str(error)[:_ERROR_CHARS]
                await self._storage.failed(mine, text, self.options.max_attempts)
                continue
            except TrunklineError as error:
                rest = [row for _, others in runs[index:] for row in others]
                await self._storage.failed(rest, str(error)[:_ERROR_CHARS], None)
                raise
            await self._storage.sent(mine, receipts)
            count += len(mine)
        return count

    async def __aenter__(self) -> Drainer:
        self._ending.clear()
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Finish what was begun: a row that is left claimed waits until its lease ends."""
        self._ending.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while not self._ending.is_set():
            try:
                await self.drain()
            except Exception as error:  # noqa: BLE001 -- the bus or the database: it will be back
                logger.warning("the outbox waits: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.options.poll_s):
                    await self._ending.wait()


def _runs(rows: Sequence[OutboxRow]) -> list[tuple[str, list[OutboxRow]]]:
    """Neighbours of one topic that are tried or not tried alike: they go as one batch."""
    found: list[tuple[str, list[OutboxRow]]] = []
    for row in rows:
        last = found[-1][1] if found else []
        if last and last[-1].event.topic == row.event.topic and last[-1].tried == row.tried:
            last.append(row)
        else:
            found.append((row.event.topic, [row]))
    return found


async def _send(
    bus: OutboxTarget, topic: str, rows: Sequence[OutboxRow], *, again: bool
) -> list[Receipt]:
    events = [row.event for row in rows]
    return await (bus.publish_again if again else bus.publish_many)(topic, events)


def outgoing(
    topic: str | Event, payload: Any, fields: dict[str, Any], now: datetime, limits: Limits
) -> tuple[Event, bytes]:
    """The event of a new row, checked, and its JSON."""
    if isinstance(topic, Event):
        if payload is not None or fields:
            raise InvalidEvent("a whole event was given, and fields besides", field="payload")
        event = topic
    else:
        event = Event(topic=topic, payload=payload, **fields_of({"ts": now, **fields}, lambda: now))
    check_event(event, limits)
    if len(event.id) > _ID_CHARS:
        raise InvalidEvent(f"an id in an outbox has at most {_ID_CHARS} characters", field="id")
    try:
        return event, encode_value(event)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise InvalidEvent(f"the payload is no JSON value: {error}", field="payload") from error


class _Table:
    """The table of an outbox, and the steps on it. Each step runs in a transaction."""

    def __init__(
        self,
        engine: Any,
        *,
        table: str = "trunkline_outbox",
        limits: Limits = Limits(),
        clock: Clock | None = None,
    ) -> None:
        self._sa = sa = load_extra("sqlalchemy", "outbox")
        self._engine = engine
        self._limits = limits
        self._clock: Clock = clock or SystemClock()
        self.table = sa.Table(
            table,
            sa.MetaData(),
            sa.Column("id", sa.String(_ID_CHARS), primary_key=True),
            sa.Column("event", sa.LargeBinary, nullable=False),
            sa.Column("created", sa.DateTime(timezone=True), nullable=False, index=True),
            sa.Column("attempts", sa.Integer, nullable=False, default=0),
            sa.Column("claimed_by", sa.String(32)),
            sa.Column("claimed_until", sa.Double),
            sa.Column("sent", sa.DateTime(timezone=True), index=True),
            sa.Column("partition", sa.Integer),
            sa.Column("offset", sa.BigInteger),
            sa.Column("error", sa.Text),
            sa.Column("given_up", sa.Boolean, nullable=False, default=False),
        )

    async def _run(self, step: Callable[[Any], T]) -> T:
        """Run a step with a connection, in a transaction."""
        raise NotImplementedError

    def _insert(self, topic: str | Event, payload: Any, fields: dict[str, Any]) -> tuple[str, Any]:
        """The id of an event, and the statement that writes its row."""
        now = self._clock.now()
        event, data = outgoing(topic, payload, fields, now, self._limits)
        row = {"id": event.id, "event": data, "created": now, "attempts": 0, "given_up": False}
        return event.id, self.table.insert().values(row)

    async def claim(self, by: str, limit: int, lease_s: float) -> list[OutboxRow]:
        return await self._run(lambda connection: self._claim(connection, by, limit, lease_s))

    def _claim(self, connection: Any, by: str, limit: int, lease_s: float) -> list[OutboxRow]:
        sa, table = self._sa, self.table
        stamp = self._clock.now().timestamp()
        mark = f"{by[:16]}-{secrets.token_hex(6)}"  # of this claim and no other
        free = sa.or_(table.c.claimed_until.is_(None), table.c.claimed_until <= stamp)
        waiting = sa.and_(table.c.sent.is_(None), table.c.given_up.is_(False), free)
        rows = connection.execute(
            sa.select(table.c.id, table.c.event, table.c.attempts)
            .where(waiting)
            .order_by(table.c.created, table.c.id)
            .limit(limit)
            .with_for_update(skip_locked=True)
        ).all()
        ids = [row.id for row in rows]
        if not ids:
            return []
        # Asked for again: SQLite has no row locks, and another may have come first.
        connection.execute(
            table.update()
            .where(table.c.id.in_(ids), waiting)
            .values(
                claimed_by=mark,
                claimed_until=stamp + lease_s,
                attempts=table.c.attempts + 1,
            )
        )
        mine = set(
            connection.execute(sa.select(table.c.id).where(table.c.claimed_by == mark)).scalars()
        )
        return [
            OutboxRow(msgspec.json.decode(row.event, type=Event), row.attempts > 0)
            for row in rows
            if row.id in mine
        ]

    async def sent(self, rows: Sequence[OutboxRow], receipts: Sequence[Receipt]) -> None:
        sa, table = self._sa, self.table
        statement = (
            table.update()
            .where(table.c.id == sa.bindparam("row"))
            .values(
                sent=self._clock.now(),
                partition=sa.bindparam("part"),
                offset=sa.bindparam("place"),
                claimed_by=None,
                claimed_until=None,
                error=None,
            )
        )
        values = [
            {"row": row.event.id, "part": receipt.partition, "place": receipt.offset}
            for row, receipt in zip(rows, receipts, strict=True)
        ]
        await self._run(lambda connection: connection.execute(statement, values))

    async def failed(self, rows: Sequence[OutboxRow], error: str, max_attempts: int | None) -> None:
        table = self.table
        enough = False if max_attempts is None else table.c.attempts >= max_attempts
        statement = (
            table.update()
            .where(table.c.id.in_([row.event.id for row in rows]), table.c.sent.is_(None))
            .values(error=error, claimed_by=None, claimed_until=None, given_up=enough)
        )
        await self._run(lambda connection: connection.execute(statement))

    def _retry(self, connection: Any) -> int:
        statement = self.table.update().where(self.table.c.given_up)
        return int(connection.execute(statement.values(given_up=False, attempts=1)).rowcount)

    def _waiting(self, connection: Any) -> int:
        table = self.table
        statement = self._sa.select(self._sa.func.count()).select_from(table)
        waiting = statement.where(table.c.sent.is_(None), table.c.given_up.is_(False))
        return int(connection.execute(waiting).scalar_one())

    def _prune(self, connection: Any, older_than_s: float) -> int:
        check_span(older_than_s, "older_than_s")
        before = self._clock.now() - timedelta(seconds=older_than_s)
        statement = self.table.delete().where(self.table.c.sent < before)
        return int(connection.execute(statement).rowcount)


class SqlOutbox(_Table):
    """An outbox in a table. ``engine`` is a SQLAlchemy engine; a drainer calls it in a thread.

    ``add`` is called inside of your own transaction, with its session or connection.
    """

    def __init__(self, engine: Any, **options: Unpack[OutboxTableFields]) -> None:
        check_kind(engine, asynchronous=False, use="AsyncSqlOutbox")
        super().__init__(engine, **options)

    async def _run(self, step: Callable[[Any], T]) -> T:
        return await asyncio.to_thread(self._now, step)

    def _now(self, step: Callable[[Any], T]) -> T:
        with self._engine.begin() as connection:
            return step(connection)

    def create(self) -> None:
        """Make the table if there is none."""
        self.table.metadata.create_all(self._engine)

    def add(
        self,
        session: Any,
        topic: str | Event,
        payload: Any = None,
        **fields: Unpack[EventFields],
    ) -> str:
        """Write an event in the caller's transaction; the id it will have. The fields are those of
        ``publish``.
        """
        check_kind(session, asynchronous=False, use="AsyncSqlOutbox")
        id_, statement = self._insert(topic, payload, {**fields})
        session.execute(statement)
        return id_

    def retry(self) -> int:
        """Let rows that were given up be tried again; how many there are."""
        return self._now(self._retry)

    def waiting(self) -> int:
        """How many rows are neither sent nor given up."""
        return self._now(self._waiting)

    def prune(self, older_than_s: float) -> int:
        """Remove rows that were sent so long ago."""
        return self._now(lambda connection: self._prune(connection, older_than_s))


class AsyncSqlOutbox(_Table):
    """The same for ``sqlalchemy.ext.asyncio``: an ``AsyncEngine``, and ``await add`` with your
    ``AsyncSession`` or ``AsyncConnection``.
    """

    def __init__(self, engine: Any, **options: Unpack[OutboxTableFields]) -> None:
        check_kind(engine, asynchronous=True, use="SqlOutbox")
        super().__init__(engine, **options)

    async def _run(self, step: Callable[[Any], T]) -> T:
        async with self._engine.begin() as connection:
            found: T = await connection.run_sync(step)
            return found

    async def create(self) -> None:
        """Make the table if there is none."""
        await self._run(self.table.metadata.create_all)

    async def add(
        self,
        session: Any,
        topic: str | Event,
        payload: Any = None,
        **fields: Unpack[EventFields],
    ) -> str:
        """Write an event in the caller's transaction; the id it will have. The fields are those of
        ``publish``.
        """
        check_kind(session, asynchronous=True, use="SqlOutbox")
        id_, statement = self._insert(topic, payload, {**fields})
        await session.execute(statement)
        return id_

    async def retry(self) -> int:
        """Let rows that were given up be tried again; how many there are."""
        return await self._run(self._retry)

    async def waiting(self) -> int:
        """How many rows are neither sent nor given up."""
        return await self._run(self._waiting)

    async def prune(self, older_than_s: float) -> int:
        """Remove rows that were sent so long ago."""
        return await self._run(lambda connection: self._prune(connection, older_than_s))


def check_kind(thing: Any, *, asynchronous: bool, use: str) -> None:
    """``TypeError`` for an engine, a session or a connection of the other kind: its calls would
    never be awaited.
    """
    kind = type(thing)
    if kind.__module__.startswith("sqlalchemy.ext.asyncio") or any(
        base.__module__.startswith("sqlalchemy.ext.asyncio") for base in kind.__mro__
    ):
        found = True
    elif hasattr(thing, "execute") or hasattr(thing, "begin"):
        found = inspect.iscoroutinefunction(getattr(thing, "execute", None))
    else:
        raise TypeError(f"an engine, a session or a connection, not {kind.__name__}")
    if found is not asynchronous:
        of = "of sqlalchemy.ext.asyncio" if asynchronous else "without asyncio"
        raise TypeError(f"an engine or a session {of}, not {kind.__name__}: use {use} for that")
