"""``trunkline spool``: a directory as a priority queue.

Everything ``nbs-bus`` does, by the same words and with the same output, and the events that chat
and worker programs publish by convention.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from trunkline.cli import BAD_ARGUMENTS, OK, Parser
from trunkline.files import conventions, nbs_bus
from trunkline.files.spool import Spool

_USAGE = """\
usage: trunkline spool publish|check|read|ack|ack-all|prune|status|watch|help ...   as nbs-bus
       trunkline spool publish-worker-event DIR WORKER STATE [DETAIL] [--dedup-window=N]
       trunkline spool publish-chat DIR HANDLE MESSAGE [--channel=NAME] [--human]
"""
_OPTIONS: dict[str, tuple[str, ...]] = {
    "publish": ("--dedup-window=",),
    "check": ("--handle=", "--limit="),
    "read": (),
    "ack": (),
    "ack-all": ("--handle=",),
    "prune": ("--max-bytes=",),
    "status": (),
    "watch": ("--handle=", "--timeout=", "--limit="),
}


def register(commands: argparse._SubParsersAction[Any]) -> None:
    # No character starts an option for argparse here: nbs-bus reads its words itself.
    parser = commands.add_parser("spool", prefix_chars="\0", add_help=False)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    words: list[str] = args.words
    match words[:1]:
        case ["publish-worker-event"]:
            return _worker(words[1:])
        case ["publish-chat"]:
            return _chat(words[1:])
        case ["-h" | "--help"]:
            sys.stdout.write(_USAGE)
            return OK
        case []:
            sys.stderr.write(_USAGE)
            return BAD_ARGUMENTS
    unknown = _unknown(words)
    if unknown is not None:
        hint = "a payload that begins with - goes behind --, or on stdin by -"
        print(f"Error: unknown option: {unknown} ({hint})", file=sys.stderr)
        return BAD_ARGUMENTS
    if words[0] == "publish" and len(words) > 5:
        return _publish(words[1:])
    return nbs_bus.main(words)


def _unknown(words: list[str]) -> str | None:
    """The first option that the command does not have: ``nbs-bus`` would pass over it."""
    known = _OPTIONS.get(words[0])
    if known is None:
        return None
    behind = words[1 : words.index("--")] if "--" in words else words[1:]
    return next(
        (w for w in behind if w.startswith("--") and not w.startswith(known or ("\0",))), None
    )


def _publish(words: list[str]) -> int:
    """``publish DIR SOURCE TYPE PRIORITY PAYLOAD``: the payload may be ``-`` for all of stdin, and
    may begin with ``--`` where a ``--`` stands before it.
    """
    plain, marker = words[4:], "--" in words
    options = [word for word in plain if word.startswith("--dedup-window=")]
    rest = [word for word in plain if word not in options]
    if marker:
        at = words.index("--", 4)
        options = [word for word in words[4:at] if word.startswith("--dedup-window=")]
        rest = [word for word in words[4:at] if word not in options] + words[at + 1 :]
    if len(rest) > 1:
        print(f"Error: one payload, not {len(rest)}: quote it", file=sys.stderr)
        return BAD_ARGUMENTS
    if not rest or (rest[0] != "-" and not marker):
        return nbs_bus.main(["publish", *words[:4], *rest, *options])
    payload = sys.stdin.buffer.read() if rest[0] == "-" else os.fsencode(rest[0])
    directory, source, type_, priority = map(os.fsencode, words[:4])
    try:
        nbs_bus.check_words(source, type_)
        given = [os.fsencode(word) for word in options]
        return nbs_bus.publish(directory, source, type_, priority, payload, given)
    except nbs_bus.Exit as error:
        sys.stderr.write(os.fsdecode(error.line) + "\n")
        return error.code


def _worker(words: list[str]) -> int:
    parser = Parser("trunkline spool publish-worker-event")
    parser.add_argument("directory")
    parser.add_argument("worker")
    parser.add_argument("state", choices=tuple(conventions.WORKER_STATES))
    parser.add_argument("detail", nargs="?", default="")
    parser.add_argument("--dedup-window", type=int, metavar="S")
    args = parser.parse_args(words)
    spool = Spool(args.directory)
    print(
        conventions.publish_worker_event(
            spool, args.worker, args.state, args.detail, dedup_window_s=args.dedup_window
        )
    )
    return OK


def _chat(words: list[str]) -> int:
    parser = Parser("trunkline spool publish-chat")
    parser.add_argument("directory")
    parser.add_argument("handle")
    parser.add_argument("message")
    parser.add_argument("--channel", default="")
    parser.add_argument("--human", action="store_true")
    args = parser.parse_args(words)
    names = conventions.publish_chat(
        Spool(args.directory), args.handle, args.message, channel=args.channel, human=args.human
    )
    print("\n".join(names))
    return OK
