"""What the parts of the shop share: the database, the types of the events, and the bus."""

from __future__ import annotations

import os

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import trunkline
from trunkline.patterns.inbox import AsyncInbox
from trunkline.patterns.outbox import AsyncSqlOutbox


class Order(msgspec.Struct):
    """The payload of ``orders``."""

    id: int
    customer: str
    cents: int


class Payment(msgspec.Struct):
    """The payload of ``payments``."""

    order: int
    cents: int


class Base(DeclarativeBase):
    pass


class OrderRow(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    cents: Mapped[int]


class ChargeRow(Base):
    """One row for each time a customer was charged: a doubled event would make a second one."""

    __tablename__ = "charges"

    number: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[int]


class ParcelRow(Base):
    """One row for each time a parcel was sent."""

    __tablename__ = "parcels"

    number: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[int]


class LabelRow(Base):
    """One row for each time a label was printed."""

    __tablename__ = "labels"

    number: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[int]


def open_bus() -> trunkline.Bus:
    return trunkline.connect(os.environ.get("SHOP_BUS", "file:.bus"))


def open_database() -> AsyncEngine:
    path = os.environ.get("SHOP_DB", "shop.db")
    # Several processes write: each waits up to 60 s until the others have committed.
    return create_async_engine(f"sqlite+aiosqlite:///{path}", connect_args={"timeout": 60})


async def create(engine: AsyncEngine) -> None:
    """Make the tables that are not there."""
    async with engine.begin() as connection:
        # With a write-ahead log, readers and the writer of SQLite do not wait for each other.
        await connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        await connection.run_sync(Base.metadata.create_all)
    await AsyncSqlOutbox(engine).create()
    await AsyncInbox(engine).create()
