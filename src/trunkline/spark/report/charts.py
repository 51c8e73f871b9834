"""The kinds of drawings that the report has, each a Vega-Lite chart made by Altair.

Rows come with fixed names of fields, so what an event says is only ever a value in a drawing: never
a name, an expression or a format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import altair as alt

Row = dict[str, Any]
SERIES: Final = 8  # that a drawing tells apart by colour; the others are one
LABEL: Final = 160  # characters of a label; the axis shows what fits
GREY: Final = "#9aa5b1"
BLUE: Final = "#4c8bd6"
RED: Final = "#d64545"
AMBER: Final = "#d9892b"
GREEN: Final = "#3f9d6b"
PALETTE: Final = (
    BLUE, "#e0883c", "#4fa88b", "#b667b6", "#c9a227", "#5fb0c9", "#d0637c", "#8a7fd1", GREY,
)  # fmt: skip
OTHER: Final = "all others"
DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


class Chart(NamedTuple):
    """A drawing: what it shows, in words, and how Vega-Lite draws it."""

    title: str
    spec: dict[str, Any]


def over_time(title: str, rows: Sequence[Row], unit: str, step_ms: int) -> Chart:
    """Stacked bars: ``t`` in milliseconds, ``series``, ``n``."""
    found = _named(_few(rows, "t"), step_ms)
    order = _order(found)
    for row in found:
        row["rank"] = order.index(row["series"])
        row["end"] = row["t"] + step_ms
    chart = (
        _chart(found)
        .mark_bar(orient="vertical")
        .encode(
            x=_time(found),
            x2="end:T",
            y=alt.Y("n:Q", title=unit, stack="zero", axis=_amounts(found)),
            color=_colour(order),
            order="rank:Q",
            tooltip=[_tip("when", "when"), _tip("series", "what"), _number("n", unit)],
        )
    )
    return Chart(title, _spec(chart, 190))


def lines(title: str, rows: Sequence[Row], unit: str, *, log: bool = False) -> Chart:
    """A line per series: ``t`` in milliseconds, ``series``, ``n``."""
    found = _named(_few(rows, "t", add=False), 0)
    scale = alt.Scale(type="log") if log else alt.Scale(zero=True)
    if log:
        found = [row for row in found if row["n"] and row["n"] > 0]
    chart = (
        _chart(found)
        .mark_line(point=alt.OverlayMarkDef(size=18), interpolate="monotone", strokeWidth=1.6)
        .encode(
            x=_time(found),
            y=alt.Y(
                "n:Q",
                title=None if unit == "ms" else unit,
                scale=scale,
                axis=_amounts(found, log=log, unit=unit),
            ),
            color=_colour(_order(found)),
            tooltip=[_tip("when", "when"), _tip("series", "what"), _number("n", unit)],
        )
    )
    return Chart(title, _spec(chart, 190))


def bars(title: str, rows: Sequence[Row], unit: str, *, colours: dict[str, str] | None = None,
         log: bool = False) -> Chart:  # fmt: skip
    """Bars to the right: ``label``, ``n``, and where they are stacked ``series``."""
    found = [_cut(row) for row in rows]
    labels = list(dict.fromkeys(row["label"] for row in found))
    scale = alt.Scale(type="symlog", constant=1) if log else alt.Scale()
    tips = [_tip("label", "what"), _number("n", unit)]
    encoding: dict[str, Any] = {
        "y": alt.Y("label:N", title=None, sort=labels, axis=alt.Axis(labelLimit=250)),
        "x": alt.X("n:Q", title=unit, scale=scale, axis=_amounts(found, ticks=5, log=log)),
    }
    if any("series" in row for row in found):
        order = _order(found)
        encoding["color"] = _colour(order, colours)
        tips.insert(1, _tip("series", "of"))
    else:
        encoding["color"] = alt.value(BLUE)
    chart = _chart(found).mark_bar(height=alt.RelativeBandSize(band=0.72))
    return Chart(title, _spec(chart.encode(**encoding, tooltip=tips), 26 + 20 * len(labels)))


def heat(title: str, rows: Sequence[Row], unit: str, x: Sequence[str], y: Sequence[str], *,
         x_title: str | None = None, y_title: str | None = None, text: bool = False,
         share: bool = False) -> Chart:  # fmt: skip
    """A square per pair of ``x`` and ``y``, as dark as its ``n``."""
    form = ".0%" if share else ",.4~g"
    found = [_cut(row, "x", "y") for row in rows]
    base = _chart(found).encode(
        x=alt.X("x:N", title=x_title, sort=list(map(_short, x)),
                axis=alt.Axis(labelAngle=-40 if text else 0, labelLimit=110,
                              labelOverlap=not text)),
        y=alt.Y("y:N", title=y_title, sort=list(map(_short, y)), axis=alt.Axis(labelLimit=150)),
        tooltip=[_tip("y", y_title or "row"), _tip("x", x_title or "column"),
                 alt.Tooltip("n:Q", title=unit, format=form)],
    )  # fmt: skip
    chart: Any = base.mark_rect(cornerRadius=1).encode(
        color=alt.Color("n:Q", title=unit, scale=alt.Scale(scheme="blues", domainMin=0),
                        legend=None if text else alt.Legend(format="~s", gradientLength=90)),
    )  # fmt: skip
    if text:
        high = max((row["n"] for row in found), default=0) or 1
        for row in found:
            row["dark"] = row["n"] > high * 0.55
            row["word"] = _share_word(row["n"]) if share else f"{row['n']:,.4g}"
        words = base.mark_text(fontSize=10).encode(
            text="word:N",
            color=alt.Color("dark:N", legend=None,
                            scale=alt.Scale(domain=[True, False], range=["#fff", "#1c2733"])),
        )  # fmt: skip
        chart = alt.layer(chart, words).resolve_scale(color="independent")
    return Chart(title, _spec(chart, (70 if text else 40) + 21 * len(y)))


def _share_word(share: float) -> str:
    """A share in percent. A share above 0 never reads as 0%."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def timeline(title: str, rows: Sequence[Row], unit: str) -> Chart:
    """A bar from ``t`` to ``end`` in the line of its ``label``, coloured by ``series``."""
    found = [_cut(row) for row in rows]
    labels = list(dict.fromkeys(row["label"] for row in found))
    for row in found:
        row["when"] = f"{stamp(row['t'])} to {stamp(row['end'])}"
    base = _chart(found).encode(
        x=_time(found),
        y=alt.Y("label:N", title=None, sort=labels, axis=alt.Axis(labelLimit=180, grid=True)),
        color=_colour(_order(found)),
        tooltip=[_tip("label", "who"), _tip("when", "when"), _tip("series", "mostly"),
                 _number("n", unit)],
    )  # fmt: skip
    spans = base.mark_bar(height=9, cornerRadius=2).encode(x2="end:T")
    # A short one would be too thin to see.
    ends = base.mark_tick(thickness=2, size=9)
    return Chart(title, _spec(alt.layer(spans, ends), 30 + 19 * len(labels)))


