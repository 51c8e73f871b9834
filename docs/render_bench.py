"""Put the numbers of the last ``make bench`` between the markers of two pages: all of them into
``docs/measurements.md``, five of them into the README.

    python docs/render_bench.py

Neither page quotes a number that does not come from ``benchmarks/results/latest.json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "latest.json"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "measurements.md"
BLOCK = re.compile(r"(<!-- bench -->\n).*?(<!-- /bench -->)", re.S)
FIVE = re.compile(r"(<!-- numbers -->\n).*?(<!-- /numbers -->)", re.S)
# The lines of the README: wins and losses alike, one for each thing that people ask first.
PICKED = {
    "publish-64-nats-async": "durable publishes, 64 at a time, beside a peer that does not sync",
    "publish-64-nats-sync": "the same beside a peer that syncs each event",
    "ws-publish-64-nats-sync": "the same through a broker, over WebSocket",
    "end-to-end-p95": "publish to handler at 1,000 a second, p95, beside one bare sync",
    "spark-scan": "a Spark scan of the log",
}
NOTHING = "There are no numbers yet: run `make bench`.\n"


def render(results: Sequence[dict[str, Any]]) -> str:
    """The table, or one sentence where there are no results."""
    if not results:
        return NOTHING
    rows = [
        "| what | ours | theirs | against | ratio | goal | met |",
        "|---|---:|---:|---|---:|---|---|",
    ]
    for one in results:
        ours, theirs = (f"{_number(one[side])} {one['unit']}" for side in ("ours", "theirs"))
        met = "yes" if one["met"] else "**no**"
        name = f"`{one['name']}`"
        cells = (name, ours, theirs, one["against"], _number(one["ratio"]), one["goal"], met)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def place(page: str, results: Sequence[dict[str, Any]]) -> str:
    """``page`` with the rendered results between its markers."""
    fresh, count = BLOCK.subn(lambda found: found[1] + render(results) + found[2], page)
    if count != 1:
        raise ValueError("the page has no <!-- bench --> … <!-- /bench -->, or several")
    return fresh


def pick(results: Sequence[dict[str, Any]]) -> str:
    """The short table of the README."""
    rows = ["| | ours | theirs | |", "|---|---:|---:|---|"]
    known = {one["name"]: one for one in results}
    for name, about in PICKED.items():
        if (one := known.get(name)) is not None:
            ours, theirs = (f"{_number(one[side])} {one['unit']}" for side in ("ours", "theirs"))
            rows.append(f"| {about} | {ours} | {theirs} | {one['against']} |")
    return "\n".join(rows) + "\n" if len(rows) > 2 else NOTHING


def place_five(page: str, results: Sequence[dict[str, Any]]) -> str:
    """``page`` with the five numbers between its markers."""
    fresh, count = FIVE.subn(lambda found: found[1] + pick(results) + found[2], page)
    if count != 1:
        raise ValueError("the page has no <!-- numbers --> … <!-- /numbers -->, or several")
    return fresh


def main() -> None:
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []
    PAGE.write_text(place(PAGE.read_text("utf-8"), results), "utf-8")
    README.write_text(place_five(README.read_text("utf-8"), results), "utf-8")


if __name__ == "__main__":
    main()
