"""``trunkline dlq``: dead letters, and giving their records back to the group that gave them up."""

from __future__ import annotations

import argparse
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING, Any

from trunkline.cli import ERROR, OK, Commands, branch, leaf, width
from trunkline.cli.arguments import add_bounds, at_least, bus_path, choose_bus
from trunkline.cli.render import Printer, clean, confirm, is_terminal, record_row, to_json
from trunkline.cli.still import StillStore, run_still
from trunkline.delivery.deadletters import Desk, Letter
from trunkline.errors import NotFound
from trunkline.event import Record
from trunkline.filters import to_filter
from trunkline.folder import Folder
from trunkline.names import (
    DEAD_SUFFIX,
    check_pattern,
    dead_topic,
    is_dead,
    is_pattern,
    matches,
)
from trunkline.options import StoreOptions

if TYPE_CHECKING:
    from trunkline.bus import DeadLetters

_NAMED = 8  # letters of one error that are named
_COLUMNS = ("letter", "topic", "partition", "offset", "group", "attempts", "reason", "error", "at")


def register(commands: Commands[Any]) -> None:
    below = branch(commands, "dlq", "list, show, redrive and drop dead letters")

    ls = leaf(below, "ls", run_ls, "list dead letters")
    add_bounds(ls)
    ls.add_argument("topic", metavar="TOPIC", nargs="?", help="only of these: orders, orders.*")
    ls.add_argument(
        "--closed", action="store_true", help="also letters that were redriven or dropped"
    )
    _add_choice(ls)

    show = leaf(below, "show", run_show, "show a dead letter and its event")
    show.add_argument("topic", metavar="TOPIC")
    show.add_argument("letter", metavar="LETTER", type=at_least(1))

    redrive = leaf(below, "redrive", run_redrive, "deliver records once more, to that group only")
    drop = leaf(below, "drop", run_drop, "close dead letters and leave their records alone")
    for parser in (redrive, drop):
        parser.add_argument("topic", metavar="TOPIC")
        parser.add_argument(
            "letters",
            metavar="LETTER",
            nargs="*",
            type=at_least(1),
            default=[],  # else argparse says that some are required
            help="these (all open ones)",
        )
        _add_choice(parser)
        parser.add_argument("--dry-run", action="store_true", help="only show the effect")
    redrive.add_argument("--rate", type=_rate, help="letters a second, at most")
    redrive.add_argument(
        "--max-redrives", type=at_least(0), help="leave letters alone that were redriven so often"
    )
    drop.add_argument("--yes", action="store_true", help="do not ask")


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"not a number above 0: {text!r}")
    return value


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--group", help="only letters of this group")
    parser.add_argument("--where", metavar="SQL", help="only events that meet this condition")


def _run(
    args: argparse.Namespace, job: Callable[[], Coroutine[Any, Any, int]], *, reading: bool
) -> int:
    """Run a command; one that only looks at a folder needs no event loop."""
    if reading and choose_bus(args).is_folder:
        return run_still(job())
    import asyncio

    return asyncio.run(job())


@asynccontextmanager
async def _open(
    args: argparse.Namespace, *, reading: bool
) -> AsyncIterator[tuple[set[str], Callable[[str], DeadLetters]]]:
    """The topics of the bus, and its desks."""
    chosen = choose_bus(args)
    if not chosen.is_folder:
        from trunkline.cli.far import open_bus

        async with open_bus(chosen.url, chosen.token, create=False) as bus:
            yield set(await bus.topics()), bus.dead_letters
        return
    path, network = bus_path(chosen.url), args.allow_network
    if reading:
        folder = Folder(path, StoreOptions(create=False, allow_network=network))
        with closing(folder):
            still = StillStore(folder)
            yield set(folder.topics()), lambda topic: Desk(still, dead_topic(topic), folder.clock)
        return
    from trunkline.store.file import FileStore

    store = FileStore(path, create=False, allow_network=network)
    try:
        yield (
            set(await store.topics()),
            lambda topic: Desk(store, dead_topic(topic), store.folder.clock),
        )
    finally:
        await store.close()


@asynccontextmanager
async def _desks(
    args: argparse.Namespace, topic: str | None, *, reading: bool = True
) -> AsyncIterator[list[DeadLetters]]:
    """A desk for each topic that has dead letters and is asked for."""
    async with _open(args, reading=reading) as (topics, desk):
        wanted = None if topic is None else check_pattern(topic.removesuffix(DEAD_SUFFIX))
        letters = sorted(name.removesuffix(DEAD_SUFFIX) for name in topics if is_dead(name))
        picked = [name for name in letters if wanted is None or matches(wanted, name)]
        if not picked and wanted is not None and not is_pattern(wanted) and wanted not in topics:
            raise NotFound(f"there is no topic {wanted}", hint="trunkline dlq ls")
        yield [desk(name) for name in picked]


def _row(letter: Letter) -> dict[str, Any]:
    return {
        "letter": letter.offset,
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.origin,
        "group": letter.group,
        "attempts": letter.attempts,
        "reason": letter.reason,
        "error": letter.error,
        "at": letter.at,
        "redrives": letter.redrives,
        "open": letter.open,
        "dropped": letter.dropped,
    }


