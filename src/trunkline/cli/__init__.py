"""The command line. One module per noun, imported only when its verb is typed.

A verb's module has ``register(commands)``, which adds its parsers and sets ``run`` on them: a
function that takes the parsed arguments and returns an exit code, or None for success.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from trunkline import errors

OK, ERROR, NO_BUS, NOT_FOUND, BAD_ARGUMENTS, DUPLICATE = range(6)

EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (errors.Duplicate, DUPLICATE),
    (errors.Invalid, BAD_ARGUMENTS),
    (errors.NoBus, NO_BUS),
    (errors.NotFound, NOT_FOUND),
    (errors.TrunklineError, ERROR),
    (OSError, ERROR),
)

VERBS: dict[str, tuple[str, str]] = {
    "pub": ("records", "publish events"),
    "sub": ("records", "receive events as a member of a group"),
    "tail": ("records", "show the last events, and follow"),
    "grep": ("records", "find events by content"),
    "get": ("records", "show one event"),
    "topic": ("topics", "list, create, edit, remove, purge and compact topics"),
    "group": ("groups", "list, seek, pause, resume and remove groups"),
    "dlq": ("dead", "list, show, redrive and drop dead letters"),
    "init": ("folder", "make a bus folder"),
    "verify": ("folder", "check every byte of a bus folder"),
    "doctor": ("folder", "say what is wrong and what to do about it"),
    "backup": ("folder", "copy a bus folder, also while it is written"),
    "restore": ("folder", "make a bus folder from a backup"),
    "bench": ("folder", "measure this machine"),
    "spool": ("spool", "a directory as a priority queue"),
    "ndjson": ("ndjson", "an NDJSON file with consumer-owned offsets"),
    "claim": ("claims", "hold a path or glob for a while"),
    "release": ("claims", "give a claim back"),
    "claims": ("claims", "list who holds what"),
    "bridge": ("bridge", "move events between two places"),
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(BAD_ARGUMENTS, f"{self.prog}: {message}\n")


def build(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = Parser(prog="trunkline", description="A durable event bus that starts as a folder.")
    commands = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verb = next((word for word in argv if not word.startswith("-")), None)
    if verb in VERBS:
        import_module(f"trunkline.cli.{VERBS[verb][0]}").register(commands)
    else:
        for name, (_, about) in VERBS.items():
            commands.add_parser(name, help=about)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = build(argv).parse_args(argv)
    try:
        return args.run(args) or OK
    except (errors.TrunklineError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return OK
        print(f"trunkline: {error}", file=sys.stderr)
        return next(code for kind, code in EXIT_CODES if isinstance(error, kind))
    except KeyboardInterrupt:
        return 130
