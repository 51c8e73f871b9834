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
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from trunkline import errors
from trunkline.log.descriptors import raise_file_limit

OK, ERROR, NO_BUS, NOT_FOUND, BAD_ARGUMENTS, DUPLICATE, TAKEN = range(7)
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
    "take": ("take", "lease events to handles that outlive the command"),
    "inbox": ("inbox", "take the most important events, and count the rest"),
    "ack": ("handle", "finish an event that was taken"),
    "nack": ("handle", "give an event that was taken back for a later try"),
    "extend": ("handle", "hold an event that was taken for longer"),
    "tail": ("receive", "show the last events, and follow"),
    "grep": ("records", "find events by content"),
    "get": ("records", "show events by offset or time"),
    "topic": ("topics", "list, create, edit, remove, purge and compact topics"),
    "top": ("top", "show rates and lags, again and again"),
    "group": ("groups", "list, edit, seek, pause, resume and remove groups"),
    "dlq": ("dead", "list, show, redrive and drop dead letters"),
    "flag": ("flag", "switch middleware on and off"),
    "gate": ("gate", "show attention decisions and replay their thresholds"),
    "why": ("why", "tell the whole story of one event"),
    "metrics": ("why", "print figures for Prometheus"),
    "context": ("context", "name buses: --context prod"),
    "init": ("folder", "make a bus folder"),
    "verify": ("folder", "check every byte of a bus folder"),
    "seal": ("evidence", "sign what the log holds"),
    "prove": ("evidence", "prove that an event is in the signed log"),
    "shred": ("evidence", "erase a subject, or a space, for good"),
    "doctor": ("doctor", "say what is wrong and what to do about it"),
    "backup": ("copies", "copy a bus folder, also while it is written"),
    "restore": ("copies", "make a bus folder from a backup"),
    "bench": ("folder", "measure this machine"),
    "spool": ("spool", "a directory as a priority queue"),
    "ndjson": ("ndjson", "an NDJSON file with consumer-owned offsets"),
    "claim": ("claims", "hold a path or glob for a while"),
    "release": ("claims", "give a claim back"),
    "claims": ("claims", "list claims and their holders"),
    "bridge": ("bridge", "move events between two places"),
    "run": ("run", "run the handlers of an application, in processes"),
    "serve": ("serve", "run the broker: WebSocket and HTTP on one port"),
    "token": ("token", "make, list and revoke the broker's tokens"),
    "nats": ("nats", "a NATS server for development: one node, or three"),
    "keys": ("keys", "make, list, rotate and shred the keys of payloads"),
    "policy": ("policy", "check and explain a policy file"),
    "spark": ("spark", "a Spark shell, submit, or a small cluster"),
    "pipeline": ("pipeline", "turn events into tables, reports and events"),
}

# How the help groups the verbs; a verb that is in no group is shown under "more".
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("events", ("pub", "sub", "tail", "grep", "get", "why")),
    ("work, one event at a time", ("take", "inbox", "ack", "nack", "extend", "run")),
    ("what there is", ("topic", "group", "dlq", "top", "metrics", "doctor")),
    ("agents in one tree", ("claim", "release", "claims", "spool", "ndjson", "bridge")),
    ("a bus folder", ("init", "verify", "backup", "restore", "bench")),
    ("servers", ("serve", "token", "nats", "context")),
    ("tables and reports", ("pipeline", "spark")),
    ("protection", ("seal", "prove", "shred", "keys", "policy")),
    ("attention", ("gate", "flag")),
)
EXAMPLES = (
    ("trunkline pub orders '{\"id\": 1}' --key c42", "publish an event; makes .bus"),
    ("trunkline sub orders --group billing --exec ./bill", "run a command for each event"),
    ("trunkline group ls --watch", "see which groups are behind"),
    ("trunkline claim src/parser -- make test", "hold a path while a command runs"),
)

