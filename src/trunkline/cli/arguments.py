"""From what a person types to a place: which bus, which topics, which offsets, what time.

Offsets and times::

    start  end  +N  -N  N         the first, the one to come, N after the first, N before the end
    N:  :N  A:B                   from N on, up to N, from A up to B; the last is not in it
    @time  @time:  @:time  @t1:t2

A time is ISO 8601 (UTC unless it says otherwise), epoch seconds or milliseconds, or how long ago:
``@-1h``, ``@-90s:-30s``.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn

from trunkline import units
from trunkline.errors import InvalidOption, NoBus, NotFound
from trunkline.event import Bounds
from trunkline.folder import Folder
from trunkline.log.layout import folder_path
from trunkline.log.reader import PartitionReader
from trunkline.names import check_pattern, check_topic, is_dead, is_pattern, matches
from trunkline.options import StoreOptions

if TYPE_CHECKING:
    from trunkline.cli.far import FarLog, FarReader, StoreLog

URL = "file:.bus"
FAR = ("ws", "wss", "nats", "nats+tls", "mongodb", "mongodb+srv")
_POINT = re.compile(r"(start|end|earliest|latest)|([+-]?)(\d{1,18})", re.ASCII)
_POINTS = "start end +N -N N @time"
_SPANS = "start end +N -N N N: :N A:B @time @t1:t2"


class BusChoice(NamedTuple):
    """The bus of a command."""

    url: str
    token: str | None = None

    @property
    def is_folder(self) -> bool:
        return self.url.startswith("file:")


def choose_bus(args: argparse.Namespace) -> BusChoice:
    """``--url`` or ``--context``, else the environment, else ``file:.bus``."""
    url: str = getattr(args, "url", "")
    context: str = getattr(args, "context", "")
    token: str | None = getattr(args, "bus_token", None)
    if url and context:
        raise InvalidOption("--url and --context both name a bus", hint="give one of them")
    if not (url or context):
        url = os.environ.get("TRUNKLINE_URL") or os.environ.get("BUS_URL") or ""
        context = "" if url else os.environ.get("TRUNKLINE_CONTEXT", "")
    if context:
        from trunkline.cli.context import find, read_token

        found = find(context)
        url = found.url
        if token is None and found.token_file is not None:
            token = read_token(found.token_file)
    url = url or URL
    if check_scheme(url) in ("ws", "wss"):
        token = token or os.environ.get("TRUNKLINE_TOKEN") or None
    return BusChoice(url, token)


def bus_url(args: argparse.Namespace) -> str:
    return choose_bus(args).url


def check_scheme(url: str) -> str:
    """The scheme of a bus that a command can open."""
    scheme, colon, place = url.partition(":")
    if scheme == "memory" and colon:
        raise InvalidOption(
            "memory: ends with the process that made it, so a command finds nothing there",
            hint="use file:<folder>",
        )
    if scheme in ("http", "https") and place.startswith("//"):
        ws = "wss" if scheme == "https" else "ws"
        raise InvalidOption(f"a bus has no {scheme}: address", hint=f"--url {ws}:{place}")
    if scheme in FAR and place.startswith("//"):
        return scheme
    if scheme != "file" or not place:
        raise InvalidOption(
            f"not a bus: {url!r}",
            hint="file:.bus, ws://host:7070, nats://host:4222 or mongodb://host/database",
        )
    return scheme


def bus_path(url: str) -> str:
    """The folder that ``url`` names; refused for any other bus."""
    scheme = check_scheme(url)
    if scheme != "file":
        raise InvalidOption(
            f"this command works on the files of a bus, and {scheme}: has none here",
            hint="run it where the folder is, with --url file:<folder>",
        )
    return folder_path(url.partition(":")[2])


def open_folder(args: argparse.Namespace, *, create: bool = False) -> Folder:
    """The bus of this command; ``NoBus`` if there is none and it is not to be made."""
    options = StoreOptions(create=create, allow_network=args.allow_network)
    return Folder(bus_path(bus_url(args)), options)


def open_log(args: argparse.Namespace, *, create: bool = False) -> Folder | FarLog:
    """The bus of this command, wherever it is."""
    chosen = choose_bus(args)
    if chosen.is_folder:
        return open_folder(args, create=create)
    from trunkline.cli.far import open_far

    return open_far(chosen.url, chosen.token, create=create)


def open_ledgers(args: argparse.Namespace, what: str) -> Folder | StoreLog:
    """The bus of this command, whose groups can be looked at offset by offset; else refused."""
    log = open_log(args)
    if isinstance(log, Folder):
        return log
    from trunkline.cli.far import StoreLog

    if not isinstance(log, StoreLog):
        log.close()
        refuse(log.url, "ledgers", what)
    return log


def check_there(log: Folder | FarLog) -> None:
    """``NoBus`` for a folder that was removed or moved since it was opened."""
    if isinstance(log, Folder) and not os.path.exists(os.path.join(log.path, "bus.json")):
        raise gone(log.path)


def gone(path: str) -> NoBus:
    return NoBus(
        f"the bus at {path} is gone: the folder was removed or moved while this ran",
        path=path,
        hint="put it back, or start again with --url where it is now",
    )


def rest(log: Folder | FarLog, seconds: float | None = None) -> None:
    """Wait a moment before the next look."""
    if isinstance(log, Folder):
        time.sleep(log.options.poll_s if seconds is None else seconds)
    else:
        log.pause(log.poll_s if seconds is None else seconds)


def refuse(url: str, feature: str, what: str) -> NoReturn:
    scheme = url.partition(":")[0]
    raise InvalidOption(
        f"{what} is not for a bus at {scheme}:// (it does not promise {feature!r})",
        name=feature,
        hint="docs/cli.md lists what each bus can do",
    )


def duration(text: str) -> float:
    """Seconds: ``90``, ``1.5s``, ``10m``, ``2h``, ``500ms``."""
    try:
        return units.read_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}: {units.DURATIONS}") from None


def add_bounds(parser: argparse.ArgumentParser) -> None:
    """The options of every command that can print much."""
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="print N at most")
    parser.add_argument(
        "--budget",
        type=at_least(1),
        metavar="CHARS",
        help="print about CHARS characters at most; the first is always printed",
    )


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: a whole number from ``low`` on."""

    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) >= low):
            raise argparse.ArgumentTypeError(f"not a whole number from {low} on: {text!r}")
        return int(text)

    return number