def ranges(title: str, rows: Sequence[Row], unit: str) -> Chart:
    """Percentiles of each ``label``: a line from ``low`` to ``high`` with a mark at ``mid``."""
    found = [_cut(row) for row in rows]
    labels = [row["label"] for row in found]
    scale = alt.Scale(type="log", nice=True)
    tips = [_tip("label", "of"), _number("low", "p50"), _number("mid", "p95"),
            _number("high", "p99")]  # fmt: skip
    y = alt.Y("label:N", title=None, sort=labels, axis=alt.Axis(labelLimit=220))
    base = _chart(found).encode(y=y, tooltip=tips)
    edges = [{"n": row[name]} for row in found for name in ("low", "high")]
    axis = _amounts(edges, ticks=5, log=True, unit=unit)
    x = alt.X("low:Q", title=None if unit == "ms" else unit, scale=scale, axis=axis)
    parts = alt.layer(
        base.mark_rule(strokeWidth=4, color=BLUE, opacity=0.45).encode(x=x, x2="high:Q"),
        base.mark_point(filled=True, size=70, color=BLUE, opacity=1).encode(x=x),
        base.mark_tick(thickness=2, size=14, color=AMBER).encode(x=alt.X("mid:Q", scale=scale)),
        base.mark_point(filled=True, size=45, color=RED, opacity=1).encode(
            x=alt.X("high:Q", scale=scale)
        ),
    )
    return Chart(title, _spec(parts, 34 + 24 * len(labels)))


