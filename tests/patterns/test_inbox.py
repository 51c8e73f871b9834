from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from trunkline.event import Event
from trunkline.patterns.inbox import Inbox


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    made = sa.create_engine(f"sqlite:///{tmp_path / 'app.db'}")
    yield made
    made.dispose()


@pytest.fixture
def inbox(engine: Any) -> Inbox:
    inbox = Inbox(engine)
    inbox.create()
    return inbox


def test_an_event_is_new_once_for_each_group(inbox: Inbox, engine: Any) -> None:
    event = Event(topic="orders")
    seen = []
    for group in ("billing", "billing", "audit"):
        with engine.begin() as connection:
            seen.append(inbox.first_time(connection, group, event))
    with engine.begin() as connection:
        seen.append(inbox.first_time(connection, "audit", event.id))
    assert seen == [True, False, True, False]


def test_the_note_goes_with_its_transaction(inbox: Inbox, engine: Any) -> None:
    event = Event(topic="orders")
    with engine.connect() as connection:
        assert inbox.first_time(connection, "billing", event)
        connection.rollback()
    with engine.begin() as connection:
        assert inbox.first_time(connection, "billing", event)
        assert not inbox.first_time(connection, "billing", event)


def test_an_id_may_be_longer_than_a_column(inbox: Inbox, engine: Any) -> None:
    ids = ["x" * 1000 + "a", "x" * 1000 + "b", "x" * 1000 + "a"]
    with engine.begin() as connection:
        assert [inbox.first_time(connection, "g", id_) for id_ in ids] == [True, True, False]
        kept = connection.execute(sa.select(inbox.table.c.event_id)).scalars().all()
    assert max(map(len, kept)) <= 200


def test_old_notes_are_forgotten(inbox: Inbox, engine: Any) -> None:
    with engine.begin() as connection:
        inbox.first_time(connection, "billing", "e1")
    assert (inbox.prune(60), inbox.prune(0)) == (0, 1)
