"""``trunkline flag``: switch middleware of running processes on and off."""

from __future__ import annotations

import argparse
import getpass
from typing import Any

from trunkline.cli import OK, Commands, branch, leaf
from trunkline.cli.arguments import bus_path, bus_url
from trunkline.cli.render import Printer, to_time
from trunkline.clock import SystemClock
from trunkline.middleware.flags import FlagChange, flag_events
from trunkline.names import FLAGS, check_topic


def register(commands: Commands[Any]) -> None:
    below = branch(commands, "flag", "switch middleware on and off")
    leaf(below, "ls", run_ls, "list flags as they were last set")
    for name, about in (("on", "switch a middleware on"), ("off", "switch a middleware off")):
        parser = leaf(below, name, run_set, about)
        parser.add_argument("flag", metavar="FLAG")
        parser.add_argument("--by", default="", help="the actor that switches it (else the user)")
        parser.add_argument("--reason", default="", help="why, for the audit")
        parser.set_defaults(on=name == "on")


def _open(args: argparse.Namespace) -> Any:
    import trunkline

    path = bus_path(bus_url(args))
    return trunkline.open(f"file:{path}", create=False, allow_network=args.allow_network)


def run_ls(args: argparse.Namespace) -> int:
    rows: dict[str, dict[str, Any]] = {}
    with _open(args) as bus:
        start = None
        while FLAGS in bus.topics() and (records := bus.read(FLAGS, start, 1000)):
            start = records[-1].offset + 1
            for record in records:
                if isinstance(payload := record.event.payload, dict) and "flag" in payload:
                    rows[payload["flag"]] = {
                        "flag": payload["flag"],
                        "state": "on" if payload.get("on") else "off",
                        "since": to_time(record.event.ts),
                        "by": payload.get("by", ""),
                        "reason": payload.get("reason", ""),
                    }
    columns = ("flag", "state", "since", "by", "reason")
    Printer(args).table(rows.values(), columns, "no flag was ever set")
    return OK


def run_set(args: argparse.Namespace) -> int:
    change = FlagChange(check_topic(args.flag), args.on, args.by or _user(), args.reason)
    with _open(args) as bus:
        if FLAGS not in bus.topics():
            bus.define(FLAGS, compact=True)
        for event in flag_events(change, SystemClock().now()):
            bus.publish(event)
    state = "on" if args.on else "off"
    Printer(args).row({"flag": args.flag, "state": state}, f"{args.flag} is {state}")
    return OK


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
