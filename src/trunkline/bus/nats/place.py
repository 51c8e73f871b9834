"""Where things are on a NATS server: the URL, and the names of streams, subjects and consumers.

A partition of a topic is one stream, so that its sequence numbers are the offsets: 1, 2, 3, …
Several buses share a server: the path of the URL names the bus.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from trunkline.errors import InvalidOption

PORT = 4222
MONITOR = 4000  # the monitoring port is that much higher: 8222
BUS = "tl"
MARK = "trunkline"  # the metadata of every stream and consumer that is ours
FORMAT = "1"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
_HINT = "for example nats://127.0.0.1:4222, or nats://a:4222,b:4222,c:4222/shop for a bus by name"


class Place(msgspec.Struct, frozen=True):
    """The servers, the bus on them, and the user. Credentials never stand in ``servers``, which
    is logged.
    """

    servers: tuple[str, ...]
    bus: str = BUS
    user: str | None = None
    password: str | None = None
    token: str | None = None

    def stream(self, topic: str, partition: int) -> str:
        return f"{self.bus}~{flat(topic)}~{partition}"

    def subject(self, topic: str, partition: int) -> str:
        return f"{self.bus}.log.{partition}.{topic}"

    @property
    def notes(self) -> str:
        """The stream of the bus's own documents: the topics, the groups, the closed letters."""
        return f"{self.bus}~~notes"

    def note(self, name: str) -> str:
        return f"{self.bus}.notes.{name}"

    @property
    def again(self) -> str:
        """The stream of redriven records: each goes to one group."""
        return f"{self.bus}~~again"

    def again_subject(self, topic: str, group: str) -> str:
        return f"{self.bus}.again.{flat(topic)}.{flat(group)}"

    @property
    def news(self) -> str:
        """The subject on which one member tells the others that a topic or group changed."""
        return f"{self.bus}.news"


class StreamName(NamedTuple):
    topic: str
    partition: int


def flat(name: str) -> str:
    """A name as one token: no name holds ``=``."""
    return name.replace(".", "=")


def deep(token: str) -> str:
    return token.replace("=", ".")


def parse(url: str) -> Place:
    """``nats://[user:password@|token@]host[:port][,host[:port]…][/bus]``."""
    scheme, _, rest = url.partition("://")
    hosts, _, bus = rest.partition("/")
    if scheme not in ("nats", "nats+tls") or "?" in url or "#" in url:
        said = "options are arguments of their own" if "?" in url else _HINT
        raise InvalidOption("not a NATS URL", name="url", hint=said)
    who, _, hosts = hosts.rpartition("@")
    user, colon, password = who.partition(":")
    if bus and not _NAME.fullmatch(bus):
        hint = "at most 32 of A-Z a-z 0-9 _ -"
        raise InvalidOption(f"not the name of a bus: {bus[:80]!r}", name="url", hint=hint)
    return Place(
        servers=tuple(_server(host) for host in hosts.split(",")),
        bus=bus or BUS,
        user=unquote(user) if colon else None,
        password=unquote(password) if colon else None,
        token=unquote(user) if user and not colon else None,
    )


def _server(host: str) -> str:
    try:
        parts = urlsplit(f"nats://{host}")
        name, port = parts.hostname, parts.port or PORT
    except ValueError:
        name, port = None, 0
    if not name or parts.path:
        raise InvalidOption(f"not a server: {host[:80]!r}", name="url", hint=_HINT)
    return f"nats://[{name}]:{port}" if ":" in name else f"nats://{name}:{port}"
