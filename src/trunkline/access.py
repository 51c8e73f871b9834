"""Rights: tokens, grants, and the one rule that decides.

Nothing is allowed unless a grant says so, and a grant that denies beats any that allows. Dead
letters and the topics below ``system`` are resources of their own: a pattern covers them only if it
names them (``orders.DLQ``, ``system.metrics``, ``system.>``), so ``>`` never does.

A token is ``tl_<id>_<secret>``. Only the SHA-256 of the secret is kept; it has 256 random bits, so
there is nothing to guess and nothing to stretch.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from datetime import datetime
from typing import Final, Literal

import msgspec

from trunkline.errors import Denied, InvalidOption
from trunkline.names import SYSTEM_PREFIX, check_pattern, is_dead, is_pattern, matches

Action = Literal["publish", "subscribe", "read", "admin"]
ACTIONS: Final = ("publish", "subscribe", "read", "admin")
_TOKEN = re.compile(r"tl_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")


class Grant(msgspec.Struct, frozen=True, omit_defaults=True):
    """``subscribe`` needs the group to match too. ``admin`` on a topic is everything on it, and
    making and removing it.
    """

    actions: tuple[Action, ...]
    topics: tuple[str, ...] = ()
    groups: tuple[str, ...] = (">",)
    deny: bool = False

    def __post_init__(self) -> None:
        for pattern in (*self.topics, *self.groups):
            check_pattern(pattern)


class Token(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token as it is kept. With ``certificate`` it has no secret: a client certificate in which
    the agent is named stands for it.
    """

    id: str
    agent: str
    digest: str
    grants: tuple[Grant, ...] = ()
    created: datetime | None = None
    expires: datetime | None = None
    revoked: bool = False
    certificate: bool = False
    scopes: tuple[str, ...] = ()  # roles; the lists of a topic may name them like agents

    def counts(self, now: datetime) -> bool:
        return not self.revoked and (self.expires is None or now < self.expires)


class Principal(msgspec.Struct, frozen=True):
    """The owner of a connection. ``agent`` comes from the token, never from a frame."""

    agent: str
    grants: tuple[Grant, ...] = ()
    token: str = ""
    expires: datetime | None = None
    scopes: tuple[str, ...] = ()


def principal_of(token: Token) -> Principal:
    return Principal(token.agent, token.grants, token.id, token.expires, token.scopes)


EVERYTHING: Final = Grant(("admin",), (">", "system.>", "*.DLQ"), (">",))
LOCAL: Final = Principal("local", (EVERYTHING,))
NOBODY: Final = Principal("")


def may(who: Principal, action: Action, topic: str, group: str = "") -> bool:
    """``topic`` may be a pattern for ``subscribe``: then everything it can match must be allowed.
    With admin over everything it always is.
    """
    inside = _below_system(topic)
    return _allowed(who, action, topic, group) and (
        inside is None or _allowed(who, action, inside, group)
    )


def _below_system(topic: str) -> str | None:
    """The part of a pattern that lies below ``system``, if it reaches there without naming it."""
    first, _, rest = topic.partition(".")
    if first == ">":
        return SYSTEM_PREFIX + ">"
    return SYSTEM_PREFIX + rest if first == "*" and rest else None


def _allowed(who: Principal, action: Action, topic: str, group: str) -> bool:
    allowed = False
    for grant in who.grants:
        if action not in grant.actions and "admin" not in grant.actions:
            continue
        if grant.deny:
            if any(touches(p, topic) for p in grant.topics) and (
                not group or any(matches(p, group) for p in grant.groups)
            ):
                return False
        elif _is_all(grant) or (
            any(covers(p, topic) for p in grant.topics)
            and (not group or any(matches(p, group) for p in grant.groups))
        ):
            allowed = True
    return allowed


