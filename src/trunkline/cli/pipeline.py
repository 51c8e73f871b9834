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
from trunkline.cli.places import bus_url
from trunkline.cli.render import Output, amount
from trunkline.cli.spark import located, part

LAKE = ".lake"
SHOWN = 6  # columns of a table at a terminal; the page has them all


def register(commands: argparse._SubParsersAction[Any]) -> None:
    below = branch(commands, "pipeline", "tables and reports from the log, by Spark")
    run = leaf(below, "run", _run, "run pipelines; all of them without a name")
    run.add_argument("names", nargs="*", metavar="NAME")
    how = run.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="over what there is now (the default)")
    how.add_argument("--follow", action="store_true", help="as things happen, until stopped")
    run.add_argument(
        "--every", type=float, default=5.0, metavar="S", help="how often, with --follow"
    )
    _shared(run)
    listed = leaf(below, "ls", _list, "list the pipelines")
    listed.add_argument("--load", action="append", default=[], metavar="MODULE")
    status = leaf(below, "status", _status, "how each ended when it last ran")
    status.add_argument("--lake", default=LAKE, metavar="DIR")
    report = leaf(below, "report", _report, "one HTML page with a drawing for each table")
    report.add_argument("--out", default="report.html", metavar="FILE")
    report.add_argument("--title", default="Trunkline")
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
        help="keep the pauses between records, so many times as fast; else all at once",
    )
    replay.add_argument("--where", default="", help="only those that fit this condition")
    replay.add_argument("--from-lake", action="store_true")
    replay.add_argument(
        "--name", default="", help="tried again under this name, nothing is sent twice"
    )
    _shared(replay)


def _shared(parser: argparse.ArgumentParser) -> None:
    _tables(parser)
    parser.add_argument("--master", default="local[*]", metavar="URL", help="which Spark")


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
    return part("pipelines").find(names, tuple(args.load))


def _session(args: argparse.Namespace) -> Any:
    return part("cluster").open_session(args.master, "trunkline pipeline")


def _run(args: argparse.Namespace) -> int:
    pipelines = _pipelines(args, args.names)
    jobs = part("jobs")
    lake = part("lake").Lake(args.lake)
    bars = part("progress")
    part("extents").Catalog(part("choice").folder_of({"url": bus_url(args)})).close()
    spark = _session(args)
    runner = jobs.Runner(spark, bus_url(args), lake)
    if args.follow:
        with bars.show_progress(spark, "following", enabled=not args.quiet):
            return _follow(args, runner, pipelines)
    outcomes = []
    for pipeline in pipelines:
        with bars.show_progress(spark, pipeline.name, enabled=not args.quiet):
            outcomes += runner.run([pipeline])
        _show(args, outcomes[-1])
    return ERROR if any(outcome.error for outcome in outcomes) else OK


def _follow(args: argparse.Namespace, runner: Any, pipelines: Any) -> int:
    """A signal ends it between two batches. Spark's own handler would break off the jobs."""
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    show = partial(_show, args)
    failed = runner.keep(pipelines, show, every_s=args.every, until=lambda: bool(asked))
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
        print(f"{outcome.name:14} {told} in {outcome.seconds} s", flush=True)


def _list(args: argparse.Namespace) -> int:
    for pipeline in _pipelines(args, []):
        if args.json:
            values = {"name": pipeline.name, "kind": pipeline.kind, "about": pipeline.about}
            print(json.dumps(values | {"to_topic": pipeline.to_topic}))
        elif args.quiet:
            print(pipeline.name)
        else:
            back = f" (published to {pipeline.to_topic})" if pipeline.to_topic else ""
            print(f"{pipeline.name:14} {pipeline.kind:7} {pipeline.about}{back}")
    return OK


def _status(args: argparse.Namespace) -> int:
    lake = part("report").find_lake(args.lake)
    ran = part("jobs").read_outcomes(lake)
    rows = [msgspec.structs.asdict(one) for one in ran]
    columns = ("name", "at", "seconds", "rows", "set_aside", "published", "state")
    rows = [row | {"state": row["error"] or "ok"} for row in rows]
    Output(args).table(rows, columns, empty="no pipeline has run on this lake")
    return OK


def _report(args: argparse.Namespace) -> int:
    report = part("report")
    tables = report.read_gold(args.lake, _pipelines(args, []))
    with open(args.out, "w", encoding="utf-8") as file:
        file.write(report.write_report(args.lake, tables, args.title))
    output = Output(args)
    for one in tables:
        output.say(f"\n{one.name}: {amount(one.total, 'row')}; {one.measure}")
        if not (args.json or args.quiet):
            rows = [dict(zip(("what", "value"), pair, strict=True)) for pair in one.drawn]
            output.table(rows, ("what", "value"))
            rows = [dict(zip(one.columns, row, strict=True)) for row in one.rows]
            output.table(rows, one.columns[:SHOWN])
    drawn = {one.name: len(one.drawn) for one in tables}
    output.row({"report": args.out, "drawn": drawn}, f"\n{args.out}")
    return OK


def _replay(args: argparse.Namespace) -> int:
    jobs = part("jobs")
    lake = part("report").find_lake(args.lake) if args.from_lake else None
    source = {"url": located(bus_url(args)), "subscribe": args.topic}
    if args.from_time:
        source["startingTimestamp"] = args.from_time
    if args.to_time:
        source["endingTimestamp"] = args.to_time
    if lake is None:
        part("choice").check_source(source)
    target = {"url": located(args.to_url or bus_url(args)), "topic": args.to}
    if args.name:
        target |= {"txnAppId": f"replay.{args.name}", "txnVersion": "1"}
        root = part("choice").folder_of(target)
        sink = part("sink")
        if sink.sent_version(root, target["txnAppId"]) >= 1:
            said = f"replayed 0 records: {args.name} was sent before"
            print(json.dumps({"replayed": 0}) if args.json else said)
            return OK
    spark = _session(args)
    count = jobs.replay(spark, source, target, where=args.where, lake=lake, speed=args.speed)
    print(json.dumps({"replayed": count}) if args.json else f"replayed {amount(count, 'record')}")
    return OK
