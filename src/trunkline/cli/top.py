"""``trunkline top``: events published and settled a second, and the lag of groups, live."""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from trunkline.cli import OK, Commands, leaf
from trunkline.cli.arguments import at_least, duration, open_log, rest
from trunkline.cli.groups import far_groups, group_row, info_row, ledgers_of
from trunkline.cli.render import Printer, clear_screen
from trunkline.delivery.deadletters import is_hidden
from trunkline.folder import Folder
from trunkline.names import check_pattern, is_dead, matches

if TYPE_CHECKING:
    from trunkline.cli.far import FarLog

Counts = dict[tuple[str, ...], int]
_TOPICS = ("topic", "partitions", "records", "in_s", "dead")
_GROUPS = ("topic", "group", "lag", "out_s", "leases", "waiting", "paused", "members")


def register(commands: Commands[Any]) -> None:
    top = leaf(commands, "top", run, "show rates and lags, again and again, until Ctrl-C")
    top.add_argument("topic", metavar="TOPIC", nargs="?", help="only of these: orders, orders.*")
    top.add_argument("--every", type=duration, default=2.0, metavar="S", help="so often (2)")
    top.add_argument("--count", type=at_least(1), help="show COUNT tables, then end")
    top.add_argument("--limit", type=at_least(1), default=15, help="rows of each table (15)")


def run(args: argparse.Namespace) -> int:
    if args.topic is not None:
        check_pattern(args.topic)
    out = Printer(args)
    shown, before, at = 0, Counts(), 0.0
    with closing(open_log(args)) as log:
        while True:
            now = time.monotonic()
            topics, groups, counts = look(log, args.topic)
            for row in (*topics, *groups):
                key = tuple(str(row[name]) for name in ("topic", "group") if name in row)
                rate = (counts[key] - before[key]) / (now - at) if key in before else None
                row["in_s" if len(key) == 1 else "out_s"] = (
                    None if rate is None else round(max(0.0, rate), 1)
                )
            before, at = counts, now
            if shown and not out.json:
                clear_screen()
            _show(out, args, topics, groups)
            shown += 1
            if shown == args.count:
                return OK
            rest(log, args.every)


def _show(
    out: Printer,
    args: argparse.Namespace,
    topics: list[dict[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    """The busiest topics and the groups that are most behind."""
    topics.sort(key=lambda row: (-(row["in_s"] or 0), -row["records"], row["topic"]))
    groups.sort(key=lambda row: (-row["lag"], -(row["out_s"] or 0), row["topic"], row["group"]))
    out.table(topics[: args.limit], _TOPICS, "there are no topics", optional=("dead",))
    out.say("")
    optional = ("leases", "waiting", "paused", "members")
    out.table(groups[: args.limit], _GROUPS, "there are no groups", optional=optional)
    left = max(0, len(topics) - args.limit) + max(0, len(groups) - args.limit)
    if left:
        out.say(f"\n{left} more rows (--limit)")


def look(
    log: Folder | FarLog, pattern: str | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Counts]:
    """Topics, groups, and how many records each had published or settled."""
    counts: Counts = {}
    topics: dict[str, dict[str, Any]] = {}
    dead: dict[str, int] = {}
    for name, options in sorted(log.topics().items()):
        bounds = [log.bounds(name, n) for n in range(options.partitions)]
        if is_dead(name):
            dead[name] = sum(end - first for first, end in bounds)
        elif pattern is None or matches(pattern, name):
            counts[(name,)] = sum(end for _, end in bounds)
            topics[name] = {
                "topic": name,
                "partitions": options.partitions,
                "records": sum(end - first for first, end in bounds),
                "dead": 0,
            }
    for name, count in dead.items():
        if (of := name.rpartition(".")[0]) in topics:
            topics[of]["dead"] = count
    folder = ledgers_of(log)
    if folder is None:
        assert not isinstance(log, Folder)
        rows = [info_row(one) for one in far_groups(log, pattern)]
    else:
        listening = folder.listening()
        keys = [key for key in folder.groups() if not is_hidden(key)]
        rows = [group_row(folder, key, listening) for key in keys]
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["topic"], row["group"])
        if row["topic"] not in topics:
            continue
        counts[key] = counts.get(key, 0) + row["floor"]
        whole = groups.setdefault(key, {**row, "lag": 0, "leases": 0, "waiting": 0, "members": 0})
        for name in ("lag", "leases", "waiting"):
            whole[name] += row[name]
        whole["members"] = max(whole["members"], row["members"])
        whole["paused"] = whole["paused"] or row["paused"]
    return list(topics.values()), list(groups.values()), counts
