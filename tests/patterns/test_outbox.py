from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import trunkline
from trunkline.errors import InvalidEvent, StorageFull
from trunkline.event import Event, Receipt
from trunkline.patterns.outbox import Drainer, OutboxRow, SqlOutbox

# The address of a database whose tables may be dropped, as in postgresql+pg8000://user@host/name.
SERVER = os.environ.get("TRUNKLINE_TEST_DATABASE")


@pytest.fixture(params=["sqlite", *(["server"] if SERVER else [])])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    here = f"sqlite:///{tmp_path / 'app.db'}"
    made = sa.create_engine(SERVER if SERVER and request.param == "server" else here)
    SqlOutbox(made).table.drop(made, checkfirst=True)
    yield made
    made.dispose()


@pytest.fixture
def outbox(engine: Any) -> SqlOutbox:
    outbox = SqlOutbox(engine)
    outbox.create()
    return outbox


@pytest.fixture
async def bus() -> AsyncIterator[Any]:
    async with trunkline.connect("memory:") as bus:
        yield bus


def add(outbox: SqlOutbox, engine: Any, *payloads: Any, topic: str = "orders") -> list[str]:
    with engine.begin() as connection:
        return [outbox.add(connection, topic, payload, key="k") for payload in payloads]


async def kept(bus: Any, topic: str = "orders") -> list[Any]:
    return [record.event.payload for record in await bus.read(topic)]


async def test_what_is_committed_is_published_once(
    bus: Any, outbox: SqlOutbox, engine: Any
) -> None:
    ids = add(outbox, engine, 1, 2, 3)
    drainer = Drainer(outbox, bus, batch=2)
    assert await drainer.drain() == 3
    assert await drainer.drain() == 0
    records = await bus.read("orders")
    assert [(r.event.id, r.event.payload, r.event.key) for r in records] == [
        (id_, n, "k") for n, id_ in enumerate(ids, 1)
    ]
    with engine.connect() as connection:
        rows = connection.execute(sa.select(outbox.table.c.offset)).scalars().all()
    assert sorted(rows) == [1, 2, 3]
    assert outbox.waiting() == 0


async def test_what_is_rolled_back_is_not_published(
    bus: Any, outbox: SqlOutbox, engine: Any
) -> None:
    with engine.connect() as connection:
        outbox.add(connection, "orders", 1)
        connection.rollback()
    assert await Drainer(outbox, bus).drain() == 0


class Killed(BaseException):
    pass


class Dies:
    """A bus or a storage that is killed before or after one call."""

    def __init__(self, inner: Any, name: str, *, after: bool) -> None:
        self._inner, self._name, self._after = inner, name, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name.replace("again", "many") != self._name:  # after its lease a row is looked for
            return found

        async def call(*args: Any) -> Any:
            if self._after:
                await found(*args)
            raise Killed

        return call


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", ["claim", "publish_many", "sent"])
async def test_killed_at_any_step_each_row_is_one_record(
    bus: Any, outbox: SqlOutbox, engine: Any, step: str, after: bool
) -> None:
    await bus.define("orders", partitions=2)
    add(outbox, engine, 1, 2, 3)
    storage: Any = outbox if step == "publish_many" else Dies(outbox, step, after=after)
    target: Any = Dies(bus, step, after=after) if step == "publish_many" else bus
    with pytest.raises(Killed):
        await Drainer(storage, target, lease_s=0.01).drain()
    await asyncio.sleep(0.02)
    await Drainer(outbox, bus).drain()
    found = [r.event.payload for p in (0, 1) for r in await bus.read("orders", partition=p)]
    assert sorted(found) == [1, 2, 3]
    assert outbox.waiting() == 0


async def test_two_drainers_do_not_take_the_same_row(
    bus: Any, outbox: SqlOutbox, engine: Any
) -> None:
    add(outbox, engine, *range(20))
    one, two = Drainer(outbox, bus, batch=3), Drainer(outbox, bus, batch=3)
    sent = await asyncio.gather(one.drain(), two.drain())
    assert sum(sent) == 20
    assert sorted(await kept(bus)) == list(range(20))


async def test_a_bad_row_is_given_up_and_holds_up_nobody(
    bus: Any, outbox: SqlOutbox, engine: Any
) -> None:
    add(outbox, engine, 1)
    add(outbox, engine, "x" * 2_000_000)
    add(outbox, engine, 3)
    drainer = Drainer(outbox, bus, max_attempts=2)
    for _ in range(4):
        await drainer.drain()
    assert await kept(bus) == [1, 3]
    assert outbox.waiting() == 0
    with engine.connect() as connection:
        errors = connection.execute(
            sa.select(outbox.table.c.error).where(outbox.table.c.given_up)
        ).scalars()
        assert ["are allowed" in text for text in errors] == [True]


async def test_an_event_that_is_none_is_refused_in_the_transaction(
    outbox: SqlOutbox, engine: Any
) -> None:
    with engine.begin() as connection:
        for topic, payload in (("a/b", 1), ("a", object())):
            with pytest.raises(trunkline.Invalid):
                outbox.add(connection, topic, payload)
        with pytest.raises(InvalidEvent):
            outbox.add(connection, Event(topic="a", key=7))  # type: ignore[arg-type]
    assert outbox.waiting() == 0


