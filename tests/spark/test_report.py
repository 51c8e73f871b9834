"""The report: every pipeline's table drawn, in one page that needs nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from trunkline.cli import main
from trunkline.cli.render import amount
from trunkline.errors import NotFound
from trunkline.spark.jobs import Runner
from trunkline.spark.lake import Lake
from trunkline.spark.pipelines import all_pipelines, find
from trunkline.spark.report import read_gold

from .demo import make_demo

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
# What a person would see: the marks of each section that have a size on the screen.
MEASURE = """<script>document.title = JSON.stringify(Object.fromEntries(
[...document.querySelectorAll('section')].map(s => [s.id, [...s.querySelectorAll('svg .bar')]
.filter(b => b.getBoundingClientRect().width > 0.5 && b.getBoundingClientRect().height > 5).length]
)))</script>"""


class Marks(HTMLParser):
    """How many marks the drawing of each section has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}
        self.asked_for: list[str] = []
        self._section = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "section":
            self._section = given["id"] or ""
            self.found[self._section] = 0
        elif tag == "rect" and float(given["width"] or 0) > 0:
            self.found[self._section] += 1
        self.asked_for += [given[name] or "" for name in ("src", "href") if name in given]


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    home = tmp_path_factory.mktemp("report")
    root = make_demo(home / "bus", 2000, damaged=True)
    place = str(home / "lake")
    ran = Runner(spark, f"file:{root}", Lake(place)).run(find([]))
    assert {one.name: one.error for one in ran if one.error} == {}
    assert {one.name for one in ran if one.published} == {
        one.name for one in find([]) if one.to_topic
    }
    return place


@pytest.fixture(scope="module")
def page(lake: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["pipeline", "report", "--lake", lake, "--out", str(out), "--quiet"]) == 0
    return out


def test_every_table_is_drawn_and_nothing_is_asked_of_the_network(page: Path) -> None:
    marks = Marks()
    marks.feed(page.read_text("utf-8"))

    assert set(marks.found) == set(all_pipelines())
    assert [name for name, count in marks.found.items() if not count] == []
    assert marks.asked_for == []
    assert not re.search(r"https?:|<script|@import|url\(", page.read_text("utf-8"))


def test_a_browser_shows_every_mark(page: Path, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("there is no browser: 'make tools' installs one")
    copy = tmp_path / "measured.html"
    text = page.read_text("utf-8")
    copy.write_text(text.replace("</body>", f"{MEASURE}</body>"), "utf-8")

    done = subprocess.run(
        [browser, "--no-sandbox", "--disable-gpu", "--dump-dom", copy.as_uri()],
        capture_output=True,
        text=True,
        timeout=100,
    )

    told = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert told, done.stderr[-2000:]
    seen = json.loads(told[1])
    assert set(seen) == set(all_pipelines())
    assert [name for name, count in seen.items() if not count] == []


def test_the_same_is_printed(lake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"

    assert main(["pipeline", "report", "--lake", lake, "--out", str(out)]) == 0

    said = capsys.readouterr().out
    for one in read_gold(lake, find([])):
        assert f"\n{one.name}: {amount(one.total, 'row')}; {one.measure}" in said
        assert one.drawn[0][0] in said
    assert said.endswith(f"{out}\n")


def test_counts_add_up_and_of_times_the_worst_is_drawn(lake: str) -> None:
    drawn = {one.name: dict(one.drawn) for one in read_gold(lake, find([]))}

    assert drawn["traffic"]["orders"] == 1300
    assert 30 < drawn["latency"]["orders"] < 40


def test_a_lake_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no lake at"):
        read_gold(str(tmp_path / "nowhere"), find([]))
