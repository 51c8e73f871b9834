"""What a broker can be told, and where it may be told: a flag, the environment, a file, in this
order; then the default.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from trunkline.errors import InvalidOption, NotFound
from trunkline.options import MIB, Count, Interval, Options, Positive, Seconds, make

Port = Annotated[int, Meta(ge=0, le=65535)]
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/*\s]+/?")


class BrokerOptions(Options, frozen=True):
    """What belongs to one broker."""

    url: str = "file:.bus"
    host: str = "127.0.0.1"
    port: Port = 7070
    auth: bool = False  # deny what no token allows; also on as soon as there is a token
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None  # ask clients for a certificate signed by this
    origins: tuple[str, ...] = ()  # of web pages that may connect, besides our own
    hosts: tuple[str, ...] = ()  # names under which the broker may be addressed
    max_inflight: Positive = 32
    max_inflight_limit: Positive = 10_000
    ack_timeout_s: Interval | None = None
    frame_bytes: Annotated[int, Meta(ge=1024)] = 4 * MIB
    connections: Positive = 10_000
    subscriptions: Positive = 1_000  # on one connection
    publish_inflight: Positive = 4_096  # on one connection
    pending_bytes: Positive = 8 * MIB  # unsent, on one connection
    stall_s: Interval = 10.0  # a consumer that takes nothing for so long is let go
    rate_frames_s: Count = 0  # frames a second from one agent; 0 for no limit
    auth_timeout_s: Interval = 5.0
    ping_s: Interval = 20.0
    rights_s: Interval = 1.0  # how often changed rights are looked for
    drain_s: Seconds = 3.0
    metrics_s: Seconds = 10.0  # between two events of system.metrics; 0 for none
    audit: Annotated[float, Meta(ge=0, le=1)] = 0.0  # share of decisions on system.bus.audit

    def __post_init__(self) -> None:
        super().__post_init__()
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):  # it would be no page's, and nobody be told
                raise InvalidOption(
                    f"not the origin of a page: {origin!r}",
                    name="origins",
                    hint="each one as a browser sends it: https://app.example, http://localhost:3000",
                )


_CLIENT = ("ws:", "wss:")


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# The older names are those of the Node.js service whose clients this broker speaks to.
ENVIRONMENT: dict[str, tuple[str, ...]] = {
    "url": ("TRUNKLINE_URL", "BUS_URL"),
    "host": ("TRUNKLINE_HOST", "BUS_HOST"),
    "port": ("TRUNKLINE_PORT", "BUS_PORT"),
    "ack_timeout_s": ("TRUNKLINE_ACK_TIMEOUT_MS", "BUS_ACK_TIMEOUT_MS"),
    "max_inflight": ("TRUNKLINE_MAX_INFLIGHT", "BUS_MAX_INFLIGHT"),
}


def gather(
    flags: Mapping[str, Any], environ: Mapping[str, str] | None = None, file: str | None = None
) -> BrokerOptions:
    """Options from flags (None where one was not given), environment and a TOML file."""
    environ = os.environ if environ is None else environ
    values = _from_file(file or environ.get("TRUNKLINE_CONFIG") or None)
    values |= _from_environment(environ)
    values |= {name: value for name, value in flags.items() if value is not None}
    port = values.get("port")
    if isinstance(port, int) and not 0 <= port <= 65535:
        raise InvalidOption(f"ports are 0 to 65535, not {port}", name="port")
    options = make(BrokerOptions, values)
    if options.url.startswith(_CLIENT):
        raise InvalidOption(
            f"{options.url} is a broker; a broker serves a bus",
            name="url",
            hint="for example --url file:.bus",
        )
    return options


def _from_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}", path=path) from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidOption(f"{path} is no TOML: {error}", path=path) from error
    values = found.get("broker")
    if not isinstance(values, dict):  # else what it asks for, a guard perhaps, would not be there
        raise InvalidOption(f"{path} has no table [broker]", path=path)
    return values


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option, names in ENVIRONMENT.items():
        name = next((name for name in names if environ.get(name)), None)
        if name is None or (option == "url" and environ[name].startswith(_CLIENT)):
            continue  # not said, or said to the clients of this machine
        text = environ[name]
        if option in ("url", "host"):
            values[option] = text
            continue
        try:
            number = int(text)
        except ValueError:
            raise InvalidOption(f"{name} is a whole number, not {text!r}", name=name) from None
        values[option] = number / 1000 if option.endswith("_s") else number
    return values