async def test_it_drains_while_it_is_entered(bus: Any, outbox: SqlOutbox, engine: Any) -> None:
    async with Drainer(outbox, bus, poll_s=0.01):
        add(outbox, engine, 1)
        async with asyncio.timeout(30):
            while outbox.waiting():
                await asyncio.sleep(0.01)
    assert await kept(bus) == [1]
    assert outbox.prune(0) == 1


class Listed:
    """The smallest storage there can be: the seam is three methods."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.rows = [OutboxRow(event) for event in events]
        self.done: list[int] = []
        self.errors: list[str] = []

    async def claim(self, by: str, limit: int, lease_s: float) -> list[OutboxRow]:
        taken, self.rows = self.rows[:limit], self.rows[limit:]
        return taken

    async def sent(self, rows: Sequence[OutboxRow], receipts: Sequence[Receipt]) -> None:
        self.done += [receipt.offset for receipt in receipts]

    async def failed(self, rows: Sequence[OutboxRow], error: str, max_attempts: int | None) -> None:
        self.errors += [error] * len(rows)
        if max_attempts is None:
            self.rows = [*rows, *self.rows]


async def test_any_storage_with_three_methods_will_do(bus: Any) -> None:
    storage = Listed([Event(topic="a"), Event(topic="b"), Event(topic="b")])
    assert await Drainer(storage, bus).drain() == 3
    assert storage.done == [1, 1, 2]


async def test_while_the_bus_is_away_rows_wait_and_none_is_given_up(
    bus: Any, outbox: SqlOutbox, engine: Any
) -> None:
    class Away:
        is_away = True

        async def _publish(self, topic: str, events: Any) -> Any:
            if self.is_away:
                raise StorageFull("no room")
            return await bus.publish_again(topic, events)

        publish_many = publish_again = _publish

    ids = add(outbox, engine, 1, 2) + add(outbox, engine, 3, topic="others")
    away = Away()
    drainer = Drainer(outbox, away, max_attempts=2)
    for _ in range(5):
        with pytest.raises(StorageFull):
            await drainer.drain()
    with engine.connect() as connection:
        found = connection.execute(sa.select(outbox.table.c.error)).scalars().all()
    assert found == ["no room"] * 3
    away.is_away = False
    assert await drainer.drain() == 3
    assert [r.event.id for r in [*await bus.read("orders"), *await bus.read("others")]] == ids


async def test_a_database_that_is_away_for_a_while_does_not_end_it(bus: Any) -> None:
    class Flaky(Listed):
        fails = 3

        async def claim(self, by: str, limit: int, lease_s: float) -> list[OutboxRow]:
            if self.fails:
                self.fails -= 1
                raise sa.exc.OperationalError("select", {}, Exception("database is locked"))
            return await super().claim(by, limit, lease_s)

    storage = Flaky([Event(topic="a")])
    async with Drainer(storage, bus, poll_s=0.01), asyncio.timeout(30):
        while not storage.done:
            await asyncio.sleep(0.01)
    assert storage.done == [1]


async def test_leaving_it_finishes_what_was_begun(bus: Any, outbox: SqlOutbox, engine: Any) -> None:
    begun = asyncio.Event()

    class Slow:
        async def publish_many(self, topic: str, events: Any) -> Any:
            begun.set()
            await asyncio.sleep(0.05)
            return await bus.publish_many(topic, events)

        publish_again = publish_many

    add(outbox, engine, 1, 2, 3)
    async with Drainer(outbox, Slow(), batch=2):
        await begun.wait()
    assert await kept(bus) == [1, 2]
    assert await Drainer(outbox, bus).drain() == 1, "the third was not claimed"


async def test_after_its_lease_a_row_is_looked_for_before_it_is_published(bus: Any) -> None:
    """The drainer stood still between taking a row and publishing it; another took it over."""

    class Overtaken(Listed):
        async def claim(self, by: str, limit: int, lease_s: float) -> list[OutboxRow]:
            taken = await super().claim(by, limit, lease_s)
            for row in taken:
                await bus.publish(row.event)
            await asyncio.sleep(lease_s)
            return taken

    storage = Overtaken([Event(topic="a", payload=1)])
    assert await Drainer(storage, bus, lease_s=0.01).drain() == 1
    assert await kept(bus, "a") == [1]


async def test_what_was_given_up_can_be_tried_again(
    bus: Any, outbox: SqlOutbox, engine: Any
) -> None:
    class Strict:
        async def publish_many(self, topic: str, events: Any) -> Any:
            raise InvalidEvent("does not fit the schema")

        publish_again = publish_many

    add(outbox, engine, 1)
    assert await Drainer(outbox, Strict(), max_attempts=1).drain() == 0
    assert (outbox.waiting(), await Drainer(outbox, bus).drain()) == (0, 0)
    assert outbox.retry() == 1
    assert await Drainer(outbox, bus).drain() == 1
    assert await kept(bus) == [1]


def test_an_id_that_no_column_holds_is_refused(outbox: SqlOutbox, engine: Any) -> None:
    with engine.begin() as connection, pytest.raises(InvalidEvent, match="255"):
        outbox.add(connection, Event(topic="a", id="x" * 256))


async def test_publish_again_keeps_what_is_not_there(bus: Any) -> None:
    events = [Event(topic="t", payload=n) for n in range(3)]
    await bus.publish(events[1])
    receipts = await bus.publish_again("t", events)
    assert [receipt.offset for receipt in receipts] == [2, 1, 3]
    assert await kept(bus, "t") == [1, 0, 2]
