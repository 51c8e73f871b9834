"""WebSocket connections: the handshake and its checks, then a session fed by picows.

uvicorn parses every request; one that asks for an upgrade is handed over here with its transport,
so that both doors share a port and neither is in the other's way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from picows import (
    WSAutoPingStrategy,
    WSCloseCode,
    WSFrame,
    WSListener,
    WSMsgType,
    WSTransport,
    WSUpgradeRequest,
    WSUpgradeResponse,
    WSUpgradeResponseWithListener,
)
from picows.picows import WSProtocol  # type: ignore[attr-defined]

from trunkline.access import Principal
from trunkline.broker.hub import GOODBYE_S, Hub
from trunkline.broker.options import is_loopback
from trunkline.broker.session import Op, Session
from trunkline.wire.frames import CLIENT, CLOUDEVENTS, SUBPROTOCOL, SUBPROTOCOLS

logger = logging.getLogger(__name__)

PATHS = ("/", "/ws")
_NAME_CHARS = 100
_HIGH_WATER_BYTES = 16 * 1024  # the kernel takes more: this is for clients that do not read
_READ_BYTES = 4096
_READ_MAX_BYTES = 256 * 1024  # at once: what was read is handled before reading can be held up
_REST_BYTES = 1024 * 1024
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class Gate:
    """What every request must pass, whichever door it takes."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.configure()

    def configure(self) -> None:
        """Take the names and origins from the hub's options, at the start and at a reload."""
        options = self.hub.options
        self._hosts = _LOOPBACK | {options.host.lower(), *(h.lower() for h in options.hosts)}
        # A page of another site can make a browser ask for any name that leads here; on an address
        # that others reach by names we do not know, tokens are what protects.
        self._check_hosts = bool(options.hosts) or is_loopback(options.host)
        self.origins = frozenset(origin.rstrip("/").lower() for origin in options.origins)

    def refuses(self, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Status and reason, if this request must not go on."""
        host = headers.get("Host", "")
        if self._check_hosts and _name_of(host) not in self._hosts:
            return (
                421,
                "this broker does not go by that name: 'trunkline serve --name HOST' lets it",
            )
        origin = headers.get("Origin")
        if origin is not None and not self._is_ours(origin, host):
            return 403, "this origin may not connect"
        return None

    def _is_ours(self, origin: str, host: str) -> bool:
        origin = origin.rstrip("/").lower()
        return origin in self.origins or origin.partition("://")[2] == host.lower() != ""

    def principal(
        self,
        headers: Mapping[str, str],
        names: frozenset[str] = frozenset(),
        ticket: str | None = None,
    ) -> tuple[Principal | None, bool]:
        """The principal, and whether a token or ticket was shown that is not valid. A token comes
        before a ticket, and a ticket before the ``names`` in a certificate.
        """
        shown = headers.get("Authorization")
        if shown is None and ticket is not None:
            holder = self.hub.tickets.holder(ticket)
            who = None if holder is None else self.hub.rights.current(holder)
            return who, who is None
        if shown is None:
            return self.hub.rights.known(None) or self.hub.rights.certified(names), False
        kind, _, token = shown.partition(" ")
        who = self.hub.rights.known(token.strip()) if kind.lower() == "bearer" else None
        return who, who is None


def _name_of(host: str) -> str:
    """The name in a Host header; "" if what follows the name is no port."""
    name = host.lower()
    if name.startswith("["):
        name, closed, rest = name[1:].partition("]")
        if not closed or rest[:1] not in ("", ":"):
            return ""
        port = rest[1:]
    else:
        name, _, port = name.partition(":")
    return name if not port or (port.isascii() and port.isdigit()) else ""


def names_of(transport: asyncio.BaseTransport) -> frozenset[str]:
    """What the certificate of the other side is for; the handshake has verified it."""
    found: dict[str, Any] = transport.get_extra_info("peercert") or {}
    common = [v for part in found.get("subject", ()) for k, v in part if k == "commonName"]
    return frozenset((*common, *(value for _, value in found.get("subjectAltName", ()))))


class Listener(WSListener):
    """One connection, from the handshake to its end."""

    def __init__(
        self,
        hub: Hub,
        who: Principal | None,
        subprotocol: str | None,
        ops: dict[str, Op],
        client: str | None,
    ) -> None:
        self._hub = hub
        self._who = who
        self._batch = subprotocol == SUBPROTOCOL
        self._cloudevents = subprotocol == CLOUDEVENTS
        self._ops = ops
        self._client = client
        self._parts: bytearray | None = None  # of a message that has not ended yet
        self.is_seen_off = False
        self._transport: WSTransport
        self._raw: asyncio.Transport
        self.session: Session | None = None

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport
        self._raw = transport.underlying_transport
        self._raw.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self.session = Session(
            self._hub,
            self,
            self._who,
            batch=self._batch,
            cloudevents=self._cloudevents,
            ops=self._ops,
            client=self._client,
        )
        self._log("connected")

    def _log(self, what: str) -> None:
        if logger.isEnabledFor(logging.INFO) and self.session is not None:
            agent = self.session.who.agent
            host, port = (self._raw.get_extra_info("peername") or ("", 0))[:2]
            address = f"{host}:{port}"
            facts = {"agent": agent, "address": address, "connections": len(self._hub.sessions)}
            logger.info("%s: %s from %s", what, agent or "nobody", address, extra=facts)

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        kind = frame.msg_type
        session = self.session
        if session is None or transport.is_close_frame_sent:
            if kind == WSMsgType.CLOSE:
                transport.disconnect()
            return  # picows parses on for a while after it has refused a frame
        if frame.rsv1 or frame.rsv2 or frame.rsv3:  # of an extension, and none was agreed on
            transport.send_close(WSCloseCode.PROTOCOL_ERROR)
            transport.disconnect()
            return
        if kind == WSMsgType.TEXT and frame.fin and self._parts is None:
            session.receive(frame.get_payload_as_bytes())
        elif kind in (WSMsgType.TEXT, WSMsgType.BINARY, WSMsgType.CONTINUATION):
            self._part(frame)
        elif kind == WSMsgType.PONG:
            session.alive()
        elif kind == WSMsgType.CLOSE:
            transport.send_close(WSCloseCode.OK)
            transport.disconnect()

    def _part(self, frame: WSFrame) -> None:
        """A message in pieces, or one marked as binary: the text counts, not the mark."""
        if self._parts is None:
            self._parts = bytearray()
        self._parts += frame.get_payload_as_memoryview()
        if len(self._parts) > self._hub.options.frame_bytes:
            self._transport.send_close(WSCloseCode.MESSAGE_TOO_BIG)
            self._transport.disconnect()
        elif frame.fin:
            whole, self._parts = bytes(self._parts), None
            if self.session is not None:
                self.session.receive(whole)

    def on_ws_disconnected(self, _transport: WSTransport) -> None:
        if self.session is not None:
            self._log("disconnected")
            self._hub.spawn(self.session.close())

    def pause_writing(self) -> None:
        if self.session is not None:
            self.session.pause_writing()

    def resume_writing(self) -> None:
        if self.session is not None:
            self.session.resume_writing()

    # -- as a session sees it --------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        self._transport.send(WSMsgType.TEXT, data)

    def ping(self) -> None:
        self._transport.send_ping(b"alive?")

    def pending(self) -> int:
        return self._raw.get_write_buffer_size()

    def pause(self) -> None:
        if not self._raw.is_closing():
            self._raw.pause_reading()

    def resume(self) -> None:
        if not self._raw.is_closing():
            self._raw.resume_reading()

    def close(self, code: int, reason: str, *, abort: bool = False) -> None:
        if abort or self._transport.is_close_frame_sent:
            self._raw.abort()
            return
        self._transport.send_close(code, reason.encode()[:120])  # type: ignore[arg-type]
        self.is_seen_off = True
        self.resume()
        self._hub.spawn(self._see_off())

    async def _see_off(self) -> None:
        """Leave the other side time to read what it is owed. What it still sends is read, too: to
        close on it would reset the connection, and take along what is on its way.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._hub.options.drain_s or None):
                unread = math.inf
                while (left := self.pending()) < unread and not self._transport.is_disconnected:
                    unread = left
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(GOODBYE_S):
                            await self._transport.wait_disconnected()
        self._raw.abort()


