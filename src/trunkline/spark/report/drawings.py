"""What the report says and draws of each table: the table decides what it is drawn as.

Each function looks at one table and returns a ``TableSummary``: a sentence, whether it needs a
look, the drawings, and a few rows worth printing. A table that has no function here is drawn by its
columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from trunkline.spark.pipelines.builtin.latency import STEP
from trunkline.spark.report.charts import (
    AMBER,
    DAYS,
    GREEN,
    GREY,
    RED,
    Chart,
    bars,
    calibration,
    heat,
    lines,
    over_time,
    ranges,
    rates,
    stamp,
    timeline,
)  # fmt: skip
from trunkline.spark.report.tables import Row, Tables, time_column, time_step

if TYPE_CHECKING:
    from trunkline.spark.pipelines import Pipeline

TOP: Final = 12
ROWS_PRINTED: Final = 6
EVENTS: Final = "events"
OWN: Final = "pipeline."  # groups of the pipelines themselves
HOUR_S: Final = 3600


class State(Enum):
    """``FAILED`` comes first on the page, ``LOOK`` next."""

    FAILED = "failed"
    LOOK = "look"
    WELL = "well"


class TableSummary(NamedTuple):
    """What there is to say of a table. ``top`` are a few rows for a terminal; the page shows them
    too where they have a ``heading``.
    """

    line: str
    state: State = State.WELL
    charts: Sequence[Chart] = ()
    top: Sequence[Row] = ()
    heading: str = ""


Drawing = Callable[[Tables, str, float], TableSummary]


def draw(tables: Tables, pipeline: Pipeline, now_ms: float) -> TableSummary:
    """What the report says of a pipeline's table."""
    table = pipeline.table or pipeline.name
    known = KNOWN.get(pipeline.name)
    if known is not None and known[1] <= frozenset(tables.columns(table)):
        return known[0](tables, table, now_ms)
    if tables.dataset(table) is None:
        return TableSummary(EMPTY.get(pipeline.name, "no rows"))
    return default(tables, table, pipeline.chart)


def freshness(tables: Tables, table: str, now_ms: float) -> TableSummary:
    found = tables.ask(
        table,
        "SELECT topic AS label, count(*) AS events, epoch_ms(max(timestamp)) AS last FROM rows"
        " GROUP BY topic ORDER BY last DESC, label",
    )
    own = [row for row in found if not row["label"].startswith("system.")]
    newest = max(row["last"] for row in found)
    events = sum(row["events"] for row in found)
    line = f"{events:,} records of {len(found)} topics; the newest is {ago(now_ms - newest)} old"
    oldest = max((now_ms - row["last"] for row in own), default=0.0)
    units = ((86_400_000, "days"), (3_600_000, "hours"), (60_000, "minutes"))
    size, unit = next(((s, u) for s, u in units if oldest >= 2 * s), (1000, "seconds"))
    drawn = [
        {"label": row["label"], "n": max(0.0, (now_ms - row["last"]) / size)}
        for row in own[: TOP * 2]
    ]
    top = [
        {"topic": row["label"], "records": row["events"], "newest": stamp(row["last"])}
        for row in found
    ]
    chart = bars("How old the newest event of each topic is", drawn, unit, log=_is_wide(drawn))
    return TableSummary(line, charts=[chart] if drawn else [], top=top)


def traffic(tables: Tables, table: str, now_ms: float) -> TableSummary:  # noqa: ARG001
    low, high, events = _span(tables, table, "hour", "sum(events)")
    step = time_step(low, high, HOUR_S)
    found = tables.ask(
        table,
        f"SELECT floor(epoch_ms(hour) / {step}) * {step} AS t, topic AS series,"
        " CAST(sum(events) AS DOUBLE) AS n FROM rows GROUP BY ALL ORDER BY ALL",
    )
    per = {HOUR_S * 1000: "hour", 86_400_000: "day", 604_800_000: "week"}.get(step, "bar")
    top = tables.ask(
        table,
        "SELECT topic, CAST(sum(events) AS BIGINT) AS events, CAST(sum(bytes) AS BIGINT) AS bytes,"
        " strftime(max(hour), '%Y-%m-%d %H:00') AS last_hour FROM rows GROUP BY topic"
        " ORDER BY events DESC",
    )
    line = f"{events:,.0f} events of {len(top)} topics, {stamp(low)} to {stamp(high + 3_600_000)}"
    return TableSummary(
        line, charts=[over_time(f"Events per {per}, by topic", found, "events", step)], top=top
    )


