"""``trunkline ack``, ``nack`` and ``extend``: settle what ``take`` or ``inbox`` leased."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from trunkline.cli import NOT_FOUND, OK, TAKEN, Commands, leaf
from trunkline.cli.arguments import duration
from trunkline.cli.render import Printer
from trunkline.cli.take import open_bus

if TYPE_CHECKING:
    from trunkline.bus.handles import HandleState, LeaseHandle
    from trunkline.store import Store

Answer = tuple[str, dict[str, Any], int]
Verb = Callable[["Store", "LeaseHandle"], Awaitable[Answer]]

_LOST = {
    "free": ("the lease is over, and the event is to be delivered again", TAKEN),
    "taken": ("the lease is over, and another member has the event", TAKEN),
    "settled": ("the event is settled already", TAKEN),
    "gone": ("the group was moved or removed since", NOT_FOUND),
}


def register(commands: Commands[Any]) -> None:
    ack = leaf(commands, "ack", run_ack, "finish an event that was taken")
    nack = leaf(commands, "nack", run_nack, "give an event that was taken back for a later try")
    nack.add_argument(
        "--delay", type=duration, metavar="S", help="try again after so long (the group's backoff)"
    )
    nack.add_argument("--reason", default="", help="why; a dead letter keeps it")
    extend = leaf(commands, "extend", run_extend, "hold an event that was taken for longer")
    extend.add_argument(
        "--lease", type=duration, default=300.0, metavar="S", help="from now on for so long (5m)"
    )
    for parser in (ack, nack, extend):
        parser.add_argument("handles", metavar="HANDLE", nargs="+", help="as take printed it")


def run_ack(args: argparse.Namespace) -> int:
    from trunkline.bus.handles import HandleState, ack

    async def verb(store: Store, handle: LeaseHandle) -> Answer:
        found = await ack(store, handle)
        if found is HandleState.SETTLED:
            return "was settled before", {"state": "settled"}, OK
        if found in (HandleState.TAKEN, HandleState.GONE):
            return _lost(found)
        return "acked", {"state": "acked"}, OK

    return _each(args, verb)


def run_nack(args: argparse.Namespace) -> int:
    from trunkline.bus.handles import HandleState, nack

    async def verb(store: Store, handle: LeaseHandle) -> Answer:
        done = await nack(store, handle, args.delay, args.reason)
        if done.standing is not HandleState.HELD:
            return _lost(done.standing)
        if done.dead:
            return "is a dead letter: no try is left", {"state": "dead"}, OK
        delay_s = round(done.delay_s, 3)
        return f"comes again in {delay_s:g} s", {"state": "nacked", "delay_s": delay_s}, OK

    return _each(args, verb)


def run_extend(args: argparse.Namespace) -> int:
    from trunkline.bus.handles import HandleState, extend

    async def verb(store: Store, handle: LeaseHandle) -> Answer:
        found = await extend(store, handle, args.lease)
        if found is not HandleState.HELD:
            return _lost(found)
        return f"is held for {args.lease:g} s", {"state": "held", "lease_s": args.lease}, OK

    return _each(args, verb)


def _lost(found: HandleState) -> Answer:
    text, code = _LOST[found.value]
    return text, {"state": found.value}, code


def _each(args: argparse.Namespace, verb: Verb) -> int:
    """Run a verb on every handle. All handles are read before the first one is changed."""
    import asyncio

    from trunkline.bus.handles import LeaseHandle
    from trunkline.errors import NotFound

    handles = [LeaseHandle.parse(text) for text in args.handles]
    out = Printer(args)

    async def run() -> int:
        store = open_bus(args)
        codes = [OK]
        try:
            for handle in handles:
                try:
                    text, fields, code = await verb(store, handle)
                except NotFound as error:
                    text, fields, code = str(error), {"state": "gone"}, NOT_FOUND
                codes.append(code)
                ok = code == OK
                row = {"ok": ok, "topic": handle.topic, "partition": handle.partition}
                row |= {"offset": handle.offset, "group": handle.group, **fields}
                if ok or args.json:
                    out.row(row, f"{handle.place} {text}")
                else:
                    out.note(f"{handle.place}: {text}")
        finally:
            await store.close()
        return max(codes)

    return asyncio.run(run())