def require(who: Principal, action: Action, topic: str, group: str = "") -> None:
    """Raise ``Denied``, in the same words whatever the reason, so that nothing can be learnt."""
    if not may(who, action, topic, group):
        raise Denied("access denied", actor=who.agent, action=action, topic=topic)


def _is_all(grant: Grant) -> bool:
    return "admin" in grant.actions and set(EVERYTHING.topics) <= {*grant.topics}


def _special(topic: str) -> bool:
    return is_dead(topic) or topic.startswith(SYSTEM_PREFIX)


def covers(pattern: str, topic: str) -> bool:
    """Whether everything that ``topic`` matches is matched by ``pattern``."""
    if _special(topic) and not _names(pattern, topic):
        return False
    if not is_pattern(topic):
        return matches(pattern, topic)
    want, have = topic.split("."), pattern.split(".")
    for index, token in enumerate(have):
        if token == ">":
            return len(want) > index
        if index >= len(want) or want[index] == ">":
            return False
        if token != "*" and token != want[index]:
            return False
    return len(want) == len(have)


def _names(pattern: str, topic: str) -> bool:
    """Whether a pattern means dead letters or system topics when it matches one."""
    if topic.startswith(SYSTEM_PREFIX) and not pattern.startswith(SYSTEM_PREFIX):
        return False
    return not is_dead(topic) or is_dead(pattern)


def touches(pattern: str, topic: str) -> bool:
    """Whether the two can match one topic: enough for a denial."""
    left, right = pattern.split("."), topic.split(".")
    for a, b in zip(left, right, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    if len(left) == len(right):
        return True
    longer = left if len(left) > len(right) else right
    shorter = right if longer is left else left
    return shorter[-1] == ">"


# -- tokens ----------------------------------------------------------------------------------------


def new_token(
    agent: str,
    grants: Iterable[Grant],
    *,
    created: datetime,
    expires: datetime | None = None,
    certificate: bool = False,
    scopes: Iterable[str] = (),
) -> tuple[str, Token]:
    """The token to hand out, once, and what to keep of it. For a certificate there is none."""
    if not agent or len(agent) > 200 or not agent.isprintable():
        raise InvalidOption("an agent has a name of 1 to 200 printable characters", name="agent")
    if agent == "*" or agent.startswith("!"):  # lists of topics would read it as something else
        raise InvalidOption("an agent's name is not * and does not begin with !", name="agent")
    scopes = tuple(scopes)
    if any(not re.fullmatch(r"[A-Za-z0-9_.:-]{1,200}", scope) for scope in scopes):
        raise InvalidOption("a scope has 1 to 200 letters, digits or _.:-", name="scopes")
    name, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    kept = Token(
        id=name,
        agent=agent,
        digest="" if certificate else _digest(secret),
        grants=tuple(grants),
        created=created,
        expires=expires,
        certificate=certificate,
        scopes=scopes,
    )
    return "" if certificate else f"tl_{name}_{secret}", kept


def bare_token(token: object) -> str:
    """A token as a header can carry it; one that was read from a file ends with a newline."""
    word = token.strip() if isinstance(token, str) else ""
    if token and not (word and all("!" <= char <= "~" for char in word)):
        hint = "as 'trunkline token create' printed it"
        raise InvalidOption("a token is one word of ASCII", name="token", hint=hint)
    return word


def token_id(text: str) -> str | None:
    """Which token it claims to be; None if it is none."""
    found = _TOKEN.fullmatch(text)
    return found[1] if found else None


def admit(text: str, kept: Token | None, now: datetime) -> Principal | None:
    """The principal of a token that was shown; None if it is unknown, expired or revoked."""
    found = _TOKEN.fullmatch(text)
    digest = kept.digest if kept is not None else "0" * 64
    secret = found[2] if found else ""
    same = hmac.compare_digest(_digest(secret), digest)  # also for an unknown one: in equal time
    if not same or found is None or kept is None or kept.id != found[1] or not kept.counts(now):
        return None
    return principal_of(kept)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
