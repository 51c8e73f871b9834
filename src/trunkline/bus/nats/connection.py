"""One connection to NATS: requests with typed errors, and what the server says of itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from typing import Any

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from trunkline.bus.nats.place import FORMAT, MARK, MONITOR, PORT, Place
from trunkline.errors import (
    Closed,
    Conflict,
    ConnectionLost,
    Denied,
    NoBus,
    NotFound,
    ProtocolError,
    StorageFull,
    TrunklineError,
    UnsupportedFormat,
)
from trunkline.options import NatsOptions

logger = logging.getLogger(__name__)

OLDEST = (2, 14)  # the first server that moves a consumer to a sequence number
_PENDING_BYTES = 32 * 1024 * 1024
_REQUEST_S = 2.0
_AGAIN_S = 0.1
_HERE = ("127.0.0.1", "localhost", "::1")
_HERE_S = 0.5  # how long a monitoring port may take that nobody named
_AWAY = frozenset({10004, 10005, 10008, 10009, 10118, 10119})  # passes by itself
_GONE = frozenset({10059, 10014, 10037})  # no stream, no consumer, no message
_FULL = frozenset({10023, 10047, 10028, 10077, 10002})
WRONG_LAST = frozenset({10071, 10164})


class _Client(Client):  # type: ignore[misc]
    """nats-py looks at every letter of every header; the server's need less."""

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        pairs = (line.partition(":") for line in raw.decode("utf-8", "replace").split("\r\n"))
        return {name: value.strip() for name, colon, value in pairs if colon}


class ApiError(TrunklineError):
    """The server refused a request. ``code`` is its own error code."""