def clean(tables: Tables, table: str, now_ms: float) -> TableSummary:  # noqa: ARG001
    passed = tables.ask(table, "SELECT topic AS label, count(*) AS n FROM rows GROUP BY topic")
    rows = [{**row, "series": "passed"} for row in passed]
    if tables.has("quarantine", "topic"):
        # Tables of one's own put rows there, too.
        own = "WHERE pipeline IN ('clean', 'lake')" if tables.has("quarantine", "pipeline") else ""
        refused = tables.ask(
            "quarantine", f"SELECT topic AS label, count(*) AS n FROM rows {own} GROUP BY topic"
        )
        rows += [{**row, "series": "set aside"} for row in refused]
    sums: dict[str, int] = {}
    for row in rows:
        sums[row["label"]] = sums.get(row["label"], 0) + row["n"]
    order = sorted(sums, key=lambda name: -sums[name])[:TOP]
    drawn = [row for name in order for row in rows if row["label"] == name]
    good = sum(row["n"] for row in passed)
    bad = sum(sums.values()) - good
    share = f", {bad:,} set aside ({bad / (good + bad):.1%})" if bad else ", nothing set aside"
    chart = bars(
        "Events that passed and that were set aside, by topic",
        drawn, "events", colours={"passed": GREEN, "set aside": AMBER},
    )  # fmt: skip
    return TableSummary(f"{good:,} events passed{share}", charts=[chart])


def quarantine(tables: Tables, table: str, now_ms: float) -> TableSummary:  # noqa: ARG001
    text = "value" if tables.has(table, "value") else "id"
    # A row of a table of one's own may have neither topic nor time.
    topic = "topic"
    if tables.has(table, "pipeline"):
        topic = "coalesce(topic, 'table ' || CAST(pipeline AS VARCHAR))"
    when = "coalesce(timestamp, TIMESTAMPTZ '1970-01-01 00:00:00Z')"
    # What follows a colon differs from event to event.
    found = tables.ask(
        table,
        f"SELECT count(*) AS events, {topic} AS topic, trim(split_part(reason, ':', 1)) AS kind,"
        f" max_by(reason, {when}) AS reason,"
        f" max_by(CAST({text} AS VARCHAR), {when}) AS example FROM rows"
        " GROUP BY 2, kind ORDER BY events DESC, kind, 2 LIMIT 200",
    )
    kinds: dict[str, int] = {}
    for row in found:
        kinds[row["kind"]] = kinds.get(row["kind"], 0) + row["events"]
    order = sorted(kinds, key=lambda name: -kinds[name])[:TOP]
    drawn = [
        {"label": kind, "series": row["topic"], "n": row["events"]}
        for kind in order
        for row in found
        if row["kind"] == kind
    ]
    line = f"{tables.count(table):,} events were set aside, most often: {order[0]}"
    top = [{name: row[name] for name in ("events", "topic", "reason", "example")} for row in found]
    chart = bars("Why events were set aside, by topic", drawn, "events")
    return TableSummary(line, State.LOOK, [chart], top, "With the newest example of each")


def verify(tables: Tables, table: str, now_ms: float) -> TableSummary:  # noqa: ARG001
    found = tables.ask(table, "SELECT * FROM rows ORDER BY severe DESC, topic, partition, position")
    if not found:
        return TableSummary(EMPTY["verify"])
    severe = sum(bool(row["severe"]) for row in found)
    counts: dict[tuple[str, str], int] = {}
    for row in found:
        kind = ("damage" if row["severe"] else "a remark", row["topic"])
        counts[kind] = counts.get(kind, 0) + 1
    drawn = [{"label": t, "series": kind, "n": n} for (kind, t), n in sorted(counts.items())]
    line = f"{severe} places are damaged" if severe else f"{len(found)} remarks, no damage"
    shades = {"damage": RED, "a remark": AMBER}
    chart = bars("Findings by topic", drawn[:TOP], "findings", colours=shades)
    top = [{name: row[name] for name in ("topic", "problem", "path")} for row in found]
    return TableSummary(line, State.FAILED if severe else State.LOOK, [chart], top, "Findings")


