"""``trunkline bridge``: carry events between a spool, an NDJSON file and any bus."""

from __future__ import annotations

import argparse
import json
from typing import Any

from trunkline.cli import OK
from trunkline.cli.context import without_secrets
from trunkline.cli.render import amount
from trunkline.names import check_pattern
from trunkline.patterns.bridge import Carried, follow, open_bridge


def register(commands: argparse._SubParsersAction[Any]) -> None:
    about = "carry events from one place to another: spool:DIR, ndjson:FILE, or a bus"
    parser = commands.add_parser("bridge", help=about, description=about, allow_abbrev=False)
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("sink", metavar="DST")
    parser.add_argument("--topics", default="", help="only these, comma-separated, * and > allowed")
    parser.add_argument(
        "--follow", action="store_true", help="stay, and carry events that come later"
    )
    parser.add_argument(
        "--ack", action="store_true", help="acknowledge events of a spool that were carried"
    )
    parser.add_argument(
        "--skip-invalid", action="store_true", help="pass over events that the sink cannot hold"
    )
    for side in ("source", "sink"):
        parser.add_argument(
            f"--{side}-token", metavar="TOKEN", help=f"the token for the broker of the {side}"
        )
    # Without defaults: typed before the verb they are not undone here. It has no --url: SRC and DST
    # are the places.
    for flags in (("--json",), ("-q", "--quiet"), ("--no-color",)):
        parser.add_argument(*flags, action="store_true", default=argparse.SUPPRESS)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    topics = [check_pattern(name.strip()) for name in args.topics.split(",") if name.strip()]
    source, source_token = _place(args.source, args.source_token)
    sink, sink_token = _place(args.sink, args.sink_token)
    with open_bridge(
        source,
        sink,
        topics,
        ack=args.ack,
        skip_invalid=args.skip_invalid,
        tokens=(source_token, sink_token),
    ) as bridge:
        if not args.follow:
            _show(args, bridge.run())
            return OK
        for counts in follow(bridge):
            _show(args, counts)
    return OK


def _place(text: str, token: str | None) -> tuple[str, str | None]:
    """A place and its token; ``context:NAME`` is that of a context."""
    scheme, _, name = text.partition(":")
    if scheme != "context":
        return text, token
    from trunkline.cli.context import find, read_token

    found = find(name)
    if token is None and found.token_file is not None:
        token = read_token(found.token_file)
    return found.url, token


def _show(args: argparse.Namespace, counts: Carried) -> None:
    values = counts.to_json()
    if args.json:
        ends = {"source": without_secrets(args.source), "sink": without_secrets(args.sink)}
        print(json.dumps({**ends, **values}), flush=True)
        return
    if args.quiet:
        return
    extra = ", ".join(f"{n} {name}" for name, n in values.items() if n and name != "copied")
    print(
        f"copied {amount(values['copied'], 'event')}" + (f" ({extra})" if extra else ""), flush=True
    )
