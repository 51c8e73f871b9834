"""One self-contained page with a drawing and a table for each table the pipelines made.

It reads the lake's files by itself, so no Spark is started for it.
"""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
from pyspark.sql.variant_utils import VariantUtils

from trunkline.errors import NotFound
from trunkline.spark.jobs import Ran, read_outcomes
from trunkline.spark.lake import Lake

if TYPE_CHECKING:
    from trunkline.spark.pipelines import Pipeline

_STYLE = """
:root{--ink:#1c2733;--dim:#5b6b7a;--line:#dfe5ea;--head:#f3f6f8;--page:#fff;--mark:#2f7ed8}
@media(prefers-color-scheme:dark){:root{--ink:#dbe3ea;--dim:#9fb0bf;--line:#2c3640;
--head:#1e262e;--page:#14191f;--mark:#5aa2ef}}
body{font:14px/1.5 system-ui,sans-serif;max-width:1200px;margin:1.5rem auto;padding:0 1rem;
color:var(--ink);background:var(--page)}h1{font-size:1.4rem;margin:0}
h2{margin:0;font-size:1.05rem}p{color:var(--dim);margin:0 0 .5rem}
main{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,34rem),1fr))}
section{border:1px solid var(--line);border-radius:6px;padding:.8rem 1rem;min-width:0}
svg{display:block;width:100%;height:auto}svg text{font-size:11px;fill:var(--ink)}
.bar{fill:var(--mark)}.wide{overflow-x:auto}table{border-collapse:collapse;font-size:12px}
th,td{padding:.15rem .6rem;text-align:left;border-bottom:1px solid var(--line);max-width:20rem;
overflow:hidden;text-overflow:ellipsis;white-space:nowrap}th{background:var(--head)}
summary{cursor:pointer;color:var(--dim);font-size:12px;margin:.4rem 0}
"""
ROWS = 12


class Gold(NamedTuple):
    """What the report shows of one pipeline: some rows of its table, and what is drawn of it."""

    name: str
    about: str
    total: int
    columns: list[str]
    rows: list[list[Any]]
    measure: str
    drawn: list[tuple[str, float]]


def read_gold(path: str, pipelines: Sequence[Pipeline]) -> list[Gold]:
    """The tables of these pipelines, as far as the lake has them."""
    lake = find_lake(path)
    return [_gold(lake.place(one.into), one) for one in pipelines if lake.has(one.into)]


def find_lake(path: str) -> Lake:
    """The lake at a path where there is one."""
    lake = Lake(path)
    if not os.path.isdir(lake.path):
        raise NotFound(
            f"there is no lake at {lake.path}", hint="'trunkline pipeline run' makes one"
        )
    return lake


def _gold(place: str, pipeline: Pipeline) -> Gold:
    label, number = pipeline.chart or ("topic", "rows")
    table = _dataset(place)
    if table is None:
        return Gold(pipeline.name, pipeline.about, 0, [], [], "it has no rows", [])
    columns = [name for name in table.schema.names if not name.startswith("_")]
    rows = [
        list(map(_plain, row.values())) for row in table.head(ROWS, columns=columns).to_pylist()
    ]
    drawn = _largest(table, label, number) if label in columns else []
    measure = f"{number} by {label}"
    total = table.count_rows()
    return Gold(pipeline.name, pipeline.about, total, columns, rows, measure, drawn)


def _dataset(place: str) -> ds.Dataset | None:
    """The files of a table's newest version; None if it has no rows."""
    from deltalake import DeltaTable

    actions = pa.table(DeltaTable(place).get_add_actions(flatten=True))
    files = [os.path.join(place, path) for path in actions["path"].to_pylist()]
    if not files:
        return None
    return ds.dataset(files, partitioning="hive", partition_base_dir=place)


def _largest(table: ds.Dataset, label: str, number: str) -> list[tuple[str, float]]:
    """The largest numbers by label. Counts add up; of times, rates and the like, the worst."""
    counted = number == "rows"
    columns = table.to_table(columns=[label] if counted else [label, number])
    if counted:
        grouped = columns.group_by(label).aggregate([([], "count_all")])
    else:
        adds = pa.types.is_integer(columns.schema.field(number).type)
        grouped = columns.group_by(label).aggregate([(number, "sum" if adds else "max")])
    value = next(name for name in grouped.column_names if name != label)
    found = [(str(_plain(one[label])), float(one[value] or 0)) for one in grouped.to_pylist()]
    return sorted(found, key=lambda one: -one[1])[:ROWS]


def write_report(path: str, tables: Sequence[Gold], title: str = "Trunkline") -> str:
    """The page, as HTML. It asks the network for nothing."""
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    sections = "\n".join(map(_section, tables))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<body><h1>{html.escape(title)}</h1><p>{made}</p>\n<main>{sections}</main>\n"
        f"<h2>Runs</h2>{_overview(read_outcomes(Lake(path)))}</body></html>\n"
    )


def _section(one: Gold) -> str:
    name, about = html.escape(one.name), html.escape(one.about)
    rows = f"{len(one.rows)} of {one.total:,} rows"
    return (
        f'<section id="{name}"><h2>{name}</h2><p>{about}</p>{_svg(one)}'
        f"<details><summary>{rows}</summary>{_table(one.columns, one.rows)}</details></section>"
    )


def _overview(outcomes: list[Ran]) -> str:
    rows = [
        [one.name, one.rows, one.set_aside, one.published, one.seconds, one.at, one.error or "ok"]
        for one in outcomes
    ]
    return _table(["pipeline", "rows", "set aside", "published", "seconds", "at", "state"], rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(value))}</td>" for value in row) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _svg(one: Gold) -> str:
    most = max((value for _, value in one.drawn), default=0.0) or 1.0
    lines = []
    for at, (label, value) in enumerate(one.drawn):
        y, width = at * 20, max(1.0, 270 * value / most)
        name = label if len(label) <= 23 else f"{label[:22]}…"
        lines.append(
            f'<text x="170" y="{y + 13}" text-anchor="end">{html.escape(name)}</text>'
            f'<rect class="bar" x="178" y="{y + 2}" width="{width:.1f}" height="14" rx="2">'
            f"<title>{html.escape(label)}: {value:,.6g}</title></rect>"
            f'<text x="{184 + width:.1f}" y="{y + 13}">{value:,.6g}</text>'
        )
    about = html.escape(one.measure)
    return (
        f'<svg role="img" aria-label="{about}" viewBox="0 0 520 {20 * len(lines) + 2}">'
        f"{''.join(lines)}</svg><p>{about}</p>"
    )


def _plain(value: Any) -> Any:
    """A value for people."""
    match value:
        case None:
            return ""
        case float():
            return f"{value:.4g}"
        case datetime():
            return value.isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
        case bytes():
            return f"{len(value)} bytes"
        case {"value": bytes(), "metadata": bytes()}:
            return VariantUtils.to_json(value["value"], value["metadata"])
        case list():
            return ", ".join(str(_plain(part)) for part in value)
        case _:
            return value
