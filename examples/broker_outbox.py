"""An order and its event are written in one transaction; the event is published later, once."""

import asyncio

import sqlalchemy as sa

import trunkline
from trunkline.patterns.outbox import Drainer, SqlOutbox


async def main() -> None:
    engine = sa.create_engine("sqlite:///outbox.db")
    orders = sa.Table("orders", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True))
    orders.metadata.create_all(engine)
    outbox = SqlOutbox(engine)
    outbox.create()

    with engine.begin() as connection:
        (number,) = connection.execute(orders.insert().returning(orders.c.id)).one()
        outbox.add(connection, "orders", {"id": number}, key=f"order-{number}")
    with engine.connect() as connection:
        connection.execute(orders.insert())
        outbox.add(connection, "orders", {"id": number + 1})
        connection.rollback()  # neither the order nor its event

    async with trunkline.connect("file:.bus-outbox") as bus:
        print(f"sent {await Drainer(outbox, bus).drain()}, waiting {outbox.waiting()}")
        for record in await bus.read("orders"):
            print(f"offset {record.offset}: {record.event.payload}")
    engine.dispose()


asyncio.run(main())
