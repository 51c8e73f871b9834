"""``trunkline bridge``: carry events between a spool, an NDJSON file and a bus folder."""

from __future__ import annotations

import argparse
import json
from typing import Any

from trunkline.bridge import Carried, follow, open_bridge
from trunkline.cli import OK


def register(commands: argparse._SubParsersAction[Any]) -> None:
    about = "carry events from one place to another: spool:DIR, ndjson:FILE or file:DIR"
    parser = commands.add_parser("bridge", help=about, description=about)
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("sink", metavar="DST")
    parser.add_argument("--topics", default="", help="only these, comma-separated, * and > allowed")
    parser.add_argument("--follow", action="store_true", help="stay, and carry what comes")
    parser.add_argument("--ack", action="store_true", help="acknowledge what came from a spool")
    parser.add_argument("--skip-invalid", action="store_true", help="pass over what does not fit")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    topics = [name.strip() for name in args.topics.split(",") if name.strip()]
    with open_bridge(
        args.source, args.sink, topics, ack=args.ack, skip_invalid=args.skip_invalid
    ) as bridge:
        if not args.follow:
            _show(args, bridge.run())
            return OK
        for counts in follow(bridge):
            _show(args, counts)
    return OK


def _show(args: argparse.Namespace, counts: Carried) -> None:
    values = counts.to_json()
    if args.json:
        print(json.dumps({"source": args.source, "sink": args.sink, **values}), flush=True)
        return
    extra = ", ".join(f"{n} {name}" for name, n in values.items() if n and name != "copied")
    print(f"copied {values['copied']} events" + (f" ({extra})" if extra else ""), flush=True)
