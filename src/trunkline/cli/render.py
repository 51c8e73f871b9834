"""What a command prints: tables for people, one JSON object a line for programs.

Tables are drawn by rich where it is installed and the output is a terminal; else they are aligned
text. What came out of an event never reaches a terminal with control characters in it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from trunkline.cli import Enough, width
from trunkline.errors import InvalidOption
from trunkline.event import Event, Record
from trunkline.units import read_time

Row = Mapping[str, Any]
Progress = Callable[[int, int], None]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_KEEPING_LINES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_ESCAPE = re.compile(r"%(.)|\\(.)", re.DOTALL)
_BACKSLASH = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)")
_DAY_S = 86_400
_NARROW = 6  # no column is cut further than this
_encode = msgspec.json.Encoder().encode
_UNSET = msgspec.structs.asdict(Event(topic="unset"))


def to_time(value: datetime) -> str:
    """A time as it stands in the JSON of a record."""
    return str(msgspec.to_builtins(value))


def to_json(value: Any) -> str:
    """One line of JSON."""
    return _encode(value).decode()


def shown_json(value: Any) -> str:
    """One line of JSON to print. At a terminal, control characters are escaped."""
    text = to_json(value)
    if is_terminal():
        text = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return text


def is_terminal() -> bool:
    return sys.stdout.isatty()


def clean(text: str) -> str:
    """``text`` with its control characters spelled out."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def amount(count: int, noun: str) -> str:
    """How many, in words: ``1 record``, ``2 records``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class Printer:
    """Where a command's results go, as its arguments ask for."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.json: bool = args.json
        self.quiet: bool = args.quiet
        self._no_color: bool = args.no_color
        self._limit: int | None = getattr(args, "limit", None)
        self._budget: int | None = getattr(args, "budget", None)

    def row(self, row: Row, text: str) -> None:
        """One result: ``row`` for a program, ``text`` for a person."""
        if self.json:
            print(shown_json(row))
        elif not self.quiet:
            print(text)

    def say(self, text: str) -> None:
        """Something for people only."""
        if not (self.json or self.quiet):
            print(text)

    def note(self, text: str) -> None:
        """Something to know that is not the result."""
        if not self.quiet:
            print(f"trunkline: {text}", file=sys.stderr)

    def table(
        self,
        rows: Iterable[Row],
        columns: Sequence[str],
        empty: str = "",
        *,
        optional: Collection[str] = (),
    ) -> None:
        """A list: every field as JSON, these columns for people, only the first when quiet. An
        ``optional`` column in which every row says nothing (0, no, -) is left out for people.
        """
        rows = self.cut(list(rows), columns)
        if self.json:
            for row in rows:
                print(shown_json(row))
            return
        if self.quiet:
            for name in dict.fromkeys(cell(row[columns[0]]) for row in rows):
                print(name)
            return
        lines = [[short(row[name]) for name in columns] for row in rows]
        silent = [
            name in optional and all(line[i] in ("0", "no", "-", "") for line in lines)
            for i, name in enumerate(columns)
        ]
        columns = [name for name, left_out in zip(columns, silent, strict=True) if not left_out]
        lines = [
            [text for text, left_out in zip(line, silent, strict=True) if not left_out]
            for line in lines
        ]
        if is_terminal():
            lines = fit([list(columns), *lines], width() - 2 * len(columns))[1:]
        numbers = [all(_is_number(line[i]) for line in lines) for i in range(len(columns))]
        if not lines:
            self.say(empty)
        elif not (is_terminal() and self._draw(columns, lines, numbers)):
            print(_aligned([list(columns), *lines], numbers))

    def cut(self, rows: Sequence[Row], columns: Sequence[str]) -> Sequence[Row]:
        """The first rows, as many as ``--limit`` and ``--budget`` allow, and at least one."""
        most = len(rows) if self._limit is None else min(self._limit, len(rows))
        if self._budget is not None:
            used = 0
            for at, row in enumerate(rows[:most]):
                text = to_json(row) if self.json else "  ".join(cell(row[name]) for name in columns)
                used += len(text) + 1
                if used > self._budget:
                    most = max(1, at)
                    break
        if most < len(rows):
            self.note(f"{len(rows) - most} more, of {len(rows)} (--limit, --budget)")
        return rows[:most]

    def _draw(self, columns: Sequence[str], lines: list[list[str]], numbers: list[bool]) -> bool:
        try:
            from rich.box import SIMPLE_HEAD
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            return False
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for name, number in zip(columns, numbers, strict=True):
            table.add_column(name, justify="right" if number else "left", no_wrap=True)
        for line in lines:
            table.add_row(*map(Text, line))
        Console(no_color=self._no_color or None).print(table)
        return True


