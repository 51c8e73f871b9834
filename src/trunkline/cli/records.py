"""``trunkline pub``, ``grep`` and ``get``: records in and out of a log, by no group's cursor."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from trunkline.check import check_event
from trunkline.cli import DUPLICATE, NOT_FOUND, OK, Commands, leaf
from trunkline.cli.arguments import (
    Point,
    Span,
    add_bounds,
    at_least,
    duration,
    in_order,
    open_log,
    parse_point,
    parse_span,
    parse_time,
    pick_partitions,
    pick_topics,
)
from trunkline.cli.render import FORMAT_HELP, Printer, amount, record_writer, shown_json, to_json
from trunkline.clock import SystemClock
from trunkline.codec import decode_payload, encode_event
from trunkline.errors import InvalidEvent, InvalidOption, NotFound
from trunkline.event import BANDS, PRIORITIES, Event, Receipt, Record
from trunkline.fields import WORDS
from trunkline.folder import Folder
from trunkline.folder.direct import DirectBus
from trunkline.options import Limits

if TYPE_CHECKING:
    from trunkline.cli.far import FarLog

_BATCH = 1000
_CHUNK = 1024 * 1024
_TEXT_FLAGS = {
    "key": "records of one key stay in order",
    "type": "what kind of event it is",
    "actor": "the actor it is from (else TRUNKLINE_ACTOR)",
    "space": "the space it belongs to",
    "subject": "what it is about",
    "idem-key": "a repeat within the topic's window is a duplicate",
    "trace": "W3C traceparent",
    "cause": "the id of the event that led to this one",
}


def register(commands: Commands[Any]) -> None:
    pub = leaf(commands, "pub", run_pub, "publish events")
    pub.add_argument("topic", metavar="TOPIC")
    pub.add_argument(
        "payload", metavar="JSON", nargs="?", help="the payload; - or none: each line of stdin"
    )
    pub.add_argument("--text", action="store_true", help="payloads are text, not JSON")
    for name, about in _TEXT_FLAGS.items():
        pub.add_argument(f"--{name}", help=about)
    pub.add_argument("--ttl", type=duration, help="how long it is of use: 90, 10m, 2h")
    pub.add_argument("--priority", choices=PRIORITIES)
    pub.add_argument("--band", choices=BANDS)
    pub.add_argument("--cap", action="append", help="a capability it asks for; repeatable")
    pub.add_argument("-H", "--header", action="append", metavar="K:V", help="repeatable")
    later = pub.add_mutually_exclusive_group()
    later.add_argument("--delay", type=duration, help="deliver it after this time: 90, 10m, 2h")
    later.add_argument("--at", metavar="TIME", help="deliver it then, not before")
    pub.add_argument("--count", type=at_least(1), default=1, help="publish it COUNT times")

    grep = leaf(commands, "grep", run_grep, "find events by content")
    grep.add_argument("topic", metavar="TOPIC", help="a topic, or a pattern with * and >")
    grep.add_argument("pattern", metavar="PATTERN", nargs="?", help="a regular expression")
    grep.add_argument("-i", "--ignore-case", action="store_true")
    grep.add_argument("-F", "--fixed", action="store_true", help="the pattern is plain text")
    grep.add_argument("--from", dest="start", metavar="WHERE", help="offsets or times: A:B, @-1h")
    grep.add_argument("--to", dest="stop", metavar="PLACE", help="up to there")
    grep.add_argument("--count", type=at_least(1), help="stop after COUNT events")
    add_selection(grep)

    get = leaf(commands, "get", run_get, "show events by offset or time")
    get.add_argument("topic", metavar="TOPIC")
    get.add_argument("place", metavar="OFFSET", help="7, -1 (the last), 3:9, @-1h:, start, ...")
    add_selection(get)


def add_selection(parser: argparse.ArgumentParser) -> None:
    """The options of every command that shows records."""
    parser.add_argument("-p", "--partition", type=at_least(0), help="only this one")
    parser.add_argument("--where", metavar="SQL", help="only events that meet this condition")
    parser.add_argument("--format", help=FORMAT_HELP.replace("%", "%%"))
    add_bounds(parser)


def compile_wanted(args: argparse.Namespace) -> Callable[[Record], bool]:
    """``--where`` as a function of a record."""
    if args.where is None:
        return lambda _: True
    from trunkline.filters.where import Where

    return Where(args.where).matches


def read_span(folder: Folder | FarLog, topic: str, partition: int, span: Span) -> Iterator[Record]:
    """The records of a span. What retention takes away meanwhile is passed over."""
    reader = folder.reader(topic, partition)
    low, high = span.resolve(reader)
    while low < high:
        found = reader.read(low, _BATCH, strict=False)
        if not found:
            return
        for record in found:
            if record.offset >= high:
                return
            yield record
        low = found[-1].offset + 1


# -- pub ---------------------------------------------------------------------------------------


def run_pub(args: argparse.Namespace) -> int:
    now = SystemClock().now()
    fields = _fields(args, now)
    piped = args.payload is None or args.payload == "-"
    if args.payload is None and sys.stdin.isatty():
        raise InvalidEvent("there is no payload", hint="give it as JSON, or pipe a line an event")
    if piped and args.count > 1:
        raise InvalidOption("--count repeats one payload, not those of stdin")
    read = _text if args.text else _json
    payload = None if piped else read(os.fsencode(args.payload))
    sample = Event(topic=args.topic, payload=payload, **fields)
    check_event(sample, Limits())  # before a folder is made for nothing
    encode_event(sample, Limits())
    with closing(open_log(args, create=True)) as folder:
        if args.idem_key is not None and not folder.topic(args.topic).dedup_window_s:
            Printer(args).note(
                f"{args.topic} does not look for duplicates "
                f"(trunkline topic edit {args.topic} --dedup-window-s 120)"
            )
        publisher = _Publisher(folder, args, fields)
        try:
            if piped:
                publisher.drain(read)
            else:
                for done in range(0, args.count, _BATCH):
                    size = min(_BATCH, args.count - done)
                    publisher.publish([publisher.prepare(payload) for _ in range(size)])
        except BaseException:
            if publisher.published:
                publisher.sum_up()
            raise
        publisher.sum_up()
    return DUPLICATE if publisher.duplicates else OK


def _fields(args: argparse.Namespace, now: datetime) -> dict[str, Any]:
    """What was typed, as fields of an event."""
    names = [name.replace("-", "_") for name in _TEXT_FLAGS]
    fields = {name: getattr(args, name) for name in (*names, "priority", "band")}
    fields["actor"] = args.actor or os.environ.get("TRUNKLINE_ACTOR") or None
    fields["ttl_s"] = args.ttl
    if args.delay is not None:
        try:
            fields["not_before"] = now + timedelta(seconds=args.delay)
        except OverflowError:
            raise InvalidOption("--delay is too long") from None
    elif args.at is not None:
        fields["not_before"] = parse_time(args.at.removeprefix("@"), now)
        if fields["not_before"] is None:
            raise InvalidOption(f"--at: not a time: {args.at!r}", hint="2030-01-02T03:04:05Z")
    if args.header:
        pairs = [text.partition(":") for text in args.header]
        wrong = [name for name, colon, _ in pairs if not (name and colon)]
        if wrong:
            raise InvalidOption(f"--header: not NAME:VALUE: {wrong[0]!r}")
        fields["headers"] = {name.strip(): value.strip() for name, _, value in pairs}
        if len(fields["headers"]) < len(pairs):
            raise InvalidOption("--header: a name is given twice, and has one value")
    if args.cap:
        fields["caps"] = tuple(args.cap)
    return {name: value for name, value in fields.items() if value is not None}


def _json(line: bytes) -> Any:
    try:
        return decode_payload(line)
    except InvalidEvent as error:
        raise InvalidEvent(error.message, hint="--text publishes plain text") from None


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InvalidEvent(f"not UTF-8: {error}") from None


class _Publisher:
    """Publishes batches to one topic and remembers where they went."""

    def __init__(
        self, folder: Folder | FarLog, args: argparse.Namespace, fields: dict[str, Any]
    ) -> None:
        self.duplicates = 0
        self._folder = folder
        self._direct = DirectBus.of(folder) if isinstance(folder, Folder) else None
        self._limits = folder.options.limits if isinstance(folder, Folder) else Limits()
        self._topic: str = args.topic
        self._fields = fields
        self._out = Printer(args)
        self.published = 0
        self._last: Receipt | None = None
        self._ranges: dict[int, tuple[int, int]] = {}
        self._ids: dict[tuple[int, int], str | None] = {}  # of what duplicates repeat

    def drain(self, read: Callable[[bytes], Any]) -> None:
        """Publish each line of stdin; lines that arrive together are one batch."""
        number, rest = 0, b""
        while True:
            chunk = sys.stdin.buffer.read1(_CHUNK)  # type: ignore[union-attr]
            *lines, rest = (rest + chunk).split(b"\n")
            if not chunk and rest:
                lines, rest = [rest], b""
            endless = len(rest) > self._limits.record_bytes
            batch: list[tuple[Event, bytes]] = []
            for line in lines:
                number += 1
                if not line.strip():
                    continue
                try:
                    batch.append(self.prepare(read(line.rstrip(b"\r"))))
                except InvalidEvent as error:
                    self.publish(batch)
                    raise InvalidEvent(
                        f"line {number}: {error.message}; {amount(self.published, 'event')} "
                        f"before it {'was' if self.published == 1 else 'were'} published",
                        hint=error.hint,
                    ) from None
            self.publish(batch)
            if endless:
                most = self._limits.record_bytes
                raise InvalidEvent(f"line {number + 1}: it is longer than {most} bytes")
            if not chunk:
                return

    def prepare(self, payload: Any) -> tuple[Event, bytes]:
        now = self._folder.clock.now()
        event = Event(topic=self._topic, payload=payload, ts=now, **self._fields)
        return event, encode_event(event, self._limits)

    def publish(self, batch: list[tuple[Event, bytes]]) -> None:
        if not batch:
            return
        if self._direct is not None:
            receipts = self._direct.append(self._topic, batch)
        else:
            assert not isinstance(self._folder, Folder)
            receipts = self._folder.publish(self._topic, [event for event, _ in batch])
        for receipt in receipts:
            self._note(receipt)

    def _note(self, receipt: Receipt) -> None:
        self.published += 1
        self._last = receipt
        self.duplicates += receipt.duplicate
        if not receipt.duplicate:
            low, high = self._ranges.get(receipt.partition, (receipt.offset, receipt.offset))
            self._ranges[receipt.partition] = (min(low, receipt.offset), max(high, receipt.offset))
        if self._out.json:
            row = msgspec.to_builtins(receipt)
            if receipt.duplicate:
                row["id"] = self._stored_id(receipt.partition, receipt.offset)
            print(shown_json(row))

    def _stored_id(self, partition: int, offset: int) -> str | None:
        """The id of the record at an offset; None if it was trimmed since."""
        place = (partition, offset)
        if place not in self._ids:
            self._ids[place] = self._folder.reader(self._topic, partition).id_at(offset)
        return self._ids[place]

    def sum_up(self) -> None:
        """One line for a person: the receipt, or what all of them say together."""
        last = self._last
        if last is not None and self.published == 1:
            place = f"{last.topic}/{last.partition}@{last.offset}"
            self._out.say(f"{place} {'duplicate' if last.duplicate else last.id}")
            return
        places = " ".join(
            f"{self._topic}/{partition}@{low}-{high}"
            for partition, (low, high) in sorted(self._ranges.items())
        )
        fresh = self.published - self.duplicates
        extra = f", {amount(self.duplicates, 'duplicate')}" if self.duplicates else ""
        self._out.say(f"published {amount(fresh, 'event')}{extra} {places}".rstrip())


# -- grep and get ------------------------------------------------------------------------------


def run_grep(args: argparse.Namespace) -> int:
    if args.pattern is None and args.where is None:
        raise InvalidOption("nothing to look for", hint="a pattern, or --where")
    now = SystemClock().now()
    span = parse_span(args.start, now) if args.start is not None else Span(None, None)
    if args.stop is not None:
        span = in_order(span._replace(stop=parse_point(args.stop, now)), f"--to {args.stop}")
    wanted = compile_wanted(args)
    has_text = _text_test(args)
    write = record_writer(args)
    with closing(open_log(args)) as folder:
        found = (
            record
            for topic, count in pick_topics(folder, args.topic).items()
            for partition in pick_partitions(count, args.partition)
            for record in read_span(folder, topic, partition, span)
            if has_text(record.event) and wanted(record)
        )
        shown = 0
        for record in islice(found, args.count):
            shown += 1
            if not args.quiet:
                write(record, 0)
    return OK if shown else NOT_FOUND


def _text_test(args: argparse.Namespace) -> Callable[[Event], bool]:
    if args.pattern is None:
        return lambda _: True
    text = re.escape(args.pattern) if args.fixed else args.pattern
    try:
        search = re.compile(text, re.IGNORECASE if args.ignore_case else 0).search
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidOption(f"not a regular expression: {error}", hint="-F for text") from None
    return lambda event: search(_searched(event)) is not None


def _searched(event: Event) -> str:
    """What of an event is looked at: its payload, names and headers, a line each."""
    parts = [to_json(event.payload)]
    names = [field.name for field in WORDS if field.kind != "word" and field.name != "topic"]
    parts += [value for name in names if (value := getattr(event, name)) is not None]
    parts += [f"{name}: {value}" for name, value in event.headers.items()]
    return "\n".join(parts)


def run_get(args: argparse.Namespace) -> int:
    span = parse_span(args.place, SystemClock().now())
    wanted = compile_wanted(args)
    write = record_writer(args)
    with closing(open_log(args)) as folder:
        count = pick_topics(folder, args.topic).get(args.topic)
        if count is None:
            raise InvalidOption("one topic, not a pattern", hint="trunkline grep takes patterns")
        if span.single:
            if count > 1 and args.partition is None:
                raise InvalidOption(
                    f"{args.topic} has {count} partitions", hint="say which: --partition N"
                )
            assert span.start is not None
            partition = pick_partitions(count, args.partition)[0]
            records = iter([_one(folder, args.topic, partition, span.start)])
        else:
            records = (
                record
                for partition in pick_partitions(count, args.partition)
                for record in read_span(folder, args.topic, partition, span)
            )
        shown = 0
        for record in filter(wanted, records):
            shown += 1
            write(record, 0)
    return OK if shown else NOT_FOUND


def _one(folder: Folder | FarLog, topic: str, partition: int, point: Point) -> Record:
    """The record at a point; ``OutOfRange`` if it was trimmed, ``NotFound`` if there is none."""
    reader = folder.reader(topic, partition)
    offset = point.resolve(reader)
    first, end = reader.bounds()
    if point.base == "end" and point.n > end - first:
        offset = -point.n  # not the first in its place, as in a range
        found = []
    else:
        found = reader.read(offset, 1)
    if not found or (point.base == "offset" and found[0].offset != offset):
        hint = f"it holds {first} to {end - 1}" if first < end else "it is empty"
        if first <= offset < end:
            hint = "compaction removed it, or it was lost and the rest salvaged"
        raise NotFound(f"{topic}/{partition} has no record {offset}", hint=hint)
    return found[0]
