"""Publishing to JetStream: a window of publishes, each with its own deadline.

A publish that has no acknowledgement in time is sent again with the same ``Nats-Msg-Id``: the
server keeps it once. nats-py's own futures have no deadline, so they are not used here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from uuid import uuid4

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError

from trunkline.bus.nats.connection import NatsLink, end_task, fault
from trunkline.errors import Closed, ConnectionLost, InvalidEvent, TrunklineError

ID = "Nats-Msg-Id"
BATCH_MAX = 1000
BATCHES = 16  # of one client at a time: the server takes 50 of one stream from all clients
_BUSY = frozenset({10210, 10008, 10009})
REPEATED = 10201  # a batch with an id that is there already
_LOST = frozenset({10176})  # a batch that the server does not hold any more


class PubAck(msgspec.Struct):
    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    count: int = 0
    error: _Fault | None = None
    resent: bool = False  # set here: the first send may have been kept


class _Fault(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


_decode = msgspec.json.Decoder(PubAck).decode


class _Open:
    """A publish without its acknowledgement."""

    __slots__ = ("ack", "due", "end", "messages", "resent", "subject")

    def __init__(
        self,
        ack: asyncio.Future[PubAck],
        subject: str,
        messages: Sequence[tuple[bytes, dict[str, str]]],
        due: float,
        end: float,
    ) -> None:
        self.ack = ack
        self.subject = subject
        self.messages = messages
        self.due = due
        self.end = end
        self.resent = False


class Window:
    """The publishes of one connection that wait for their acknowledgements."""

    def __init__(self, link: NatsLink) -> None:
        self._link = link
        self._free = asyncio.Semaphore(link.options.publish_inflight)
        self._batches = asyncio.Semaphore(BATCHES)
        self._open: dict[str, _Open] = {}  # by token; the oldest first
        self._tokens = itertools.count(1)
        self._prefix = ""
        self._sweeper: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self.repeats = 0

    async def start(self) -> None:
        if self._sweeper is not None:
            return
        async with self._starting:
            if self._sweeper is not None:
                return
            await self._link.open()
            prefix = self._link.nc.new_inbox() + "."
            await self._link.nc.subscribe(prefix + "*", cb=self._acked)
            await self._link.flush()
            self._prefix = prefix
            self._link.at_reconnect(self._hurry)
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def send(self, subject: str, data: bytes, message_id: str) -> PubAck:
        """Publish one message; returns its acknowledgement."""
        return await self._send(subject, ((data, {ID: message_id}),), self._free)

    async def send_batch(self, subject: str, messages: Sequence[tuple[bytes, str]]) -> PubAck:
        """Publish messages as one atomic batch; the acknowledgement is that of the last one."""
        pairs = [(data, {ID: message_id}) for data, message_id in messages]
        return await self._send(subject, pairs, self._batches)

    async def _send(
        self,
        subject: str,
        messages: Sequence[tuple[bytes, dict[str, str]]],
        slots: asyncio.Semaphore,
    ) -> PubAck:
        if self._closed:
            raise Closed("the bus is closed")
        link = self._link
        if not link.is_up and link.options.when_away == "raise":
            raise ConnectionLost("no NATS server is there", hint="publish again later")
        async with slots:
            loop = asyncio.get_running_loop()
            now = loop.time()
            options = link.options
            waiting: asyncio.Future[PubAck] = loop.create_future()
            end = now + options.patience_s
            one = _Open(waiting, subject, messages, now + options.ack_deadline_s, end)
            token = str(next(self._tokens))
            self._open[token] = one
            try:
                await self._write(token, one)
                return await waiting
            finally:
                self._open.pop(token, None)

    async def _write(self, token: str, one: _Open) -> None:
        nc, reply = self._link.nc, self._prefix + token
        try:
            if len(one.messages) == 1:
                data, headers = one.messages[0]
                await nc.publish(one.subject, data, reply=reply, headers=dict(headers))
                return
            batch, last = uuid4().hex, len(one.messages)
            for number, (data, headers) in enumerate(one.messages, 1):
                more = {**headers, "Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}
                if number == last:
                    more["Nats-Batch-Commit"] = "1"
                there = reply if number == last else ""
                await nc.publish(one.subject, data, reply=there, headers=more)
        except MaxPayloadError:
            most = nc.max_payload
            raise InvalidEvent(
                f"the NATS server takes messages of at most {most} bytes",
                hint="max_payload in the server's configuration",
            ) from None
        except (NatsError, OSError):
            pass  # the sweep sends it again

    async def _acked(self, message: Msg) -> None:
        token = message.subject[len(self._prefix) :]
        one = self._open.get(token)
        if one is None or not message.data:  # nobody waits; or no server answers for the stream now
            return
        ack = _decode(message.data)
        if ack.error is not None:
            code = ack.error.err_code
            if code in _BUSY or code in _LOST:
                return  # the sweep sends it again
            error = fault(code, ack.error.description)
            error.fields["resent"] = one.resent
            self._end(token, error)
            return
        ack.resent = one.resent
        self._open.pop(token, None)
        if not one.ack.done():
            one.ack.set_result(ack)

    def _end(self, token: str, error: TrunklineError) -> None:
        one = self._open.pop(token, None)
        if one is not None and not one.ack.done():
            one.ack.set_exception(error)

    def _hurry(self) -> None:
        """Send everything again now: the new connection knows nothing of it."""
        now = asyncio.get_running_loop().time()
        for one in self._open.values():
            one.due = now

    async def _sweep(self) -> None:
        deadline_s = self._link.options.ack_deadline_s
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(deadline_s / 8)
            now = loop.time()
            for token, one in list(self._open.items()):
                if one.due > now:
                    continue
                if now >= one.end:
                    said = f"no acknowledgement within {self._link.options.patience_s:g} s"
                    hint = "the event may be stored: publish it again with the same id"
                    self._end(token, ConnectionLost(f"NATS: {said}", hint=hint))
                    continue
                if not self._link.is_up:
                    continue
                self.repeats += 1
                one.resent = True
                one.due = now + deadline_s
                await self._write(token, one)

    async def close(self) -> None:
        self._closed = True
        await end_task(self._sweeper)
        for token in list(self._open):
            self._end(token, Closed("the bus is closed"))
