"""``trunkline pipeline``: run the pipelines over the log, and see what they found."""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import import_module
from typing import Any

from trunkline.cli import ERROR, OK, branch, leaf
from trunkline.cli.places import bus_url

LAKE = ".lake"


def register(commands: argparse._SubParsersAction[Any]) -> None:
    below = branch(commands, "pipeline", "tables and reports from the log, by Spark")
    run = leaf(below, "run", _run, "run pipelines; all of them without a name")
    run.add_argument("names", nargs="*", metavar="NAME")
    how = run.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="over what there is now (the default)")
    how.add_argument("--follow", action="store_true", help="again and again, until stopped")
    run.add_argument("--every", type=float, default=30.0, metavar="S", help="pause with --follow")
    _shared(run)
    listed = leaf(below, "ls", _list, "list the pipelines")
    listed.add_argument("--load", action="append", default=[], metavar="MODULE")
    status = leaf(below, "status", _status, "how each ended when it last ran")
    status.add_argument("--lake", default=LAKE, metavar="DIR")
    report = leaf(below, "report", _report, "one HTML page with a drawing for each table")
    report.add_argument("--out", default="report.html", metavar="FILE")
    _shared(report)
    replay = leaf(below, "replay", _replay, "publish records of the log or the lake once more")
    replay.add_argument("topic", help="the topic to read")
    replay.add_argument("--to", required=True, metavar="TOPIC")
    replay.add_argument("--to-url", default="", help="another bus than --url")
    replay.add_argument("--from-time", default="", metavar="TIME")
    replay.add_argument("--where", default="", help="only those that fit this condition")
    replay.add_argument("--from-lake", action="store_true")
    _shared(replay)


def _shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lake", default=LAKE, metavar="DIR", help="where the tables are")
    parser.add_argument("--master", default="local[*]", metavar="URL", help="which Spark")
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
    return import_module("trunkline.spark.pipelines").find(names, tuple(args.load))


def _session(args: argparse.Namespace) -> Any:
    start = import_module("trunkline.spark.start")
    settings = {}
    if not args.master.startswith("local"):
        settings = import_module("trunkline.spark.cluster").cluster_settings()
    return start.session("trunkline pipeline", master=args.master, config=settings)


def _run(args: argparse.Namespace) -> int:
    pipelines = _pipelines(args, args.names)
    jobs = import_module("trunkline.spark.jobs")
    lake = import_module("trunkline.spark.lake").Lake(args.lake)
    bars = import_module("trunkline.spark.progress")
    import_module("trunkline.spark.extents").Catalog(
        import_module("trunkline.spark.choice").folder_of({"url": bus_url(args)})
    ).close()
    spark = _session(args)
    runner = jobs.Runner(spark, bus_url(args), lake)
    while True:
        failed = 0
        for pipeline in pipelines:
            with bars.show_progress(spark, pipeline.name, enabled=not args.quiet):
                (outcome,) = runner.run([pipeline])
            failed += bool(outcome.error)
            _show(args, outcome)
        if not args.follow:
            return ERROR if failed else OK
        import_module("time").sleep(args.every)


def _show(args: argparse.Namespace, outcome: Any) -> None:
    values = import_module("msgspec").structs.asdict(outcome)
    if args.json:
        print(json.dumps(values), flush=True)
    elif outcome.error:
        print(f"{outcome.name:14} failed: {outcome.error}", file=sys.stderr, flush=True)
    elif not args.quiet:
        sent = f", {outcome.published} published" if outcome.published else ""
        print(f"{outcome.name:14} {outcome.rows} rows{sent} in {outcome.seconds} s", flush=True)


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
    jobs = import_module("trunkline.spark.jobs")
    for outcome in jobs.read_outcomes(import_module("trunkline.spark.lake").Lake(args.lake)):
        if args.json:
            print(json.dumps(import_module("msgspec").structs.asdict(outcome)))
        else:
            state = f"failed: {outcome.error}" if outcome.error else f"{outcome.rows} rows"
            print(f"{outcome.name:14} {outcome.at}  {outcome.seconds:8} s  {state}")
    return OK


def _report(args: argparse.Namespace) -> int:
    report = import_module("trunkline.spark.report")
    lake = import_module("trunkline.spark.lake").Lake(args.lake)
    pipelines = _pipelines(args, [])
    spark = _session(args)
    page = report.write_report(spark, lake, pipelines)
    with open(args.out, "w", encoding="utf-8") as file:
        file.write(page)
    if not args.quiet:
        for pipeline in pipelines:
            _draw(pipeline, *report.gold(spark, lake, pipeline))
        print(args.out)
    return OK


def _draw(pipeline: Any, columns: list[str], rows: list[list[Any]]) -> None:
    if not rows or pipeline.kind == "stream":
        return
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(pipeline.name, *columns, sep="\t")
        for row in rows:
            print("", *row, sep="\t")
        return
    table = Table(*columns, title=pipeline.name)
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table)


def _replay(args: argparse.Namespace) -> int:
    jobs = import_module("trunkline.spark.jobs")
    lake = import_module("trunkline.spark.lake").Lake(args.lake) if args.from_lake else None
    source = {"url": bus_url(args), "subscribe": args.topic}
    if args.from_time:
        source["startingTimestamp"] = args.from_time
    target = {"url": args.to_url or bus_url(args), "topic": args.to}
    spark = _session(args)
    count = jobs.replay(spark, source, target, where=args.where, lake=lake)
    print(json.dumps({"replayed": count}) if args.json else f"replayed {count} records")
    return OK
