"""The outbox and the inbox with SQLAlchemy's ``AsyncSession``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

import trunkline
from trunkline.patterns.inbox import AsyncInbox, Inbox
from trunkline.patterns.outbox import AsyncSqlOutbox, Drainer, SqlOutbox


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    yield engine
    await engine.dispose()


async def test_an_event_is_written_with_the_session_or_not_at_all(engine: AsyncEngine) -> None:
    outbox = AsyncSqlOutbox(engine)
    await outbox.create()
    async with AsyncSession(engine) as session, session.begin():
        await outbox.add(session, "orders", {"id": 1}, key="c1", delay_s=0, priority=1)
    async with AsyncSession(engine) as session:
        await outbox.add(session, "orders", {"id": 2})
        await session.rollback()
    async with engine.begin() as connection:
        await outbox.add(connection, "orders", {"id": 3})
    assert await outbox.waiting() == 2
    async with trunkline.connect("memory:") as bus:
        assert await Drainer(outbox, bus).drain() == 2
        records = await bus.read("orders")
    assert [record.event.payload["id"] for record in records] == [1, 3]
    assert (records[0].event.key, records[0].event.priority) == ("c1", "high")
    assert await outbox.waiting() == 0
    assert await outbox.retry() == 0
    assert await outbox.prune(0) == 2


async def test_an_event_takes_effect_once(engine: AsyncEngine) -> None:
    inbox = AsyncInbox(engine)
    await inbox.create()
    seen = []
    for _ in range(2):
        async with AsyncSession(engine) as session, session.begin():
            seen.append(await inbox.first_time(session, "billing", "e1"))
    async with AsyncSession(engine) as session:
        assert await inbox.first_time(session, "billing", "e2")
        await session.rollback()
    async with engine.begin() as connection:
        seen.append(await inbox.first_time(connection, "billing", "e2"))
    assert seen == [True, False, True]
    assert await inbox.prune(0) == 2


async def test_the_wrong_kind_of_session_is_a_type_error(engine: AsyncEngine) -> None:
    plain = sa.create_engine("sqlite://")
    tries: list[Any] = [
        lambda: SqlOutbox(engine),
        lambda: Inbox(engine),
        lambda: AsyncSqlOutbox(plain),
        lambda: AsyncInbox(plain),
        lambda: SqlOutbox(plain).add(AsyncSession(engine), "orders", 1),
        lambda: Inbox(plain).first_time(AsyncSession(engine), "g", "e"),
        lambda: SqlOutbox("sqlite://"),
    ]
    for wrong in tries:
        with pytest.raises(TypeError):
            wrong()
    with plain.connect() as connection:
        with pytest.raises(TypeError, match="use SqlOutbox"):
            await AsyncSqlOutbox(engine).add(connection, "orders", 1)
        with pytest.raises(TypeError, match="use Inbox"):
            await AsyncInbox(engine).first_time(connection, "g", "e")
    plain.dispose()


def test_a_plain_session_works_as_a_connection_does(tmp_path: Path) -> None:
    from sqlalchemy.orm import Session

    plain = sa.create_engine(f"sqlite:///{tmp_path}/plain.db")
    outbox, inbox = SqlOutbox(plain), Inbox(plain)
    outbox.create()
    inbox.create()
    with Session(plain) as session, session.begin():
        assert inbox.first_time(session, "billing", "e1")
        assert not inbox.first_time(session, "billing", "e1")
        outbox.add(session, "orders", 1, delay_s=5)
    assert outbox.waiting() == 1
    plain.dispose()
