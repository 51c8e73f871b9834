"""``trunkline policy``: check a policy file, and explain what it allows an actor."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from typing import Any

from trunkline.cli import ERROR, OK, branch, leaf
from trunkline.cli.arguments import parse_time
from trunkline.cli.render import Printer, amount
from trunkline.errors import InvalidOption
from trunkline.event import BANDS, Event
from trunkline.guard.config import read_toml
from trunkline.guard.policy import Policy, Question
from trunkline.names import check_topic


def register(commands: argparse._SubParsersAction[Any]) -> None:
    below = branch(commands, "policy", "check and explain a policy file")
    check = leaf(below, "check", run_check, "say whether a policy file is valid")
    check.add_argument("file", help="a TOML file with actors and roles")
    explain = leaf(below, "explain", run_explain, "say whether something is allowed, and why")
    explain.add_argument("file", help="a TOML file with actors and roles")
    explain.add_argument("actor", help="the actor that asks")
    explain.add_argument("action", choices=("publish", "read", "admin"))
    explain.add_argument("topic")
    explain.add_argument("--space", help="the event's space")
    explain.add_argument("--band", choices=BANDS, default="GREEN", help="the event's band (GREEN)")
    explain.add_argument("--cap", action="append", default=[], help="a capability it demands")
    explain.add_argument("--device", default="", help="the actor's device")
    explain.add_argument("--at", metavar="TIME", help="when (now)")


def run_check(args: argparse.Namespace) -> int:
    policy = Policy.parse(read_toml(args.file))
    rules = sum(len(role.allow) + len(role.deny) for role in policy.roles.values())
    unused = sorted(
        policy.roles.keys()
        - {name for names in policy.actors.values() for name in names}
        - {name for role in policy.roles.values() for name in role.includes}
    )
    row = {
        "ok": True,
        "actors": len(policy.actors),
        "roles": len(policy.roles),
        "rules": rules,
        "unused": unused,
    }
    counts = (
        f"{amount(len(policy.actors), 'actor')}, {amount(len(policy.roles), 'role')}, "
        f"{amount(rules, 'rule')}"
    )
    out = Printer(args)
    for name in unused:
        out.note(f"no actor has the role {name}")
    out.row(row, f"{args.file}: {counts}: valid")
    return OK


def run_explain(args: argparse.Namespace) -> int:
    policy = Policy.parse(read_toml(args.file))
    now = datetime.now(UTC)
    when = now if args.at is None else parse_time(args.at, now)
    if when is None:
        raise InvalidOption(f"not a time: {args.at!r}", name="at")
    event = Event(
        topic=check_topic(args.topic), space=args.space, band=args.band, caps=tuple(args.cap)
    )
    ask = Question(args.actor, args.action, args.topic, when, args.device, event)
    decision = policy.decide(ask)
    row = {
        "allowed": decision.allowed,
        "actor": args.actor,
        "roles": policy.roles_of(args.actor),
        "rule": decision.rule,
        "missing": decision.missing,
    }
    said = f"allowed by {decision.rule}" if decision.allowed else f"denied: {decision.missing}"
    Printer(args).row(row, said)
    return OK if decision.allowed else ERROR