_COMMON: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--url",), {"help": "the bus: file:<folder>, ws:, nats: or mongodb://… (TRUNKLINE_URL)"}),
    (("--context",), {"metavar": "NAME", "help": "the bus of a context (TRUNKLINE_CONTEXT)"}),
    (("--token",), {"dest": "bus_token", "help": "the token for that bus (TRUNKLINE_TOKEN)"}),
    (("--json",), {"action": "store_true", "help": "print one JSON object a line"}),
    (("-q", "--quiet"), {"action": "store_true", "help": "print less: names, or nothing"}),
    (("--no-color",), {"action": "store_true", "help": "no colours (NO_COLOR does it as well)"}),
    (("--allow-network",), {"action": "store_true", "help": "use a network file system anyway"}),
)
BUS_OPTIONS = ("--url", "--context", "--token")  # each takes a value
_SWITCHES = ("json", "quiet", "no_color", "allow_network")
# Offsets such as -3 and -3: are values, not options.
_VALUE_LIKE = re.compile(r"-\d+(?:\.\d+|:.*)?$")

_SHOWN = 8  # so many choices are named; more are noise

Commands = argparse._SubParsersAction
Run = Callable[[argparse.Namespace], int | None]


class Enough(Exception):
    """``--limit`` or ``--budget`` is used up, and there is more."""


class _Help(argparse.HelpFormatter):
    """Knows the width by itself: argparse would import shutil for it, with all compressors."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=width() - 2)


def width() -> int:
    """How wide the terminal is; 80 where there is none."""
    with contextlib.suppress(ValueError):
        if columns := int(os.environ.get("COLUMNS", 0)):
            return columns
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 80  # type: ignore[union-attr]
    return 80


class Parser(argparse.ArgumentParser):
    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **{"formatter_class": _Help, **options})

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

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        what = "command" if isinstance(action, argparse._SubParsersAction) else "value"
        guess = _of_a_noun(value) if "group" in known else None
        guess = guess or _nearest(str(value), known)
        if guess:
            said = f"did you mean {guess}?"
        elif len(known) <= _SHOWN:
            said = f"there are {', '.join(known)}"
        else:
            said = "trunkline help lists them"
        text = f"there is no {what} {value!r}: {said}"
        raise argparse.ArgumentError(None if what == "command" else action, text)

    def format_help(self) -> str:
        return _whole_help(self) if self.prog == "trunkline" else super().format_help()

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """Say which words nobody understands, and what may have been meant."""
        first = words[0].partition("=")[0]
        guess = _nearest(first, self._option_string_actions) if first.startswith("-") else None
        if guess:
            self.error(f"there is no option {first}: did you mean {guess}?")
        self.error(f"unrecognized arguments: {' '.join(words)}")

    def _is_option(self, word: str) -> bool:
        return word.startswith("-") and word != "-" and not _VALUE_LIKE.fullmatch(word)

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_ARGUMENTS, f"trunkline: {message} (see {self.prog} --help)\n")


def _of_a_noun(verb: str) -> str | None:
    """The command that was meant where its noun was left out: ``group lag`` for ``lag``."""
    for noun in ("group", "topic", "dlq"):
        commands = argparse.ArgumentParser().add_subparsers()
        import_module(f"trunkline.cli.{VERBS[noun][0]}").register(commands)
        for action in commands.choices[noun]._actions:
            if isinstance(action, argparse._SubParsersAction) and verb in action.choices:
                return f"{noun} {verb}"
    return None


def _nearest(word: str, known: Iterable[str]) -> str | None:
    from trunkline.explain import nearest

    return nearest(word, known)


def _whole_help(parser: argparse.ArgumentParser) -> str:
    grouped = {verb for _, verbs in GROUPS for verb in verbs}
    more = tuple(verb for verb in VERBS if verb not in grouped)
    lines = [f"usage: trunkline [OPTIONS] VERB …\n\n{parser.description}"]
    for title, verbs in (*GROUPS, ("more", more)):
        there = [verb for verb in verbs if verb in VERBS]
        lines += [f"\n{title}"] if there else []
        lines += [f"  {verb:<10} {VERBS[verb][1]}" for verb in there]
    lines.append("\neverywhere")
    for flags, options in _COMMON:
        value = options.get("metavar") or flags[-1].lstrip("-").upper()
        named = ", ".join(flags) + ("" if options.get("action") else f" {value}")
        lines.append(f"  {named:<16} {options['help']}")
    lines.append("  --version")
    lines.append("\nexamples")
    for command, about in EXAMPLES:
        lines += [f"  {command}", f"      {about}"]
    lines.append(f"\ntrunkline VERB --help tells more of a verb.\n{parser.epilog}")
    return "\n".join(lines) + "\n"


def leaf(
    commands: Commands[Any], name: str, run: Run, about: str, *, without: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """Add a command that does something, with the options that every command has; ``without``
    those that mean something else here, or nothing.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=about, allow_abbrev=False
    )
    _add_common(parser, without)
    parser._negative_number_matcher = _VALUE_LIKE
    parser.set_defaults(run=run, parser=parser)
    return parser


