"""The workers: billing and shipping. Start them in ``examples``:

``trunkline run shop.workers:billing --processes 2``
``trunkline run shop.workers:shipping``

An event may be delivered twice, and a task may be handed in twice. The inbox makes each count once.
"""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncSession

import trunkline
from shop.model import ChargeRow, LabelRow, Order, ParcelRow, Payment, open_bus, open_database
from trunkline import Event, GroupOptions
from trunkline.patterns.inbox import AsyncInbox
from trunkline.patterns.outbox import AsyncSqlOutbox
from trunkline.patterns.replies import respond
from trunkline.patterns.tasks import TaskQueue

PATIENT = GroupOptions.patient(backoff_base_s=0.1)


def billing() -> trunkline.Bus:
    bus, engine = open_bus(), open_database()
    outbox, inbox = AsyncSqlOutbox(engine), AsyncInbox(engine)

    @bus.on("orders", group="billing", workers=2, policy=PATIENT, timeout_s=60)
    async def charge(event: Event[Order]) -> None:
        order = event.payload
        async with AsyncSession(engine) as session, session.begin():
            if await inbox.first_time(session, "billing", event):
                session.add(ChargeRow(order=order.id))
                await outbox.add(session, "payments", Payment(order.id, order.cents), key=event.key)

    @respond(bus, "quotes", group="quotes")
    async def quote(order: Order) -> int:
        return order.cents + 490

    return bus


def shipping() -> trunkline.Bus:
    bus, engine = open_bus(), open_database()
    inbox = AsyncInbox(engine)
    labels = TaskQueue(bus, "labels")

    @labels.task
    async def print_label(order: int) -> None:
        async with AsyncSession(engine) as session, session.begin():
            if await inbox.first_time(session, "labels", f"order-{order}"):
                session.add(LabelRow(order=order))

    labels.serve(workers=2, policy=PATIENT)

    @bus.on("payments", group="shipping", policy=PATIENT, timeout_s=60)
    async def ship(event: Event[Payment]) -> None:
        async with AsyncSession(engine) as session, session.begin():
            if await inbox.first_time(session, "shipping", event):
                session.add(ParcelRow(order=event.payload.order))
        # After the commit, each time: a worker that is killed in between hands it in next time.
        await print_label.delay(event.payload.order)

    return bus
