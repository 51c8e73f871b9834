"""``trunkline spool``: a directory as a priority queue.

Everything ``nbs-bus`` does, by the same words and with the same output, and the events that chat
and worker programs publish by convention.
"""

from __future__ import annotations

import argparse
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
    return nbs_bus.main(words)


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
