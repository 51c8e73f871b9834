"""``trunkline inbox``: the most important events first, with handles, then a digest of the rest.

It leases more than it shows, sorts, and returns the others as if they were never taken. So the
events that it shows are the most important of all partitions, and no other event loses a try.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

from trunkline.cli import NOT_FOUND, OK, Commands, leaf
from trunkline.cli.arguments import at_least
from trunkline.cli.render import amount, is_terminal, to_json
from trunkline.cli.take import (
    add_taking,
    held_line,
    held_row,
    make_taker,
    open_bus,
    print_or_give_back,
)
from trunkline.event import RANK

if TYPE_CHECKING:
    from trunkline.bus.handles import HeldRecord, Taker
    from trunkline.store import Store

LOOKED_AT = 500  # events that are compared by importance
_DIGEST_CHARS = 200  # of the budget, for the digest
_TOPICS = 3  # in the digest


def register(commands: Commands[Any]) -> None:
    about = "take the most important events, and count the rest"
    inbox = leaf(commands, "inbox", run_inbox, about)
    add_taking(inbox)
    inbox.add_argument("--limit", type=at_least(1), default=20, help="how many at most (20)")
    inbox.add_argument(
        "--budget",
        type=at_least(1),
        metavar="CHARS",
        help="print about CHARS characters at most; the first event is always printed",
    )


def run_inbox(args: argparse.Namespace) -> int:
    import asyncio

    return asyncio.run(_inbox(args))


async def _inbox(args: argparse.Namespace) -> int:
    store = open_bus(args)
    try:
        taker = make_taker(args, store)
        found = await taker.take(max(LOOKED_AT, args.limit), args.wait)
        found.sort(key=_importance)
        shown = choose(found, args.limit, args.budget, as_json=args.json or not is_terminal())
        rest = found[len(shown) :]
        await taker.give_back(rest)
        last = await _digest(args, store, taker, shown, rest)
        await print_or_give_back(args, taker, shown, last)
    finally:
        await store.close()
    return OK if shown else NOT_FOUND


def _importance(held: HeldRecord) -> tuple[int, Any, str, int, int]:
    event, record = held.record.event, held.record
    return RANK[event.priority], event.ts, event.topic, record.partition, record.offset


def choose(
    found: list[HeldRecord], limit: int, budget: int | None, *, as_json: bool
) -> list[HeldRecord]:
    """The first events that fit into the budget; at least one, or an inbox with a long event in
    front would be stuck.
    """
    shown: list[HeldRecord] = []
    left = float("inf") if budget is None else budget - _DIGEST_CHARS
    for held in found[:limit]:
        left -= 1 + len(to_json(held_row(held)) if as_json else held_line(held))
        if left < 0 and shown:
            break
        shown.append(held)
    return shown


async def _digest(
    args: argparse.Namespace,
    store: Store,
    taker: Taker,
    shown: list[HeldRecord],
    rest: list[HeldRecord],
) -> str:
    """One line on the events that are not shown; nothing if there are none."""
    from trunkline.group import Group

    more: Counter[str] = Counter()
    leased = 0
    for key in taker.keys:
        first, end = await store.bounds(key.topic, key.partition)

        def count(group: Group, first: int = first, end: int = end) -> tuple[int, int]:
            return group.lag(end, first), len(group.leases)

        lag, leases = await store.change(key, count)
        more[key.topic] += lag - leases
        leased += leases
    more = +more
    total, at_work = more.total(), leased - len(shown)
    if args.quiet or not (total or at_work):
        return ""
    ranks: Counter[str] = Counter(held.record.event.priority for held in rest)
    seen = {name: ranks[name] for name in RANK if ranks[name]}
    oldest = min((held.record.event.ts for held in rest), default=None)
    if args.json or not is_terminal():
        topics = dict(more.most_common(_TOPICS))
        row = {"more": total, "in_flight": at_work, "priorities": seen, "topics": topics}
        return to_json({**row, "oldest": oldest})
    words = [f"{amount(total, 'more event')}"]
    if seen:
        words.append(", ".join(f"{n} {name}" for name, n in seen.items()))
    if more:
        words.append(", ".join(f"{topic} {n}" for topic, n in more.most_common(_TOPICS)))
    if oldest is not None:
        words.append(f"the oldest of {oldest:%H:%M}")
    if at_work:
        words.append(f"{at_work} in flight")
    return "; ".join(words)
