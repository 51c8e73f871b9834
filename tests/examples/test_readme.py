"""The numbers and extras of the README and of the page of measurements come from their sources."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PAGE = (ROOT / "docs" / "measurements.md").read_text("utf-8")
BENCH: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "render_bench.py"))
RESULTS = [
    {
        "name": "publish-64",
        "ours": 123456.7,
        "against": "bare ceiling",
        "theirs": 200000.0,
        "unit": "ev/s",
        "ratio": 0.6173,
        "goal": ">= 0.4",
        "met": True,
    }
]


def test_results_become_a_table() -> None:
    assert BENCH["render"](RESULTS).splitlines()[2:] == [
        "| `publish-64` | 123,457 ev/s | 200,000 ev/s | bare ceiling | 0.617 | >= 0.4 | yes |"
    ]
    assert "**no**" in BENCH["render"]([{**RESULTS[0], "met": False}])


def test_the_table_goes_between_the_markers_and_nowhere_else() -> None:
    page = BENCH["place"](PAGE, RESULTS)
    start, end = page.index("<!-- bench -->"), page.index("<!-- /bench -->")
    assert page[start:end].count("| `publish-64` |") == 1
    assert BENCH["BLOCK"].sub("", page) == BENCH["BLOCK"].sub("", PAGE)
    assert BENCH["place"](page, []).count("run `make bench`") == 1


def test_the_pages_show_the_last_run() -> None:
    results = json.loads(BENCH["RESULTS"].read_text("utf-8"))
    assert BENCH["place"](PAGE, results) == PAGE
    assert BENCH["place_five"](README, results) == README
    assert BENCH["pick"](results).count("\n") == 2 + len(BENCH["PICKED"])


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="bench"):
        BENCH["place"]("no markers", RESULTS)
    with pytest.raises(ValueError, match="numbers"):
        BENCH["place_five"]("no markers", RESULTS)


def test_no_number_of_the_bench_stands_outside_its_block() -> None:
    for outside in (BENCH["FIVE"].sub("", README), BENCH["BLOCK"].sub("", PAGE)):
        assert re.findall(r"\d[\d,.]* (?:ev/s|events/s|ms)\b", outside) == []


def test_the_extras_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, libraries in re.findall(r"^\| `trunkline\[(\w+)\]` \| ([^|]+) \|", README, re.M):
        wanted = {re.split(r"[\[>=]", one)[0] for one in extras["optional-dependencies"][name]}
        wanted.discard("trunkline")  # other extras of its own, named in its last column
        assert name == "all" or set(libraries.split(", ")) == wanted
