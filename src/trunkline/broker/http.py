"""The HTTP door."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trunkline.broker.hub import Hub
from trunkline.broker.wire import Gate


def application(hub: Hub, gate: Gate) -> Any:
    async def healthz(request: Request) -> Response:
        return Response("ok\n")

    return Starlette(routes=[Route("/healthz", healthz)])