def calibration(title: str, rows: Sequence[Row]) -> Chart:
    """``expected`` against what came, ``rate``, with its interval ``low`` to ``high``: on the
    diagonal the two are the same.
    """
    found = [_cut(row) for row in rows]
    axis = alt.Axis(format=".0%", tickCount=5)
    unit = alt.Scale(domain=[0, 1])
    x = alt.X("expected:Q", title="how sure it was", scale=unit, axis=axis)
    tips = [_tip("label", "of"), _share("expected", "how sure"), _share("rate", "went well"),
            _share("low", "at least"), _share("high", "at most"),
            _number("n", "judged")]  # fmt: skip
    base = _chart(found).encode(x=x, tooltip=tips)
    ideal = (
        _chart([{"expected": 0, "rate": 0}, {"expected": 1, "rate": 1}])
        .mark_line(strokeDash=[4, 4], strokeWidth=1, color=GREY)
        .encode(x=x, y=alt.Y("rate:Q", scale=unit))
    )
    spread = base.mark_rule(color=BLUE, opacity=0.6).encode(
        y=alt.Y("low:Q", title="how often it went well", scale=unit, axis=axis), y2="high:Q"
    )
    points = base.mark_point(filled=True, opacity=0.9, color=BLUE).encode(
        y=alt.Y("rate:Q", scale=unit),
        size=alt.Size("n:Q", legend=None, scale=alt.Scale(range=[30, 220], zero=True)),
    )
    _spread_labels(found)
    sides: tuple[tuple[bool, Any, int], ...] = ((False, "left", 8), (True, "right", -8))
    words = [
        _chart([row for row in found if (row["expected"] > 0.75) == on_right])
        .mark_text(align=side, dx=shift, fontSize=10, limit=140)
        .encode(x=x, y=alt.Y("at:Q", scale=unit), text="label:N")
        for on_right, side, shift in sides
    ]
    return Chart(title, _spec(alt.layer(ideal, spread, points, *words), 260))


