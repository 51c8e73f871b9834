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
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

from trunkline.errors import InvalidOption, NotFound
from trunkline.log.folder import Folder
from trunkline.log.layout import folder_path
from trunkline.log.reader import Bounds, PartitionReader
from trunkline.options import StoreOptions
from trunkline.topics import check_pattern, check_topic, is_dead, is_pattern, matches

URL = "file:.bus"
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)?", re.ASCII)
_POINT = re.compile(r"(start|end|earliest|latest)|([+-]?)(\d{1,18})", re.ASCII)
_EPOCH = re.compile(r"\d{9,14}", re.ASCII)
_MILLISECONDS_FROM = 100_000_000_000  # as seconds, that would be the year 5138
_POINTS = "start end +N -N N @time"
_SPANS = "start end +N -N N N: :N A:B @time @t1:t2"


def bus_url(args: argparse.Namespace) -> str:
    given = (getattr(args, "url", ""), os.environ.get("TRUNKLINE_URL"), os.environ.get("BUS_URL"))
    return next((url for url in given if url), URL)


def bus_path(url: str) -> str:
    """The folder that ``url`` names."""
    scheme, colon, place = url.partition(":")
    if scheme == "memory" and colon:
        raise InvalidOption(
            "memory: ends with the process that made it, so a command finds nothing there",
            hint="use file:<folder>",
        )
    if place.startswith("//") and scheme in ("ws", "wss", "http", "https"):
        raise InvalidOption(
            f"{url} is a broker, and this command works on a folder",
            hint="run it with --url file:<folder> where that is, or ask the broker over HTTP",
        )
    if scheme != "file" or not place:
        raise InvalidOption(f"not a bus in a folder: {url!r}", hint="for example --url file:.bus")
    return folder_path(place)


def open_folder(args: argparse.Namespace, *, create: bool = False) -> Folder:
    """The bus of this command; ``NoBus`` if there is none and it is not to be made."""
    options = StoreOptions(create=create, allow_network=args.allow_network)
    return Folder(bus_path(bus_url(args)), options)


def duration(text: str) -> float:
    """Seconds: ``90``, ``1.5s``, ``10m``, ``2h``, ``500ms``."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"not a duration: {text!r}: 90, 500ms, 10m, 2h, 1d")
    return float(found[1]) * _UNITS[found[2] or "s"]


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: a whole number from ``low`` on."""

    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) >= low):
            raise argparse.ArgumentTypeError(f"not a whole number from {low} on: {text!r}")
        return int(text)

    return number


def parse_time(text: str, now: datetime) -> datetime | None:
    """None if ``text`` is no time."""
    if _EPOCH.fullmatch(text):
        value = int(text)
        return datetime.fromtimestamp(value / 1000 if value >= _MILLISECONDS_FROM else value, UTC)
    if text == "now":
        return now
    if text.startswith("-"):
        back = _DURATION.fullmatch(text[1:])
        try:
            ago = timedelta(seconds=float(back[1]) * _UNITS[back[2] or "s"]) if back else None
            return None if ago is None else now - ago
        except OverflowError:
            return None
    if len(text) < 8:  # fromisoformat reads "2024" no more than we do
        return None
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


class Point(NamedTuple):
    """One place in any partition: ``n`` after its start, before its end, or that very offset; or
    the first record at or after a time.
    """

    base: Literal["start", "end", "offset", "time"]
    n: int = 0
    when: datetime | None = None

    def resolve(self, reader: PartitionReader) -> int:
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

    def resolve(self, reader: PartitionReader) -> Bounds:
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


def pick_topics(folder: Folder, pattern: str) -> dict[str, int]:
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
