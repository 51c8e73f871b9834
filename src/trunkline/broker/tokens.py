"""Tokens and their rights, kept on the bus itself: the topic ``system.access`` holds one record per
change of a token, the last one counts. A user that can write the bus can make tokens; a broker that
runs sees a change at once where its store tells of other processes, else within ``rights_s``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Protocol

import msgspec

from trunkline.access import (
    LOCAL,
    Grant,
    Principal,
    Token,
    admit,
    new_token,
    principal_of,
    token_id,
)
from trunkline.clock import Clock
from trunkline.errors import NotFound
from trunkline.patterns.topic_table import TableBus, TopicTable

TOPIC = "system.access"


class RightsBus(TableBus, Protocol):
    """What rights need of a bus: their table, and the time."""

    @property
    def clock(self) -> Clock: ...


class Rights:
    def __init__(self, bus: RightsBus, *, forced: bool = False) -> None:
        self._bus = bus
        self._table = TopicTable(bus, TOPIC, Token, self._take)
        self._forced = forced
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
        changed = await self._table.refresh()
        self.version += changed
        return changed

    def _take(self, token: Token) -> None:
        self.tokens[token.id] = token

    def known(self, text: str | None) -> Principal | None:
        """The principal of a token; None if the token is not valid."""
        if not self.is_on:
            return LOCAL
        if text is None:
            return None
        name = token_id(text)
        return admit(text, self.tokens.get(name) if name else None, self._bus.clock.now())

    def certified(self, names: Collection[str]) -> Principal | None:
        """The principal of a client certificate with these names; None if there is none."""
        now = self._bus.clock.now()
        for token in self.tokens.values():
            if token.certificate and token.agent in names and token.counts(now):
                return principal_of(token)
        return None

    def current(self, who: Principal) -> Principal | None:
        """The same principal as of now; None if its token no longer counts."""
        if not who.token:
            return None if self.is_on else who
        token = self.tokens.get(who.token)
        if token is None or not token.counts(self._bus.clock.now()):
            return None
        return principal_of(token)

    async def create(
        self,
        agent: str,
        grants: Sequence[Grant],
        expires: datetime | None = None,
        *,
        certificate: bool = False,
        scopes: Sequence[str] = (),
    ) -> tuple[str, Token]:
        """Make a token. Its text is given here and never again."""
        text, token = new_token(
            agent,
            grants,
            created=self._bus.clock.now(),
            expires=expires,
            certificate=certificate,
            scopes=scopes,
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
        await self._table.put(token.id, token, type="token")
        await self.refresh()