def parse_time(text: str, now: datetime) -> datetime | None:
    """None if ``text`` is no time."""
    try:
        return units.read_moment(text, now)
    except ValueError:
        return None


class Point(NamedTuple):
    """One place in any partition: ``n`` after its start, before its end, or that very offset; or
    the first record at or after a time.
    """

    base: Literal["start", "end", "offset", "time"]
    n: int = 0
    when: datetime | None = None

    def resolve(self, reader: PartitionReader | FarReader) -> int:
        """The offset it means here. It may lie outside of what there is."""
        first, end = reader.bounds()
        match self.base:
            case "start":
                return min(first + self.n, end)
            case "end":
                return max(first, end - self.n)
            case "time":
                assert self.when is not None
                return reader.seek(self.when)
        return self.n


class Span(NamedTuple):
    """From ``start`` up to and without ``stop``; ``single`` where one point was typed."""

    start: Point | None
    stop: Point | None
    single: bool = False

    def resolve(self, reader: PartitionReader | FarReader) -> Bounds:
        """The offsets of a partition that are in it and in the log."""
        first, end = reader.bounds()
        low = first if self.start is None else max(first, self.start.resolve(reader))
        high = end if self.stop is None else min(end, self.stop.resolve(reader))
        return Bounds(low, max(low, high))


def parse_point(text: str, now: datetime, forms: str = _POINTS) -> Point:
    if text.startswith("@"):
        when = parse_time(text[1:], now)
        if when is not None:
            return Point("time", when=when)
    found = _POINT.fullmatch(text)
    if found is None:
        raise InvalidOption(f"not a place in a log: {text!r}", hint=forms)
    word, sign, digits = found.groups()
    if word:
        return Point("start" if word in ("start", "earliest") else "end")
    number = int(digits)
    return Point({"+": "start", "-": "end", "": "offset"}[sign], number)  # type: ignore[arg-type]


def parse_span(text: str, now: datetime) -> Span:
    """Any of the forms above. Between two times the colon that makes sense divides."""
    if text.startswith("@"):
        whole = parse_time(text[1:], now)
        if whole is not None:
            return Span(Point("time", when=whole), None, single=True)
        for at, letter in enumerate(text):
            if letter == ":":
                sides = [parse_time(side, now) for side in (text[1:at], text[at + 1 :]) if side]
                if sides and None not in sides:
                    left = Point("time", when=sides[0]) if at > 1 else None
                    right = Point("time", when=sides[-1]) if at + 1 < len(text) else None
                    return in_order(Span(left, right), text)
    elif ":" in text:
        first, _, last = text.partition(":")
        if first or last:
            start = parse_point(first, now, _SPANS) if first else None
            stop = parse_point(last, now, _SPANS) if last else None
            return in_order(Span(start, stop), text)
    else:
        return Span(parse_point(text, now, _SPANS), None, single=True)
    raise InvalidOption(f"not a range of a log: {text!r}", hint=_SPANS)


def in_order(span: Span, text: str) -> Span:
    """``span``, unless it ends before it begins, whatever the log holds."""
    start, stop = span.start, span.stop
    if start is not None and stop is not None and start.base == stop.base:
        if start.when is not None and stop.when is not None:
            is_backwards = start.when > stop.when
        else:
            is_backwards = start.n < stop.n if start.base == "end" else start.n > stop.n
        if is_backwards:
            hint = "A:B is from A up to B, without B"
            raise InvalidOption(f"it ends before it begins: {text!r}", hint=hint)
    return span


def pick_topics(folder: Folder | FarLog, pattern: str) -> dict[str, int]:
    """The topics that ``pattern`` names and how many partitions each has; ``NotFound`` if there is
    none. Dead letters are picked by name or by a pattern that asks for them.
    """
    topics = folder.topics()
    if is_pattern(pattern):
        check_pattern(pattern)
        picked = {
            name: options.partitions
            for name, options in sorted(topics.items())
            if matches(pattern, name) and (not is_dead(name) or is_dead(pattern))
        }
    else:
        check_topic(pattern)
        picked = {pattern: topics[pattern].partitions} if pattern in topics else {}
    if not picked:
        raise NotFound(f"there is no topic {pattern}", topic=pattern, hint="trunkline topic ls")
    return picked


def pick_partitions(count: int, wanted: int | None) -> list[int]:
    """All of a topic's partitions, or the one that is wanted."""
    if wanted is None:
        return list(range(count))
    if wanted >= count:
        there = f"they are 0 to {count - 1}" if count > 1 else "there is only 0"
        raise NotFound(f"there is no partition {wanted}: {there}")
    return [wanted]
