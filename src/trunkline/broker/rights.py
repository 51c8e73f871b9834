"""Who may do what, kept on the bus itself: the topic ``system.access`` holds one record per change
of a token, the last one counts. Whoever can write the bus can make tokens; a broker that runs sees
a change at once where its store tells of other processes, else within ``rights_s``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from datetime import datetime

import msgspec

from trunkline.access import LOCAL, Grant, Principal, Token, admit, new_token, token_id
from trunkline.buses.local import LocalBus
from trunkline.errors import NotFound
from trunkline.event import Event

TOPIC = "system.access"


class Rights:
    def __init__(self, bus: LocalBus, *, forced: bool = False) -> None:
        self._bus = bus
        self._forced = forced
        self._next = 1
        self.tokens: dict[str, Token] = {}
        self.version = 0

    @property
    def is_on(self) -> bool:
        """Off until somebody asks for it or makes a token; then for good."""
        return self._forced or bool(self.tokens)

    def now(self) -> datetime:
        return self._bus.clock.now()

    async def refresh(self) -> bool:
        """Take in what changed; True if anything did."""
        changed = False
        first, end = await self._bus.store.bounds(TOPIC, 0)
        if not first <= self._next <= end:  # trimmed, or made anew
            self._next = first
        while self._next < end:
            for record in await self._bus.read(TOPIC, self._next):
                self._next = record.offset + 1
                changed = True
                # A record that is no token was not written by this code and grants nothing.
                with contextlib.suppress(msgspec.ValidationError):
                    token = msgspec.convert(record.event.payload, Token)
                    self.tokens[token.id] = token
        self.version += changed
        return changed

    def known(self, text: str | None) -> Principal | None:
        """Who shows this token; None if it is not valid."""
        if not self.is_on:
            return LOCAL
        if text is None:
            return None
        name = token_id(text)
        return admit(text, self.tokens.get(name) if name else None, self._bus.clock.now())

    def certified(self, names: Collection[str]) -> Principal | None:
        """Who a client certificate with these names belongs to; None if it is nobody known."""
        now = self._bus.clock.now()
        for token in self.tokens.values():
            if token.certificate and token.agent in names and token.counts(now):
                return Principal(token.agent, token.grants, token.id, token.expires)
        return None

    def current(self, who: Principal) -> Principal | None:
        """The same principal as of now; None if its token no longer counts."""
        if not who.token:
            return None if self.is_on else who
        token = self.tokens.get(who.token)
        if token is None or not token.counts(self._bus.clock.now()):
            return None
        return Principal(token.agent, token.grants, token.id, token.expires)

    async def create(
        self,
        agent: str,
        grants: Sequence[Grant],
        expires: datetime | None = None,
        *,
        certificate: bool = False,
    ) -> tuple[str, Token]:
        """Make a token. Its text is given here and never again."""
        text, token = new_token(
            agent,
            grants,
            created=self._bus.clock.now(),
            expires=expires,
            certificate=certificate,
        )
        await self._keep(token)
        return text, token

    async def revoke(self, name: str) -> Token:
        await self.refresh()
        token = self.tokens.get(name)
        if token is None:
            raise NotFound(
                f"there is no token {name}", token=name, hint="trunkline token ls has their ids"
            )
        token = msgspec.structs.replace(token, revoked=True)
        await self._keep(token)
        return token

    async def _keep(self, token: Token) -> None:
        if TOPIC not in await self._bus.topics():
            await self._bus.define(TOPIC, compact=True)
        payload = msgspec.to_builtins(token)
        await self._bus.publish(Event(topic=TOPIC, key=token.id, type="token", payload=payload))
        await self.refresh()
