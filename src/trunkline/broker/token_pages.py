"""Tokens and tickets over HTTP."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from trunkline import access
from trunkline.access import EVERYTHING, Grant, Token
from trunkline.broker.http import Ask, reply
from trunkline.broker.tokens import TOPIC
from trunkline.errors import Denied, InvalidOption, NotFound

_YEARS_S = 100 * 366 * 86_400.0


class NewToken(msgspec.Struct, forbid_unknown_fields=True):
    agent: str
    grants: list[Grant] = []
    admin: bool = False  # a grant of everything
    scopes: list[str] = []
    certificate: bool = False
    expires_s: Annotated[float, Meta(gt=0, le=_YEARS_S)] | None = None


class NewTicket(msgspec.Struct, forbid_unknown_fields=True):
    ttl_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0


async def create_token(ask: Ask) -> Response:
    """Make a token. The answer has its text, once. The first token shuts an open broker."""
    asked: NewToken = await ask.json(NewToken)
    _require_admin(ask)
    grants = [EVERYTHING, *asked.grants] if asked.admin else asked.grants
    if not grants:
        raise InvalidOption("a token that allows nothing", name="grants", hint="grants, or admin")
    rights = ask.hub.rights
    if not rights.is_on and not access.may(access.Principal("", tuple(grants)), "admin", ">"):
        raise InvalidOption(
            "the first token must be an admin's: only an admin makes others",
            name="admin",
            hint='{"agent": "ops", "admin": true}',
        )
    expires = None
    if asked.expires_s is not None:
        expires = rights.now() + timedelta(seconds=asked.expires_s)
    text, token = await rights.create(
        asked.agent, grants, expires, certificate=asked.certificate, scopes=asked.scopes
    )
    return reply({"token": text or None, **_row(ask, token)}, 201)


async def list_tokens(ask: Ask) -> Response:
    _require_admin(ask)
    await ask.hub.rights.refresh()
    return reply({"tokens": [_row(ask, token) for token in ask.hub.rights.tokens.values()]})


async def revoke_token(ask: Ask) -> Response:
    _require_admin(ask)
    try:
        token = await ask.hub.rights.revoke(ask.path("token"))
    except NotFound as error:
        raise NotFound(error.message, hint="GET /tokens has their ids") from None
    return reply(_row(ask, token))


def _require_admin(ask: Ask) -> None:
    """A maker of tokens can have any right, so only an admin of everything makes them."""
    if not access.may(ask.who, "admin", ">"):
        ask.hub.denied(ask.who, "admin", TOPIC, missing="admin on everything")
        raise Denied("access denied", actor=ask.who.agent, action="admin", topic=TOPIC)
    ask.require("admin", TOPIC)


def _row(ask: Ask, token: Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "agent": token.agent,
        "grants": token.grants,
        "scopes": token.scopes,
        "certificate": token.certificate,
        "created": token.created,
        "expires": token.expires,
        "revoked": token.revoked,
        "valid": token.counts(ask.hub.rights.now()),
    }


async def create_ticket(ask: Ask) -> Response:
    """A ticket of the caller, for ``?ticket=`` of a tail, a stream or a WebSocket."""
    asked: NewTicket = await ask.json(NewTicket)
    text, expires = ask.hub.tickets.issue(ask.who, asked.ttl_s)
    return reply({"ticket": text, "expires": expires}, 201)
