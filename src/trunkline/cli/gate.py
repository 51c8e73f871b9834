"""``trunkline gate``: the decisions of attention gates, and what other thresholds would do."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

from trunkline.cli import OK, Commands, branch, leaf
from trunkline.cli.arguments import bus_path, bus_url
from trunkline.cli.render import Printer, to_time
from trunkline.cognition.decision import Action, Decision, read_decision
from trunkline.cognition.replay import parse_thresholds, replayed, summed
from trunkline.errors import NotFound
from trunkline.event import Record
from trunkline.names import ATTENTION, check_pattern, matches

_READ = 1000


def register(commands: Commands[Any]) -> None:
    below = branch(commands, "gate", "show attention decisions and replay their thresholds")

    ls = leaf(below, "ls", run_ls, "list the decisions of attention gates")
    ls.add_argument("--action", choices=[one.value for one in Action], help="only this action")

    replay = leaf(below, "replay", run_replay, "apply other thresholds to the decisions in the log")
    replay.add_argument(
        "--thresholds", required=True, metavar="DROP,ADMIT,BOOST", help="for example 0.3,0.5,0.9"
    )
    replay.add_argument("--changed", action="store_true", help="list each event that changes")
    for parser in (ls, replay):
        parser.add_argument("--topic", metavar="TOPIC", help="only events of these: orders.*")
        parser.add_argument("--group", help="only decisions before this group")


def _decisions(args: argparse.Namespace) -> Iterator[tuple[Record, Decision]]:
    import trunkline

    topic = None if args.topic is None else check_pattern(args.topic)
    path = bus_path(bus_url(args))
    with trunkline.open(f"file:{path}", create=False, allow_network=args.allow_network) as bus:
        if ATTENTION not in bus.topics():
            raise NotFound(
                f"there is no topic {ATTENTION}", hint="no attention gate has decided anything here"
            )
        start: int | None = None
        while records := bus.read(ATTENTION, start, _READ):
            for record in records:
                decision = read_decision(record.event)
                if (
                    decision is not None
                    and (topic is None or matches(topic, decision.topic))
                    and (args.group is None or args.group == decision.group)
                ):
                    yield record, decision
            start = records[-1].offset + 1


def run_ls(args: argparse.Namespace) -> int:
    rows = [
        {
            "at": to_time(record.event.ts),
            "topic": one.topic,
            "partition": one.partition,
            "offset": one.offset,
            "group": one.group,
            "action": one.action.value,
            "by": one.by.value,
            "salience": one.salience,
            "reason": one.reason,
            "id": one.id,
            "features": one.features,
        }
        for record, one in _decisions(args)
        if args.action is None or args.action == one.action.value
    ]
    columns = ("at", "topic", "offset", "group", "action", "by", "salience", "reason")
    Printer(args).table(rows, columns, "there are no decisions")
    return OK


def run_replay(args: argparse.Namespace) -> int:
    thresholds = parse_thresholds(args.thresholds)
    found = list(replayed((one for _, one in _decisions(args)), thresholds))
    output = Printer(args)
    if args.changed:
        rows: list[dict[str, Any]] = [
            {
                "topic": one.decision.topic,
                "offset": one.decision.offset,
                "group": one.decision.group,
                "salience": one.decision.salience,
                "was": one.decision.action.value,
                "now": one.action.value,
                "id": one.decision.id,
            }
            for one in found
            if one.is_changed
        ]
        columns = ("topic", "offset", "group", "salience", "was", "now", "id")
        output.table(rows, columns, "no event changes")
        return OK
    rows = [
        {"topic": topic, "group": group, "was": was.value, "now": now.value, "events": count}
        for (topic, group, was, now), count in sorted(
            summed(found).items(), key=lambda item: (*item[0][:2], item[0][2].value)
        )
    ]
    output.table(rows, ("topic", "group", "was", "now", "events"), "there are no decisions")
    totals = Counter(one.action for one in found)
    changed = sum(one.is_changed for one in found)
    told = ", ".join(f"{totals[action]} {action.value}" for action in Action)
    if not args.json:
        output.say(f"{len(found)} events: {told}; {changed} change")
    return OK
