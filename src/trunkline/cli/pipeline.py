"""``trunkline pipeline``: run the pipelines over the log, and see what they found."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from functools import partial
from typing import Any

import msgspec

from trunkline.cli import ERROR, INTERRUPTED, OK, branch, leaf
from trunkline.cli.arguments import bus_url
from trunkline.cli.render import Printer, amount, clean
from trunkline.cli.spark import located, part, settings_of
from trunkline.errors import InvalidOption, NotFound

LAKE = ".lake"


def register(commands: argparse._SubParsersAction[Any]) -> None:
    below = branch(commands, "pipeline", "tables and reports from the log, by Spark")
    run = leaf(below, "run", _run, "run pipelines; all of them without a name")
    run.add_argument("names", nargs="*", metavar="NAME")
    how = run.add_mutually_exclusive_group()
    how.add_argument(
        "--once", action="store_true", help="over the records that are there now (the default)"
    )
    how.add_argument("--follow", action="store_true", help="as things happen, until stopped")
    run.add_argument(
        "--every", type=float, default=None, metavar="S",
        help="again every S seconds, until stopped; with --follow how often (5)",
    )  # fmt: skip
    run.add_argument(
        "--publish", action="store_true", help="let pipelines send their events to the bus"
    )
    run.add_argument(
        "--rebuild", action="store_true", help="make the tables anew beside the old, then swap"
    )
    run.add_argument("--from", dest="since", default="", metavar="TIME", help="records since then")
    run.add_argument("--to", dest="until", default="", metavar="TIME", help="records before then")
    run.add_argument(
        "--set", action="append", default=[], metavar="[PIPELINE.]NAME=VALUE",
        help="a parameter of a pipeline, repeatable; ls --json shows them",
    )  # fmt: skip
    _shared(run)
    listed = leaf(below, "ls", _list, "list the pipelines")
    listed.add_argument("--load", action="append", default=[], metavar="MODULE")
    status = leaf(below, "status", _status, "how each ended when it last ran")
    status.add_argument("--lake", default=LAKE, metavar="DIR")
    report = leaf(below, "report", _report, "one HTML page with drawings of each table")
    report.add_argument("names", nargs="*", metavar="NAME", help="only these; else all of them")
    report.add_argument("--out", default="report.html", metavar="FILE")
    report.add_argument("--title", default="Trunkline")
    report.add_argument(
        "--rows", type=int, default=5, metavar="N", help="rows to print of each table; 5"
    )
    _tables(report)
    replay = leaf(below, "replay", _replay, "publish records of the log or the lake once more")
    replay.add_argument("topic", help="the topic to read")
    replay.add_argument("--to", required=True, metavar="TOPIC")
    replay.add_argument("--to-url", default="", help="another bus than --url")
    replay.add_argument("--from-time", default="", metavar="TIME")
    replay.add_argument("--to-time", default="", metavar="TIME")
    replay.add_argument(
        "--speed",
        type=float,
        default=0.0,
        help="keep the pauses between records, SPEED times as fast; else all at once",
    )
    replay.add_argument("--where", default="", help="only records that fit this condition")
    replay.add_argument("--from-lake", action="store_true")
    replay.add_argument(
        "--name", default="", help="tried again under this name, nothing is sent twice"
    )
    _shared(replay)


def _shared(parser: argparse.ArgumentParser) -> None:
    _tables(parser)
    parser.add_argument("--master", default="local[*]", metavar="URL", help="which Spark")
    parser.add_argument(
        "--conf", action="append", default=[], metavar="NAME=VALUE",
        help="a setting of Spark, repeatable",
    )  # fmt: skip


def _tables(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lake", default=LAKE, metavar="DIR", help="where the tables are")
    parser.add_argument(
        "--load",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module with pipelines of your own",
    )


def _pipelines(args: argparse.Namespace, names: list[str]) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return part("pipelines").find(names, tuple(args.load))
    except ModuleNotFoundError as error:
        raise NotFound(
            f"{error.name} is not installed", hint="pip install 'trunkline[spark]'"
        ) from None


def _session(args: argparse.Namespace) -> Any:
    config = settings_of(args.conf)
    return part("session.cluster").open_session(args.master, "trunkline pipeline", config)


def _run(args: argparse.Namespace) -> int:
    again = args.follow or args.every is not None
    if again and (args.rebuild or args.since or args.until):
        raise InvalidOption(
            "--rebuild, --from and --to are for one run",
            hint="run it once with them, then with --every or --follow",
        )
    pipelines = _pipelines(args, args.names)
    jobs = part("pipelines.run")
    lake = part("lake").Lake(args.lake)
    bars = part("session.progress")
    url = located(bus_url(args))
    part("source.offsets").topics_of({"url": url})
    chosen = _parameters(args.set, pipelines)
    spark = _session(args)
    runner = jobs.Runner(
        spark,
        url,
        lake,
        publish=args.publish,
        settings=chosen,
        since=args.since,
        until=args.until,
    )
    if again:
        with bars.show_progress(spark, "following", enabled=not args.quiet):
            return _follow(args, runner, pipelines)
    show = partial(_show, args)
    with bars.show_progress(spark, "pipelines", enabled=not args.quiet):
        outcomes = runner.run(pipelines, show, rebuild=args.rebuild)
    return ERROR if any(outcome.error for outcome in outcomes) else OK


def _parameters(given: list[str], pipelines: Any) -> dict[str, dict[str, Any]]:
    """The parameters of each pipeline that ``--set`` names; of each that has it without a name."""
    found: dict[str, dict[str, Any]] = {}
    for name, text in settings_of(given).items():
        owner, dot, parameter = name.rpartition(".")
        takers = [
            one for one in pipelines if parameter in one.settings and (not dot or one.name == owner)
        ]
        if not takers:
            known = [f"{one.name}.{each}" for one in pipelines for each in one.settings]
            raise InvalidOption(
                f"no pipeline that runs has a parameter {name}", hint=f"known: {', '.join(known)}"
            )
        for one in takers:
            value = _value(name, text, one.settings[parameter])
            found.setdefault(one.name, {})[parameter] = value
    return found


def _value(name: str, text: str, default: Any) -> Any:
    """The text as the default's type has it."""
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise InvalidOption(f"{name}={text}", hint="true or false")
        return text.lower() == "true"
    try:
        return type(default)(text)
    except ValueError:
        raise InvalidOption(f"{name}={text}", hint=f"for example {default}") from None


