"""The HTTP door: one table of endpoints, from which the routes and the OpenAPI page are made.

Each endpoint is a function of the hub, the request and its principal; it checks the rights itself.
An error becomes a status and a JSON object with ``code`` and ``message``, by the table that the
WebSocket door uses too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trunkline import access
from trunkline.access import Principal
from trunkline.broker.gate import Gate, names_of
from trunkline.broker.hub import Hub
from trunkline.broker.spelling import ALIASES, our_names
from trunkline.errors import Denied, Invalid, InvalidOption, TrunklineError
from trunkline.explain import reason
from trunkline.wire.codes import code_of, status_of

logger = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
_NAMES = "trunkline.names"  # in a request's scope: those in the client's certificate
_BODY_S = 60.0
_HEAD_BYTES = 64 * 1024
_DISCARDED = 8  # a body of so many times the limit is read to its end, to be refused
_TOKEN = "send Authorization: Bearer with a token; 'trunkline token create' makes one"
_SECURITY = [
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
]

Handler = Callable[["Ask"], Awaitable[Response]]


class Endpoint(NamedTuple):
    method: str
    path: str
    handler: Handler
    about: str
    body: dict[str, Any] | None = None  # JSON Schema by media type
    query: Mapping[str, Any] = MappingProxyType({})
    status: int = 200
    answers: dict[str, Any] | None = None  # JSON Schema by media type; JSON of any shape if None
    open: bool = False  # needs no token
    tag: str = "topics"
    ticket: bool = False  # a browser may show a ticket in the address
    lenient: bool = False  # parameters that are not known are ignored, as a protocol asks


class Ask:
    """A request, and the principal that makes it."""

    __slots__ = ("hub", "request", "who")

    def __init__(self, hub: Hub, request: Request, who: Principal) -> None:
        self.hub = hub
        self.request = request
        self.who = who

    def path(self, name: str) -> str:
        found: str = self.request.path_params[name]
        return found

    def query(self, name: str, default: str | None = None) -> str | None:
        """One value; the same parameter twice is an error."""
        found = self.request.query_params.getlist(name)
        if len(found) > 1:
            raise InvalidOption(f"{name} is given twice", name=name)
        return found[0] if found else default

    def number(self, name: str, default: int, low: int, high: int) -> int:
        text = self.query(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise InvalidOption(f"{name} is a whole number", name=name)
        if not low <= int(text) <= high:
            raise InvalidOption(f"{name} is {low} to {high}", name=name)
        return int(text)

    def flag(self, name: str) -> bool:
        text = self.query(name, "false")
        if text not in ("true", "false"):
            raise InvalidOption(f"{name} is true or false", name=name)
        return text == "true"

    async def bytes(self) -> bytes:
        """The body, within the limit for frames. What is larger is read and thrown away, up to a
        point: a client that still sends when the connection is closed does not see the answer.
        """
        limit = self.hub.options.frame_bytes
        parts: list[bytes] = []
        size = 0
        async for part in self.request.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
            elif size > limit * _DISCARDED:
                break
        if size > limit:
            raise Invalid(f"the body is larger than {limit} bytes", code="too_large", status=413)
        who = self.hub.rights.current(self.who)
        if who is None:  # it may have taken a while
            raise _unknown()
        self.who = who
        return b"".join(parts)

    async def json(self, kind: Any) -> Any:
        """The body, read as ``kind``."""
        content = self.request.headers.get("content-type", "application/json")
        if content.partition(";")[0].strip().lower() != "application/json":
            raise Invalid("the body is application/json", code="media_type", status=415)
        body = await self.bytes()
        if ALIASES.keys() & set(kind.__struct_encode_fields__):
            body = _encode(our_names(decoded(body, Any)))
        found = decoded(body, kind)
        if getattr(found, "where", None) is not None:
            await self.hub.load_conditions()
        return found

    def require(self, action: access.Action, topic: str, group: str = "") -> None:
        self.hub.require(self.who, action, topic, group)


def decoded(body: bytes, kind: Any, hint: str = "") -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeError, ValueError) as error:
        said = f"the body is not what is expected: {reason(error) if body else 'it is empty'}"
        raise InvalidOption(said, hint=hint) from error


def reply(value: Any, status: int = 200, media: str = "application/json") -> Response:
    return Response(_encode(value), status, media_type=media)


def failure(error: TrunklineError) -> Response:
    said: dict[str, Any] = {"code": code_of(error), "message": error.message}
    if error.hint:
        said["hint"] = error.hint
    if said["code"] == "schema" and "path" in error.fields:
        said["path"] = error.fields["path"]
    headers = {}
    status = status_of(error)
    if said["code"] == "unauthenticated":
        headers["www-authenticate"] = "Bearer"
    if said["code"] == "rate":
        status = 429
        headers["retry-after"] = str(max(1, round(error.fields.get("retry_s", 1))))
    return Response(_encode(said), status, headers, media_type="application/json")


def _unknown() -> Denied:
    return Denied("not authenticated", hint=_TOKEN, code="unauthenticated", status=401)


def _refuse_unknown(request: Request, endpoint: Endpoint) -> None:
    """A parameter that is misspelt must not look as if it had been obeyed."""
    for name in request.query_params:
        if name not in endpoint.query:
            known = ", ".join(endpoint.query)
            raise InvalidOption(
                f"there is no parameter {name[:80]!r}",
                name=name,
                hint=f"known here: {known}" if known else "this takes none",
            )


class Asking(HttpToolsProtocol):
    """uvicorn's connections, which know the names in a client's certificate, are only so many, and
    do not wait for ever for a request, nor for a client that takes nothing of the answer.
    """

    hub: ClassVar[Hub]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._names = names_of(transport)
        self._patience: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._fed_bytes = self._header_bytes = 0
        self._head_bytes: int | None = None  # of a request whose head has not ended yet
        self._wait(self.hub.options.auth_timeout_s)
        if len(self.connections) > self.hub.options.connections:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        self._cancel_stall()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """As the original, but what is only half said is not waited for."""
        if self.cycle is not None and self.cycle.more_body:
            self.transport.abort()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._cancel_stall()
        super().resume_writing()

    def _watch(self, size: int) -> None:
        self._stall = self.loop.call_later(self.hub.options.stall_s, self._look, size)

    def _look(self, before: int) -> None:
        """Slow is not stalled: only a client that took nothing at all is let go."""
        size = self.transport.get_write_buffer_size()
        if size < before:
            self._watch(size)
            return
        self.hub.counts.evicted += 1
        self.transport.abort()

    def _cancel_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()

    def data_received(self, data: bytes) -> None:
        self._fed_bytes = len(data)
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too long.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """What this raises the parser turns into 400: a head that came in one piece is as long as
        one that drips, and a request with two hosts is two requests to two readers (RFC 9112).
        """
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > _HEAD_BYTES:
            raise ValueError("the head of the request is too long")
        if name.lower() == b"host" and any(known == b"host" for known, _ in self.headers):
            raise ValueError("a request has one Host")
        super().on_header(name, value)

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        self._head_bytes = -self._fed_bytes  # what it began with may be of those before it
        super().on_message_begin()
        self.scope[_NAMES] = self._names  # type: ignore[literal-required]
        self._wait(self.hub.options.auth_timeout_s)

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        self._wait(_BODY_S)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._wait(None)
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._wait(None)
        super().handle_websocket_upgrade()

    def _wait(self, seconds: float | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._patience = (
            None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
        )


def requests_for(hub: Hub) -> type[Asking]:
    return type("Asking", (Asking,), {"hub": hub})


class _Guard:
    """Host, Origin and the headers that every answer has; the app below sees only what passes."""

    def __init__(self, app: Any, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        refused = self._gate.refuses(Headers(scope=scope))
        if refused is not None:
            status, reason = refused
            denied = Denied(reason, code="refused", status=status)
            await failure(denied)(scope, receive, send)
            return

        async def marked(message: Any) -> None:
            if message["type"] == "http.response.start":
                have = {name for name, _ in message["headers"]}
                missing = [header for header in _SECURITY if header[0] not in have]
                message["headers"] = [*message["headers"], *missing]
            await send(message)

        await self._app(scope, receive, marked)


class _Pages(CORSMiddleware):
    """CORS headers for pages of the origins that the gate lets in now."""

    def __init__(self, app: Any, gate: Gate, methods: Sequence[str]) -> None:
        super().__init__(app, allow_methods=methods, allow_headers=("*",), expose_headers=("*",))
        self._gate = gate

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._gate.origins:
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def is_allowed_origin(self, origin: str) -> bool:
        return origin.rstrip("/").lower() in self._gate.origins


class _Number(IntegerConvertor):
    regex = "[0-9]{1,19}"  # Python reads no number of thousands of digits


register_url_convertor("number", _Number())


def application(hub: Hub, gate: Gate) -> Any:
    """The ASGI application."""
    from trunkline.broker.routes import ENDPOINTS

    def route(endpoint: Endpoint) -> Route:
        async def answer(request: Request) -> Response:
            try:
                ticket = request.query_params.get("ticket") if endpoint.ticket else None
                who, is_wrong = gate.principal(request.headers, request.scope[_NAMES], ticket)
                if (who is None or is_wrong) and not endpoint.open:
                    hub.denied(Principal(""), "connect", "")
                    raise _unknown()
                who = who or access.NOBODY
                if not endpoint.lenient:
                    _refuse_unknown(request, endpoint)
                wait_s = hub.rate(who)
                if wait_s:
                    raise TrunklineError("too many requests", code="rate", retry_s=wait_s)
                if "where" in request.query_params:
                    await hub.load_conditions()
                return await endpoint.handler(Ask(hub, request, who))
            except TrunklineError as error:
                if status_of(error) >= 500 and status_of(error) != 501:
                    logger.warning("%s %s: %s", request.method, request.url.path, error)
                return failure(error)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody is there to read it
            except Exception:
                logger.exception("%s %s failed", request.method, request.url.path)
                return reply({"code": "internal", "message": "internal error"}, 500)

        path = endpoint.path.replace(":int}", ":number}")
        return Route(path, answer, methods=[endpoint.method])

    async def missing(_request: Request, error: Any) -> Response:
        code = "not_found" if error.status_code == 404 else "bad_method"
        hint = "/openapi.json describes what there is"
        return Response(
            _encode({"code": code, "message": str(error.detail), "hint": hint}),
            error.status_code,
            error.headers,
            media_type="application/json",
        )

    methods = sorted({endpoint.method for endpoint in ENDPOINTS})
    middleware = [Middleware(_Guard, gate=gate), Middleware(_Pages, gate=gate, methods=methods)]
    return Starlette(
        routes=_merged([route(endpoint) for endpoint in ENDPOINTS]),
        middleware=middleware,
        exception_handlers={404: missing, 405: missing},
    )


def _merged(routes: list[Route]) -> list[Route]:
    """One route a path, so that a method that is not there is answered with those that are."""
    found: dict[str, dict[str, Route]] = {}
    for route in routes:
        for method in route.methods or ():
            found.setdefault(route.path, {})[method] = route
    merged = []
    for path, methods in found.items():

        def dispatch(methods: dict[str, Route]) -> Handler:
            async def answer(request: Any) -> Response:
                done: Response = await methods[request.method].endpoint(request)
                return done

            return answer

        merged.append(Route(path, dispatch(methods), methods=list(methods)))
    return merged