class _Fault(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Answer(msgspec.Struct):
    error: _Fault | None = None


_answer = msgspec.json.Decoder(_Answer).decode


def fault(code: int, text: str) -> TrunklineError:
    """The error that a person understands for a code of the server."""
    if code in _GONE:
        return NotFound(f"NATS: {text}", code=code)
    if code in _FULL:
        return StorageFull(f"NATS: {text}", code=code)
    if code in WRONG_LAST:
        return Conflict(f"NATS: {text}", code=code)
    return ApiError(f"NATS: {text}", code=code)


class NatsLink:
    """Connects when it is first needed, and by itself again whenever the connection is lost."""

    def __init__(
        self,
        place: Place,
        options: NatsOptions,
        *,
        creds: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.place = place
        self.options = options
        self.is_up = False
        self.replicas = options.replicas or 1
        self.syncs = False  # whether the server syncs before it acknowledges
        self._creds = creds
        self._tls = tls
        self._client: Client | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._up: list[Callable[[], object]] = []
        self._trouble = ""
        self._refused: asyncio.Future[None] | None = None

    @property
    def nc(self) -> Client:
        assert self._client is not None, "the link was not opened"
        return self._client

    def at_reconnect(self, call: Callable[[], object]) -> Callable[[], None]:
        """Call back after every reconnect, until the result is called."""
        self._up.append(call)
        return lambda: self._up.remove(call)

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._client is not None and not self._closed:
            return
        async with self._opening:
            if self._closed:
                raise Closed("the bus is closed")
            if self._client is not None:
                return
            client = _Client()
            try:
                await self._connect(client)
                await self._look_at_server(client)
            except BaseException:
                self.is_up = False  # before it is closed: nothing was lost
                with contextlib.suppress(Exception):
                    await client.close()
                raise
            self._client = client

    async def _connect(self, client: Client) -> None:
        place = self.place
        self._refused = asyncio.get_running_loop().create_future()
        who: dict[str, Any] = {"user": place.user, "password": place.password}
        who |= {"token": place.token, "user_credentials": self._creds, "tls": self._tls}
        connecting = asyncio.ensure_future(
            client.connect(
                list(place.servers),
                name="trunkline",
                max_reconnect_attempts=-1,
                reconnect_time_wait=_AGAIN_S,
                connect_timeout=self.options.connect_timeout_s,
                ping_interval=5,
                max_outstanding_pings=2,
                pending_size=_PENDING_BYTES,
                error_cb=self._failed,
                disconnected_cb=self._lost,
                reconnected_cb=self._back,
                **{name: value for name, value in who.items() if value is not None},
            )
        )
        done, _ = await asyncio.wait(
            [connecting, self._refused],
            timeout=self.options.connect_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if connecting in done and connecting.exception() is None:
            self.is_up = True
            self._refused.cancel()
            return
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        where = ", ".join(place.servers)
        if self._refused in done:
            self._refused.exception()
            raise Denied(
                f"{where} refuses the credentials",
                hint="nats://user:password@host, nats://token@host, or creds=<file>",
            )
        self._refused.cancel()
        error = connecting.exception() if connecting in done else None
        said = self._trouble or (str(error) if error else "no answer")
        hint = "is the server running? 'trunkline nats up' starts one"
        raise ConnectionLost(f"no NATS server at {where}: {said}", hint=hint)

    async def _look_at_server(self, client: Client) -> None:
        version = client.connected_server_version
        if (version.major, version.minor) < OLDEST:
            needed = ".".join(map(str, OLDEST))
            raise ProtocolError(
                f"nats-server {version.major}.{version.minor}.{version.patch} is too old",
                hint=f"{needed} or later is needed",
            )
        answer = await self._account(client)
        if (found := _answer(answer.data).error) is not None:
            raise Denied(f"NATS: {found.description}")
        info: dict[str, Any] = getattr(client, "_server_info", {})
        if self.options.replicas is None:
            self.replicas = 3 if info.get("cluster") else 1
        if self.options.monitor:
            self.syncs = await _syncs_always(self.options.monitor)
        elif (url := client.connected_url) is not None and url.hostname in _HERE:
            where = url.port or PORT
            self.syncs = await _syncs_here(url.hostname, where, info.get("server_id"))

    async def _account(self, client: Client) -> Any:
        """The first answer of JetStream; a cluster that has just begun may have no leader yet."""
        end = asyncio.get_running_loop().time() + self.options.patience_s
        while True:
            try:
                return await client.request("$JS.API.INFO", b"", timeout=_REQUEST_S)
            except NoRespondersError:
                raise NoBus(
                    "JetStream is not switched on at the NATS server",
                    hint="jetstream { store_dir: … } in its configuration, or nats-server -js",
                ) from None
            except (NatsError, TimeoutError) as error:
                if asyncio.get_running_loop().time() >= end:
                    said = f"JetStream does not answer: {_spell(error)}"
                    raise ConnectionLost(said) from None

    async def close(self) -> None:
        self._closed = True
        self.is_up = False
        if self._client is not None:
            with contextlib.suppress(NatsError, OSError, TimeoutError):
                await self._client.close()

    async def _failed(self, error: Exception) -> None:
        self._trouble = _spell(error)
        waiting = self._refused
        if waiting is not None and not waiting.done() and "uthoriz" in self._trouble:
            waiting.set_exception(error)
        logger.debug("NATS: %s", self._trouble)

    async def _lost(self) -> None:
        if self.is_up and not self._closed:
            logger.warning("the connection to NATS was lost; connecting again")
        self.is_up = False

    async def _back(self) -> None:
        self.is_up = True
        logger.warning("connected to NATS again")
        for call in list(self._up):
            call()

    # -- requests ------------------------------------------------------------------------------

    async def api(self, call: str, body: Any = None) -> bytes:
        """Ask JetStream. Repeats the request while no server answers, for ``patience_s``."""
        data = b"" if body is None else msgspec.json.encode(body)
        return await self.ask(f"$JS.API.{call}", data)

    async def ask(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> bytes:
        """Send a request; its answer, or the error that the server tells."""
        await self.open()
        end = asyncio.get_running_loop().time() + self.options.patience_s
        while True:
            try:
                answer = await self.nc.request(
                    subject, data, timeout=_REQUEST_S, headers=dict(headers) if headers else None
                )
            except (NatsError, TimeoutError, OSError) as error:
                if self._closed:
                    raise Closed("the bus is closed") from None
                trouble: TrunklineError = ConnectionLost(f"NATS does not answer: {_spell(error)}")
            else:
                found = _answer(answer.data).error
                if found is None:
                    return bytes(answer.data)
                trouble = fault(found.err_code, found.description)
                if found.err_code not in _AWAY:
                    raise trouble
            if asyncio.get_running_loop().time() >= end:
                raise trouble
            await asyncio.sleep(_AGAIN_S)

    async def flush(self) -> None:
        with contextlib.suppress(NatsError, TimeoutError, OSError):
            await self.nc.flush(timeout=int(self.options.connect_timeout_s) or 1)

    async def tell(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        """Send without an answer; lost if the connection is."""
        with contextlib.suppress(NatsError, OSError):
            await self.nc.publish(subject, data, headers=headers)

    def check_ours(self, name: str, metadata: dict[str, str] | None) -> None:
        mark = (metadata or {}).get(MARK)
        if mark is None:
            raise Conflict(
                f"the stream {name} is not one of Trunkline's",
                stream=name,
                hint="take another bus: nats://host:4222/other; nothing was changed",
            )
        if mark != FORMAT:
            raise UnsupportedFormat(
                f"the stream {name} has format {mark}, this program knows {FORMAT}",
                stream=name,
                hint="upgrade trunkline",
            )


def _spell(error: BaseException) -> str:
    return str(error).removeprefix("nats: ") or type(error).__name__


async def _syncs_always(monitor: str) -> bool:
    """Whether the server syncs every write, as its monitoring port says; False if it is silent."""
    from urllib.request import urlopen

    def ask() -> bool:
        with urlopen(f"{monitor.rstrip('/')}/varz", timeout=2) as answer:
            found = msgspec.json.decode(answer.read())
        return bool(found["jetstream"]["config"].get("sync_always"))

    try:
        return await asyncio.to_thread(ask)
    except (OSError, KeyError, ValueError) as error:
        logger.warning("%s does not say whether NATS syncs: %s", monitor, error)
        return False


async def _syncs_here(host: str, port: int, server_id: str | None) -> bool:
    """Whether a server on this machine syncs every write, if its monitoring port is the usual one:
    8222 beside 4222. The answer counts only if it comes from the server that is connected.
    """
    try:
        async with asyncio.timeout(_HERE_S):
            reader, writer = await asyncio.open_connection(host, port + MONITOR)
            try:
                writer.write(b"GET /varz HTTP/1.0\r\n\r\n")
                _, _, body = (await reader.read()).partition(b"\r\n\r\n")
            finally:
                writer.close()
        found = msgspec.json.decode(body)
        is_same = found["server_id"] == server_id
        return is_same and bool(found["jetstream"]["config"].get("sync_always"))
    except (OSError, KeyError, TypeError, ValueError, OverflowError) as error:
        logger.debug("nobody says whether NATS at port %s syncs: %s", port, error)
        return False


async def end_task(task: asyncio.Task[None] | None) -> None:
    """Cancel a task until it ends: ``wait_for`` of Python 3.11, in nats-py, may lose one cancel."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.2)
