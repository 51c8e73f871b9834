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

from trunkline.clock import Clock, SystemClock
from trunkline.errors import check_span, load_extra
from trunkline.event import Event, check_text
from trunkline.topics import check_group

_ID_CHARS = 200


class Inbox:
    """Notes in a table of any database that SQLAlchemy knows."""

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

    def create(self) -> None:
        """Make the table if there is none."""
        self.table.metadata.create_all(self._engine)

    def first_time(self, connection: Any, group: str, event: Event | str) -> bool:
        """Whether ``group`` sees this event, or id, for the first time; it is noted in the caller's
        transaction. Of two at once, one waits for the other's end and then knows.
        """
        name = event.id if isinstance(event, Event) else event
        check_text("an event's id", name, sys.maxsize)
        if len(name) > _ID_CHARS:
            name = "sha256:" + hashlib.sha256(name.encode()).hexdigest()
        values = {"consumer": check_group(group), "event_id": name, "seen": self._clock.now()}
        dialect = connection.dialect.name
        if dialect in ("sqlite", "postgresql"):
            module = import_module(f"sqlalchemy.dialects.{dialect}")
            once = module.insert(self.table).values(values).on_conflict_do_nothing()
            return bool(connection.execute(once).rowcount == 1)
        try:
            with connection.begin_nested():
                connection.execute(self.table.insert().values(values))
        except self._sa.exc.IntegrityError:
            return False
        return True

    def prune(self, older_than_s: float) -> int:
        """Forget what was seen so long ago. Keep more than the bus can deliver again."""
        check_span(older_than_s, "older_than_s")
        before = self._clock.now() - timedelta(seconds=older_than_s)
        with self._engine.begin() as connection:
            done = connection.execute(self.table.delete().where(self.table.c.seen < before))
        return int(done.rowcount)
