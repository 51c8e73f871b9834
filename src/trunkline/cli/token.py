"""``trunkline token``: the tokens of a broker, and the rights of each."""

from __future__ import annotations

import argparse
import json
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import timedelta
from typing import Any, TypeVar

import msgspec

from trunkline.access import EVERYTHING, Grant, Token
from trunkline.cli import branch, leaf
from trunkline.cli.arguments import bus_path, bus_url, duration
from trunkline.cli.render import Printer
from trunkline.errors import InvalidOption

T = TypeVar("T")


def register(commands: argparse._SubParsersAction[Any]) -> None:
    below = branch(commands, "token", "create, list and revoke tokens for the broker")
    create = leaf(below, "create", run_create, "make a token; it is shown once")
    create.add_argument("agent", help="the agent that it is for")
    create.add_argument("--publish", action="append", default=[], metavar="TOPIC")
    create.add_argument("--subscribe", action="append", default=[], metavar="TOPIC")
    create.add_argument("--read", action="append", default=[], metavar="TOPIC")
    create.add_argument("--manage", action="append", default=[], metavar="TOPIC")
    create.add_argument("--group", action="append", default=[], metavar="GROUP")
    create.add_argument("--deny", action="append", default=[], metavar="TOPIC")
    create.add_argument(
        "--scope",
        action="append",
        default=[],
        metavar="SCOPE",
        help="a role, which lists of topics may name",
    )
    create.add_argument("--admin", action="store_true", help="everything")
    create.add_argument(
        "--certificate", action="store_true", help="shown by a client certificate with that name"
    )
    create.add_argument("--expires", type=duration, help="for how long: 90d, 12h (for ever)")
    leaf(below, "ls", run_ls, "list tokens, without their secrets")
    revoke = leaf(below, "revoke", run_revoke, "make a token worthless, within seconds")
    revoke.add_argument("id")


def grants_of(args: argparse.Namespace) -> list[Grant]:
    """Patterns as on the command line, as grants."""
    groups = tuple(args.group) or (">",)
    found = [EVERYTHING] if args.admin else []
    if args.publish:
        found.append(Grant(("publish",), tuple(args.publish)))
    if args.subscribe:
        found.append(Grant(("subscribe",), tuple(args.subscribe), groups))
    if args.read:
        found.append(Grant(("read",), tuple(args.read)))
    if args.manage:
        found.append(Grant(("admin",), tuple(args.manage), groups))
    if args.deny:
        found.append(Grant(("admin",), tuple(args.deny), (">",), deny=True))
    if not found:
        raise InvalidOption(
            "a token that allows nothing", hint="--publish, --subscribe, --read, --manage, --admin"
        )
    return found


def run_create(args: argparse.Namespace) -> None:
    grants = grants_of(args)

    async def create(rights: Any) -> tuple[str, Token]:
        expires = None
        try:
            if args.expires is not None:
                expires = rights.now() + timedelta(seconds=args.expires)
        except OverflowError:
            raise InvalidOption("--expires is too long") from None
        made: tuple[str, Token] = await rights.create(
            args.agent, grants, expires, certificate=args.certificate, scopes=args.scope
        )
        return made

    text, token = _with_rights(args, create, make=True)
    if args.json:
        shown = {"token": text} if text else {}
        print(json.dumps({**shown, "id": token.id, "agent": token.agent}))
    else:
        print(text or token.id)


def run_ls(args: argparse.Namespace) -> None:
    async def listed(rights: Any) -> list[Token]:
        return sorted(rights.tokens.values(), key=lambda token: str(token.created))

    rows = []
    for token in _with_rights(args, listed):
        shown = msgspec.to_builtins(token)
        del shown["digest"]
        if not args.json:
            until = f"until {shown['expires']}" if token.expires else "for ever"
            shown |= {"valid": "revoked" if token.revoked else until, "allows": _said(token)}
        rows.append(shown)
    Printer(args).table(rows, ("id", "agent", "valid", "allows"), "no tokens")


def run_revoke(args: argparse.Namespace) -> None:
    async def revoke(rights: Any) -> Token:
        gone: Token = await rights.revoke(args.id)
        return gone

    token = _with_rights(args, revoke)
    if args.json:
        print(json.dumps({"id": token.id, "agent": token.agent, "revoked": True}))
    elif not args.quiet:
        print(f"revoked {token.id} of {token.agent}")


def _said(token: Token) -> str:
    def said(grant: Grant) -> str:
        what = f"{'not ' if grant.deny else ''}{','.join(grant.actions)} {','.join(grant.topics)}"
        return what if grant.groups == (">",) else f"{what} as {','.join(grant.groups)}"

    return "; ".join(map(said, token.grants))


def _with_rights(
    args: argparse.Namespace, job: Callable[[Any], Awaitable[T]], *, make: bool = False
) -> T:
    from trunkline.broker.tokens import Rights
    from trunkline.cli.still import StillBus, run_still
    from trunkline.folder.direct import DirectBus

    path = bus_path(bus_url(args))
    with closing(DirectBus(path, create=make, allow_network=args.allow_network)) as direct:

        async def run() -> T:
            rights = Rights(StillBus(direct))
            await rights.refresh()
            return await job(rights)

        return run_still(run())
