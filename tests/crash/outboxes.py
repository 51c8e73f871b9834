"""An outbox that is drained into a folder, to be interrupted anywhere: each of its rows becomes
exactly one record, and says where.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

import trunkline
import trunkline.patterns.outbox as outbox_module
from trunkline.event import Event, Receipt
from trunkline.options import changed
from trunkline.patterns.outbox import Drainer, SqlOutbox
from trunkline.store.file import FileStore
from trunkline.testing.clock import ManualClock

from .promises import BASE, OPTIONS, Promises, Say, StillClock
from .scenes import Scene

_TOPICS = {"wide": 2, "plain": 1}  # and their partitions
_ROWS = ("wide", "wide", "plain", "plain", "plain", "wide")
_LEASE_S = 60.0
_STORE = changed(OPTIONS)
_draining: list[SqlOutbox] = []


def _open(root: str, waited_s: float = 0.0) -> SqlOutbox:
    """The outbox of a process that comes ``waited_s`` later."""
    engine = sa.create_engine(f"sqlite:///{os.path.join(root, 'app.db')}")
    return SqlOutbox(engine, clock=ManualClock(BASE + timedelta(seconds=waited_s)))


async def _drained(root: str, waited_s: float) -> None:
    outbox = _open(root, waited_s)
    _draining.append(outbox)
    async with trunkline.connect(f"file:{root}/bus", **_STORE, clock=StillClock()) as bus:
        await Drainer(outbox, bus, batch=4, lease_s=_LEASE_S).drain()


def fill(root: str, _: Say) -> None:
    os.makedirs(root)
    outbox = _open(root)
    outbox.create()
    with outbox._engine.begin() as connection:
        for number, topic in enumerate(_ROWS):
            key = f"k{number}"
            outbox.add(connection, Event(topic=topic, id=f"e{number}", ts=BASE, key=key))
    outbox._engine.dispose()

    async def define() -> None:
        async with trunkline.connect(f"file:{root}/bus", **_STORE) as bus:
            for topic, partitions in _TOPICS.items():
                await bus.define(topic, partitions=partitions)

    asyncio.run(define())


def drain(root: str, _: Say) -> None:
    asyncio.run(_drained(root, 0))


def fill_and_fail(root: str, say: Say) -> None:
    """A drainer published four rows and died before it could say so; the log had the last two of
    them, and had not taken note.
    """
    fill(root, say)
    note = os.path.join(root, "bus", "wal", "plain.head")

    async def publish() -> None:
        claimed = await _open(root).claim("dead", 4, _LEASE_S)
        async with trunkline.connect(f"file:{root}/bus", **_STORE) as bus:
            await bus.publish("plain", "another's")
            await bus.publish_many("wide", [row.event for row in claimed[:2]])
            shutil.copy(note, f"{root}/before")
            await bus.publish_many("plain", [row.event for row in claimed[2:]])
        shutil.copy(f"{root}/before", note)

    asyncio.run(publish())


def drain_later(root: str, _: Say) -> None:
    asyncio.run(_drained(root, _LEASE_S + 1))


def broken(root: str, _: Promises) -> list[str]:
    """Drain what is left, as the next process does, and count."""
    return asyncio.run(_broken(root))


async def _broken(root: str) -> list[str]:
    await _drained(root, 3 * _LEASE_S)
    places: dict[str, tuple[int, int]] = {}
    seen: Counter[str] = Counter()
    async with trunkline.connect(f"file:{root}/bus", **_STORE) as bus:
        for topic, partitions in _TOPICS.items():
            for partition in range(partitions):
                for record in await bus.read(topic, partition=partition):
                    seen[record.event.id] += 1
                    places[record.event.id] = (partition, record.offset)
    names = [f"e{number}" for number in range(len(_ROWS))]
    problems = [f"row {name} is {seen[name]} records" for name in names if seen[name] != 1]
    outbox = _open(root)
    table = outbox.table
    with outbox._engine.connect() as connection:
        for row in connection.execute(sa.select(table)):
            place = (row.partition, row.offset)
            if row.sent is None or place != places.get(row.id):
                problems.append(f"row {row.id}: sent {row.sent}, at {place}")
    outbox._engine.dispose()
    return problems


OUTBOXES = {
    "outbox": Scene(drain, fill, broken),
    "outbox again": Scene(drain_later, fill_and_fail, broken),
}


# -- bugs that a sweep must find -------------------------------------------------------------------


def looks_for_nothing() -> None:
    """What was tried before is published all the same."""

    async def send(bus: Any, topic: str, rows: Any, *, again: bool) -> Any:
        return await bus.publish_many(topic, [row.event for row in rows])

    outbox_module._send = send


def looks_before_the_log_is_settled() -> None:
    async def trim(store: FileStore, topic: str, partition: int, before: int) -> Any:
        return await store.bounds(topic, partition)

    FileStore.trim = trim  # type: ignore[assignment, method-assign]


def marks_too_early() -> None:
    """A row is sent before it is."""
    send = outbox_module._send

    async def early(bus: Any, topic: str, rows: Any, *, again: bool) -> Any:
        nowhere = [Receipt(topic, 0, 0, row.event.id) for row in rows]
        await _draining[-1].sent(rows, nowhere)
        return await send(bus, topic, rows, again=again)

    outbox_module._send = early


PLANTS = (
    ("outbox again", looks_for_nothing),
    ("outbox again", looks_before_the_log_is_settled),
    ("outbox", marks_too_early),
)
