"""The page: one HTML file with everything in it. It asks the network for nothing, and its browser
is told to let no script run but the page's own.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from trunkline.spark.report.charts import GREY, PALETTE, shown
from trunkline.spark.report.drawings import State

if TYPE_CHECKING:
    from trunkline.spark.report.cards import Card, Report

CELL: Final = 300  # characters
EXAMPLES: Final = 8
_STYLE: Final = """
:root{--ink:#1c2733;--dim:#5b6b7a;--line:#e1e7ec;--soft:#f5f7f9;--page:#fff;--bad:#b42318;
--bad-soft:#fdecea;--look:#9a5b00;--look-soft:#fdf3e1;--well:#1f7a4d;--well-soft:#e8f5ee;
color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#dde5ec;--dim:#9badbc;--line:#2b353f;--soft:#1b222a;
--page:#12171c;--bad:#ff8f85;--bad-soft:#3a1917;--look:#f0b65a;--look-soft:#33260f;--well:#6fcf97;
--well-soft:#14291d}}
*{box-sizing:border-box}
body{font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;max-width:1280px;
margin:0 auto;padding:1.5rem 1rem 3rem;color:var(--ink);background:var(--page)}
h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:0;display:flex;gap:.5rem;
align-items:baseline}h2 small{font-weight:400;color:var(--dim);font-size:.8rem}
h3{font-size:.82rem;font-weight:600;margin:.9rem 0 .2rem;color:var(--dim)}
header{display:flex;flex-wrap:wrap;gap:.2rem 1rem;align-items:baseline;margin-bottom:1rem}
header p{margin:0;color:var(--dim)}
.news{border-radius:8px;padding:.6rem .9rem;margin:0 0 .6rem;border-left:4px solid;
overflow-wrap:anywhere}.news b{margin-right:.4rem}.news p{margin:.2rem 0 0}
.news ul{margin:.2rem 0 0;padding:0;list-style:none}.news a{color:inherit}
code{font:12px/1.4 ui-monospace,monospace}
.failed{background:var(--bad-soft);border-color:var(--bad);color:var(--bad)}
.look{background:var(--look-soft);border-color:var(--look);color:var(--look)}
.well{background:var(--well-soft);border-color:var(--well);color:var(--well)}
main{columns:2 30rem;column-gap:1rem;margin-top:1rem}
section{border:1px solid var(--line);border-radius:10px;padding:.9rem 1rem;margin:0 0 1rem;
break-inside:avoid}
section>p{margin:.1rem 0 0}.brief{list-style:none;margin:1rem 0 0;padding:0;color:var(--dim)}
.brief li{padding:.35rem 0;border-top:1px solid var(--line)}.brief b{color:var(--ink)}
.dot{width:.6rem;height:.6rem;border-radius:50%;display:inline-block;flex:none;border:0;padding:0}
.dot.failed{background:var(--bad)}.dot.look{background:var(--look)}.dot.well{background:var(--well)}
.chart{width:100%;overflow:hidden}.chart svg{max-width:100%}
.wide{overflow-x:auto;max-width:100%}table{border-collapse:collapse;font-size:12px}
th,td{padding:.2rem .6rem .2rem 0;text-align:left;border-bottom:1px solid var(--line);
max-width:14rem;overflow:hidden;text-overflow:ellipsis;white-space:nowrap;vertical-align:top}
.top td{max-width:none}.top td[title]{white-space:normal;overflow-wrap:anywhere}
th{color:var(--dim);font-weight:600}td.n{text-align:right;font-variant-numeric:tabular-nums}
details{margin-top:.6rem}summary{cursor:pointer;color:var(--dim);font-size:12px}
footer{margin-top:1.6rem}@media print{section{break-inside:avoid}details{display:none}}
"""
# The interpreter of Vega is used, so that the page needs no right to evaluate text.
_SCRIPT: Final = """
const specs = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
function config() {
  const css = getComputedStyle(document.documentElement);
  const ink = css.getPropertyValue("--ink").trim();
  const dim = css.getPropertyValue("--dim").trim();
  const line = css.getPropertyValue("--line").trim();
  const font = getComputedStyle(document.body).fontFamily;
  const words = {labelColor: dim, titleColor: dim, labelFont: font, titleFont: font,
    labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal"};
  return {background: "transparent", font, view: {stroke: null}, text: {color: ink, font},
    axis: {...words, gridColor: line, domainColor: line, tickColor: line},
    axisX: {grid: false}, legend: {...words, labelColor: ink}, range: {category: PALETTE}};
}
function fit(part, width) {
  if (Array.isArray(part)) return part.forEach(one => fit(one, width));
  if (part === null || typeof part !== "object") return;
  for (const [name, value] of Object.entries(part)) {
    if (name === "legend" && value && value.columns && width < 480)
      value.columns = Math.max(1, Math.floor(value.columns / 2));
    else if (name !== "data" && name !== "datasets") fit(value, width);
  }
}
async function draw() {
  const how = {actions: false, renderer: "svg", ast: true, config: config(),
    tooltip: {theme: dark.matches ? "dark" : "light"}};
  for (const box of document.querySelectorAll("[data-chart]")) {
    const spec = structuredClone(specs[box.dataset.chart]);
    fit(spec, box.clientWidth);
    await vegaEmbed(box, spec, how);
  }
  document.documentElement.dataset.drawn = "yes";
}
dark.addEventListener("change", draw);
draw().catch(error => { document.documentElement.dataset.drawn = String(error); });
"""


def write_page(report: Report) -> str:
    """The page, as HTML."""
    specs: list[dict[str, Any]] = []
    cards = "\n".join(_section(card, specs) for card in report.cards if card.charts)
    brief = "".join(map(_item, (card for card in report.cards if not card.charts)))
    data = script_json(specs)
    script = _bundle() if specs else ""
    allowed = f"script-src '{_digest(script)}'; " if specs else ""
    policy = (
        f"default-src 'none'; {allowed}style-src 'unsafe-inline'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    title = escape(report.title)
    made = datetime.fromtimestamp(report.now_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style>{_STYLE}</style></head>
<body><header><h1>{title}</h1><p>{made} · {escape(report.lake)}</p></header>
{_news(report)}
<main>{cards}</main>
{f'<ul class="brief">{brief}</ul>' if brief else ""}
<footer>{_runs(report)}{_others(report)}</footer>
<noscript><p>The drawings need JavaScript; the rows do not.</p></noscript>
<script type="application/json" id="charts">{data}</script>
{f"<script>{script}</script>" if script else ""}
</body></html>
"""


def _news(report: Report) -> str:
    """The failures, then what needs a look; one line if there is neither."""
    parts = [
        f'<div class="news failed" role="alert"><b>{escape(card.name)} failed</b>'
        f"<code>{escape(card.error)}</code><p>{escape(card.line)}</p></div>"
        if card.error
        else f'<div class="news failed" role="alert"><b>{_link(card)}</b>{escape(card.line)}</div>'
        for card in report.cards
        if card.state is State.FAILED
    ]
    looks = [card for card in report.cards if card.state is State.LOOK]
    if looks:
        lines = "".join(f"<li><b>{_link(card)}</b>{escape(card.line)}</li>" for card in looks)
        parts.append(f'<div class="news look">Worth a look:<ul>{lines}</ul></div>')
    if not parts:
        count = len(report.outcomes)
        ran = f"{count} pipelines ran, and none failed" if count else "no pipeline has run"
        parts = [f'<div class="news well"><b>All is well.</b>{ran}.</div>']
    return "\n".join(parts)


def _link(card: Card) -> str:
    name = escape(card.name)
    return f'<a href="#{name}">{name}</a>' if card.charts else name


def _section(card: Card, specs: list[dict[str, Any]]) -> str:
    drawn = []
    for chart in card.charts:
        drawn.append(
            f"<h3>{escape(chart.title)}</h3>"
            f'<div class="chart" data-chart="{len(specs)}" role="img"'
            f' aria-label="{escape(chart.title)}"></div>'
        )
        specs.append({**chart.spec, "description": shown(chart.title)})
    top = ""
    if card.heading and card.top:
        names = list(card.top[0])
        rows = [[row[name] for name in names] for row in card.top[:EXAMPLES]]
        top = f"<h3>{escape(card.heading)}</h3>{_table(names, rows, 'wide top')}"
    rows_shown = f"{len(card.rows)} of {card.total:,} rows, the newest"
    return (
        f'<section id="{escape(card.name)}"><h2><span class="dot {card.state.value}"></span>'
        f"{escape(card.name)}<small>{escape(card.about)}</small></h2><p>{escape(card.line)}</p>"
        f"{''.join(drawn)}{top}"
        f"<details><summary>{rows_shown}</summary>{_table(card.columns, card.rows)}</details>"
        "</section>"
    )


def _item(card: Card) -> str:
    return (
        f'<li id="{escape(card.name)}"><span class="dot {card.state.value}"></span>'
        f" <b>{escape(card.name)}</b>: {escape(card.line)}</li>"
    )


def _runs(report: Report) -> str:
    if not report.outcomes:
        return ""
    names = ["pipeline", "rows", "set aside", "published", "seconds", "at", "state"]
    rows = [
        [one.name, one.rows, one.set_aside, one.published, one.seconds,
         one.at[:16].replace("T", " "), one.error or "ok"]
        for one in report.outcomes
    ]  # fmt: skip
    return f"<h3>The last run of each pipeline</h3>{_table(names, rows)}"


def _others(report: Report) -> str:
    if not report.others:
        return ""
    return f"<h3>Other tables of the lake</h3>{_table(['table', 'rows'], report.others)}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]], kind: str = "wide") -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="{kind}"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
        return f'<td class="n">{text}</td>'
    text = shown(value)
    long = f' title="{html.escape(text[:2000])}"' if len(text) > 40 else ""
    return f"<td{long}>{html.escape(text[:CELL] + '…' * (len(text) > CELL))}</td>"


def escape(value: Any) -> str:
    """Text, as it may stand in an element and in an attribute."""
    return html.escape(shown(value))


def script_json(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it can end the element or begin a
    comment, and each number is one that JSON has.
    """
    text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for one in "<>&":
        text = text.replace(one, f"\\u{ord(one):04x}")
    return text


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: _finite(part) for name, part in value.items()}
        case list() | tuple():
            return [_finite(part) for part in value]
        case None | bool() | int() | str():
            return value
        case _:
            return str(value)


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed, from the package that has them, and the few lines above."""
    import vl_convert

    palette = json.dumps([*PALETTE[:8], GREY])
    script = vl_convert.javascript_bundle(_SCRIPT.replace("PALETTE", palette))
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _digest(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
