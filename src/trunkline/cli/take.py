"""``trunkline take``: lease events to handles.

The lease belongs to the handle and not to this process: ``trunkline ack HANDLE`` settles it from
any process, also after this one was killed.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from trunkline.cli import NOT_FOUND, OK, Commands, leaf
from trunkline.cli.arguments import (
    at_least,
    bus_path,
    choose_bus,
    duration,
    parse_span,
    refuse,
)
from trunkline.cli.receive import group_start
from trunkline.cli.render import is_terminal, record_line, record_row, to_json
from trunkline.clock import SystemClock

if TYPE_CHECKING:
    from trunkline.bus.handles import HeldRecord, Taker
    from trunkline.store import Store


def register(commands: Commands[Any]) -> None:
    take = leaf(commands, "take", run_take, "lease events to handles that outlive the command")
    add_taking(take)
    take.add_argument("--limit", type=at_least(1), default=1, help="how many at most (1)")


def add_taking(parser: argparse.ArgumentParser) -> None:
    """The options of every command that leases events to handles."""
    parser.add_argument("topic", metavar="TOPIC", help="a topic, or a pattern with * and >")
    parser.add_argument(
        "--group", required=True, help="take records that this group has not settled"
    )
    parser.add_argument(
        "--lease", type=duration, default=300.0, metavar="S", help="hold each for so long (5m)"
    )
    parser.add_argument(
        "--wait", type=duration, default=0.0, metavar="S", help="wait so long for the first (0)"
    )
    parser.add_argument(
        "--from", dest="start", metavar="PLACE", help="where a new group begins: start, end, 7, ..."
    )
    parser.add_argument("--where", metavar="SQL", help="only events that meet this condition")


def open_bus(args: argparse.Namespace) -> Store:
    """The store of this command; ``NoBus`` if there is none."""
    from trunkline.bus.connect import REMOTE
    from trunkline.store import open_store

    url = choose_bus(args).url
    if url.partition(":")[0] in REMOTE:
        refuse(url, "handles", "a lease to a handle")
    if url.startswith("file:"):
        url = f"file:{bus_path(url)}"
        return open_store(url, create=False, allow_network=args.allow_network)
    return open_store(url, create=False)


def make_taker(args: argparse.Namespace, store: Store) -> Taker:
    from trunkline.bus.handles import Taker

    span = None if args.start is None else parse_span(args.start, SystemClock().now())
    start = group_start(span) or "earliest"
    return Taker(store, args.topic, args.group, lease_s=args.lease, start=start, where=args.where)


def held_row(held: HeldRecord) -> dict[str, Any]:
    return record_row(
        held.record, attempt=held.attempt, lease_s=held.lease_s, handle=str(held.handle)
    )


def held_line(held: HeldRecord) -> str:
    tries = f" (attempt {held.attempt})" if held.attempt > 1 else ""
    return f"{record_line(held.record)}{tries}\n  {held.handle}"


def run_take(args: argparse.Namespace) -> int:
    import asyncio

    return asyncio.run(_take(args))


async def _take(args: argparse.Namespace) -> int:
    store = open_bus(args)
    try:
        taker = make_taker(args, store)
        found = await taker.take(args.limit, args.wait)
        await print_or_give_back(args, taker, found)
    finally:
        await store.close()
    return OK if found else NOT_FOUND


async def print_or_give_back(
    args: argparse.Namespace, taker: Taker, found: list[HeldRecord], last: str = ""
) -> None:
    """Print what was taken. What could not be printed goes back: nobody has its handle."""
    as_json = args.json or not is_terminal()
    printed = 0
    try:
        for held in found:
            if args.quiet:
                print(held.handle)
            else:
                print(to_json(held_row(held)) if as_json else held_line(held))
            sys.stdout.flush()
            printed += 1
        if last:
            print(last)
            sys.stdout.flush()
    except OSError:
        await taker.give_back(found[printed:])
        raise
