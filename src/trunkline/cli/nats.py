"""``trunkline nats up``: a NATS server with JetStream for development, one node or three."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

from trunkline.bus.nats.server import Servers
from trunkline.cli import branch, leaf
from trunkline.cli.arguments import at_least
from trunkline.errors import InvalidOption

PORT = 4222


def register(commands: argparse._SubParsersAction[Any]) -> None:
    below = branch(commands, "nats", "a NATS server for development")
    up = leaf(below, "up", run, "start a NATS server, one node or a cluster of three")
    up.add_argument("--nodes", type=int, default=1, help="1, or 3 for a cluster (1)")
    up.add_argument("--port", type=at_least(1), default=PORT, help=f"of the first node ({PORT})")
    up.add_argument("--folder", default=".nats", help="where the servers keep their files (.nats)")


def run(args: argparse.Namespace) -> int:
    if args.nodes not in (1, 3):
        hint = "a cluster of 3 goes on when one node is down"
        raise InvalidOption(f"--nodes is 1 or 3, not {args.nodes}", hint=hint)
    if args.port + args.nodes > 65536:
        raise InvalidOption(f"there is no port {args.port + args.nodes - 1}", name="port")
    done = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    with Servers(Path(args.folder).absolute(), args.nodes, port=args.port) as servers:
        if args.json:
            about = {"url": servers.url, "monitor": servers.monitor, "pid": os.getpid()}
            print(json.dumps({**about, "nodes": args.nodes}), flush=True)
        elif not args.quiet:
            kind = "one node" if args.nodes == 1 else f"{args.nodes} nodes"
            print(f"{servers.url} ({kind}, every write synced; monitor {servers.monitor})")
            if not servers.is_usual:
                print(
                    f"its usual monitoring port is taken: connect with "
                    f"monitor={servers.monitor!r}, else receipts of one node say os, not fsync"
                )
            print("Ctrl-C ends it; its files stay", flush=True)
        done.wait()
    return 0
