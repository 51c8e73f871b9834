"""``trunkline sub`` and ``tail``: records as they come.

With a group, ``sub`` is one of its members: what it has written out and flushed it acknowledges,
and nothing before. Without one it looks on and leaves no trace.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from types import FrameType
from typing import TYPE_CHECKING, Any

from trunkline.cli import INTERRUPTED, OK, Commands, leaf
from trunkline.cli.arguments import (
    Span,
    at_least,
    bus_path,
    check_there,
    choose_bus,
    duration,
    open_ledgers,
    open_log,
    parse_span,
    pick_partitions,
    pick_topics,
    rest,
)
from trunkline.cli.records import add_selection, compile_wanted, read_span
from trunkline.cli.render import Printer, RecordWriter, record_writer
from trunkline.clock import SystemClock
from trunkline.errors import InvalidOption, NotFound
from trunkline.event import Record
from trunkline.folder import Folder
from trunkline.group import Group
from trunkline.log.reader import PartitionReader
from trunkline.names import GroupKey, check_group, check_pattern, matches
from trunkline.options import Flow

if TYPE_CHECKING:
    from trunkline.cli.far import FarLog, FarReader

_READ = 1000
_LOOK_S = 0.05
Place = tuple[str, int]
Write = RecordWriter


def register(commands: Commands[Any]) -> None:
    about = "receive events, as a member of a group or looking on"
    sub = leaf(commands, "sub", run_sub, about)
    sub.add_argument("topic", metavar="TOPIC", help="a topic, or a pattern with * and >")
    sub.add_argument("--group", help="be a member of it; without, only look on")
    sub.add_argument(
        "--from",
        dest="start",
        metavar="PLACE",
        help="where a new group begins (start), or looking on does (end): 7, -10, @-1h, ...",
    )
    sub.add_argument("--count", type=at_least(1), help="stop after COUNT events")
    sub.add_argument("--wait", type=duration, metavar="S", help="stop when none came for so long")
    sub.add_argument(
        "--ack",
        choices=("auto", "none"),
        default="auto",
        help="auto: each event once it is written out; none: show unsettled records",
    )
    sub.add_argument(
        "--exec",
        dest="command",
        metavar="CMD",
        help="run CMD for each event, payload on stdin: exit 0 acks, 75 retries, any other nacks",
    )
    add_selection(sub)

    tail = leaf(commands, "tail", run_tail, "show the last events, and follow")
    tail.add_argument("topic", metavar="TOPIC", help="a topic, or a pattern with * and >")
    tail.add_argument("-n", "--lines", type=at_least(0), default=10, help="how many")
    tail.add_argument(
        "-f", "--follow", action="store_true", help="go on with records that come later"
    )
    add_selection(tail)


# -- looking on --------------------------------------------------------------------------------


class _Terminated(BaseException):
    """The process was asked to end."""


@contextlib.contextmanager
def _ending_on_request() -> Iterator[None]:
    """Let a SIGTERM end what is inside, cleanly."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except _Terminated:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


def run_tail(args: argparse.Namespace) -> int:
    wanted = compile_wanted(args)
    write = record_writer(args)
    with closing(open_log(args)) as folder, _ending_on_request():
        found: list[Record] = []
        reached: dict[Place, int] = {}
        for topic, count in _topics(folder, args, waiting=args.follow).items():
            for partition in pick_partitions(count, args.partition):
                reader = folder.reader(topic, partition)
                reached[topic, partition] = reader.bounds().next
                found += _last(reader, reached[topic, partition], args.lines, wanted)
        found.sort(key=lambda record: (record.event.ts, record.offset))
        for record in found[-args.lines :] if args.lines else ():
            write(record, 0)
        if args.follow:
            for record in _follow(folder, args, reached, None):
                if wanted(record) and not write.print(record):
                    break
    return OK


def _topics(folder: Folder | FarLog, args: argparse.Namespace, *, waiting: bool) -> dict[str, int]:
    """The topics that are there; a command that is ``waiting`` may see others come."""
    try:
        return pick_topics(folder, args.topic)
    except NotFound:
        if not waiting:
            raise
        Printer(args).note(f"there is no topic {args.topic} yet")
        return {}


