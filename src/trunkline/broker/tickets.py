"""Tickets: short-lived stand-ins for a token, for browsers.

``EventSource`` and ``WebSocket`` of a browser send no header of their own, and a token does not
belong into an address. A ticket does: it is good for a minute or so, for server-sent events and for
the handshake of a WebSocket, and for nothing else. What it opened lasts as long as its token.
"""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta

from trunkline.access import Principal
from trunkline.clock import Clock
from trunkline.errors import Conflict

_TICKETS_MAX = 10_000


class Tickets:
    """The tickets of one broker. They end with it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, tuple[Principal, datetime]] = {}

    def issue(self, who: Principal, seconds: float) -> tuple[str, datetime]:
        now = self._clock.now()
        if len(self._known) >= _TICKETS_MAX:
            self._known = {k: v for k, v in self._known.items() if v[1] > now}
            if len(self._known) >= _TICKETS_MAX:
                raise Conflict("too many tickets are open", code="too_many")
        text = f"tk_{secrets.token_urlsafe(32)}"
        until = now + timedelta(seconds=seconds)
        if who.expires is not None:
            until = min(until, who.expires)
        self._known[text] = (who, until)
        return text, until

    def holder(self, text: str) -> Principal | None:
        """The principal of a ticket; None if it is unknown or over. The caller asks whether the
        token behind it still counts.
        """
        found = self._known.get(text)
        if found is None:
            return None
        if found[1] <= self._clock.now():
            del self._known[text]
            return None
        return found[0]