def _answering(
    hub: Hub, gate: Gate, ops: dict[str, Op]
) -> Callable[[frozenset[str], WSUpgradeRequest], Any]:
    """What an upgrade is answered with."""

    def answer(names: frozenset[str], request: WSUpgradeRequest) -> Any:
        refused = gate.refuses(request.headers)
        if refused is not None:
            return _refusal(*refused)
        path, _, query = request.path.decode("latin-1").partition("?")
        if path not in PATHS:
            return _refusal(404, "connect to /")
        if len(hub.sessions) >= hub.options.connections or not hub.is_open:
            return _refusal(503, "no room for another connection")
        ticket = next((value for name, value in parse_qsl(query) if name == "ticket"), None)
        who, is_wrong = gate.principal(request.headers, names, ticket)
        if is_wrong:
            hub.denied(Principal(""), "connect", "", missing="a valid token or ticket")
            return _refusal(401, "not authenticated")
        client = request.headers.get(CLIENT) or None
        if client is not None and len(client) > _NAME_CHARS:
            return _refusal(400, f"{CLIENT} has at most {_NAME_CHARS} characters")
        asked = request.headers.get("Sec-WebSocket-Protocol", "")
        wanted = [name.strip() for name in asked.split(",")]
        chosen = next((name for name in SUBPROTOCOLS if name in wanted), None)
        extra = {"Sec-WebSocket-Protocol": chosen} if chosen else None
        listener = Listener(hub, who, chosen, ops, client)
        return WSUpgradeResponseWithListener(
            WSUpgradeResponse.create_101_response(extra_headers=extra), listener
        )

    return answer


