"""The outbox: events that are written in one transaction with the data they speak of, and published
afterwards.

A row becomes exactly one record, whenever the drainer is killed. Each row is the event, with its
id. Before it is published the row says so; if it still says so later, nobody knows how far it came,
and the log is asked for the id before it is published again. A row is marked as sent only after the
receipt is there.

While the bus cannot be reached rows wait, for as long as it takes. A row that the bus refuses is
tried ``max_attempts`` times, then given up and kept.

Where rows live is a seam, ``OutboxStorage``; ``SqlOutbox`` is one in any database that SQLAlchemy
knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import msgspec

from trunkline.clock import Clock, SystemClock
from trunkline.errors import Denied, Invalid, InvalidEvent, TrunklineError, check_span, load_extra
from trunkline.event import Event, Receipt, check_event
from trunkline.options import Interval, Limits, Options, Positive, make
from trunkline.store import Store

logger = logging.getLogger(__name__)

_LOOK_BACK = 1000
_ERROR_CHARS = 1000
_ID_CHARS = 255
_REFUSED = (Invalid, Denied)  # the event is at fault; anything else is the bus, and will pass


class OutboxOptions(Options, frozen=True):
    """What belongs to one drainer."""

    batch: Positive = 100
    max_attempts: Positive = 10
    poll_s: Interval = 0.5
    lease_s: Interval = 60.0


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


class Drainer:
    """Publishes what is in an outbox: what is there now by ``drain``, or all the time while it is
    entered.
    """

    def __init__(self, storage: OutboxStorage, bus: Any, **options: Any) -> None:
        self.options = make(OutboxOptions, options)
        self._storage = storage
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


async def _send(bus: Any, topic: str, rows: Sequence[OutboxRow], *, again: bool) -> list[Receipt]:
    events = [row.event for row in rows]
    receipts: list[Receipt]
    if not again:
        receipts = await bus.publish_many(topic, events)
    elif hasattr(bus, "publish_again"):
        receipts = await bus.publish_again(topic, events)
    else:
        receipts = await publish_once(bus.store, bus.publish_many, topic, events)
    return receipts


async def publish_once(
    store: Store,
    publish: Callable[[str, Sequence[Event]], Awaitable[list[Receipt]]],
    topic: str,
    events: Sequence[Event],
) -> list[Receipt]:
    """Publish those of ``events`` whose id the log does not hold yet. Their own times say how far
    back to look.
    """
    wanted = {event.id for event in events}
    options = (await store.topics()).get(topic)
    earliest = min(event.ts for event in events)
    found: dict[str, Receipt] = {}
    for partition in range(options.partitions if options is not None else 0):
        # A writer that died may have left a batch of which it is not settled whether it counts. The
        # next one to lock the log settles that; nothing is below 0, so this does and no more.
        await store.trim(topic, partition, 0)
        start = await store.seek(topic, partition, earliest)
        while records := await store.read(topic, partition, start, _LOOK_BACK):
            start = records[-1].offset + 1
            for record in records:
                if (name := record.event.id) in wanted:
                    durability = options.durability if options is not None else ""
                    found[name] = Receipt(
                        topic, partition, record.offset, name, durability=durability
                    )
    rest = [event for event in events if event.id not in found]
    if rest:
        for event, receipt in zip(rest, await publish(topic, rest), strict=True):
            found[event.id] = receipt
    return [found[event.id] for event in events]


class SqlOutbox:
    """An outbox in a table. ``engine`` is a SQLAlchemy engine; its calls run in a thread.

    ``add`` is called inside of your own transaction, with its connection.
    """

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

    def create(self) -> None:
        """Make the table if there is none."""
        self.table.metadata.create_all(self._engine)

    def add(self, connection: Any, topic: str | Event, payload: Any = None, **fields: Any) -> str:
        """Write an event in the caller's transaction; the id it will have."""
        now = self._clock.now()
        if isinstance(topic, Event):
            if payload is not None or fields:
                raise InvalidEvent("a whole event was given, and fields besides", field="payload")
            event = topic
        else:
            try:
                event = Event(topic=topic, payload=payload, **{"ts": now, **fields})
            except TypeError as error:
                raise InvalidEvent(f"not a field of an event: {error}") from None
        check_event(event, self._limits)
        if len(event.id) > _ID_CHARS:
            raise InvalidEvent(f"an id in an outbox has at most {_ID_CHARS} characters", field="id")
        try:
            data = msgspec.json.encode(event)
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            raise InvalidEvent(f"the payload is no JSON value: {error}", field="payload") from error
        connection.execute(
            self.table.insert().values(
                id=event.id, event=data, created=now, attempts=0, given_up=False
            )
        )
        return event.id

    async def claim(self, by: str, limit: int, lease_s: float) -> list[OutboxRow]:
        return await asyncio.to_thread(self._claim, by, limit, lease_s)

    def _claim(self, by: str, limit: int, lease_s: float) -> list[OutboxRow]:
        sa, table = self._sa, self.table
        stamp = self._clock.now().timestamp()
        mark = f"{by[:16]}-{secrets.token_hex(6)}"  # of this claim and no other
        free = sa.or_(table.c.claimed_until.is_(None), table.c.claimed_until <= stamp)
        waiting = sa.and_(table.c.sent.is_(None), table.c.given_up.is_(False), free)
        with self._engine.begin() as connection:
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
                connection.execute(
                    sa.select(table.c.id).where(table.c.claimed_by == mark)
                ).scalars()
            )
        return [
            OutboxRow(msgspec.json.decode(row.event, type=Event), row.attempts > 0)
            for row in rows
            if row.id in mine
        ]

    async def sent(self, rows: Sequence[OutboxRow], receipts: Sequence[Receipt]) -> None:
        await asyncio.to_thread(self._sent, rows, receipts)

    def _sent(self, rows: Sequence[OutboxRow], receipts: Sequence[Receipt]) -> None:
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
        with self._engine.begin() as connection:
            connection.execute(statement, values)

    async def failed(self, rows: Sequence[OutboxRow], error: str, max_attempts: int | None) -> None:
        await asyncio.to_thread(self._failed, rows, error, max_attempts)

    def _failed(self, rows: Sequence[OutboxRow], error: str, max_attempts: int | None) -> None:
        table = self.table
        enough = False if max_attempts is None else table.c.attempts >= max_attempts
        with self._engine.begin() as connection:
            connection.execute(
                table.update()
                .where(table.c.id.in_([row.event.id for row in rows]), table.c.sent.is_(None))
                .values(error=error, claimed_by=None, claimed_until=None, given_up=enough)
            )

    def retry(self) -> int:
        """Let rows that were given up be tried again; how many there are."""
        table = self.table
        with self._engine.begin() as connection:
            done = connection.execute(
                table.update().where(table.c.given_up).values(given_up=False, attempts=1)
            )
        return int(done.rowcount)

    def waiting(self) -> int:
        """How many rows are neither sent nor given up."""
        sa, table = self._sa, self.table
        with self._engine.connect() as connection:
            count: int = connection.execute(
                sa.select(sa.func.count())
                .select_from(table)
                .where(table.c.sent.is_(None), table.c.given_up.is_(False))
            ).scalar_one()
        return count

    def prune(self, older_than_s: float) -> int:
        """Remove rows that were sent so long ago."""
        check_span(older_than_s, "older_than_s")
        before = self._clock.now() - timedelta(seconds=older_than_s)
        with self._engine.begin() as connection:
            done = connection.execute(self.table.delete().where(self.table.c.sent < before))
        return int(done.rowcount)