def branch(commands: Commands[Any], name: str, about: str) -> Commands[Any]:
    """Add a noun, whose commands come below it."""
    parser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    _add_common(parser)
    below: Commands[Any] = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    return below


def _add_common(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    # Without defaults: an option typed before a command is not undone by the command.
    group = parser.add_argument_group("everywhere")
    for flags, options in _COMMON:
        if flags[-1] not in without:
            group.add_argument(*flags, default=argparse.SUPPRESS, **options)


def build(argv: Sequence[str]) -> Parser:
    from trunkline import __version__

    parser = Parser(
        prog="trunkline",
        description="A durable event bus that starts as a folder.",
        epilog="exit codes: 0 ok, 1 error, 2 no bus, 3 not found, 4 bad arguments, 5 duplicate, "
        "6 taken",
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
        if word in BUS_OPTIONS:
            next(words, None)
        elif not word.startswith("-"):
            return word
    return None


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    _fill_streams()
    raise_file_limit()
    if argv[:1] == ["help"] or not argv:
        argv = [*argv[1:], "--help"]
    try:
        try:
            parser = build(argv)
            rest: list[str] = []
            if _verb(argv) in ("claim", "claims"):
                from trunkline.cli.claims import arrange

                argv, rest = arrange(argv)
            args, unknown = parser.parse_known_args(argv)
            if unknown:  # told by the command itself: its help is the one to look at
                getattr(args, "parser", parser).refuse_unknown(unknown)
            for name in _SWITCHES:
                setattr(args, name, getattr(args, name, False))
            args.rest = rest
            code = args.run(args) or OK
            sys.stdout.flush()
        except BrokenPipeError:
            _leave_pipe()
            return OK
    except (errors.TrunklineError, OSError) as raised:
        error = _gone(raised) or raised
        print(f"trunkline: {_said(error)}", file=sys.stderr)
        return next(code for kind, code in EXIT_CODES if isinstance(error, kind))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Enough:
        if not args.quiet:
            print("trunkline: there is more (--limit, --budget)", file=sys.stderr)
        return OK
    return int(code)


def _gone(error: errors.TrunklineError | OSError) -> errors.TrunklineError | None:
    """What to say where a file of the bus is missing because the whole folder is."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, FileNotFoundError) or cause.filename is None:
        return None
    folder = os.path.dirname(os.path.abspath(os.fsdecode(cause.filename)))
    top = os.path.dirname(folder)  # the files of a bus lie one folder deep
    if os.path.exists(top) or os.path.basename(folder) not in ("wal", "dlq", "offsets", "members"):
        return None
    from trunkline.cli.arguments import gone

    return gone(top)


def _said(error: errors.TrunklineError | OSError) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return " ".join(text.split())


def _fill_streams() -> None:
    """A closed stream is not wanted, and no file of ours may get its number. A program
    that reads our output gets UTF-8, and a terminal whatever it can show.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            setattr(sys, name, os.fdopen(null, "w" if fd else "r", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        encoding = sys.stdout.encoding if sys.stdout.isatty() else "utf-8"
        sys.stdout.reconfigure(encoding=encoding, errors="backslashreplace")


def _leave_pipe() -> None:
    """The reader of our output has gone. Bytes that are still buffered must not fail at exit."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