def clear_screen() -> None:
    """Begin the screen anew at a terminal; elsewhere, put an empty line between two tables."""
    sys.stdout.write("\x1b[H\x1b[2J" if is_terminal() else "\n")
    sys.stdout.flush()


def short(value: Any) -> str:
    """A cell of a table: as ``cell``, with times as a person reads them."""
    when = value
    if isinstance(value, str) and _MOMENT.fullmatch(value):
        when = read_time(value)
    if not isinstance(when, datetime):
        return cell(value)
    when = when.astimezone(UTC)
    ago_s = (datetime.now(UTC) - when).total_seconds()
    return f"{when:%H:%M:%S}" if abs(ago_s) < _DAY_S / 2 else f"{when:%Y-%m-%d}"


def fit(lines: list[list[str]], most: int) -> list[list[str]]:
    """The lines of a table, the widest columns cut until a line is no wider than ``most``."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lowest = [max(_NARROW, len(lines[0][i])) for i in range(len(widths))]
    while sum(widths) + 2 * (len(widths) - 1) > most:
        free = [i for i in range(len(widths)) if widths[i] > lowest[i]]
        if not free:
            break
        widths[max(free, key=lambda i: widths[i])] -= 1
    return [
        [
            text if len(text) <= width else _shorten(text, width)
            for text, width in zip(line, widths, strict=True)
        ]
        for line in lines
    ]


def _shorten(text: str, most: int) -> str:
    """Cut behind a word, if that leaves most of the text."""
    kept = text[: most - 1]
    at = kept.rfind(" ")
    return f"{kept[:at] if at > most // 2 else kept}…"


def cell(value: Any) -> str:
    match value:
        case None | msgspec.UNSET:
            return "-"
        case bool():
            return "yes" if value else "no"
        case str():
            return clean(value)
        case int():
            return str(value)
        case float():
            return f"{value:g}"
        case list() | tuple() if value and all(isinstance(item, str) for item in value):
            return clean(" ".join(value))
        case list() | tuple() if not value:
            return "-"
    if value is msgspec.UNSET:
        return "none"
    return clean(to_json(value))


def _is_number(text: str) -> bool:
    return text == "-" or text.replace(".", "", 1).isdigit()


def _aligned(lines: list[list[str]], numbers: list[bool]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(numbers))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(line, widths, numbers, strict=True)
        ).rstrip()
        for line in lines
    )


# -- records -----------------------------------------------------------------------------------


def record_row(record: Record, **more: Any) -> dict[str, Any]:
    """A record under the names that a ``where`` knows, without fields that were not set."""
    event = record.event
    row: dict[str, Any] = {
        "topic": event.topic,
        "partition": record.partition,
        "offset": record.offset,
        **more,
    }
    for name in Event.__struct_fields__:
        value = getattr(event, name)
        if name not in ("topic", "payload") and value != _UNSET[name]:
            row[name] = value
    row["payload"] = event.payload
    return row


def record_line(record: Record) -> str:
    """A record for a person, on one line."""
    event = record.event
    words = [f"{event.topic}/{record.partition}@{record.offset}"]
    words.append(event.ts.isoformat(timespec="milliseconds").replace("+00:00", "Z"))
    words += [
        f"{name}={value}"
        for name in ("type", "key", "actor", "subject")
        if (value := getattr(event, name)) is not None
    ]
    if event.priority != "normal":
        words.append(event.priority)
    return clean(" ".join([*words, to_json(event.payload)]))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)


_FIELDS: dict[str, Callable[[Record, int], str]] = {
    "t": lambda r, _: r.event.topic,
    "p": lambda r, _: str(r.partition),
    "o": lambda r, _: str(r.offset),
    "k": lambda r, _: r.event.key or "",
    "v": lambda r, _: to_json(r.event.payload),
    "s": lambda r, _: _text(r.event.payload),
    "h": lambda r, _: to_json(r.event.headers),
    "i": lambda r, _: r.event.id,
    "d": lambda r, _: to_time(r.event.ts),
    "y": lambda r, _: r.event.type or "",
    "a": lambda _, attempt: str(attempt),
    "%": lambda *_: "%",
}


def compile_format(text: str) -> Callable[[Record, int], str]:
    """A function that writes a record as ``text`` asks for; see ``FORMAT_HELP``."""
    parts: list[str | Callable[[Record, int], str]] = []
    position = 0
    for found in _ESCAPE.finditer(text):
        parts.append(text[position : found.start()])
        position = found.end()
        percent, backslash = found.groups()
        if percent is not None and percent not in _FIELDS:
            raise InvalidOption(f"not a format: {found[0]!r}", hint=FORMAT_HELP)
        parts.append(_FIELDS[percent] if percent else _BACKSLASH.get(backslash, found[0]))
    parts.append(text[position:])
    if not text.endswith("\\n"):
        parts.append("\n")

    def write(record: Record, attempt: int) -> str:
        line = "".join(p if isinstance(p, str) else p(record, attempt) for p in parts)
        return _KEEPING_LINES.sub("?", line) if is_terminal() else line

    return write


FORMAT_HELP = (
    "%t topic, %p partition, %o offset, %k key, %v payload as JSON, %s payload as text, "
    "%h headers, %i id, %d time, %y type, %a attempt, %% percent, \\n \\t"
)


class RecordWriter:
    """Prints records. A record is out, and not in some buffer, when the call returns."""

    def __init__(self, form: Callable[[Record, int], str], args: argparse.Namespace) -> None:
        self._form = form
        self._limit: float = getattr(args, "limit", None) or math.inf
        self._budget: float = getattr(args, "budget", None) or math.inf
        self._shown = self._used = 0

    def __call__(self, record: Record, attempt: int = 0) -> None:
        """Print a record, or raise ``Enough`` if it is one too many. The first is printed however
        long it is.
        """
        line = self._form(record, attempt)
        if self._shown and (self._shown >= self._limit or self._used + len(line) > self._budget):
            raise Enough
        self._print(line)

    def print(self, record: Record, attempt: int = 0) -> bool:
        """Print a record that nobody else gets; whether there is room for another one."""
        self._print(self._form(record, attempt))
        return self._shown < self._limit and self._used < self._budget

    def _print(self, line: str) -> None:
        sys.stdout.write(line)
        sys.stdout.flush()
        self._shown += 1
        self._used += len(line)


def record_writer(args: argparse.Namespace) -> RecordWriter:
    """Print records as the arguments ask for: by format, as JSON, or for a person at a terminal."""
    wanted: str | None = getattr(args, "format", None)
    if wanted is not None:
        write = compile_format(wanted)
    elif args.json or not is_terminal():
        write = _json_line
    else:
        write = _plain_line
    return RecordWriter(write, args)


def _json_line(record: Record, attempt: int) -> str:
    return shown_json(record_row(record, **({"attempt": attempt} if attempt else {}))) + "\n"


def _plain_line(record: Record, attempt: int) -> str:
    return record_line(record) + (f" (attempt {attempt})\n" if attempt > 1 else "\n")


# -- people ------------------------------------------------------------------------------------


def confirm(args: argparse.Namespace, question: str) -> bool:
    """Whether to go on with what cannot be undone. Without a terminal nothing is asked."""
    if args.yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InvalidOption(
            f"{question} There is no terminal to answer at, so nothing was done",
            hint="--yes goes ahead, --dry-run only shows",
        )
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    print("trunkline: nothing was done", file=sys.stderr)
    return False


@contextlib.contextmanager
def progress(args: argparse.Namespace, title: str) -> Iterator[Progress]:
    """A bar on stderr that a call of ``(done, total)`` moves; nothing unless that is a terminal."""
    try:
        if args.quiet or args.json or not sys.stderr.isatty():
            raise ImportError
        from rich.console import Console
        from rich.progress import Progress as Bar
    except ImportError:
        yield lambda _done, _total: None
        return
    with Bar(console=Console(stderr=True, no_color=args.no_color or None), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
