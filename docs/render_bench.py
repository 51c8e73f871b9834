"""Put the numbers of the last ``make bench`` into the README, between its two markers.

    python docs/render_bench.py

The README quotes no number that does not come from ``benchmarks/results/latest.json``.
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
BLOCK = re.compile(r"(<!-- bench -->\n).*?(<!-- /bench -->)", re.S)
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


def main() -> None:
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []
    README.write_text(place(README.read_text("utf-8"), results), "utf-8")


if __name__ == "__main__":
    main()
