"""``trunkline why`` and ``trunkline metrics``: what the files tell, with nothing running."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from trunkline.cli import OK, Commands, leaf
from trunkline.cli.arguments import bus_path, bus_url
from trunkline.cli.render import Printer, amount, clean, shown_json, to_time
from trunkline.cli.spark import part
from trunkline.patterns.measures import measure, to_text
from trunkline.patterns.story import Step, tell


def register(commands: Commands[Any]) -> None:
    why = leaf(commands, "why", run_why, "tell the whole story of one event")
    why.add_argument("id", metavar="ID", help="the id of the event")
    why.add_argument("--lake", metavar="FOLDER", help="say which tables of a lake hold it")
    metrics = leaf(commands, "metrics", run_metrics, "print figures for Prometheus")
    metrics.add_argument(
        "--outbox", action="append", default=[], metavar="URL", help="a database with an outbox"
    )


def run_why(args: argparse.Namespace) -> int:
    import trunkline

    path = bus_path(bus_url(args))
    with trunkline.open(f"file:{path}", create=False, allow_network=args.allow_network) as bus:
        story = tell(bus, path, args.id)
    if args.lake and story.offset:
        rows = part("lake.find").rows_of(args.lake, story.topic, story.partition, story.offset)
        for table, count in rows.items():
            text = f"in the lake: {amount(count, 'row')} of {table}"
            story.steps.append(Step("in the lake", text, facts={"table": table, "rows": count}))
    output = Printer(args)
    if args.json:
        for step in story.steps:
            print(shown_json(step))
        return OK
    place = f"{story.topic}/{story.partition}@{story.offset}" if story.offset else story.topic
    output.say(f"{story.id} {place}")
    for step in story.steps:
        at = "" if step.at is None else to_time(step.at)
        output.say(f"{at:28} {clean(step.text)}")
    return OK


def run_metrics(args: argparse.Namespace) -> int:
    import trunkline

    async def run() -> int:
        path = bus_path(bus_url(args))
        bus = trunkline.connect(f"file:{path}", create=False, allow_network=args.allow_network)
        try:
            families = await measure(bus, {name: _rows(name) for name in args.outbox})
        finally:
            await bus.close()
        if args.json:
            for family in families:
                for sample in family.samples:
                    row = {"name": sample.name, **sample.labels, "value": sample.value}
                    print(shown_json(row))
        else:
            print(to_text(families), end="")
        return OK

    return asyncio.run(run())


def _rows(url: str) -> Any:
    """A function that counts the waiting rows of an outbox in a database."""
    from trunkline.check import load_extra
    from trunkline.patterns.outbox import SqlOutbox

    engine = load_extra("sqlalchemy", "outbox").create_engine(url)
    return SqlOutbox(engine).waiting
