"""``trunkline ndjson``: the NDJSON file with consumer-owned offsets.

The flags, the result object and the exit codes are those of the tools this door stands in for:
0, or 1 for every error. So the words are read here and not by argparse, which has its own ideas.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from trunkline.cli import ERROR, OK
from trunkline.cli.render import amount
from trunkline.errors import InvalidEvent, InvalidOption, TrunklineError
from trunkline.files import ndjson

_PUBLISH = """\
Usage: trunkline ndjson publish --topic <topic> --scope <scope> --actor <actor> [options]

Options:
  --payload-json <json>      what to tell, a JSON object (default: {})
  --ttl-s <seconds>          how long it is of use (default: 600)
  --idempotency-key <key>    another key than topic|scope|actor|ts
  --ts <RFC3339>             another time than now, with its zone
  --event-id <id>            another id than the computed one
  --events-file <path>       the log (default: state/pubsub/events_v0.ndjson)
  -h, --help                 this text
"""
_POLL = """\
Usage: trunkline ndjson poll --consumer <name> [options]

Options:
  --topics <csv>           only these topics, separated by commas
  --max-events <int>       at most so many at once (default: 50)
  --events-file <path>     the log (default: state/pubsub/events_v0.ndjson)
  --offsets-dir <path>     the offsets (default: state/pubsub/offsets)
  --now-ts <RFC3339>       judge expiry by this time
  --wait <time>            wait so long for the first event: 55, 55s, 2m (default: 0)
  --budget <chars>         print about so many characters at most, and at least one event
  -h, --help               this text
"""
_STATUS = """\
Usage: trunkline ndjson status [options]

Options:
  --events-file <path>     the log (default: state/pubsub/events_v0.ndjson)
  --offsets-dir <path>     the offsets (default: state/pubsub/offsets)
  --json                   as one JSON object
  -h, --help               this text
"""
_REPLAY = """\
Usage: trunkline ndjson replay [options]

Options:
  --topics <csv>           only these topics, separated by commas
  --from-line <int>        first line (default: 1)
  --to-line <int>          last line (default: the end)
  --now-ts <RFC3339>       leave out what is expired by then (default: show all)
  --events-file <path>     the log (default: state/pubsub/events_v0.ndjson)
  -h, --help               this text
