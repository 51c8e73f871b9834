"""``trunkline spark``: a shell, a job, or a whole cluster, with the log as a table in it."""

from __future__ import annotations

import argparse
import code
import json
import os
import re
import runpy
import signal
import sys
import threading
from importlib import import_module
from typing import Any

from trunkline.check import load_extra
from trunkline.cli import OK, branch, leaf
from trunkline.cli.arguments import bus_url
from trunkline.errors import InvalidOption, NoBus, NotFound
from trunkline.log.layout import folder_path


def register(commands: argparse._SubParsersAction[Any]) -> None:
    below = branch(commands, "spark", "Spark with the log as a table in it")
    shell = leaf(below, "shell", _shell, "a Python shell with a session, and each topic as a view")
    _where(shell)
    submit = leaf(below, "submit", _submit, "run a Python file in a session, with the same views")
    submit.add_argument("file")
    submit.add_argument("arguments", nargs=argparse.REMAINDER)
    _where(submit)
    leaf(below, "info", _info, "which Java, which Spark, and what is missing")
    cluster = branch(below, "cluster", "a standalone cluster on this machine")
    up = leaf(cluster, "up", _up, "start a master and workers; Ctrl-C ends them")
    up.add_argument("--workers", type=int, default=2)
    up.add_argument("--cores", type=int, default=1, help="of each worker")
    up.add_argument("--memory", default="1g", help="of each worker")
    up.add_argument("--port", type=int, default=17077)
    up.add_argument("--folder", default=".spark", help="logs and scratch space")


def _where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--master", default="local[*]", metavar="URL")
    parser.add_argument("--lake", default=".lake", metavar="DIR", help="its tables are views, too")
    parser.add_argument(
        "--conf", action="append", default=[], metavar="NAME=VALUE", help="a setting of Spark"
    )


def settings_of(given: list[str]) -> dict[str, str]:
    """Settings that were given as NAME=VALUE."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidOption(f"{text!r} is not NAME=VALUE", hint="for example pause_s=600")
        found[name] = value
    return found


def part(name: str) -> Any:
    """A module of ``trunkline.spark``, which needs its extra."""
    return load_extra(f"trunkline.spark.{name}", "spark")


def _session(args: argparse.Namespace) -> Any:
    return part("session.cluster").open_session(args.master, config=settings_of(args.conf))


def located(url: str) -> str:
    """The same bus for processes that run elsewhere, as executors do."""
    if "://" in url:
        return url
    return f"file:{os.path.abspath(folder_path(url.removeprefix('file:')))}"


def _views(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """A session, and each topic in it as a view."""
    url = located(bus_url(args))
    topics = part("source.offsets").topics_of({"url": url})
    spark = _session(args)
    names: dict[str, Any] = {}
    for topic in topics:
        name = re.sub(r"\W|^(?=\d)", "_", topic)
        names[name] = spark.read.format("trunkline").options(url=url, subscribe=topic).load()
        names[name].createOrReplaceTempView(name)
    for name in part("lake").register(spark, args.lake):
        names[name] = spark.table(name)
    return spark, names


def _shell(args: argparse.Namespace) -> int:
    spark, names = _views(args)
    banner = f"spark is a session; views: {', '.join(names) or 'none'}"
    names = {"__name__": "__main__", "spark": spark, "sql": spark.sql, **names}
    if sys.stdin.isatty():
        code.interact(banner, local=names, exitmsg="")
    else:  # a program that was piped in
        exec(compile(sys.stdin.read(), "<stdin>", "exec"), names)
    return OK


def _submit(args: argparse.Namespace) -> int:
    if not os.path.isfile(args.file):
        raise NotFound(f"there is no file {args.file}")
    try:
        spark, _ = _views(args)
    except NoBus:  # a program may bring its own
        spark = _session(args)
    sys.argv = [args.file, *args.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(args.file)))
    runpy.run_path(args.file, {"spark": spark}, run_name="__main__")
    return OK


def _info(args: argparse.Namespace) -> int:
    java = part("session.java").find_java()
    values = {"java": java.version, "java_home": java.home, "python": sys.executable}
    for name in ("pyspark", "pyarrow", "pandas", "duckdb", "deltalake"):
        try:
            values[name] = import_module(name).__version__
        except ImportError:
            values[name] = "missing: pip install 'trunkline[spark]'"
    if args.json:
        print(json.dumps(values))
    else:
        for name, value in values.items():
            print(f"{name:10} {value}")
    return OK


def _up(args: argparse.Namespace) -> int:
    made = part("session.cluster").Cluster(
        folder=os.path.abspath(args.folder),
        workers=args.workers,
        cores=args.cores,
        memory=args.memory,
        port=args.port,
    )
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with made as cluster:
        values = {"master": cluster.url, "page": cluster.page, "workers": args.workers}
        print(json.dumps(values) if args.json else f"{cluster.url}  {cluster.page}", flush=True)
        ended.wait()
    return OK
