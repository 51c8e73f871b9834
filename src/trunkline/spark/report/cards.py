"""What the report shows of each pipeline, read from the lake."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from trunkline.errors import NotFound
from trunkline.spark.lake import Lake
from trunkline.spark.pipelines import Pipeline
from trunkline.spark.pipelines.run import RunResult, read_outcomes
from trunkline.spark.report.charts import Chart
from trunkline.spark.report.drawings import State, TableSummary, draw, quarantine
from trunkline.spark.report.tables import Row, Tables

ROWS: Final = 12
_ORDER: Final = (
    "traffic", "lake", "clean", "quarantine", "dead_letters", "latency", "lag", "consolidation",
    "sequences", "learning", "temporal", "claims", "compaction",
)  # fmt: skip


class Card(NamedTuple):
    """What the report shows of one pipeline. ``error`` is why it failed, ``line`` what its table
    says; ``top`` are the rows that are worth printing, and ``heading`` what the page calls them;
    ``rows`` are the newest.
    """

    name: str
    about: str
    state: State
    line: str
    error: str
    charts: Sequence[Chart]
    top: Sequence[Row]
    heading: str
    total: int
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


class Report(NamedTuple):
    title: str
    lake: str
    now_ms: float
    cards: Sequence[Card]
    outcomes: Sequence[RunResult]
    others: Sequence[tuple[str, int]]  # tables of the lake that no card shows, and their rows


def find_lake(path: str) -> Lake:
    """The lake at a path where there is one."""
    lake = Lake(path)
    if not lake.storage.is_there():
        raise NotFound(
            f"there is no lake at {lake.path}", hint="'trunkline pipeline run' makes one"
        )
    return lake


def read_report(
    path: str,
    pipelines: Sequence[Pipeline],
    title: str = "Trunkline",
    now_ms: float | None = None,
    *,
    only: bool = False,
) -> Report:
    """What there is to say of these pipelines' tables, as far as the lake has them. A pipeline that
    failed is shown without being among them, unless ``only`` they are wanted.
    """
    lake = find_lake(path)
    now = time.time_ns() / 1e6 if now_ms is None else now_ms
    outcomes = read_outcomes(lake)
    ended = {outcome.name: outcome for outcome in outcomes}
    if not only:
        known = {one.name for one in pipelines}
        failed = [one.name for one in outcomes if one.error and one.name not in known]
        pipelines = [*pipelines, *map(_not_loaded, failed)]
    with Tables.open(lake) as tables:
        cards = [
            _card(tables, one, ended.get(one.name), now)
            for one in pipelines
            if lake.has(one.table or one.name) or (one.name in ended and ended[one.name].error)
        ]
        if tables.has("quarantine", "reason", "topic", "timestamp"):
            found = quarantine(tables, "quarantine", now)
            cards.append(_shown(tables, "quarantine", "events that were refused, and why", found))
        shown = {one.table or one.name for one in pipelines} | {"quarantine"}
        others = [(name, lake.rows(name)) for name in lake.tables() if name not in shown]
    urgency = list(State)
    cards.sort(key=lambda card: (urgency.index(card.state) > 0, _place(card.name), card.name))
    return Report(title, path.removeprefix("file:"), now, cards, outcomes, others)


def _not_loaded(name: str) -> Pipeline:
    """What stands for a pipeline of which only its last run is known."""
    return Pipeline(name=name, about="it is not loaded now", transform=lambda df: df)


def _place(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _card(tables: Tables, pipeline: Pipeline, ended: RunResult | None, now_ms: float) -> Card:
    table, name, about = pipeline.table or pipeline.name, pipeline.name, pipeline.about
    error = ended.error if ended is not None else ""
    try:
        found = draw(tables, pipeline, now_ms)
        if error:
            old = f"Its table is as of the run before: {found.line}."
            line = old if tables.lake.has(table) else "It has no table yet."
            found = found._replace(state=State.FAILED, line=line)
        return _shown(tables, name, about, found, table, error)
    except Exception as problem:  # noqa: BLE001 -- a table that cannot be read hides no other
        unread = TableSummary(f"its table cannot be read: {problem}", State.FAILED)
        return _made(name, about, unread, error, tables.lake.rows(table), [], [])


def _shown(
    tables: Tables, name: str, about: str, found: TableSummary, table: str = "", error: str = ""
) -> Card:
    columns, rows = tables.newest(table or name, ROWS)
    return _made(name, about, found, error, tables.count(table or name), columns, rows)


def _made(
    name: str,
    about: str,
    found: TableSummary,
    error: str,
    total: int,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
) -> Card:
    return Card(
        name=name,
        about=about,
        state=found.state,
        line=found.line,
        error=error,
        charts=found.charts,
        top=found.top,
        heading=found.heading,
        total=total,
        columns=columns,
        rows=rows,
    )
