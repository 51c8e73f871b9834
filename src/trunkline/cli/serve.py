"""``trunkline serve``: the broker."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
from typing import Any

from trunkline.cli import leaf
from trunkline.cli.context import without_secrets
from trunkline.errors import InvalidOption

# Flag, option, type, help. What is not typed here is not asked for again below.
_TEXT: tuple[tuple[str, str, str], ...] = (
    ("--host", "host", "the address to listen on (127.0.0.1)"),
    ("--tls-cert", "tls_cert", "certificate chain, PEM"),
    ("--tls-key", "tls_key", "its key, PEM"),
    ("--tls-client-ca", "tls_client_ca", "ask clients for a certificate signed by this, PEM"),
    ("--policy", "policy", "TOML file with the rights of each actor"),
)
_NUMBERS: tuple[tuple[str, str, type, str], ...] = (
    ("--port", "port", int, "the port, for WebSocket and HTTP (7070)"),
    ("--max-inflight", "max_inflight", int, "of a subscription that does not say (32)"),
    ("--connections", "connections", int, "at most (10000)"),
    ("--frame-bytes", "frame_bytes", int, "of one message at most"),
    ("--rate", "rate_frames_s", int, "frames a second from one agent at most"),
    ("--stall", "stall_s", float, "seconds until a consumer that takes nothing is let go"),
    ("--metrics-every", "metrics_s", float, "seconds between two events of system.metrics"),
    ("--audit", "audit", float, "share of decisions told on system.bus.audit, 0 to 1"),
)


def register(commands: argparse._SubParsersAction[Any]) -> None:
    parser = leaf(commands, "serve", run, "run the broker: WebSocket and HTTP on one port")
    for flag, name, about in _TEXT:
        parser.add_argument(flag, dest=name, help=about)
    for flag, name, kind, about in _NUMBERS:
        parser.add_argument(flag, dest=name, type=kind, help=about)
    parser.add_argument(
        "--ack-timeout-ms", type=int, help="of groups that are made here without a policy (30000)"
    )
    parser.add_argument("--auth", action="store_true", default=None, help="deny without a token")
    parser.add_argument("--origin", dest="origins", action="append", help="of web pages allowed")
    parser.add_argument("--name", dest="hosts", action="append", help="a host name of this broker")
    parser.add_argument("--config", metavar="FILE", help="TOML with a table [broker]")
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=os.environ.get("TRUNKLINE_LOG_LEVEL", "warning"),
        help="the lowest level that is logged to stderr (warning)",
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default=os.environ.get("TRUNKLINE_LOG_FORMAT", "text"),
        help="one line of text, or one JSON object a line (text)",
    )


def run(args: argparse.Namespace) -> int:
    try:
        from trunkline.broker import logs
        from trunkline.broker.options import gather
        from trunkline.broker.server import Broker, serve
    except ImportError as error:
        raise InvalidOption(
            f"the broker needs {error.name}", hint="pip install 'trunkline[broker]'"
        ) from None

    names = {name for _, name, _ in _TEXT} | {name for _, name, *_ in _NUMBERS}
    flags: dict[str, Any] = {name: getattr(args, name) for name in names | {"auth"}}
    flags["url"] = getattr(args, "url", None)
    flags["origins"] = tuple(args.origins) if args.origins else None
    flags["hosts"] = tuple(args.hosts) if args.hosts else None
    if args.ack_timeout_ms is not None:
        flags["ack_timeout_s"] = args.ack_timeout_ms / 1000
    options = gather(flags, file=args.config)
    if args.log_level not in logs.LEVELS or args.log_format not in ("text", "json"):
        raise InvalidOption(
            "TRUNKLINE_LOG_LEVEL is debug, info, warning or error, TRUNKLINE_LOG_FORMAT is text "
            "or json"
        )
    logs.configure(args.log_level, args.log_format)

    def ready(broker: Broker) -> None:
        guarded, bus = broker.hub.rights.is_on, without_secrets(options.url)
        if args.json:
            about = {"url": broker.url, "bus": bus, "pid": os.getpid(), "auth": guarded}
            print(json.dumps(about), flush=True)
        elif not args.quiet:
            lock = "tokens are asked for" if guarded else "open to this machine"
            http = broker.url.replace("ws", "http", 1)
            print(f"serving {bus} at {broker.url} and {http} ({lock})", flush=True)

    # What is in flight is no garbage, and to look through it every 700 objects, as is usual, takes
    # a tenth of the broker's time.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    # A thread that reads files may keep the interpreter for 5 ms, as is usual: publishes wait.
    sys.setswitchinterval(0.0005)
    config = args.config or os.environ.get("TRUNKLINE_CONFIG")
    files = [config] if config else []
    _runner()(serve(options, ready, lambda: gather(flags, file=args.config), files))
    return 0


def _runner() -> Any:
    """uvloop where it is installed: it is why the broker keeps up."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run
