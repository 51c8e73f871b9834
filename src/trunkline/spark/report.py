"""One self-contained page with a table and a drawing for each gold table of the lake."""

from __future__ import annotations

import html
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from trunkline.spark.jobs import Ran, read_outcomes
from trunkline.spark.pipelines import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from trunkline.spark.lake import Lake

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem;
color:#1c2733;background:#fff}h1{font-size:1.5rem}h2{margin-top:2.5rem;font-size:1.15rem}
table{border-collapse:collapse;font-size:13px;margin-top:.6rem}th,td{padding:.25rem .7rem;
text-align:left;border-bottom:1px solid #dfe5ea;max-width:22rem;overflow:hidden;
text-overflow:ellipsis;white-space:nowrap}th{background:#f3f6f8}p{color:#52616f;margin:.2rem 0}
.bar{fill:#2f7ed8}text{font-size:12px;fill:#1c2733}.bad{color:#b3261e}
@media(prefers-color-scheme:dark){body{background:#14191f;color:#dbe3ea}th{background:#1e262e}
td,th{border-color:#2c3640}text{fill:#dbe3ea}p{color:#9fb0bf}}
"""
ROWS = 12


def gold(spark: SparkSession, lake: Lake, pipeline: Pipeline) -> tuple[list[str], list[list[Any]]]:
    """The first rows of a pipeline's table."""
    if not lake.has(pipeline.name):
        return [], []
    df = lake.read(spark, pipeline.name)
    rows = [[_plain(value) for value in row] for row in df.limit(ROWS).collect()]
    return df.columns, rows


def bars(spark: SparkSession, lake: Lake, pipeline: Pipeline) -> list[tuple[str, float]]:
    """What to draw: the largest sums of the chart's number by its label."""
    if pipeline.chart is None or not lake.has(pipeline.name):
        return []
    from pyspark.sql import functions as f

    label, number = pipeline.chart
    df = lake.read(spark, pipeline.name)
    measure = f.count("*") if number == "rows" else f.sum(number)
    top = df.groupBy(label).agg(measure.alias("n")).orderBy(f.desc("n")).limit(ROWS)
    return [(str(row[0]), float(row[1] or 0)) for row in top.collect()]


def write_report(
    spark: SparkSession, lake: Lake, pipelines: list[Pipeline], title: str = "Trunkline"
) -> str:
    """The page, as HTML. It asks the network for nothing."""
    outcomes = {one.name: one for one in read_outcomes(lake)}
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = [f"<h1>{html.escape(title)}</h1><p>{made}</p>", _overview(outcomes)]
    for pipeline in pipelines:
        if pipeline.kind == "stream":
            continue
        parts.append(f"<h2>{html.escape(pipeline.name)}</h2><p>{html.escape(pipeline.about)}</p>")
        drawn = bars(spark, lake, pipeline)
        columns, rows = gold(spark, lake, pipeline)
        parts.append(_svg(drawn) if drawn else "<p>There is nothing of this yet.</p>")
        if rows:
            parts.append(_table(columns, rows))
    body = "\n".join(parts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><body>{body}</body></html>\n"
    )


def _overview(outcomes: dict[str, Ran]) -> str:
    rows = [
        [one.name, one.rows, one.published, one.seconds, one.at, one.error or "ok"]
        for one in outcomes.values()
    ]
    return _table(["pipeline", "rows", "published", "seconds", "at", "state"], rows)


def _table(columns: list[str], rows: list[list[Any]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(_plain(v)))}</td>" for v in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _svg(drawn: list[tuple[str, float]]) -> str:
    most = max(value for _, value in drawn) or 1.0
    lines = []
    for at, (label, value) in enumerate(drawn):
        y, width = at * 22, max(1.0, 560 * value / most)
        lines.append(
            f'<text x="195" y="{y + 14}" text-anchor="end">{html.escape(label[:28])}</text>'
            f'<rect class="bar" x="205" y="{y + 2}" width="{width:.1f}" height="16" rx="2"/>'
            f'<text x="{212 + width:.1f}" y="{y + 14}">{value:,.6g}</text>'
        )
    height = 22 * len(drawn) + 4
    return f'<svg role="img" width="880" height="{height}">{"".join(lines)}</svg>'


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    return "" if value is None else value