"""
_USAGE = "Usage: trunkline ndjson publish|poll|status|replay [options]\n"
_LOOK_S = 0.2


class UsageError(Exception):
    """Wrong words: the usage follows the message."""


def register(commands: argparse._SubParsersAction[Any]) -> None:
    # No character starts an option for argparse here: all words come to us as they are.
    parser = commands.add_parser("ndjson", prefix_chars="\0", add_help=False)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    words: list[str] = args.words
    if not words or words[0] not in _VERBS:
        helped = bool(words) and words[0] in ("-h", "--help")
        if words and not helped:
            print(f"Unknown arg: {words[0]}", file=sys.stderr)
        (sys.stdout if helped else sys.stderr).write(_USAGE)
        return OK if helped else ERROR
    verb, usage, known = _VERBS[words[0]]
    try:
        given = _parse(words[1:], known)
        if "help" in given:
            sys.stdout.write(usage)
            return OK
        return verb(given)
    except UsageError as error:
        sys.stderr.write(f"{error}\n{usage}")
    except (TrunklineError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(error, file=sys.stderr)
    return ERROR


def _parse(words: list[str], known: str) -> dict[str, str]:
    given: dict[str, str] = {}
    names = known.split()
    at = 0
    while at < len(words):
        word = words[at]
        if word in ("-h", "--help"):
            return {"help": ""}
        name = word.removeprefix("--")
        if word == "--json" and "json" in names:
            given["json"] = ""
            at += 1
            continue
        if not word.startswith("--") or name not in names:
            raise UsageError(f"Unknown arg: {word}")
        if at + 1 >= len(words):
            raise UsageError(f"{word} needs a value")
        given[name] = words[at + 1]
        at += 2
    return given


def _publish(given: dict[str, str]) -> int:
    topic, scope, actor = (given.get(name, "") for name in ("topic", "scope", "actor"))
    if not (topic and scope and actor):
        raise UsageError("--topic, --scope, and --actor are required")
    ttl_s = _number(given, "ttl-s", ndjson.TTL_S)
    try:
        payload = json.loads(given.get("payload-json", "{}"))
    except (ValueError, RecursionError) as error:
        raise InvalidEvent(f"invalid --payload-json: {error}") from error
    if not isinstance(payload, dict):
        raise InvalidEvent("--payload-json must decode to a JSON object")
    event = ndjson.make_event(
        topic,
        scope,
        actor,
        payload,
        ttl_s=ttl_s,
        idempotency_key=given.get("idempotency-key", ""),
        ts=_moment(given, "ts"),
        event_id=given.get("event-id", ""),
    )
    line = ndjson.publish(event, _events_file(given))
    sys.stdout.write(line.decode())
    return OK


def _poll(given: dict[str, str]) -> int:
    if not given.get("consumer"):
        raise UsageError("--consumer is required")
    limit = _number(given, "max-events", ndjson.MAX_EVENTS)
    budget = _number(given, "budget", 0) if "budget" in given else None
    now = _moment(given, "now-ts")
    until = time.monotonic() + (_duration(given, "wait") if "wait" in given else 0)
    reader = ndjson.Consumer(given["consumer"], _events_file(given), _offsets_dir(given))
    while True:
        with reader.lock():
            poll = reader.poll(_topics(given), limit, now)
            if poll.events or time.monotonic() >= until:
                text = _rendered(poll)
                while budget is not None and len(text) > budget and len(poll.events) > 1:
                    poll = reader.poll(_topics(given), len(poll.events) // 2, now)
                    text = _rendered(poll)
                if poll.replaced:
                    warning = "warning: the log was cut or replaced: reading from line 1"
                    print(warning, file=sys.stderr)
                sys.stdout.write(text)
                # The events must be out before the cursor moves, or a crash in between would
                # lose them.
                sys.stdout.flush()
                reader.commit(poll)
                return OK
        time.sleep(min(_LOOK_S, max(0.0, until - time.monotonic())))


def _rendered(poll: ndjson.Poll) -> str:
    return json.dumps(poll.result(), indent=2, sort_keys=True) + "\n"


def _duration(given: dict[str, str], name: str) -> float:
    from trunkline.cli.arguments import duration

    try:
        return duration(given[name])
    except argparse.ArgumentTypeError as error:
        raise InvalidOption(f"--{name}: {error}", name=name) from None


def _status(given: dict[str, str]) -> int:
    events_file, offsets_dir = _events_file(given), _offsets_dir(given)
    total, states = ndjson.consumers(events_file, offsets_dir)
    rule = ndjson.adoption(events_file, offsets_dir)
    if "json" in given:
        value = {
            "events_file": events_file,
            "lines": total,
            "consumers": [
                {
                    "consumer": state.name,
                    "next_line": state.next_line,
                    "lag": state.lag,
                    "updated_at": state.updated_at and ndjson.format_ts(state.updated_at),
                }
                for state in states
            ],
            "adoption_met": rule.met,
        }
        print(json.dumps(value, sort_keys=True))
        return OK
    print(f"{events_file}: {amount(total, 'line')}")
    for state in states:
        at = ndjson.format_ts(state.updated_at) if state.updated_at else "unknown"
        print(f"{state.name}: next line {state.next_line}, lag {state.lag}, updated {at}")
    print(rule)
    return OK


def _replay(given: dict[str, str]) -> int:
    last = _number(given, "to-line", 0) if "to-line" in given else None
    for event in ndjson.replay(
        _events_file(given),
        _topics(given),
        from_line=_number(given, "from-line", 1),
        to_line=last,
        now=_moment(given, "now-ts"),
    ):
        print(json.dumps(event, sort_keys=True, separators=(",", ":")))
    return OK


def _number(given: dict[str, str], name: str, default: int) -> int:
    text = given.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise InvalidOption(f"--{name} must be a non-negative integer", name=name)
    try:
        return int(text)
    except ValueError as error:
        raise InvalidOption(f"--{name}: {error}", name=name) from error


def _moment(given: dict[str, str], name: str) -> datetime | None:
    text = given.get(name, "")
    return ndjson.parse_ts(text).astimezone(UTC) if text else None


def _topics(given: dict[str, str]) -> set[str]:
    return {name.strip() for name in given.get("topics", "").split(",") if name.strip()}


def _events_file(given: dict[str, str]) -> str:
    return os.fspath(given.get("events-file") or ndjson.EVENTS_FILE)


def _offsets_dir(given: dict[str, str]) -> str:
    return os.fspath(given.get("offsets-dir") or ndjson.OFFSETS_DIR)


_Verb = tuple[Callable[[dict[str, str]], int], str, str]
_VERBS: dict[str, _Verb] = {
    "publish": (
        _publish,
        _PUBLISH,
        "topic scope actor payload-json ttl-s idempotency-key ts event-id events-file",
    ),
    "poll": (_poll, _POLL, "consumer topics max-events events-file offsets-dir now-ts wait budget"),
    "status": (_status, _STATUS, "events-file offsets-dir json"),
    "replay": (_replay, _REPLAY, "topics from-line to-line now-ts events-file"),
}