def _last(
    reader: PartitionReader | FarReader, end: int, count: int, wanted: Callable[[Record], bool]
) -> list[Record]:
    """The last ``count`` wanted records before ``end``, looked for from the end backwards."""
    first = reader.bounds().first
    found: list[Record] = []
    step, high = max(count, 1), end
    while len(found) < count and high > first:
        low = max(first, high - step)
        block: list[Record] = []
        while low < high:
            batch = [r for r in reader.read(low, _READ, strict=False) if r.offset < high]
            if not batch:
                break
            block += filter(wanted, batch)
            low = batch[-1].offset + 1
        found = block + found
        high, step = max(first, high - step), step * 2
    return found[-count:] if count else []


def _follow(
    folder: Folder | FarLog,
    args: argparse.Namespace,
    reached: dict[Place, int],
    idle_s: float | None,
) -> Iterator[Record]:
    """Records from the places reached on, for ever or until none came for ``idle_s``. A topic or
    partition that is new is read from its start.
    """
    since = time.monotonic()
    while True:
        topics: dict[str, int] = {}
        with contextlib.suppress(NotFound):
            topics = pick_topics(folder, args.topic)
        places = [(topic, n) for topic, count in topics.items() for n in range(count)]
        batches = [
            folder.reader(*place).read(reached.get(place, 1), _READ, strict=False)
            for place in places
            if args.partition in (None, place[1])
        ]
        came = any(batches)
        for record in heapq.merge(*batches, key=lambda record: record.event.ts):
            reached[record.topic, record.partition] = record.offset + 1
            yield record
        if came:
            since = time.monotonic()
        elif idle_s is not None and time.monotonic() - since >= idle_s:
            return
        else:
            check_there(folder)
            rest(folder)


def run_sub(args: argparse.Namespace) -> int:
    check_pattern(args.topic)
    span = None if args.start is None else parse_span(args.start, SystemClock().now())
    if args.limit is not None:
        args.count = args.limit if args.count is None else min(args.limit, args.count)
    write = record_writer(args)
    if args.group is None:
        if args.ack == "none":
            raise InvalidOption("--ack is for a group", hint="without --group nothing is acked")
        if args.command is not None:
            raise InvalidOption("--exec is for a group", hint="--group NAME: its exit code acks")
        return _look_on(args, span, write)
    check_group(args.group)
    if args.command is not None and (args.ack == "none" or args.format is not None):
        raise InvalidOption("--exec goes with neither --ack none nor --format")
    if args.ack == "none":
        return _peek(args, span, write)
    return _join(args, span, write)


def _look_on(args: argparse.Namespace, span: Span | None, write: Write) -> int:
    wanted = compile_wanted(args)
    with closing(open_log(args)) as folder, _ending_on_request():
        topics = _topics(folder, args, waiting=span is None or span.stop is None)
        places = [(t, p) for t, n in topics.items() for p in pick_partitions(n, args.partition)]
        if span is not None and span.stop is not None:
            records: Iterator[Record] = (
                r for place in places for r in read_span(folder, *place, span)
            )
        else:
            reached = {place: _start(folder, place, span) for place in places}
            records = _follow(folder, args, reached, args.wait)
        _show(args, filter(wanted, records), write)
        pick_topics(folder, args.topic)  # if it never came, that is what to tell
    return OK


def _start(folder: Folder | FarLog, place: Place, span: Span | None) -> int:
    reader = folder.reader(*place)
    if span is None or span.start is None:
        return reader.bounds().next
    return span.start.resolve(reader)


def _show(args: argparse.Namespace, records: Iterator[Record], write: Write) -> None:
    for shown, record in enumerate(records, 1):
        write(record, 0)
        if shown == args.count:
            return


def _peek(args: argparse.Namespace, span: Span | None, write: Write) -> int:
    """Show what a group has not settled, and take nothing from it."""
    wanted = compile_wanted(args)
    with closing(open_ledgers(args, "--ack none")) as folder, _ending_on_request():
        reached: dict[Place, int] = {}
        again: list[Record] = []
        for topic, count in _topics(folder, args, waiting=True).items():
            for partition in pick_partitions(count, args.partition):
                key = GroupKey(topic, partition, args.group)
                if folder.has_group(key):
                    group = folder.group(key)
                    reached[topic, partition] = group.floor + 1
                    for offset in sorted(o for o in group.again if o <= group.floor):
                        reader = folder.reader(topic, partition)
                        again += reader.read(offset, 1, strict=False)
                elif span is not None:
                    reached[topic, partition] = _start(folder, (topic, partition), span)

        looked: dict[GroupKey, tuple[float, Group]] = {}

        def is_settled(record: Record) -> bool:
            key = GroupKey(record.topic, record.partition, args.group)
            at, group = looked.get(key, (-math.inf, Group()))
            if time.monotonic() - at > _LOOK_S:
                group = folder.look(key, lambda group: group)
                looked[key] = (time.monotonic(), group)
            return group.is_settled(record.offset)

        def open_records() -> Iterator[Record]:
            yield from again
            for record in _follow(folder, args, reached, args.wait):
                if not is_settled(record):
                    yield record

        _show(args, filter(wanted, open_records()), write)
        pick_topics(folder, args.topic)
    return OK