def dead_letters(tables: Tables, table: str, now_ms: float) -> TableSummary:
    kinds = tables.ask(
        table,
        'SELECT signature, reason, topic, "group", CAST(letters AS BIGINT) AS letters,'
        " epoch_ms(first_seen) AS first, epoch_ms(last_seen) AS last, examples FROM rows"
        " ORDER BY letters DESC, signature LIMIT 200",
    )
    letters = sum(row["letters"] for row in kinds)
    last = max(row["last"] for row in kinds)
    line = f"{letters:,} letters of {len(kinds)} kinds, the last {ago(now_ms - last)} ago"
    charts = []
    moments = _letters(tables)
    if moments:
        low, high = (pick(row["t"] for row in moments) for pick in (min, max))
        step = time_step(low, high, 60)
        counted: dict[tuple[int, str], int] = {}
        for row in moments:
            place = (int(row["t"] // step) * step, row["series"] or row["reason"] or "no error")
            counted[place] = counted.get(place, 0) + 1
        rows = [{"t": t, "series": series, "n": n} for (t, series), n in sorted(counted.items())]
        charts.append(
            over_time("Dead letters over time, by what went wrong", rows, "letters", step)
        )
    else:
        drawn = [
            {"label": row["signature"] or row["reason"], "t": row["first"], "end": row["last"],
             "series": row["reason"], "n": row["letters"]}
            for row in kinds[:TOP]
        ]  # fmt: skip
        charts.append(timeline("From the first to the last letter of each kind", drawn, "letters"))
    top = [
        {"letters": row["letters"], "group": row["group"], "topic": row["topic"],
         "error": (row["examples"] or [""])[-1] or row["signature"], "last": stamp(row["last"])}
        for row in kinds
    ]  # fmt: skip
    return TableSummary(line, State.LOOK, charts, top, "With the newest example of each kind")


def _letters(tables: Tables) -> list[Row]:
    """Each dead letter of the table of events, by the shape of its error."""
    from trunkline.spark.pipelines.builtin.dead_letters import VARYING

    if not tables.has(EVENTS, "headers", "timestamp", "topic"):
        return []
    error = "coalesce(map_extract_value(headers, 'dlq-error'), '')"
    for pattern, instead in VARYING:
        error = f"regexp_replace({error}, {_quoted(pattern)}, {_quoted(instead)}, 'g')"
    return tables.ask(
        EVENTS,
        f"SELECT epoch_ms(timestamp) AS t, {error} AS series,"
        " map_extract_value(headers, 'dlq-reason') AS reason FROM rows"
        " WHERE topic LIKE '%.DLQ' ORDER BY ALL LIMIT 100000",
    )


def lag(tables: Tables, table: str, now_ms: float) -> TableSummary:  # noqa: ARG001
    found = tables.ask(
        table, 'SELECT topic, "group", lag, lost FROM rows ORDER BY lag DESC, topic, "group"'
    )
    theirs = [row for row in found if not row["group"].startswith(OWN)]
    behind = sum(row["lag"] for row in theirs)
    lost = sum(row["lost"] or 0 for row in theirs)
    slow = sum(row["lag"] > 0 for row in theirs)
    line = f"{slow} of {len(theirs)} groups are behind, by {behind:,} records"
    if not slow:
        line = f"all {len(theirs)} groups are up to date"
    if lost:
        line += f"; retention removed {lost:,} records before they were read"
    drawn = [
        {"label": f"{row['group']} on {row['topic']}", "n": row["lag"],
         "series": "a pipeline's own" if row["group"].startswith(OWN) else "a group"}
        for row in [*theirs, *(r for r in found if r["group"].startswith(OWN) and r["lag"])][:TOP]
    ]  # fmt: skip
    shades = {"a group": AMBER, "a pipeline's own": GREY}
    charts = [bars("Records not settled, now", drawn, "records", colours=shades)] if drawn else []
    history = _lag_history(tables, table)
    if len({row["t"] for row in history}) > 1:
        charts.insert(0, lines("Records not settled, at each run", history, "records"))
    top = [row for row in found if row["lag"] or not row["group"].startswith(OWN)]
    return TableSummary(line, State.LOOK if slow or lost else State.WELL, charts, top)


def _lag_history(tables: Tables, table: str) -> list[Row]:
    found = []
    for at, version in tables.versions(table):
        if not {"topic", "group", "lag"} <= set(version.schema.names):
            continue
        found += [
            {"t": at, "series": f"{row['group']} on {row['topic']}", "n": row["lag"]}
            for row in version.to_table(columns=["topic", "group", "lag"]).to_pylist()
            if not row["group"].startswith(OWN)
        ]
    return found


def latency(tables: Tables, table: str, now_ms: float) -> TableSummary:  # noqa: ARG001
    """The table has a row for each hour, topic and group; the percentiles of a group are those of
    all of its hours.
    """
    groups = tables.ask(
        table,
        'SELECT topic, "group", CAST(sum(records) AS BIGINT) AS records FROM rows GROUP BY ALL'
        ' ORDER BY records DESC, topic, "group"',
    )
    by_group = ("topic", "group")
    waits = {(r["topic"], r["group"]): r for r in _percentiles(tables, table, "_deliver", by_group)}
    works = {(r["topic"], r["group"]): r for r in _percentiles(tables, table, "_settle", by_group)}
    found = [
        {**row, "wait": waits.get(name, {}), "work": works.get(name, {})}
        for row in groups
        for name in [(row["topic"], row["group"])]
    ]
    worst = max(found, key=lambda row: row["wait"].get("p99") or 0)
    line = (
        f"{sum(row['records'] for row in found):,} deliveries; the slowest group waits"
        f" {_ms(worst['wait'].get('p50'))} in the middle and {_ms(worst['wait'].get('p99'))} at p99"
        f" ({worst['group']} on {worst['topic']})"
    )
    charts = []
    moments = _waits(tables, table)
    if len({row["t"] for row in moments}) > 1:
        charts.append(
            lines("From append to delivery over time, all groups", moments, "ms", log=True)
        )
    spans = [
        {"label": f"{row['group']} on {row['topic']}: {what}",
         **{place: max(0.001, row[what].get(percent) or 0)
            for place, percent in (("low", "p50"), ("mid", "p95"), ("high", "p99"))}}
        for row in found[:TOP]
        for what in ("wait", "work")
    ]  # fmt: skip
    charts.append(ranges("p50 (blue), p95 (amber) and p99 (red) of each group", spans, "ms"))
    top = [
        {"group": row["group"], "topic": row["topic"], "deliveries": row["records"],
         **{f"wait_{p}": _ms(row["wait"].get(p)) for p in ("p50", "p95", "p99")},
         "work_p95": _ms(row["work"].get("p95"))}
        for row in found
    ]  # fmt: skip
    return TableSummary(line, charts=charts, top=top)


def _percentiles(
    tables: Tables, table: str, column: str, by: Sequence[str], of: str = ""
) -> list[Row]:
    """p50, p95 and p99 in milliseconds, of how many latencies fell into each step; for each ``by``,
    which ``of`` makes of the table's columns.
    """
    names = ", ".join(f'"{name}"' for name in by)
    marks = ", ".join(
        f"pow({STEP}, min(step) FILTER (upto >= whole * {p / 100}) - 0.5) / 1000 AS p{p}"
        for p in (50, 95, 99)
    )
    return tables.ask(
        table,
        f"WITH each AS (SELECT {of or names}, unnest({column}) AS u FROM rows),"
        f" steps AS (SELECT {names}, u.step AS step, sum(u.n) AS n FROM each GROUP BY ALL),"
        f" sums AS (SELECT *, sum(n) OVER (PARTITION BY {names} ORDER BY step) AS upto,"
        f" sum(n) OVER (PARTITION BY {names}) AS whole FROM steps)"
        f" SELECT {names}, {marks} FROM sums GROUP BY {names} ORDER BY {names}",
    )


def _waits(tables: Tables, table: str) -> list[Row]:
    """Percentiles of the time from append to delivery, over time."""
    (span,) = tables.ask(
        table, "SELECT epoch_ms(min(hour)) AS low, epoch_ms(max(hour)) AS high FROM rows"
    )
    step = time_step(span["low"], span["high"], 3600)
    moment = f"floor(epoch_ms(hour) / {step}) * {step} AS t"
    found = _percentiles(tables, table, "_deliver", ("t",), moment)
    return [
        {"t": row["t"], "series": name, "n": max(0.001, row[name])}
        for name in ("p99", "p95", "p50")
        for row in found
    ]


def claims(tables: Tables, table: str, now_ms: float) -> TableSummary:  # noqa: ARG001
    found = tables.ask(
        table,
        "SELECT what, actor, CAST(claims AS BIGINT) AS claims, held_s, conflicts, abandoned FROM"
        " rows ORDER BY held_s DESC NULLS LAST, what, actor",
    )
    conflicts, left = (sum(row[n] or 0 for row in found) for n in ("conflicts", "abandoned"))
    line = f"{sum(row['claims'] for row in found):,} claims, {conflicts:,} conflicts"
    line += f", {left:,} never given back" if left else ", all given back"
    things: dict[str, float] = {}
    for row in found:
        things[row["what"]] = things.get(row["what"], 0) + (row["held_s"] or 0)
    order = sorted(things, key=lambda name: -things[name])[:TOP]
    held = [
        {"label": what, "series": row["actor"], "n": (row["held_s"] or 0) / 60}
        for what in order
        for row in found
        if row["what"] == what and row["held_s"]
    ]
    trouble = [
        {"label": what, "series": kind, "n": sum(r[name] or 0 for r in found if r["what"] == what)}
        for what in order
        for kind, name in (("conflict", "conflicts"), ("never given back", "abandoned"))
    ]
    charts = []
    if held:
        charts.append(bars("How long each thing was held, and by whom", held, "minutes"))
    if any(row["n"] for row in trouble):
        shades = {"conflict": AMBER, "never given back": RED}
        charts.append(
            bars("Conflicts and claims never given back", trouble, "claims", colours=shades)
        )
    return TableSummary(line, State.LOOK if left else State.WELL, charts, found)


def compaction(tables: Tables, table: str, now_ms: float) -> TableSummary:  # noqa: ARG001
    found = tables.ask(
        table,
        "SELECT topic, count(*) AS keys, CAST(sum(versions) AS BIGINT) AS records FROM rows"
        " GROUP BY topic ORDER BY keys DESC, topic LIMIT 50",
    )
    keys, records = (sum(row[name] for row in found) for name in ("keys", "records"))
    drawn = [{"label": row["topic"], "n": row["keys"]} for row in found[:TOP]]
    line = f"{keys:,} keys hold the latest of {records:,} records"
    return TableSummary(line, charts=[bars("Keys of each topic", drawn, "keys")], top=found)


def consolidation(tables: Tables, table: str, now_ms: float) -> TableSummary:  # noqa: ARG001
    summary = tables.ask(
        table,
        "SELECT count(*) AS episodes, count(DISTINCT actor) AS actors, CAST(sum(events) AS BIGINT)"
        ' AS events, median(epoch_ms("end") - epoch_ms(start)) AS usual FROM rows',
    )[0]
    busiest = tables.ask(
        table,
        'SELECT actor, space, epoch_ms(start) AS t, epoch_ms("end") AS "end", mostly AS series,'
        " CAST(events AS DOUBLE) AS n FROM rows WHERE actor IN (SELECT actor FROM rows GROUP BY"
        " actor ORDER BY sum(events) DESC, actor LIMIT 15) ORDER BY t LIMIT 2000",
    )
    sums: dict[str, float] = {}
    for row in busiest:
        row["label"] = row["actor"] + (f" in {row['space']}" if row["space"] else "")
        sums[row["label"]] = sums.get(row["label"], 0) + row["n"]
    shown = sorted(busiest, key=lambda row: (-sums[row["label"]], row["label"], row["t"]))
    low, high, _ = _span(tables, table, "start", "count(*)")
    step = time_step(low, high, HOUR_S)
    counts = tables.ask(
        table,
        f"SELECT floor(epoch_ms(start) / {step}) * {step} AS t, mostly AS series,"
        " CAST(count(*) AS DOUBLE) AS n FROM rows GROUP BY ALL ORDER BY ALL",
    )
    line = (
        f"{summary['episodes']:,} episodes of {summary['actors']:,} actors, half of them shorter"
        f" than {ago(summary['usual'] or 0)}"
    )
    drawn = [{name: row[name] for name in ("label", "t", "end", "series", "n")} for row in shown]
    charts = [
        timeline("Episodes of the busiest actors", drawn, "events"),
        over_time(
            "Episodes by when they began and what they mostly were", counts, "episodes", step
        ),
    ]
    top = [
        {"actor": row["label"], "from": stamp(row["t"]), "to": stamp(row["end"]),
         "events": int(row["n"]), "mostly": row["series"]}
        for row in sorted(shown, key=lambda row: -row["n"])[:TOP]
    ]  # fmt: skip
    return TableSummary(line, charts=charts, top=top)


def learning(tables: Tables, table: str, now_ms: float) -> TableSummary:  # noqa: ARG001
    found = tables.ask(
        table,
        "SELECT action, context, CAST(decisions AS BIGINT) AS decisions, CAST(judged AS BIGINT) AS"
        " judged, good, confidence, success_rate, expected FROM rows"
        " ORDER BY decisions DESC, action, context LIMIT 40",
    )
    judged = [row for row in found if row["judged"]]
    rows = []
    for row in judged:
        low, high = interval(row["good"], row["judged"])
        name = row["action"] + (f", {row['context']}" if row["context"] else "")
        rows.append(
            {"label": name, "expected": row["confidence"], "rate": row["success_rate"],
             "low": low, "high": high, "model": row["expected"], "n": row["judged"]}
        )  # fmt: skip
    wrong = [row for row in rows if not row["low"] <= row["expected"] <= row["high"]]
    decisions = sum(row["decisions"] for row in found)
    good = sum(row["good"] for row in judged) / max(1, sum(row["judged"] for row in judged))
    line = f"{decisions:,} decisions, {good:.0%} went well"
    if wrong:
        worst = max(wrong, key=lambda row: abs(row["expected"] - row["rate"]))
        line += (
            f"; most misjudged: {worst['label']} ({worst['expected']:.0%} sure,"
            f" {worst['rate']:.0%} went well)"
        )
    charts = []
    if rows:
        charts = [
            calibration("Was it as sure as it should be? On the line it was", rows),
            rates("How often it went well; in amber what the model expects", rows[:TOP]),
        ]
    top = [
        {"action": row["label"], "judged": row["n"], "went_well": f"{row['rate']:.0%}",
         "interval": f"{row['low']:.0%} to {row['high']:.0%}", "sure": f"{row['expected']:.0%}"}
        for row in rows
    ]  # fmt: skip
    return TableSummary(line, charts=charts, top=top)


def decisions(tables: Tables, table: str, now_ms: float) -> TableSummary:  # noqa: ARG001
    """Each decision by what came of it."""
    found = tables.ask(
        table,
        "SELECT action AS label, CASE WHEN too_late THEN 'too late' WHEN NOT has_outcome THEN"
        " 'no outcome' WHEN ok THEN 'went well' WHEN NOT ok THEN 'went badly' ELSE 'not judged' END"
        " AS series, count(*) AS n FROM rows WHERE decided IS NOT NULL GROUP BY ALL ORDER BY ALL",
    )
    shades = {"went well": GREEN, "went badly": RED, "too late": AMBER, "no outcome": GREY}
    late = sum(row["n"] for row in found if row["series"] == "too late")
    waiting = sum(row["n"] for row in found if row["series"] == "no outcome")
    line = f"{sum(row['n'] for row in found):,} decisions, {waiting:,} without an outcome"
    line += f", {late:,} whose outcome came too late" if late else ""
    sums: dict[str, int] = {}
    for row in found:
        sums[row["label"]] = sums.get(row["label"], 0) + row["n"]
    order = sorted(sums, key=lambda name: -sums[name])[:TOP]
    drawn = [row for name in order for row in found if row["label"] == name]
    chart = bars("What came of the decisions, by action", drawn, "decisions", colours=shades)
    return TableSummary(line, charts=[chart] if drawn else [])


def sequences(tables: Tables, table: str, now_ms: float) -> TableSummary:  # noqa: ARG001
    found = tables.ask(
        table,
        'SELECT "before", "after", CAST(sum(times) AS BIGINT) AS times, max(surprise) AS surprise,'
        ' count(DISTINCT actor) AS actors FROM rows GROUP BY "before", "after"'
        " ORDER BY times DESC, 1, 2",
    )
    weight: dict[str, dict[str, int]] = {"before": {}, "after": {}}
    for row in found:
        for side, names in weight.items():
            names[row[side]] = names.get(row[side], 0) + row["times"]
    rows, columns = (
        sorted(names, key=lambda name, names=names: -names[name])[:TOP]  # type: ignore[misc]
        for names in weight.values()
    )
    cells = [
        {"x": row["after"], "y": row["before"], "n": row["times"] / weight["before"][row["before"]]}
        for row in found
        if row["before"] in rows and row["after"] in columns
    ]
    total = sum(row["times"] for row in found)
    rare = [row for row in found if (row["surprise"] or 0) >= 5]
    line = (
        f"{total:,} steps between {len(weight['after'])} types; {len(rare)} kinds of steps are rare"
    )
    chart = heat("What follows what: the share of each step", cells, "share", columns, rows,
                 x_title="then", y_title="first", text=True, share=True)  # fmt: skip
    top = [
        {"first": row["before"], "then": row["after"], "times": row["times"],
         "actors": row["actors"], "bits": f"{row['surprise'] or 0:.1f}"}
        for row in sorted(found, key=lambda row: -(row["surprise"] or 0))
    ]  # fmt: skip
    return TableSummary(line, charts=[chart], top=top, heading="The most surprising steps")


def temporal(tables: Tables, table: str, now_ms: float) -> TableSummary:  # noqa: ARG001
    keys = tables.count(table)
    overdue = []
    if tables.has(table, "spread_s", "events"):
        # By the clock of the topic: its latest event of any key.
        overdue = tables.ask(
            table,
            "SELECT topic, key, usual_gap_s, epoch_ms(last_seen) AS last,"
            " epoch_ms(next_expected) AS due, epoch(clock) - epoch(last_seen) AS recency_s FROM"
            " (SELECT *, max(last_seen) OVER (PARTITION BY topic) AS clock FROM rows)"
            " WHERE next_expected <= clock AND events >= 4 AND usual_gap_s > 0"
            " AND spread_s <= 0.5 * usual_gap_s"
            " ORDER BY events DESC, topic, key LIMIT 200",  # the surest rhythm first
        )
    line = f"{keys:,} keys have a profile"
    line += f"; {len(overdue)} regular keys are overdue" if overdue else "; no key is overdue"
    charts = []
    for topic, cells in _weeks(tables, table):
        hours = [f"{hour:02}" for hour in range(24)]
        days = [day for day in DAYS if any(cell["y"] == day for cell in cells)]
        title = f"When {topic} happens: hour and weekday" if topic else "Hour and weekday"
        charts.append(heat(title, cells, "events", hours, days))
    if overdue:
        late = [
            {"label": f"{row['key']} of {row['topic']} ({ago(row['usual_gap_s'] * 1000)})",
             "n": (row["recency_s"] or 0) / max(0.001, row["usual_gap_s"])}
            for row in overdue[:TOP]
        ]  # fmt: skip
        charts.append(
            bars(
                "Overdue: silent for so many times the usual pause",
                late,
                "pauses",
                log=_is_wide(late),
            )
        )
    top = [
        {"key": row["key"], "topic": row["topic"], "usual_pause": ago(row["usual_gap_s"] * 1000),
         "last": stamp(row["last"]), "expected": stamp(row["due"])}
        for row in overdue
    ]  # fmt: skip
    return TableSummary(line, State.LOOK if overdue else State.WELL, charts, top)


def _weeks(tables: Tables, table: str) -> list[tuple[str, list[Row]]]:
    """The busiest topics by hour and weekday; the table of traffic has both at once."""
    if not tables.has("traffic", "hour", "topic", "events"):
        return []
    found = tables.ask(
        "traffic",
        "SELECT topic, isodow(hour) AS day, hour(hour) AS hour, CAST(sum(events) AS DOUBLE) AS n"
        " FROM rows GROUP BY ALL ORDER BY ALL",
    )
    sums: dict[str, float] = {}
    for row in found:
        sums[row["topic"]] = sums.get(row["topic"], 0) + row["n"]
    keyed = {row["topic"] for row in tables.ask(table, "SELECT DISTINCT topic FROM rows")}
    busiest = sorted(sums.keys() & keyed, key=lambda topic: -sums[topic])[:3]
    return [
        (
            topic,
            [
                {"x": f"{row['hour']:02}", "y": DAYS[row["day"] - 1], "n": row["n"]}
                for row in found
                if row["topic"] == topic
            ],
        )
        for topic in busiest
    ]


def default(tables: Tables, table: str, chart: tuple[str, str] | None) -> TableSummary:
    """A table that nobody knows: its declared ``chart``, else over time, else the largest."""
    line = f"{tables.count(table):,} rows"
    label, number = chart or (None, None)
    columns = tables.columns(table)
    if label is None or label not in columns:
        label = _first(tables, table, pa.types.is_string, pa.types.is_large_string)
        number = _first(tables, table, pa.types.is_integer, pa.types.is_floating) or "rows"
    when = time_column(tables, table)
    if chart is None and when is not None:
        low, high, _ = _span(tables, table, when, "count(*)")
        step = time_step(low, high, 60)
        name = f"CAST({_name(label)} AS VARCHAR)" if label else "''"
        found = tables.ask(
            table,
            f"SELECT floor(epoch_ms({_name(when)}) / {step}) * {step} AS t, {name} AS series,"
            f" {_measure(tables, table, number)} AS n FROM rows WHERE {_name(when)} IS NOT NULL"
            " GROUP BY ALL ORDER BY ALL LIMIT 20000",
        )
        what = f"{_told(tables, table, number)} over {when}" + (f", by {label}" if label else "")
        return TableSummary(line, charts=[over_time(what, found, str(number), step)])
    if label is None:
        return TableSummary(line)
    found = tables.ask(
        table,
        f"SELECT CAST({_name(label)} AS VARCHAR) AS label, {_measure(tables, table, number)} AS n"
        f" FROM rows GROUP BY 1 ORDER BY n DESC NULLS LAST, label LIMIT {TOP}",
    )
    top = [{label: row["label"], str(number): row["n"]} for row in found]
    title = f"{_told(tables, table, number)} by {label}"
    return TableSummary(line, charts=[bars(title, found, str(number))], top=top)


def _measure(tables: Tables, table: str, number: str | None) -> str:
    """Whole numbers are added up; of others the largest counts."""
    if number is None or number == "rows" or number not in tables.columns(table):
        return "CAST(count(*) AS DOUBLE)"
    return (
        f"CAST({'max' if _is_largest(tables, table, number) else 'sum'}({_name(number)}) AS DOUBLE)"
    )


def _is_largest(tables: Tables, table: str, number: str | None) -> bool:
    """Whether the largest number of several rows is drawn, in the place of their sum."""
    if number is None or number == "rows" or number not in tables.columns(table):
        return False
    return not pa.types.is_integer(tables.kind(table, number))


def _told(tables: Tables, table: str, number: str | None) -> str:
    """What a drawing's title calls the number."""
    return f"largest {number}" if _is_largest(tables, table, number) else str(number)


def _first(tables: Tables, table: str, *kinds: Callable[[pa.DataType], bool]) -> str | None:
    for name in tables.columns(table):
        if any(kind(tables.kind(table, name)) for kind in kinds):
            return name
    return None


def _span(tables: Tables, table: str, when: str, measure: str) -> tuple[float, float, float]:
    row = tables.ask(
        table,
        f"SELECT epoch_ms(min({_name(when)})) AS low, epoch_ms(max({_name(when)})) AS high,"
        f" CAST({measure} AS DOUBLE) AS n FROM rows",
    )[0]
    return float(row["low"] or 0), float(row["high"] or 0), float(row["n"] or 0)


def _is_wide(rows: Sequence[Row]) -> bool:
    """Whether the small ones would vanish beside the large."""
    sizes = [row["n"] for row in rows if row["n"] > 0]
    return bool(sizes) and max(sizes) > 50 * min(sizes)


def _name(column: str) -> str:
    """A column's name in SQL, whatever it is."""
    return '"' + column.replace('"', '""') + '"'


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def interval(good: float, judged: float) -> tuple[float, float]:
    """Wilson's interval of a rate: where the true one is, with 95 %."""
    if not judged:
        return 0.0, 1.0
    z, rate = 1.96, good / judged
    middle = rate + z * z / (2 * judged)
    spread = z * math.sqrt(rate * (1 - rate) / judged + z * z / (4 * judged * judged))
    whole = 1 + z * z / judged
    return max(0.0, (middle - spread) / whole), min(1.0, (middle + spread) / whole)


def ago(ms: float) -> str:
    """A span of time for people."""
    seconds = max(0.0, ms / 1000)
    for size, unit in ((86_400 * 365, "years"), (86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds" if seconds >= 2 else f"{seconds:.1f} seconds"


def _ms(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 120_000:
        return ago(value)
    return f"{value / 1000:.1f} s" if value >= 1000 else f"{value:.3g} ms"


EMPTY: Final = {
    "verify": "every segment was checked: all is well",
    "dead_letters": "there are no dead letters",
    "latency": "there is no audit to measure: open the bus with connect(url, audit=1.0)",
    "lag": "there are no groups",
    "claims": "nobody claimed anything",
    "quarantine": "nothing was set aside",
    "learning": "there are no decisions",
    "consolidation": "no event names an actor",
    "sequences": "no event names an actor and a type",
    "temporal": "no event has a key",
    "compaction": "no event has a key",
}
KNOWN: Final[dict[str, tuple[Drawing, frozenset[str]]]] = {
    "lake": (freshness, frozenset({"topic", "timestamp"})),
    "traffic": (traffic, frozenset({"hour", "topic", "events", "bytes"})),
    "clean": (clean, frozenset({"topic"})),
    "quarantine": (quarantine, frozenset({"reason", "topic", "timestamp"})),
    "verify": (verify, frozenset({"topic", "problem", "severe", "path"})),
    "dead_letters": (
        dead_letters,
        frozenset({"signature", "reason", "topic", "group", "letters", "first_seen", "last_seen",
                   "examples"}),
    ),
    "lag": (lag, frozenset({"topic", "group", "lag", "lost"})),
    "latency": (
        latency, frozenset({"hour", "topic", "group", "records", "deliver_p50_ms"})
    ),
    "claims": (claims, frozenset({"what", "actor", "claims", "held_s", "conflicts", "abandoned"})),
    "compaction": (compaction, frozenset({"topic", "versions"})),
    "consolidation": (
        consolidation, frozenset({"actor", "space", "start", "end", "mostly", "events"})
    ),
    "learning": (
        learning,
        frozenset({"action", "context", "decisions", "judged", "good", "confidence",
                   "success_rate", "expected"}),
    ),
    "decisions": (decisions, frozenset({"action", "decided", "too_late", "has_outcome", "ok"})),
    "sequences": (sequences, frozenset({"before", "after", "times", "surprise", "actor"})),
    "temporal": (
        temporal, frozenset({"topic", "key", "usual_gap_s", "last_seen", "next_expected"})
    ),
}  # fmt: skip
