"""The command line. One module per noun, imported only when its verb is typed.

A verb's module has ``register(commands)``, which adds its parsers and sets ``run`` on them: a
function that takes the parsed arguments and returns an exit code, or None for success.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import resource
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from trunkline import errors

OK, ERROR, NO_BUS, NOT_FOUND, BAD_ARGUMENTS, DUPLICATE = range(6)
INTERRUPTED = 130

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
    "sub": ("receive", "receive events, as a member of a group or looking on"),
    "tail": ("receive", "show the last events, and follow"),
    "grep": ("records", "find events by content"),
    "get": ("records", "show events by offset or time"),
    "topic": ("topics", "list, create, edit, remove, purge and compact topics"),
    "group": ("groups", "list, edit, seek, pause, resume and remove groups"),
    "dlq": ("dead", "list, show, redrive and drop dead letters"),
    "init": ("folder", "make a bus folder"),
    "verify": ("folder", "check every byte of a bus folder"),
    "doctor": ("doctor", "say what is wrong and what to do about it"),
    "backup": ("copies", "copy a bus folder, also while it is written"),
    "restore": ("copies", "make a bus folder from a backup"),
    "bench": ("folder", "measure this machine"),
    "spool": ("spool", "a directory as a priority queue"),
    "ndjson": ("ndjson", "an NDJSON file with consumer-owned offsets"),
    "claim": ("claims", "hold a path or glob for a while"),
    "release": ("claims", "give a claim back"),
    "claims": ("claims", "list who holds what"),
    "bridge": ("bridge", "move events between two places"),
    "serve": ("serve", "run the broker: WebSocket and HTTP on one port"),
    "token": ("token", "make, list and revoke the broker's tokens"),
    "spark": ("spark", "a Spark shell, submit, or a small cluster"),
    "pipeline": ("pipeline", "turn events into tables, reports and events"),
}

_COMMON: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--url",), {"help": "the bus: file:<folder> (else TRUNKLINE_URL, else file:.bus)"}),
    (("--json",), {"action": "store_true", "help": "print one JSON object a line"}),
    (("-q", "--quiet"), {"action": "store_true", "help": "print less: names, or nothing"}),
    (("--no-color",), {"action": "store_true", "help": "no colours (NO_COLOR does it as well)"}),
    (("--allow-network",), {"action": "store_true", "help": "use a network file system anyway"}),
)
_SWITCHES = ("json", "quiet", "no_color", "allow_network")
# Offsets such as -3 and -3: are values, not options.
_VALUE_LIKE = re.compile(r"-\d+(?:\.\d+|:.*)?$")

Commands = argparse._SubParsersAction
Run = Callable[[argparse.Namespace], int | None]


class Parser(argparse.ArgumentParser):
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """argparse takes an optional word only next to the required ones; here it may as well
        follow the options: ``pub TOPIC --key K JSON``.
        """
        found, rest = super().parse_known_args(args, namespace)
        for action in self._get_positional_actions():
            if action.nargs in ("?", "*") and not getattr(found, action.dest, True):
                taken = rest if action.nargs == "*" else rest[:1]
                if taken and not any(map(self._is_option, taken)):
                    setattr(found, action.dest, self._get_values(action, taken))
                    rest = rest[len(taken) :]
        return found, rest

    def _is_option(self, word: str) -> bool:
        return word.startswith("-") and word != "-" and not _VALUE_LIKE.fullmatch(word)

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_ARGUMENTS, f"trunkline: {message} (see {self.prog} --help)\n")


def leaf(commands: Commands[Any], name: str, run: Run, about: str) -> argparse.ArgumentParser:
    """Add a command that does something, with the options that every command has."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=about, allow_abbrev=False
    )
    _add_common(parser)
    parser._negative_number_matcher = _VALUE_LIKE
    parser.set_defaults(run=run, parser=parser)
    return parser


def branch(commands: Commands[Any], name: str, about: str) -> Commands[Any]:
    """Add a noun, whose commands come below it."""
    parser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    _add_common(parser)
    below: Commands[Any] = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    return below


def _add_common(parser: argparse.ArgumentParser) -> None:
    # Without defaults: an option typed before a command is not undone by the command.
    group = parser.add_argument_group("everywhere")
    for flags, options in _COMMON:
        group.add_argument(*flags, default=argparse.SUPPRESS, **options)


def build(argv: Sequence[str]) -> argparse.ArgumentParser:
    from trunkline import __version__

    parser = Parser(
        prog="trunkline",
        description="A durable event bus that starts as a folder.",
        epilog="exit codes: 0 ok, 1 error, 2 no bus, 3 not found, 4 bad arguments, 5 duplicate",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trunkline {__version__}")
    _add_common(parser)
    commands = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verb = _verb(argv)
    if verb in VERBS:
        import_module(f"trunkline.cli.{VERBS[verb][0]}").register(commands)
    else:
        for name, (_, about) in VERBS.items():
            commands.add_parser(name, help=about)
    return parser


def _verb(argv: Sequence[str]) -> str | None:
    words = iter(argv)
    for word in words:
        if word == "--url":
            next(words, None)
        elif not word.startswith("-"):
            return word
    return None


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    _fill_streams()
    _allow_files()
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    try:
        try:
            parser = build(argv)
            args, unknown = parser.parse_known_args(argv)
            if unknown:  # told by the command itself: its help is the one to look at
                named = getattr(args, "parser", parser)
                named.error(f"unrecognized arguments: {' '.join(unknown)}")
            for name in _SWITCHES:
                setattr(args, name, getattr(args, name, False))
            code = args.run(args) or OK
            sys.stdout.flush()
        except BrokenPipeError:
            _leave_pipe()
            return OK
    except (errors.TrunklineError, OSError) as error:
        print(f"trunkline: {_said(error)}", file=sys.stderr)
        return next(code for kind, code in EXIT_CODES if isinstance(error, kind))
    except KeyboardInterrupt:
        return INTERRUPTED
    return int(code)


def _said(error: errors.TrunklineError | OSError) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return " ".join(text.split())


def _fill_streams() -> None:
    """Who closed a stream wants nothing of it; and no file of ours may get its number. A program
    that reads our output gets UTF-8, and a terminal whatever it can show.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            setattr(sys, name, os.fdopen(null, "w" if fd else "r", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        encoding = sys.stdout.encoding if sys.stdout.isatty() else "utf-8"
        sys.stdout.reconfigure(encoding=encoding, errors="backslashreplace")


def _allow_files() -> None:
    """As many as this process may have: a folder of many partitions takes more than the 1,024 that
    are common, and so does a copy of one with many segments.
    """
    with contextlib.suppress(ValueError, OSError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _leave_pipe() -> None:
    """Whoever read our output has gone. What is still buffered must not fail at exit."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