# -- as a member -------------------------------------------------------------------------------


def _join(args: argparse.Namespace, span: Span | None, write: Write) -> int:
    import asyncio

    if args.partition is not None:
        raise InvalidOption("a group has all partitions", hint="--partition is for looking on")
    start = group_start(span)
    if start is not None:
        with closing(open_log(args)) as folder:
            if any(key == (args.topic, args.group) for key in _named_groups(folder)):
                Printer(args).note(
                    f"group {args.group} goes on where it stands, --from is for a new one "
                    f"(trunkline group seek {args.topic} {args.group})"
                )
    return asyncio.run(_consume(args, start, write))


def _named_groups(folder: Folder | FarLog) -> Iterator[tuple[str, str]]:
    if isinstance(folder, Folder):
        yield from ((key.topic, key.group) for key in folder.groups())
    else:
        found = folder.call(folder.bus.groups())
        yield from ((one.topic, one.group) for one in found)


def group_start(span: Span | None) -> Any:
    if span is None:
        return None
    if span.start is None or span.stop is not None:
        raise InvalidOption("a group begins at one place and has no end", hint="--count, --wait")
    match span.start.base, span.start.n:
        case "start", 0:
            return "earliest"
        case "end", 0:
            return "latest"
        case "offset", offset:
            return offset
        case "time", _:
            return span.start.when
    raise InvalidOption("a group begins at start, end, an offset or a time")


async def _consume(args: argparse.Namespace, start: Any, write: Write) -> int:
    import asyncio

    from trunkline.bus import Outcome
    from trunkline.bus.connect import connect
    from trunkline.cli.execute import run_for
    from trunkline.cli.far import open_bus
    from trunkline.delivery.worker import Keeper

    chosen = choose_bus(args)
    url = chosen.url
    options: dict[str, Any] = {} if start is None else {"start": start}
    if args.command is not None:
        options["max_inflight"] = 1
    elif args.count is not None:  # no more than will be shown: others of the group get the rest
        options["max_inflight"] = min(args.count, Flow().max_inflight)
    code: list[int] = []
    if chosen.is_folder:
        url = f"file:{bus_path(url)}"
        opened = connect(url, create=False, allow_network=args.allow_network)
    else:
        opened = open_bus(url, chosen.token, create=False)
    async with opened as bus:

        async def is_there() -> bool:
            return any(matches(args.topic, name) for name in await bus.topics())

        subscription: Any = None
        stopped = asyncio.Event()

        def stop(exit_code: int) -> None:
            code.append(exit_code)
            stopped.set()
            if subscription is not None:
                subscription.drain()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, stop, INTERRUPTED)
        loop.add_signal_handler(signal.SIGTERM, stop, OK)
        if not await is_there():  # a group is made only for a topic that is
            Printer(args).note(f"there is no topic {args.topic} yet")
            until = math.inf if args.wait is None else time.monotonic() + args.wait
            while not (code or await is_there()):
                if time.monotonic() >= until:
                    raise NotFound(f"there is no topic {args.topic}", hint="trunkline topic ls")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await stopped.wait()
            if code:
                return code[0]
            if start == "latest":  # all that is there now came after we did
                options["start"] = "earliest"
        subscription = bus.subscribe(args.topic, group=args.group, where=args.where, **options)
        shown = 0
        keeper = Keeper(1, bus.clock, bus.policy_of)
        async with contextlib.AsyncExitStack() as stack:
            deliveries = await stack.enter_async_context(subscription)
            stack.push_async_callback(keeper.close)
            while not code and shown != args.count:
                try:
                    async with asyncio.timeout(args.wait):
                        delivery = await anext(deliveries)
                except (TimeoutError, StopAsyncIteration):
                    break
                if args.command is not None:
                    keeper.begin(0, delivery)
                    await run_for(args.command, delivery, url)
                else:
                    has_room = write.print(delivery.record, delivery.attempt)
                    delivery.finish(Outcome.ACK)
                    if not has_room:
                        break
                shown += 1
    return code[0] if code else OK
