"""The inbox: an event takes effect once, however often it is delivered.

A delivery may come twice; the data it changes should not change twice. ``first_time`` notes the
event in the same transaction as the change: either both are there or neither, and the second time
it says so.

::

    with engine.begin() as connection:
        if inbox.first_time(connection, "billing", event):
            connection.execute(...)         # rolled back together with the note
"""

from __future__ import annotations

import hashlib
import sys
from datetime import timedelta
from importlib import import_module
from typing import Any

from trunkline.check import check_span, check_text, load_extra
from trunkline.clock import Clock, SystemClock
from trunkline.event import Event
from trunkline.names import check_group
from trunkline.patterns.outbox import check_kind

_ID_CHARS = 200


class _Notes:
    """The table of an inbox."""

    def __init__(
        self, engine: Any, *, table: str = "trunkline_inbox", clock: Clock | None = None
    ) -> None:
        self._sa = sa = load_extra("sqlalchemy", "outbox")
        self._engine = engine
        self._clock: Clock = clock or SystemClock()
        self.table = sa.Table(
            table,
            sa.MetaData(),
            sa.Column("consumer", sa.String(200), primary_key=True),
            sa.Column("event_id", sa.String(_ID_CHARS), primary_key=True),
            sa.Column("seen", sa.DateTime(timezone=True), nullable=False, index=True),
        )

    def _note(self, group: str, event: Event[Any] | str) -> dict[str, Any]:
        name = event.id if isinstance(event, Event) else event
        check_text("an event's id", name, sys.maxsize)
        if len(name) > _ID_CHARS:
            name = "sha256:" + hashlib.sha256(name.encode()).hexdigest()
        return {"consumer": check_group(group), "event_id": name, "seen": self._clock.now()}

    def _first_time(self, session: Any, note: dict[str, Any]) -> bool:
        bind = session.get_bind() if hasattr(session, "get_bind") else session
        dialect = bind.dialect.name
        if dialect in ("sqlite", "postgresql"):
            module = import_module(f"sqlalchemy.dialects.{dialect}")
            once = module.insert(self.table).values(note).on_conflict_do_nothing()
            return bool(session.execute(once).rowcount == 1)
        try:
            with session.begin_nested():
                session.execute(self.table.insert().values(note))
        except self._sa.exc.IntegrityError:
            return False
        return True

    def _prune(self, connection: Any, older_than_s: float) -> int:
        check_span(older_than_s, "older_than_s")
        before = self._clock.now() - timedelta(seconds=older_than_s)
        statement = self.table.delete().where(self.table.c.seen < before)
        return int(connection.execute(statement).rowcount)


class Inbox(_Notes):
    """Notes in a table of any database that SQLAlchemy knows."""

    def __init__(
        self, engine: Any, *, table: str = "trunkline_inbox", clock: Clock | None = None
    ) -> None:
        check_kind(engine, asynchronous=False, use="AsyncInbox")
        super().__init__(engine, table=table, clock=clock)

    def create(self) -> None:
        """Make the table if there is none."""
        self.table.metadata.create_all(self._engine)

    def first_time(self, session: Any, group: str, event: Event[Any] | str) -> bool:
        """Whether ``group`` sees this event, or id, for the first time; it is noted in the caller's
        transaction. Of two at once, one waits for the other's end and then knows.
        """
        check_kind(session, asynchronous=False, use="AsyncInbox")
        return self._first_time(session, self._note(group, event))

    def prune(self, older_than_s: float) -> int:
        """Forget what was seen so long ago. Keep more than the bus can deliver again."""
        with self._engine.begin() as connection:
            return self._prune(connection, older_than_s)


class AsyncInbox(_Notes):
    """The same for ``sqlalchemy.ext.asyncio``: an ``AsyncEngine``, and ``await first_time`` with
    your ``AsyncSession`` or ``AsyncConnection``.
    """

    def __init__(
        self, engine: Any, *, table: str = "trunkline_inbox", clock: Clock | None = None
    ) -> None:
        check_kind(engine, asynchronous=True, use="Inbox")
        super().__init__(engine, table=table, clock=clock)

    async def create(self) -> None:
        """Make the table if there is none."""
        async with self._engine.begin() as connection:
            await connection.run_sync(self.table.metadata.create_all)

    async def first_time(self, session: Any, group: str, event: Event[Any] | str) -> bool:
        """Whether ``group`` sees this event, or id, for the first time; it is noted in the caller's
        transaction. Of two at once, one waits for the other's end and then knows.
        """
        check_kind(session, asynchronous=True, use="Inbox")
        note = self._note(group, event)
        return bool(await session.run_sync(self._first_time, note))

    async def prune(self, older_than_s: float) -> int:
        """Forget what was seen so long ago. Keep more than the bus can deliver again."""
        async with self._engine.begin() as connection:
            return int(await connection.run_sync(self._prune, older_than_s))