def _spread_labels(rows: list[Row]) -> None:
    """Give each point the height ``at`` of its label: near it, and over no other label."""
    line, word = 0.055, 0.3  # of the drawing: what a label is high, and mostly wide
    taken: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda one: -one["n"]):
        x, tries = row["expected"], range(1, 2 * len(rows) + 2)
        heights = [row["rate"] + line * (step // 2) * (1 if step % 2 else -1) for step in tries]
        heights = [min(0.98, max(0.02, one + line / 2)) for one in heights]
        free = (
            one
            for one in heights
            if all(abs(one - y) >= line * 0.9 or abs(x - other) >= word for other, y in taken)
        )
        row["at"] = next(free, heights[0])
        taken.append((x, row["at"]))


def rates(title: str, rows: Sequence[Row]) -> Chart:
    """The ``rate`` of each ``label`` with its interval, and a mark at what was ``expected``."""
    found = [_cut(row) for row in rows]
    labels = [row["label"] for row in found]
    axis = alt.Axis(format=".0%", tickCount=5)
    unit = alt.Scale(domain=[0, 1])
    tips = [_tip("label", "of"), _share("rate", "went well"), _share("low", "at least"),
            _share("high", "at most"), _share("model", "the model expects"),
            _number("n", "judged")]  # fmt: skip
    y = alt.Y("label:N", title=None, sort=labels, axis=alt.Axis(labelLimit=220))
    base = _chart(found).encode(y=y, tooltip=tips)
    low = alt.X("low:Q", title="went well, with its 95 % interval", scale=unit, axis=axis)
    parts = alt.layer(
        base.mark_rule(strokeWidth=3, color=BLUE, opacity=0.45).encode(x=low, x2="high:Q"),
        base.mark_point(filled=True, size=60, color=BLUE, opacity=1).encode(
            x=alt.X("rate:Q", scale=unit)
        ),
        base.mark_tick(thickness=2, size=14, color=AMBER).encode(x=alt.X("model:Q", scale=unit)),
    )
    return Chart(title, _spec(parts, 34 + 22 * len(labels)))


def stamp(ms: float) -> str:
    """A time for people, in UTC."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "beyond the calendar"


def _chart(rows: Sequence[Row]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=list(rows)))


def _spec(chart: Any, height: int) -> dict[str, Any]:
    made: dict[str, Any] = chart.properties(width="container", height=height).to_dict()
    made.pop("config", None)  # the page has one for all, for light and dark
    return made


def _time(rows: Sequence[Row]) -> alt.X:
    """The axis of time, in UTC, as exact as its span asks for."""
    moments = [row[name] for row in rows for name in ("t", "end") if name in row]
    span_h = (max(moments, default=0) - min(moments, default=0)) / 3_600_000
    forms = ((0.05, "%H:%M:%S"), (36, "%H:%M"), (24 * 7, "%a %H:%M"), (24 * 300, "%d %b"))
    form = next((form for limit, form in forms if span_h <= limit), "%b %Y")
    return alt.X("t:T", title=None, scale=alt.Scale(type="utc"),
                 axis=alt.Axis(tickCount=6, labelOverlap=True, format=form))  # fmt: skip


def _amounts(
    rows: Sequence[Row], field: str = "n", ticks: int = 4, *, log: bool = False, unit: str = ""
) -> alt.Axis:
    """The axis of an amount: whole words below a million, short above. Counts have no ticks between
    whole numbers, a logarithmic axis has those of powers of ten.
    """
    amounts = [abs(row[field] or 0) for row in rows]
    large = any(one >= 1e6 for one in amounts)
    more: dict[str, Any] = {}
    if log:
        low, high = (math.log10(one) for one in (_least(amounts), max(amounts, default=1) or 1))
        steps = range(math.floor(low), math.ceil(high) + 1)
        more["values"] = [10.0**step for step in steps][:: max(1, len(steps) // (ticks + 1))]
    elif all(one == int(one) for one in amounts):
        sums: dict[Any, float] = {}
        for row in rows:
            place = row.get("label", row.get("t"))
            sums[place] = sums.get(place, 0) + (row[field] or 0)
        if 0 < max(sums.values(), default=0) <= ticks:
            more["values"] = list(range(int(max(sums.values())) + 1))
    if unit == "ms":
        more["labelExpr"] = "datum.value < 1000 ? datum.value + ' ms' : datum.value / 1000 + ' s'"
    form = "~s" if large else ",~f"
    return alt.Axis(format=form, tickCount=ticks, labelOverlap=True, **more)


def _least(amounts: Sequence[float]) -> float:
    return min((one for one in amounts if one > 0), default=1)


def _colour(order: Sequence[str], colours: dict[str, str] | None = None) -> alt.Color:
    known = colours or {}
    shades = [known.get(name, GREY if name == OTHER else PALETTE[at % 8])
              for at, name in enumerate(order)]  # fmt: skip
    longest = max(map(len, order), default=0)
    across = max(1, min(len(order), 72 // (min(longest, 60) + 5)))
    legend = alt.Legend(orient="bottom", columns=across, labelLimit=360, symbolSize=70)
    return alt.Color("series:N", title=None, legend=legend if len(order) > 1 else None,
                     scale=alt.Scale(domain=list(order), range=shades))  # fmt: skip


def _order(rows: Sequence[Row]) -> list[str]:
    """The series, the largest first and the rest last."""
    sums: dict[str, float] = {}
    for row in rows:
        sums[row["series"]] = sums.get(row["series"], 0) + (row["n"] or 0)
    return sorted(sums, key=lambda name: (name == OTHER, -sums[name], name))


def _few(rows: Sequence[Row], place: str, *, add: bool = True) -> list[Row]:
    """The rows of the largest series; the others are added up as one, or left out."""
    found = [_cut(row) for row in rows]
    kept = set(_order(found)[:SERIES])
    result = [row for row in found if row["series"] in kept]
    rest: dict[float, float] = {}
    for row in found:
        if row["series"] not in kept:
            rest[row[place]] = rest.get(row[place], 0) + (row["n"] or 0)
    if add:
        result += [{place: at, "series": OTHER, "n": n} for at, n in rest.items()]
    return result


def _named(rows: list[Row], step_ms: int) -> list[Row]:
    for row in rows:
        end = f" to {stamp(row['t'] + step_ms)[11:]}" if 0 < step_ms < 86_400_000 else ""
        row["when"] = stamp(row["t"]) + end
    return rows


def _cut(row: Row, *names: str) -> Row:
    return {
        name: _short(value) if name in ("label", "series", *names) else value
        for name, value in row.items()
    }


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= LABEL else text[: LABEL - 1] + "…"


def shown(value: Any) -> str:
    """Text that was an event's, without what would change how the text around it is read."""
    text = "" if value is None else str(value)
    return "".join(_spelled(one) if _is_odd(one) else one for one in text)


def _is_odd(one: str) -> bool:
    code = ord(one)
    return (
        code < 0x20
        or 0x7F <= code <= 0x9F
        or 0x200B <= code <= 0x200F
        or 0x2028 <= code <= 0x202E
        or 0x2066 <= code <= 0x2069
        or 0xD800 <= code <= 0xDFFF
        or code == 0xFEFF
    )


def _spelled(one: str) -> str:
    return " " if one in "\n\t\r" else f"\\u{ord(one):04x}"


def _tip(field: str, title: str) -> alt.Tooltip:
    return alt.Tooltip(f"{field}:N", title=title)


def _number(field: str, title: str) -> alt.Tooltip:
    return alt.Tooltip(f"{field}:Q", title=title, format=",.4~g")


def _share(field: str, title: str) -> alt.Tooltip:
    return alt.Tooltip(f"{field}:Q", title=title, format=".1%")
