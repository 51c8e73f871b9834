"""The web application. Start it in ``examples`` with ``uvicorn --factory shop.web:make``.

An order and its event are written in one transaction. The drainer publishes the events of the
outbox: those of the orders, and those that the workers wrote.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from shop.model import (
    ChargeRow,
    LabelRow,
    Order,
    OrderRow,
    ParcelRow,
    create,
    open_bus,
    open_database,
)
from trunkline.patterns.measures import measure, to_text
from trunkline.patterns.outbox import AsyncSqlOutbox, Drainer
from trunkline.patterns.replies import Requests

TABLES = {"charges": ChargeRow.order, "parcels": ParcelRow.order, "labels": LabelRow.order}


async def read_order(request: Request) -> Order:
    try:
        return msgspec.json.decode(await request.body(), type=Order)
    except msgspec.DecodeError as error:
        raise HTTPException(422, str(error)) from error


def make() -> Starlette:
    bus, engine = open_bus(), open_database()
    outbox = AsyncSqlOutbox(engine)
    requests = Requests(bus)

    @contextlib.asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        await create(engine)
        async with bus, requests, Drainer(outbox, bus, poll_s=0.05):
            yield
        await engine.dispose()

    async def place(request: Request) -> Response:
        order = await read_order(request)
        try:
            async with AsyncSession(engine) as session, session.begin():
                session.add(OrderRow(id=order.id, customer=order.customer, cents=order.cents))
                await outbox.add(session, "orders", order, key=order.customer)
        except sa.exc.IntegrityError:  # it was placed before: the client did not get the answer
            return JSONResponse({"id": order.id}, 200)
        return JSONResponse({"id": order.id}, 201)

    async def quote(request: Request) -> Response:
        order = await read_order(request)
        try:
            return JSONResponse({"cents": await requests.request("quotes", order, timeout_s=5)})
        except TimeoutError as error:
            return JSONResponse({"error": str(error)}, 503)

    async def counts(_: Request) -> Response:
        found = {}
        async with AsyncSession(engine) as session:
            for name, column in TABLES.items():
                rows = (await session.execute(sa.select(column))).scalars().all()
                found[name] = {"all": len(rows), "orders": len(set(rows))}
        return JSONResponse({**found, "outbox": await outbox.waiting()})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(to_text(await measure(bus)))

    routes = [
        Route("/orders", place, methods=["POST"]),
        Route("/quote", quote, methods=["POST"]),
        Route("/counts", counts),
        Route("/metrics", metrics),
    ]
    return Starlette(routes=routes, lifespan=life)