def _say_errors(out: Printer, rows: Sequence[Mapping[str, Any]]) -> None:
    """The errors below the table, each once: they are too long for a column."""
    from textwrap import fill

    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        found.setdefault((row["topic"], clean(row["error"])), []).append(str(row["letter"]))
    for (topic, error), letters in found.items():
        which = " ".join(letters[:_NAMED]) + (" …" if len(letters) > _NAMED else "")
        out.say(fill(f"{topic} {which}: {error}", width(), subsequent_indent="    "))


def run_ls(args: argparse.Namespace) -> int:
    async def run() -> int:
        wanted = to_filter(args.where)
        rows = []
        async with _desks(args, args.topic) as desks:
            for desk in desks:
                async for letter in desk.letters(group=args.group, closed=args.closed):
                    if wanted is None or wanted(letter.event):
                        rows.append(_row(letter))  # noqa: PERF401 -- reads better
        columns = (*_COLUMNS, "open") if args.closed else _COLUMNS
        out = Printer(args)
        if not is_terminal() or args.json or args.quiet:
            out.table(rows, columns, "there are no dead letters", optional=("partition",))
            return OK
        cut = out.cut(rows, columns)
        narrow = [name for name in columns if name != "error"]
        out.table(cut, narrow, "there are no dead letters", optional=("partition",))
        _say_errors(out, cut)
        return OK

    return _run(args, run, reading=True)


def run_show(args: argparse.Namespace) -> int:
    async def run() -> int:
        async with _desks(args, args.topic) as desks:
            letter = await _one(desks, args).letter(args.letter)
        event = record_row(Record(letter.event, 0, letter.offset))
        row = _row(letter) | {"event": event}
        out = Printer(args)
        if out.json:
            out.row(row, "")
            return OK
        for name, value in row.items():
            text = value if isinstance(value, str) else to_json(value)
            out.say(f"{name:<10} {clean(text)}")
        return OK

    return _run(args, run, reading=True)


def _one(desks: list[DeadLetters], args: argparse.Namespace) -> DeadLetters:
    if len(desks) != 1:
        several = "is more than one topic, and each counts its own letters"
        why = several if desks else "has no dead letters"
        raise NotFound(f"{args.topic} {why}", hint="trunkline dlq ls")
    return desks[0]


def run_redrive(args: argparse.Namespace) -> int:
    async def run() -> int:
        out = Printer(args)
        options: dict[str, Any] = {}
        if args.max_redrives is not None:
            options["max_redrives"] = args.max_redrives
        if args.rate is not None:
            options["rate"] = args.rate
        done = refused = 0
        async with _desks(args, args.topic, reading=args.dry_run) as desks:
            for desk in [_one(desks, args)] if args.letters else desks:
                async for outcome in desk.redrive(
                    group=args.group,
                    offsets=set(args.letters) or None,
                    where=args.where,
                    dry_run=args.dry_run,
                    **options,
                ):
                    letter = outcome.letter
                    done += 1
                    refused += bool(outcome.refused)
                    row = _row(letter) | {"refused": outcome.refused, "dry_run": args.dry_run}
                    row["open"] = args.dry_run or bool(outcome.refused)
                    out.row(row, _said(letter, outcome.refused, "redriven", args))
        out.say(_sum(args, done - refused, refused, "redriven"))
        return ERROR if refused else OK

    return _run(args, run, reading=args.dry_run)


def run_drop(args: argparse.Namespace) -> int:
    async def run() -> int:
        out = Printer(args)
        done = 0
        async with _desks(args, args.topic, reading=args.dry_run) as desks:
            which = " ".join(map(str, args.letters)) or "all open letters"
            which += f" of {args.topic}"
            which += f" that {args.group} gave up" if args.group is not None else ""
            which += f" where {args.where}" if args.where is not None else ""
            if not args.dry_run and not confirm(args, f"drop {clean(which)}?"):
                return ERROR
            for desk in [_one(desks, args)] if args.letters else desks:
                async for letter in desk.drop(
                    group=args.group,
                    offsets=set(args.letters) or None,
                    where=args.where,
                    dry_run=args.dry_run,
                ):
                    done += 1
                    row = _row(letter) | {"open": args.dry_run, "dry_run": args.dry_run}
                    out.row(row, _said(letter, "", "dropped", args))
        out.say(_sum(args, done, 0, "dropped"))
        return OK

    return _run(args, run, reading=args.dry_run)


def _said(letter: Letter, refused: str, what: str, args: argparse.Namespace) -> str:
    place = f"letter {letter.offset}: {letter.topic}/{letter.partition}@{letter.origin}"
    verb = f"would be {what}" if args.dry_run else what
    verb = f"is left alone: {refused}" if refused else verb
    return clean(f"{place} of {letter.group} {verb}")


def _sum(args: argparse.Namespace, count: int, refused: int, what: str) -> str:
    text = f"{count} {'would be ' if args.dry_run else ''}{what}"
    return text + (f", {refused} refused" if refused else "")
