"""The broker: one bus, one port, until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import uvicorn

from trunkline.broker.gate import Gate, protocol_for
from trunkline.broker.hub import Acl, Hub
from trunkline.broker.options import RELOADED, is_loopback
from trunkline.broker.rpc import OPS
from trunkline.broker.supervisor import notify
from trunkline.bus.connect import open_local
from trunkline.bus.local import LocalBus
from trunkline.errors import InvalidOption, NoBus, TrunklineError
from trunkline.log.descriptors import raise_file_limit
from trunkline.options import BrokerOptions, differences

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 5
_BACKLOG = 2048
_TICK_S = 1.0
_UNSENT_BYTES = 64 * 1024


class Broker:
    """Enter it to serve. The bus is opened by the broker unless it is given one. ``acl`` is asked
    with topic, action and principal, in addition to tokens and lists.
    """

    def __init__(
        self,
        options: BrokerOptions | None = None,
        *,
        bus: LocalBus | None = None,
        acl: Acl | None = None,
    ) -> None:
        self._acl = acl
        self.options = options or BrokerOptions()
        self._given = bus
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None
        self._gate: Gate | None = None
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
        raise_file_limit()
        tls = tls_context(options)
        self._socket = _bound(options)  # before the bus: what cannot begin makes no folder
        try:
            self.hub = hub = Hub(self._given or self._open(), options, self._acl)
        except BaseException:
            self._socket.close()
            raise
        if self._given is None:
            hub.bus.use(hub.system)  # it is told of dead letters
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
        logger.info(
            "serving %s at %s", options.url, self.url, extra={"bus": options.url, "at": self.url}
        )
        return self

    async def reload(self, options: BrokerOptions) -> None:
        """Take over changed settings and read the certificates anew; connections stay. Settings
        that need a new start are named in the log and keep their old value.
        """
        changes = differences(self.options, options)
        stays = set(options.__struct_fields__) - RELOADED
        if bool(options.tls_cert) is not bool(self.options.tls_cert):
            stays |= {"tls_cert", "tls_key", "tls_client_ca"}  # clients have its address
        kept = [name for name, *_ in changes if name in stays]
        if kept:
            logger.warning("these settings need a new start of the broker: %s", ", ".join(kept))
        keep = {name: getattr(self.options, name) for name in kept}
        options = msgspec.structs.replace(options, **keep)
        fresh = tls_context(options)  # refuses bad files before anything is changed
        if fresh is not None and self._server is not None:
            assert self._socket is not None
            self._socket = self._socket.dup()
            await self._server.renew(self._socket, fresh)
        self.options = options
        await self.hub.configure(options)
        if self._gate is not None:
            self._gate.configure()
        if self._server is not None:
            self._server.config.timeout_graceful_shutdown = _goodbye_s(options)
        told = ", ".join(name for name, *_ in changes if name not in kept) or "nothing changed"
        logger.info("reloaded: %s", told)

    def _open(self) -> LocalBus:
        options = self.options
        if options.auth or not is_exposed(options):
            return open_local(options.url)
        try:  # only a bus that is there can have tokens: none is made, to be left behind
            return open_local(options.url, create=False)
        except NoBus:
            check_exposed(options, is_guarded=False)
            raise

    def _serving(self, hub: Hub, tls: ssl.SSLContext | None) -> _Server:
        from trunkline.broker.http import application, requests_for

        options = self.options
        self._gate = gate = Gate(hub)
        config = uvicorn.Config(
            application(hub, gate),
            http=requests_for(hub),
            ws=protocol_for(hub, gate, OPS),
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nothing here asks for the address of a client
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_goodbye_s(options),
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
        logger.info("stopping: %d connections have %g s", len(hub.sessions), self.options.drain_s)
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
        logger.info("stopped")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self.ending = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def renew(self, sock: socket.socket, tls: ssl.SSLContext) -> None:
        """Accept connections with this context from here on. Authorities can be added to a context
        that is in use, and none be taken away.
        """
        before = self.servers
        self.config.ssl = tls
        await super().startup([sock])
        for server in before:
            server.close()

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


def _goodbye_s(options: BrokerOptions) -> int:
    return max(1, round(options.drain_s))


def _unusable(name: str, files: str, error: OSError, hint: str = "") -> InvalidOption:
    """What OpenSSL says of a file is an OSError too, in words that do not help."""
    why = "it is not PEM, or they do not belong together"
    if not isinstance(error, ssl.SSLError):
        why, hint = error.strerror or str(error), ""
    return InvalidOption(f"{name}: {files}: {why}", name=name, hint=hint)


def is_exposed(options: BrokerOptions) -> bool:
    """Whether other machines reach it, without a certificate."""
    return options.tls_client_ca is None and not is_loopback(options.host)


def check_exposed(options: BrokerOptions, is_guarded: bool) -> None:
    """Refuse to let every machine of a network in."""
    if is_guarded or not is_exposed(options):
        return
    raise InvalidOption(
        f"{options.host} can be reached from other machines, and nothing guards this broker",
        name="host",
        hint="make a token with 'trunkline token create', or bind to 127.0.0.1",
    )


def _bound(options: BrokerOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only for sockets that name their protocol. With it on,
    # every answer on a kept-alive HTTP connection waits 40 ms for the client's delayed ACK.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it. It bounds the unsent bytes that the kernel holds for a consumer that
    # does not read, and not the bytes on their way to a quick consumer far away.
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


async def serve(
    options: BrokerOptions,
    ready: Callable[[Broker], None] | None = None,
    gather: Callable[[], BrokerOptions] | None = None,
    files: Sequence[str] = (),
) -> None:
    """Serve until SIGTERM or SIGINT; then take no more, finish what was begun, and return.

    SIGHUP, or a change of a certificate or of one of ``files``, reloads the settings: ``gather``
    gives them.
    """
    async with _signals() as signals, Broker(options) as broker:
        if ready is not None:
            ready(broker)
        notify("READY=1")
        watcher = asyncio.get_running_loop().create_task(
            _reloading(broker, signals.reload, gather or (lambda: options), files)
        )
        try:
            await signals.ended.wait()
        finally:
            notify("STOPPING=1")
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)


async def _reloading(
    broker: Broker,
    asked: asyncio.Event,
    gather: Callable[[], BrokerOptions],
    files: Sequence[str],
) -> None:
    seen = _stamps(broker.options, files)
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TICK_S):
                await asked.wait()
        stamps = _stamps(broker.options, files)
        if not asked.is_set() and stamps == seen:
            continue
        asked.clear()
        seen = stamps
        notify("RELOADING=1")
        try:
            await broker.reload(gather())
        except (TrunklineError, OSError) as error:  # what runs goes on as it was
            logger.error("the settings were not reloaded: %s", error)
        notify("READY=1")


def _stamps(options: BrokerOptions, files: Sequence[str]) -> list[tuple[int, int] | None]:
    """When the certificates and ``files`` were last changed."""
    named = (options.tls_cert, options.tls_key, options.tls_client_ca, *files)
    found: list[tuple[int, int] | None] = []
    for path in filter(None, named):
        try:
            about = os.stat(path)
            found.append((about.st_mtime_ns, about.st_ino))
        except OSError:
            found.append(None)
    return found


class _Signals(NamedTuple):
    ended: asyncio.Event
    reload: asyncio.Event


@contextlib.asynccontextmanager
async def _signals() -> AsyncIterator[_Signals]:
    loop = asyncio.get_running_loop()
    signals = _Signals(asyncio.Event(), asyncio.Event())
    events = {
        signal.SIGTERM: signals.ended,
        signal.SIGINT: signals.ended,
        signal.SIGHUP: signals.reload,
    }
    for number, event in events.items():
        loop.add_signal_handler(number, event.set)
    try:
        yield signals
    finally:
        for number in events:
            loop.remove_signal_handler(number)