def _follow(args: argparse.Namespace, runner: Any, pipelines: Any) -> int:
    """A signal ends it between two batches. Spark's own handler would break off the jobs."""
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    show = partial(_show, args)
    every_s = 5.0 if args.every is None else args.every
    failed = runner.keep(pipelines, show, every_s=every_s, until=lambda: bool(asked))
    if failed:
        return ERROR
    return INTERRUPTED if signal.SIGINT in asked else OK


def _show(args: argparse.Namespace, outcome: Any) -> None:
    values = msgspec.structs.asdict(outcome)
    if args.json:
        print(json.dumps(values), flush=True)
    elif outcome.error:
        print(f"{outcome.name:14} failed: {outcome.error}", file=sys.stderr, flush=True)
    elif not args.quiet:
        told = amount(outcome.rows, "row")
        if outcome.set_aside:
            told += f", {outcome.set_aside} set aside (see table {outcome.refused})"
        if outcome.published:
            told += f", {outcome.published} published"
        if outcome.new_columns:
            told += f", new columns: {', '.join(outcome.new_columns)}"
        print(f"{outcome.name:14} {told} in {outcome.seconds} s", flush=True)
        for note in outcome.notes:
            print(f"{outcome.name:14} {note}", file=sys.stderr, flush=True)


def _list(args: argparse.Namespace) -> int:
    for pipeline in _pipelines(args, []):
        if args.json:
            values = {"name": pipeline.name, "source": pipeline.source, "about": pipeline.about}
            values |= {"table": pipeline.table, "parameters": pipeline.settings}
            print(json.dumps(values | {"to_topic": pipeline.to_topic}))
        elif args.quiet:
            print(pipeline.name)
        else:
            back = f" (published to {pipeline.to_topic})" if pipeline.to_topic else ""
            print(f"{pipeline.name:14} {pipeline.about}{back}")
    return OK


def _status(args: argparse.Namespace) -> int:
    lake = part("report").find_lake(args.lake)
    ran = part("pipelines.run").read_outcomes(lake)
    rows = [msgspec.structs.asdict(one) for one in ran]
    columns = ("name", "at", "seconds", "rows", "set_aside", "published", "state")
    rows = [row | {"state": row["error"] or "ok"} for row in rows]
    Printer(args).table(rows, columns, empty="no pipeline has run on this lake")
    return OK


def _report(args: argparse.Namespace) -> int:
    parts = part("report")
    pipelines = _pipelines(args, args.names)
    report = parts.read_report(args.lake, pipelines, args.title, only=bool(args.names))
    with open(args.out, "w", encoding="utf-8") as file:
        file.write(parts.write_page(report))
    output = Printer(args)
    for card in report.cards:
        told = f"failed: {card.error}. {card.line}" if card.error else card.line
        output.say("")
        output.say(clean(f"{card.name}: {told}"))
        rows = list(card.top)[: max(0, args.rows)]
        if rows and not (args.json or args.quiet):
            output.table(rows, tuple(rows[0]))
    said = [
        {"name": card.name, "state": card.state.value, "line": card.line, "error": card.error,
         "rows": card.total, "charts": len(card.charts)}
        for card in report.cards
    ]  # fmt: skip
    output.row({"report": args.out, "tables": said}, f"\nreport: {args.out}")
    return OK


def _replay(args: argparse.Namespace) -> int:
    jobs = part("pipelines.run")
    lake = part("report").find_lake(args.lake) if args.from_lake else None
    source = {"url": located(bus_url(args)), "subscribe": args.topic}
    if args.from_time:
        source["startingTimestamp"] = args.from_time
    if args.to_time:
        source["endingTimestamp"] = args.to_time
    if lake is None:
        part("source.offsets").check_source(source)
    target = {"url": located(args.to_url or bus_url(args)), "topic": args.to}
    if args.name:
        target |= {"txnAppId": f"replay.{args.name}", "txnVersion": "1"}
        if part("sink.writers").sent_version(target, target["txnAppId"]) >= 1:
            said = f"replayed 0 records: {args.name} was sent before"
            print(json.dumps({"replayed": 0}) if args.json else said)
            return OK
    spark = _session(args)
    count = jobs.replay(spark, source, target, where=args.where, lake=lake, speed=args.speed)
    print(json.dumps({"replayed": count}) if args.json else f"replayed {amount(count, 'record')}")
    return OK
