"""A client's connection to a broker: it comes back by itself, and what was asked is answered.

Every question carries a mark and waits for the answer with the same mark. When the connection is
lost, a question that may be repeated is sent again on the next one; any other fails.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import ssl
from collections.abc import Callable
from errno import ECONNREFUSED
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec
from picows import (
    WSCloseCode,
    WSError,
    WSFrame,
    WSHandshakeError,
    WSListener,
    WSMsgType,
    WSTransport,
    ws_connect,
)

from trunkline.bus.outgoing import Outgoing
from trunkline.errors import (
    Closed,
    ConnectionLost,
    Denied,
    InvalidEvent,
    InvalidOption,
    ProtocolError,
    TrunklineError,
)
from trunkline.options import ClientOptions
from trunkline.wire.codes import error_of
from trunkline.wire.frames import (
    CLIENT,
    SUBPROTOCOL,
    Bad,
    Call,
    Failure,
    Frame,
    Message,
    Ping,
    Pong,
    Published,
    Revoked,
    Told,
    dump,
    read_told,
)

logger = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
_quiet = logging.getLogger("trunkline.picows")
_quiet.setLevel(logging.CRITICAL)  # what it has to say is told by errors
_WHOLE = (WSMsgType.TEXT, WSMsgType.BINARY)
_REFUSED = "connection refused"
_UNNAMED = "the broker does not go by that name"
_NOWHERE = "there is no broker at that path"
_ANSWERS = {404: _NOWHERE, 421: _UNNAMED}
_HINTS = {
    _REFUSED: "is the broker running? 'trunkline serve' starts one, at port 7070 unless told",
    _UNNAMED: "'trunkline serve --name HOST' lets it",
    _NOWHERE: "the path is /",
    "CERTIFICATE_VERIFY_FAILED": "tls=ssl.create_default_context(cafile=…) trusts that authority",
}
_TOKEN = "pass token= or set TRUNKLINE_TOKEN; 'trunkline token create' makes one"


class User(Protocol):
    """The bus, as its link sees it."""

    def heard(self) -> None:
        """A message came: its frames follow."""

    def came(self, message: Message) -> None: ...

    def revoked(self, frame: Revoked) -> None: ...

    def failed(self, failure: Failure) -> None: ...

    def up(self) -> None: ...

    def down(self) -> None: ...

    def refused(self, error: TrunklineError) -> None: ...


class _Ask(NamedTuple):
    """A question, and what to say on the next connection if this one is lost."""

    answer: asyncio.Future[Any]
    again: bytes | None
    size: int
    since: float  # when it was asked, if there was no connection then


class Link:
    def __init__(
        self,
        url: str,
        user: User,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        options: ClientOptions | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.url = check_url(url)
        self.options = options or ClientOptions()
        self._user = user
        self._token = token
        self._tls = tls
        self._draw = draw
        self._name = ""
        self._asks: dict[int, _Ask] = {}
        self._corr = 0
        self._out = Outgoing(self._write)
        self._transport: Any = None
        self._keeper: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._refused: TrunklineError | None = None
        self._away_since = 0.0
        self._trouble = ""  # why there is no connection
        self._patience: asyncio.TimerHandle | None = None
        self._closed = False
        self.connected = asyncio.Event()
        self.room = asyncio.Event()
        self.room.set()

    @property
    def is_up(self) -> bool:
        return self._transport is not None

    @property
    def is_lost(self) -> bool:
        """Whether there is no connection, and the last try to make one failed."""
        return self._transport is None and bool(self._trouble)

    def start(self) -> None:
        if self._closed:
            raise Closed("the bus is closed")
        if self._keeper is None:
            self._name = secrets.token_hex(16)  # not before: a fork of this process is another one
            self._keeper = asyncio.get_running_loop().create_task(self._keep(), name="link")

    async def close(self) -> None:
        self._closed = True
        self.flush()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.send_close()
            transport.disconnect()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._calm()
        self._give_up(Closed("the bus is closed"))

    # -- asking ----------------------------------------------------------------------------------

    def next_corr(self) -> int:
        self._corr += 1
        return self._corr

    def ask(self, corr: int, data: bytes, *, repeat: bool = False) -> asyncio.Future[Any]:
        """Send a frame and give its answer. With ``repeat`` it survives a lost connection, and is
        sent when there is one.
        """
        answer = self._asked(corr, data, repeat)
        if self._transport is not None:
            self.send(data)
        return answer

    def publish(self, topic: str, event: bytes) -> asyncio.Future[Any]:
        """The same for one event, which shares its frame with others of its topic."""
        corr = self.next_corr()
        answer = self._asked(corr, event, repeat=True)
        if self._transport is not None:
            self._out.publish(topic, corr, event)
        return answer

    def _asked(self, corr: int, data: bytes, repeat: bool) -> asyncio.Future[Any]:
        if self._refused is not None:
            raise self._refused
        if len(data) > self.options.send_bytes:
            raise InvalidEvent(
                f"{len(data)} bytes in one frame, {self.options.send_bytes} are allowed",
                hint="publish smaller batches",
            )
        if self._keeper is None:
            self.start()
        is_up = self._transport is not None
        if not is_up and not repeat:
            raise ConnectionLost(f"there is no connection to {self.url}")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        since = 0.0 if is_up else loop.time()
        self._asks[corr] = _Ask(answer, data if repeat else None, len(data), since)
        if not is_up:
            self._wait()
        if len(self._asks) >= self.options.buffer:
            self.room.clear()
        return answer

    async def call(self, op: str, **args: Any) -> Any:
        """Ask for something that is not publishing; waits for a connection."""
        corr = self.next_corr()
        data = dump(Call(corr=corr, op=op, args=args))
        return (await self.ask(corr, data, repeat=True)).result

    def send(self, data: bytes) -> None:
        self._out.put(data)

    def tell(self, frame: Frame) -> None:
        if self._transport is not None:
            self.send(dump(frame))

    def ack(self, place: tuple[str, int, str], offset: int, linger_s: float | None = None) -> None:
        """Settle a delivery; within ``linger_s``, so that one frame does for several."""
        self._out.ack(place, offset, linger_s)

    def flush(self) -> None:
        """Send what waits to be joined by more."""
        self._out.flush()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.send(WSMsgType.TEXT, data)

    # -- the connection ----------------------------------------------------------------------------

    async def _keep(self) -> None:
        tries = 0
        while not self._closed:
            try:
                await self._connect()
            except Denied as error:
                self._refuse(error)
                return
            except Exception as error:  # noqa: BLE001 -- whatever it is, there is no connection
                logger.debug("no connection to %s: %s", self.url, error)
                is_new, self._trouble = not self._trouble, _why(error)
                if is_new:  # and not once for each attempt
                    what = "%s cannot be reached: %s; trying again"
                    logger.warning(what, self.url, self._trouble)
                if not self.options.patience_s:
                    self._lose_patience()
            else:
                if self._trouble:
                    logger.warning("%s is back", self.url)
                    self._trouble = ""
                self._greet()
                await self._lost.wait()
                self._drop()
                tries = 0
                if self._refused is not None:
                    self._refuse(self._refused)
                    return
            delay = min(self.options.backoff_base_s * 2**tries, self.options.backoff_max_s)
            tries = min(tries + 1, 30)
            await asyncio.sleep(delay * self._draw())

    def _refuse(self, error: TrunklineError) -> None:
        """The broker does not want us: nothing will change that, and everybody is told."""
        self._refused = error
        self._calm()
        self._give_up(error)
        self._user.refused(error)

    def _wait(self) -> None:
        """While there is no connection: see to it that nobody waits for longer than is said."""
        if self._patience is None and self._asks and self.options.patience_s:
            first = next(iter(self._asks.values()))
            loop = asyncio.get_running_loop()
            self._patience = loop.call_at(self._deadline(first), self._lose_patience)

    def _deadline(self, ask: _Ask) -> float:
        return max(ask.since, self._away_since) + self.options.patience_s

    def _calm(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self) -> None:
        self._calm()
        now = asyncio.get_running_loop().time()
        why = self._trouble or "it does not answer"
        for corr, ask in list(self._asks.items()):
            if self._deadline(ask) > now:
                break  # they are in the order in which they were asked
            hint = next((_HINTS[word] for word in _HINTS if word in why), "")
            self._settle(corr, ConnectionLost(f"no connection to {self.url}: {why}", hint=hint))
        self._wait()

    async def _connect(self) -> None:
        self._lost.clear()
        headers = [("Sec-WebSocket-Protocol", SUBPROTOCOL), (CLIENT, self._name)]
        if self._token is not None:
            headers.append(("Authorization", f"Bearer {self._token}"))
        secure = self.url.startswith("wss:")
        try:
            async with asyncio.timeout(self.options.connect_timeout_s):
                transport, _ = await ws_connect(
                    lambda: _Listener(self),
                    self.url,
                    ssl_context=(self._tls or ssl.create_default_context()) if secure else None,
                    extra_headers=headers,
                    enable_auto_ping=True,
                    auto_ping_idle_timeout=self.options.ping_s,
                    auto_ping_reply_timeout=self.options.ping_s,
                    max_frame_size=self.options.frame_bytes,
                    max_redirects=0,
                    logger_name=_quiet,
                )
        except WSHandshakeError as error:
            status = int(error.response.status) if error.response is not None else 0
            if status in (401, 403):
                raise Denied(
                    f"{self.url} refused the connection",
                    hint=_TOKEN if status == 401 else "",
                    status=status,
                ) from error
            raise ConnectionLost(_ANSWERS.get(status, str(error))) from error
        except (WSError, EOFError, ValueError) as error:
            raise ConnectionLost(str(error)) from error
        if transport.is_disconnected:  # it can end with the handshake, and nobody is told then
            raise ConnectionLost(f"{self.url} ended the connection")
        self._transport = transport

    def _greet(self) -> None:
        """Say again what has no answer yet, in the order in which it was first said."""
        self._calm()
        self.connected.set()
        self._user.up()
        for corr, ask in list(self._asks.items()):
            if ask.answer.done():  # nobody waits for it any more, and no answer will come
                self._settle(corr, None)
            elif ask.again is not None:
                again = _again(corr, ask.again)
                self._asks[corr] = ask._replace(again=again)
                self.send(again)

    def _drop(self) -> None:
        transport, self._transport = self._transport, None
        self._blame(transport)
        self.connected.clear()
        self._out.clear()
        error = ConnectionLost(f"the connection to {self.url} was lost")
        for corr, ask in list(self._asks.items()):
            if ask.again is None:
                self._settle(corr, error)
        self._user.down()
        self._away_since = asyncio.get_running_loop().time()
        self._wait()

    def _blame(self, transport: WSTransport) -> None:
        """A broker that ends the connection because a frame is too large would do so again."""
        said = transport.close_handshake
        if said is None or said.recv is None or said.recv.code != WSCloseCode.MESSAGE_TOO_BIG:
            return
        largest = max(self._asks, key=lambda corr: self._asks[corr].size, default=None)
        size = 0 if largest is None else self._asks[largest].size
        if size <= self._out.together:  # it was not alone: perhaps they were too large together
            self._out.halve()
        else:
            self._settle(largest, InvalidEvent(f"{size} bytes in one frame are too many for it"))

    def _give_up(self, error: TrunklineError) -> None:
        for corr in list(self._asks):
            self._settle(corr, error)

    def _settle(self, corr: Any, outcome: Any) -> None:
        ask = self._asks.pop(corr, None)
        if ask is None:
            return
        if len(self._asks) < self.options.buffer:
            self.room.set()
        if not ask.answer.done():
            if isinstance(outcome, BaseException):
                ask.answer.set_exception(outcome)
            else:
                ask.answer.set_result(outcome)

    def heard(self, data: bytes) -> None:
        self._user.heard()
        for frame in read_told(data):
            try:
                self._hear(frame)
            except Exception:
                logger.exception("a frame could not be taken in")

    def _hear(self, frame: Told | Bad) -> None:
        if isinstance(frame, Published) and frame.corrs is not None:
            asks, partition, durability = self._asks, frame.partition, frame.durability
            for offset, corr in enumerate(frame.corrs, frame.offset):
                ask = asks.pop(corr, None)  # type: ignore[arg-type]
                if ask is not None and not ask.answer.done():
                    ask.answer.set_result((partition, offset, durability))
            if len(asks) < self.options.buffer:
                self.room.set()
        elif isinstance(frame, Message):
            self._user.came(frame)
        elif isinstance(frame, Revoked):
            self._user.revoked(frame)
        elif isinstance(frame, Failure):
            if frame.code == "unauthenticated":
                frame = msgspec.structs.replace(frame, hint=frame.hint or _TOKEN)
                self._refused = error_of(frame)
            if frame.code == "closing":
                # It took nothing in: what may be said again is said to the broker that comes next.
                if self._transport is not None:
                    self._transport.disconnect()
            elif frame.corr is None:
                self._user.failed(frame)
            elif not self._is_put_off(frame):
                self._settle(frame.corr, error_of(frame))
        elif isinstance(frame, Bad):
            if frame.corr is not None:
                self._settle(frame.corr, ProtocolError(frame.error.message))
        elif isinstance(frame, Ping):
            self.tell(Pong(corr=frame.corr))
        elif frame.corr is not None:
            self._settle(frame.corr, frame)

    def _is_put_off(self, frame: Failure) -> bool:
        """What is sent again may have been kept the first time: nobody can be told that it was
        refused for its rate. It is sent until the broker looks.
        """
        ask = self._asks.get(frame.corr)  # type: ignore[arg-type]
        if frame.code != "rate" or ask is None or not (ask.again or b"").startswith(AGAIN):
            return False
        wait_s = (frame.retry_s or 0.0) + self._draw()
        asyncio.get_running_loop().call_later(wait_s, self._repeat, frame.corr)
        return True

    def _repeat(self, corr: Any) -> None:
        ask = self._asks.get(corr)
        if self._transport is not None and ask is not None and ask.again is not None:
            self.send(ask.again)

    def gone(self) -> None:
        self._lost.set()


def _why(error: BaseException) -> str:
    # One that was refused by each address of a host is no ConnectionRefusedError.
    if isinstance(error, ConnectionRefusedError) or f"[Errno {ECONNREFUSED}]" in str(error):
        return _REFUSED
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return str(error) or type(error).__name__


def check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise InvalidOption(f"not the address of a broker: {parts.scheme}:…", hint="ws://host:7070")
    if parts.username is not None or parts.password is not None or parts.query:
        raise InvalidOption("a token does not belong into an address", hint="pass token=")
    return url


_FRAME = b'{"type":'
_PUBLISH = b'{"type":"PUBLISH",'
AGAIN = b'{"type":"PUBLISH","again":true,'


def _again(corr: int, said: bytes) -> bytes:
    """What to say a second time: a broker that has an event already shall not keep it twice."""
    if not said.startswith(_FRAME):  # an event that shared its frame with others
        return b'%b"corr":%d,"event":%b}' % (AGAIN, corr, said)
    if not said.startswith(_PUBLISH) or said.startswith(AGAIN):
        return said
    return AGAIN + said[len(_PUBLISH) :]


class _Listener(WSListener):
    def __init__(self, link: Link) -> None:
        self._link = link
        self._parts: list[bytes] = []

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        kind = frame.msg_type
        if kind in _WHOLE and frame.fin:
            self._link.heard(frame.get_payload_as_bytes())
        elif kind in _WHOLE or kind == WSMsgType.CONTINUATION:
            self._parts.append(frame.get_payload_as_bytes())
            if frame.fin:
                parts, self._parts = self._parts, []
                self._link.heard(b"".join(parts))
        elif kind == WSMsgType.CLOSE:
            if not transport.is_close_frame_sent:
                transport.send_close(WSCloseCode.OK)
            transport.disconnect()

    def on_ws_disconnected(self, _transport: WSTransport) -> None:
        self._link.gone()
