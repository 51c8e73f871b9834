"""A continuous pull from one JetStream consumer.

Two requests overlap, so that messages flow while the next request travels. Every request asks for
heartbeats. Requests are gone after a reconnect, and nats-py does not tell: the pull renews them
when heartbeats are missed and when the connection is back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from time import monotonic
from typing import Any

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from trunkline.bus.nats.connection import NatsLink, end_task

EXPIRES_S = 5.0
BATCH = 250
MISSED = 2.5  # heartbeats
_OVER = frozenset({"404", "408"})  # a request that ended as it was meant to
_NS = 1_000_000_000


class Pull:
    """Asks for as many messages as ``room`` says and hands each to ``came``.

    ``group`` names the consumer's priority group: of several members the server serves one.
    """

    def __init__(
        self,
        link: NatsLink,
        stream: str,
        durable: str,
        *,
        came: Callable[[Msg], None],
        room: Callable[[], int],
        gone: Callable[[str], None],
        group: str | None = None,
        keep_s: float = 0.0,
    ) -> None:
        self._link = link
        self._api = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._came = came
        self._room = room
        self._gone = gone
        self._group = group
        self._keep_s = keep_s  # a member that asks for nothing for long loses its turn
        self._asked = 0.0
        self._pin: str | None = None
        self._due = 0  # messages that were asked for and did not come yet
        self._heard = 0.0
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._watch: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._stopping = False
        self._forget: Callable[[], None] = _nothing
        self.renewed = 0

    async def start(self) -> None:
        nc = self._link.nc
        self._inbox = nc.new_inbox()
        # The pending limits are ours: no more comes than was asked for.
        self._subscription = await nc.subscribe(
            self._inbox, cb=self._message, pending_msgs_limit=-1, pending_bytes_limit=-1
        )
        self._heard = monotonic()
        self._watch = asyncio.get_running_loop().create_task(self._watching())
        self._forget = self._link.at_reconnect(self.renew)
        self.refill()

    @property
    def is_pinned(self) -> bool:
        return self._pin is not None

    def serve(self, group: str | None) -> None:
        """Follow the consumer, which has this priority group now."""
        if group != self._group:
            self._group, self._pin = group, None
            self.renew()

    def refill(self) -> None:
        """Ask for more if there is room for more."""
        if self._stopping or self._asking is not None or not self._wanted():
            return
        self._asking = asyncio.get_running_loop().create_task(self._ask())

    def _wanted(self) -> int:
        if self._due > BATCH:  # two requests are under way
            return 0
        missing = self._room() - self._due
        return min(missing, BATCH) if missing > 0 else 0

    async def _ask(self) -> None:
        try:
            while not self._stopping and (batch := self._wanted()):
                self._due += batch
                await self._request(batch)
        finally:
            self._asking = None

    async def _request(self, batch: int) -> None:
        beat_s = self._link.options.heartbeat_s
        expires_s = max(EXPIRES_S, 4 * beat_s)
        body: dict[str, Any] = {
            "batch": batch,
            "expires": int(expires_s * _NS),
            "idle_heartbeat": int(beat_s * _NS),
        }
        if self._group is not None:
            body["group"] = self._group
            if self._pin is not None:
                body["id"] = self._pin
        self._heard = self._asked = monotonic()
        with contextlib.suppress(NatsError, OSError):  # missed heartbeats renew it
            await self._link.nc.publish(self._api, msgspec.json.encode(body), reply=self._inbox)

    async def _message(self, message: Msg) -> None:
        self._heard = monotonic()
        headers = message.headers
        status = headers.get("Status") if headers and not message.reply else None
        if status is None:
            if message.reply is None or not message.reply.startswith("$JS.ACK."):
                return
            self._due -= 1 if self._due > 0 else 0
            if headers and self._group is not None:
                self._pin = headers.get("Nats-Pin-Id", self._pin)
            self._came(message)
        elif status == "100":
            return
        else:
            self._ended(status, headers or {})
            if status not in _OVER:
                return  # refused: the watch asks again after a heartbeat, not at once for ever
        self.refill()

    def _ended(self, status: str, headers: dict[str, str]) -> None:
        """One request is over."""
        left = headers.get("Nats-Pending-Messages")
        self._due = max(0, self._due - int(left)) if left else 0
        text = headers.get("Description", "")
        if status == "423":  # another member is served now
            self._pin = None
        elif status == "409" and ("Deleted" in text or "deleted" in text):
            self._gone(text)

    def renew(self) -> None:
        """The requests of the old connection are gone."""
        self.renewed += 1
        self._due = 0
        self._heard = monotonic()
        self.refill()

    async def _watching(self) -> None:
        beat_s = self._link.options.heartbeat_s
        while True:
            await asyncio.sleep(beat_s)
            if self._due and monotonic() - self._heard > MISSED * beat_s and self._link.is_up:
                self.renew()
            elif self._pin and not self._due and monotonic() - self._asked > self._keep_s:
                self._due += 1
                await self._request(1)
            else:
                self.refill()

    async def stop(self) -> None:
        """Ask for nothing more. Messages that are on their way come before this returns."""
        if self._stopping:
            return
        self._stopping = True
        self._forget()
        await end_task(self._watch)
        if self._asking is not None:
            await asyncio.gather(self._asking, return_exceptions=True)
        if self._subscription is not None:
            with contextlib.suppress(NatsError, OSError, TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(self._subscription.drain(), 2.0)


def _nothing() -> None:
    return None
