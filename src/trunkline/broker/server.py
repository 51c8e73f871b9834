"""The broker: one bus, one port, until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

import uvicorn

from trunkline.broker.calls import OPS
from trunkline.broker.hub import Hub
from trunkline.broker.options import BrokerOptions, is_loopback
from trunkline.broker.wire import Gate, protocol_for
from trunkline.buses import connect
from trunkline.buses.local import LocalBus
from trunkline.errors import InvalidOption, NoBus
from trunkline.pump import Hooks

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 5
_BACKLOG = 2048
_TICK_S = 1.0
_UNSENT_BYTES = 64 * 1024


class Broker:
    """Enter it to serve. The bus is opened by the broker unless it is given one."""

    def __init__(
        self, options: BrokerOptions | None = None, *, bus: LocalBus | None = None
    ) -> None:
        self.options = options or BrokerOptions()
        self._given = bus
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None
        self.hub: Hub

    @property
    def port(self) -> int:
        """The port it listens on, also where any free one was asked for."""
        assert self._socket is not None
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        scheme = "wss" if self.options.tls_cert else "ws"
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        return f"{scheme}://{host}:{self.port}"

    async def __aenter__(self) -> Self:
        options = self.options
        tls = tls_context(options)
        self._socket = _bound(options)  # before the bus: what cannot begin makes no folder
        try:
            self.hub = hub = Hub(self._given or self._open(), options)
        except BaseException:
            self._socket.close()
            raise
        if self._given is None:
            self._dead = hub.system.died
        try:
            await hub.start()
            check_exposed(options, hub.rights.is_on)
            self._server = self._serving(hub, tls)
            self._task = asyncio.get_running_loop().create_task(self._server.serve([self._socket]))
            ready = asyncio.ensure_future(self._server.ready.wait())
            await asyncio.wait([ready, self._task], return_when="FIRST_COMPLETED")
            ready.cancel()
            if self._task.done():
                self._task.result()
        except BaseException:
            await self._end()
            raise
        logger.info("serving %s at %s", options.url, self.url)
        return self

    def _open(self) -> LocalBus:
        def dead(*facts: Any) -> None:
            self._dead(*facts)

        options = self.options
        if options.auth or not is_exposed(options):
            return connect(options.url, hooks=Hooks(dead=dead))
        try:  # only a bus that is there can have tokens: none is made, to be left behind
            return connect(options.url, hooks=Hooks(dead=dead), create=False)
        except NoBus:
            check_exposed(options, is_guarded=False)
            raise

    _dead: Callable[..., None] = staticmethod(lambda *_: None)

    def _serving(self, hub: Hub, tls: ssl.SSLContext | None) -> _Server:
        from trunkline.broker.http import application, requests_for

        options = self.options
        gate = Gate(hub)
        config = uvicorn.Config(
            application(hub, gate),
            http=requests_for(hub),
            ws=protocol_for(hub, gate, OPS),
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(options.drain_s)),
            backlog=_BACKLOG,
        )
        config.load()
        config.ssl = tls
        return _Server(config)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        hub = self.hub
        if self._server is not None:
            self._server.should_exit = True
            self._server.ending.set()
        await hub.close()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        if self._given is None:
            await hub.bus.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self.ending = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def main_loop(self) -> None:
        """As the original, but it ends when it is told to and not a tenth of a second later."""
        counter = 0
        while not await self.on_tick(counter):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self.ending.wait()
            counter = (counter + 10) % 864_000  # on_tick takes ten of them for a second

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As the original, without its pause before anything ends."""
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)
        if self.server_state.connections or self.server_state.tasks:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                    await self._wait_tasks_to_complete()
            for task in list(self.server_state.tasks):
                task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Signals are the caller's business."""
        yield


def tls_context(options: BrokerOptions) -> ssl.SSLContext | None:
    if not options.tls_cert:
        if options.tls_key or options.tls_client_ca:  # nobody would be asked for a certificate
            raise InvalidOption("TLS needs a certificate of the broker: tls_cert", name="tls_cert")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key)
    except OSError as error:
        files = " and ".join(filter(None, (options.tls_cert, options.tls_key)))
        hint = "" if options.tls_key else "its key is named by --tls-key, or is in the same file"
        raise _unusable("tls_cert", files, error, hint) from error
    if options.tls_client_ca is not None:
        try:
            context.load_verify_locations(options.tls_client_ca)
        except OSError as error:
            raise _unusable("tls_client_ca", options.tls_client_ca, error) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _unusable(name: str, files: str, error: OSError, hint: str = "") -> InvalidOption:
    """What OpenSSL says of a file is an OSError too, in words that help nobody."""
    why = "it is not PEM, or they do not belong together"
    if not isinstance(error, ssl.SSLError):
        why, hint = error.strerror or str(error), ""
    return InvalidOption(f"{name}: {files}: {why}", name=name, hint=hint)


def is_exposed(options: BrokerOptions) -> bool:
    """Whether other machines reach it, without a certificate."""
    return options.tls_client_ca is None and not is_loopback(options.host)


def check_exposed(options: BrokerOptions, is_guarded: bool) -> None:
    """Refuse to let everybody on a network in."""
    if is_guarded or not is_exposed(options):
        return
    raise InvalidOption(
        f"{options.host} can be reached from other machines, and nothing guards this broker",
        name="host",
        hint="make a token with 'trunkline token create', or bind to 127.0.0.1",
    )


def _bound(options: BrokerOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it: what the kernel holds for a consumer that does not read is bound, too,
    # and what is on its way to one that is quick and far away is not.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    try:
        made.bind((options.host, options.port))
    except OSError as error:
        made.close()
        raise _cannot_listen(options, error) from error
    made.setblocking(False)
    return made


def _cannot_listen(options: BrokerOptions, error: OSError) -> InvalidOption:
    where = f"{options.host} port {options.port}"
    if error.errno == errno.EADDRINUSE:
        return InvalidOption(
            f"something listens on {where} already",
            name="port",
            hint=f"stop it, or choose another: --port {options.port + 1}; 0 takes any free one",
        )
    return InvalidOption(f"cannot listen on {where}: {error.strerror}", name="host")


async def serve(options: BrokerOptions, ready: Callable[[Broker], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; then take no more, finish what was begun, and return."""
    async with _signals() as ended, Broker(options) as broker:
        if ready is not None:
            ready(broker)
        await ended.wait()


@contextlib.asynccontextmanager
async def _signals() -> AsyncIterator[asyncio.Event]:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    try:
        yield ended
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