def protocol_for(hub: Hub, gate: Gate, ops: dict[str, Op]) -> type[WSProtocol]:
    """The class that uvicorn hands upgrades to."""
    log = logging.getLogger("trunkline.broker.picows")
    log.setLevel(logging.CRITICAL)  # what a client does wrong is told to the client
    answer = _answering(hub, gate, ops)

    class Protocol(WSProtocol):  # type: ignore[misc]
        def __init__(self, **_: Any) -> None:
            options = hub.options
            super().__init__(
                None,
                None,
                False,
                lambda request: answer(self._names, request),
                log,
                True,
                options.auth_timeout_s,
                True,
                options.ping_s,
                min(options.ping_s, 20.0),
                WSAutoPingStrategy.PING_WHEN_IDLE,
                True,
                options.frame_bytes,
                None,
                _READ_BYTES,
            )

        def connection_made(self, transport: Any) -> None:
            self._names = names_of(transport)
            super().connection_made(transport)

        def get_buffer(self, size_hint: int) -> memoryview:
            return memoryview(super().get_buffer(size_hint))[:_READ_MAX_BYTES]

        def buffer_updated(self, nbytes: int) -> None:
            super().buffer_updated(nbytes)
            transport = self.transport
            if transport is not None and transport.is_close_frame_sent:
                raw = transport.underlying_transport
                if not raw.is_closing() and not self.listener.is_seen_off:
                    raw.pause_reading()  # or a frame that was refused could be sent all the same

        def connection_lost(self, exc: Exception | None) -> None:
            if exc is not None:
                self._read_rest()
            super().connection_lost(exc)

        def _read_rest(self) -> None:
            """A write found that the client is gone. What it sent before it went is still there:
            its acks must count, or records that are done would have failed.
            """
            raw = self.transport.underlying_transport
            if raw.get_extra_info("ssl_object") is None:
                with contextlib.suppress(OSError, ValueError):
                    self.data_received(os.read(raw.get_extra_info("socket").fileno(), _REST_BYTES))

        def data_received(self, data: bytes) -> None:
            """The request that uvicorn has read already, or what is read last."""
            while data:
                room = self.get_buffer(len(data))
                count = min(len(room), len(data))
                room[:count] = data[:count]
                data = data[count:]
                self.buffer_updated(count)

    return Protocol


def _refusal(status: int, reason: str) -> Any:
    body = f"{reason}\n".encode()
    return WSUpgradeResponseWithListener(
        WSUpgradeResponse.create_error_response(status, body), None
    )
