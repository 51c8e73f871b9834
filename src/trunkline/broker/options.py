"""What a broker can be told, and where it may be told: a flag, the environment, a file, in this
order; then the default.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from trunkline.errors import InvalidOption
from trunkline.explain import reason
from trunkline.guard.config import read_toml
from trunkline.options import BrokerOptions, make

_CLIENT = ("ws:", "wss:")


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# The older names are those of the Node.js service whose clients this broker speaks to. Times in
# milliseconds are theirs, too.
ENVIRONMENT: dict[str, tuple[str, ...]] = {
    **{name: (f"TRUNKLINE_{name.upper()}",) for name in BrokerOptions.__struct_fields__},
    "url": ("TRUNKLINE_URL", "BUS_URL"),
    "host": ("TRUNKLINE_HOST", "BUS_HOST"),
    "port": ("TRUNKLINE_PORT", "BUS_PORT"),
    "ack_timeout_s": (
        "TRUNKLINE_ACK_TIMEOUT_S",
        "TRUNKLINE_ACK_TIMEOUT_MS",
        "BUS_ACK_TIMEOUT_MS",
    ),
    "max_inflight": ("TRUNKLINE_MAX_INFLIGHT", "BUS_MAX_INFLIGHT"),
}
_TYPES = get_type_hints(BrokerOptions, include_extras=True)
# What a broker takes over while it runs; anything else needs a new start.
RELOADED = frozenset(BrokerOptions.__struct_fields__) - {
    *("url", "host", "port", "auth", "ping_s", "policy")
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
    values = read_toml(path).get("broker")
    if not isinstance(values, dict):  # else what it asks for, a guard perhaps, would not be there
        raise InvalidOption(f"{path} has no table [broker]", path=path)
    return values


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option, names in ENVIRONMENT.items():
        name = next((name for name in names if environ.get(name)), None)
        if name is None or (option == "url" and environ[name].startswith(_CLIENT)):
            continue  # not said, or said to the clients of this machine
        values[option] = _read(name, environ[name], option)
    return values


def _read(name: str, text: str, option: str) -> Any:
    """The value of a variable, as the type of its option; a list has commas."""
    if name.endswith("_MS"):
        try:
            return int(text) / 1000
        except ValueError:
            raise InvalidOption(f"{name} is a whole number, not {text!r}", name=name) from None
    kind = _TYPES[option]
    value = [part.strip() for part in text.split(",")] if kind == tuple[str, ...] else text
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidOption(f"{name}={text!r}: {reason(error)}", name=name) from None
