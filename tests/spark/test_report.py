"""The report: every table drawn as what it is, in one page that needs nothing else."""

from __future__ import annotations

import json
import re
import shutil
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

import msgspec
import pyarrow as pa
from deltalake import write_deltalake

from trunkline.cli import main
from trunkline.errors import NotFound
from trunkline.spark.lake import Lake
from trunkline.spark.pipelines import Pipeline, all_pipelines, find
from trunkline.spark.pipelines.run import Runner, RunResult
from trunkline.spark.report import Chart, Report, State, read_report, write_page
from trunkline.spark.report.charts import bars, calibration, heat
from trunkline.spark.report.drawings import interval
from trunkline.spark.report.page import script_json
from trunkline.spark.report.tables import time_step

from .browser import dump_dom
from .demo import make_demo

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
NOW_MS = NOW.timestamp() * 1000
# What a person would see: the marks of each drawing that have a size on the screen, once it is
# drawn. The page itself would not let this script run.
MEASURE = """<script>
(async () => {
  const root = document.documentElement;
  while (!root.dataset.drawn) await new Promise(done => setTimeout(done, 50));
  const charts = [...document.querySelectorAll("[data-chart]")].map(box => {
    const marks = [...box.querySelectorAll("svg .role-mark path, svg .role-mark line, "
      + "svg .role-mark rect, svg .role-mark text")];
    return [box.getAttribute("aria-label"), marks.filter(mark => {
      const size = mark.getBoundingClientRect();
      return size.width > 0.2 || size.height > 0.2;
    }).length];
  });
  const seen = {drawn: root.dataset.drawn, charts, wide: root.scrollWidth, window: innerWidth,
    images: document.images.length, owned: window.owned === undefined ? "no" : "yes",
    background: getComputedStyle(document.body).backgroundColor};
  const note = document.createElement("pre");
  note.id = "seen";
  note.textContent = JSON.stringify(seen);
  document.body.append(note);
})();
</script>"""
HOSTILE = (
    "</script><script>window.owned=1</script>",
    '"><img src=x onerror="window.owned=1">',
    "<!--<script>",
    "<svg onload=window.owned=1>",
    "{{constructor.constructor('window.owned=1')()}}",
    "datum.x || (window.owned = 1)",
    "' onmouseover='window.owned=1",
    "\u202egnp.exe\u2066\x00\x1b[31m",
    "a" * 5000,
    "",
)


class Page(HTMLParser):
    """What a page asks for, and what it is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.asked_for: list[str] = []
        self.ids: list[str] = []
        self.classes: list[str] = []
        self.tags: list[str] = []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.classes.append(given.get("class") or "")
        self.asked_for += [given[name] or "" for name in ("src", "href") if name in given]
        assert not [name for name in given if name.startswith("on")]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""


def look_at(page: str, place: Path, *options: str) -> dict[str, Any]:
    """What a browser shows of a page."""
    text = re.sub(r"<meta http-equiv=.*?>", "", page, count=1)
    before, end, _ = text.rpartition("</body></html>")  # the libraries write pages as well
    place.write_text(f"{before}{MEASURE}{end}", "utf-8")
    told = re.search(r'<pre id="seen">(.*?)</pre>', dump_dom(place, *options))
    assert told
    seen: dict[str, Any] = json.loads(told[1].replace("&lt;", "<").replace("&gt;", ">"))
    return seen


def write(lake: Path, table: str, rows: list[dict[str, Any]], mode: Any = "append") -> None:
    write_deltalake(str(lake / table), pa.Table.from_pylist(rows), mode=mode)


def values(chart: Chart) -> list[dict[str, Any]]:
    """The rows that a drawing is made of."""
    return [row for rows in chart.spec["datasets"].values() for row in rows]


def ran(lake: Path, *outcomes: RunResult) -> None:
    (lake / "_runs.json").write_bytes(msgspec.json.encode(list(outcomes)))


def result(name: str, error: str = "") -> RunResult:
    return RunResult(name, 1, 0.5, NOW.isoformat(), 0, error=error)


def own(name: str, **declared: Any) -> Pipeline:
    return Pipeline(name=name, about=f"what {name} has", transform=lambda df: df, **declared)


def read(lake: Path, *pipelines: Pipeline) -> Report:
    return read_report(str(lake), pipelines or find([]), now_ms=NOW_MS)


def traffic(lake: Path, hours: int = 30) -> None:
    rows = [
        {
            "hour": NOW - timedelta(hours=n),
            "topic": topic,
            "type": "t",
            "events": 10 + n,
            "bytes": 100,
        }
        for n in range(hours)
        for topic in ("orders", "visits")
    ]
    write(lake, "traffic", rows)


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    home = tmp_path_factory.mktemp("report")
    root = make_demo(home / "bus", 2000, damaged=True)
    place = str(home / "lake")
    outcomes = Runner(spark, f"file:{root}", Lake(place)).run(find([]))
    assert {one.name: one.error for one in outcomes if one.error} == {}
    return place


@pytest.fixture(scope="module")
def page(lake: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["pipeline", "report", "--lake", lake, "--out", str(out), "--quiet"]) == 0
    return out.read_text("utf-8")


def test_every_table_is_on_the_page_and_nothing_is_asked_of_the_network(page: str) -> None:
    seen = Page(page)

    made = set(all_pipelines()) - {"erasure"}  # nobody asked to be forgotten
    assert made | {"quarantine"} <= set(seen.ids)
    assert [one for one in seen.asked_for if not one.startswith("#")] == []
    assert "default-src 'none'" in seen.policy
    assert "unsafe-eval" not in seen.policy
    assert re.search(r"script-src 'sha256-[\w+/=]+';", seen.policy)
    assert seen.tags.count("script") == 2


def test_each_table_is_drawn_as_what_it_is(lake: str) -> None:
    cards = {card.name: card for card in read_report(lake, find([])).cards}

    titles = {name: [chart.title for chart in card.charts] for name, card in cards.items()}
    assert titles["traffic"] == ["Events per hour, by topic"]
    assert titles["lake"] == ["How old the newest event of each topic is"]
    assert titles["clean"] == ["Events that passed and that were set aside, by topic"]
    assert titles["quarantine"] == ["Why events were set aside, by topic"]
    assert titles["dead_letters"] == ["Dead letters over time, by what went wrong"]
    assert titles["latency"][0] == "From append to delivery over time, all groups"
    assert titles["lag"] == ["Records not settled, now"]
    assert titles["consolidation"][0] == "Episodes of the busiest actors"
    assert titles["sequences"] == ["What follows what: the share of each step"]
    assert titles["learning"][0] == "Was it as sure as it should be? On the line it was"
    assert titles["temporal"][0] == "When orders happens: hour and weekday"
    assert titles["claims"][0] == "How long each thing was held, and by whom"
    assert {name for name, found in titles.items() if not found} == set()
    assert {row["topic"]: row["events"] for row in cards["traffic"].top}["orders"] == 1300
    signatures = {row["series"] for row in values(cards["dead_letters"].charts[0])}
    assert signatures == {"KeyError: …", "timeout after # s", "refused #"}


def test_a_browser_shows_marks_in_every_drawing(page: str, tmp_path: Path) -> None:
    wide = look_at(page, tmp_path / "wide.html", "--window-size=1280,900")
    narrow = look_at(page, tmp_path / "narrow.html", "--window-size=500,900")

    for seen in (wide, narrow):
        assert seen["drawn"] == "yes"
        assert len(seen["charts"]) >= len(all_pipelines())
        assert [title for title, marks in seen["charts"] if not marks] == []
        assert seen["wide"] <= seen["window"], "the page is wider than the window"


def test_a_browser_runs_the_page_under_its_own_policy(page: str, tmp_path: Path) -> None:
    place = tmp_path / "page.html"
    place.write_text(page, "utf-8")

    shown = dump_dom(place)

    assert 'data-drawn="yes"' in shown
    assert shown.count("marks") > len(all_pipelines())


def test_the_same_is_printed(lake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"

    assert main(["pipeline", "report", "--lake", lake, "--out", str(out), "--rows", "2"]) == 0

    said = capsys.readouterr().out
    for card in read_report(lake, find([])).cards:
        assert f"\n{card.name}: " in said
    assert said.endswith(f"report: {out}\n")


def test_the_report_can_be_of_one_table_and_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traffic(tmp_path / "lake")
    out = tmp_path / "one.html"
    words = ["pipeline", "report", "traffic", "--lake", str(tmp_path / "lake"), "--out", str(out)]

    assert main([*words, "--json"]) == 0

    said = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["state"], one["rows"]) for one in said["tables"]] == [
        ("traffic", "well", 60)
    ]
    assert "Events per hour, by topic" in out.read_text("utf-8")


def test_a_lake_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no lake at"):
        read_report(str(tmp_path / "nowhere"), find([]))


def test_all_is_well_is_one_line(tmp_path: Path) -> None:
    traffic(tmp_path)
    ran(tmp_path, result("traffic"), result("verify"))

    page = write_page(read(tmp_path))

    assert page.count('class="news') == 1
    assert "<b>All is well.</b>2 pipelines ran, and none failed." in page


def test_a_pipeline_that_failed_is_red_and_first(tmp_path: Path) -> None:
    traffic(tmp_path)
    write(tmp_path, "lag", [{"topic": "orders", "group": "g", "lag": 3, "lost": 0}])
    ran(tmp_path, result("traffic", "no <b>space</b> left"), result("lag"), result("clean", "dead"))

    report = read(tmp_path)
    page = write_page(report)

    assert [card.name for card in report.cards][:2] == ["traffic", "clean"]
    assert {card.name: card.state for card in report.cards} == {
        "traffic": State.FAILED,
        "clean": State.FAILED,
        "lag": State.LOOK,
    }
    news = [one for one in Page(page).classes if one.startswith("news")]
    assert news == ["news failed", "news failed", "news look"]
    assert "<code>no &lt;b&gt;space&lt;/b&gt; left</code>" in page
    assert "Its table is as of the run before: 1,470 events of 2 topics" in page
    assert "It has no table yet." in page


def test_a_pipeline_that_failed_and_is_not_loaded_now_is_red_and_first(tmp_path: Path) -> None:
    traffic(tmp_path)
    write(tmp_path, "paid", [{"key": "x", "total": 2}])
    ran(tmp_path, result("traffic"), result("paid", "no luck"), result("gone", "no luck"))

    report = read(tmp_path)

    said = [(card.name, card.state, card.line) for card in report.cards]
    assert said[:2] == [
        ("gone", State.FAILED, "It has no table yet."),
        ("paid", State.FAILED, "Its table is as of the run before: 1 rows."),
    ]
    assert report.others == []
    assert "<b>paid failed</b><code>no luck</code>" in write_page(report)
    only = read_report(str(tmp_path), find(["traffic"]), only=True)
    assert [card.name for card in only.cards] == ["traffic"]


def test_a_table_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    traffic(tmp_path)
    write(tmp_path, "compaction", [{"topic": "orders", "versions": 1}])
    for file in (tmp_path / "compaction").glob("*.parquet"):
        file.unlink()

    cards = {card.name: card for card in read(tmp_path).cards}

    assert cards["compaction"].state is State.FAILED
    assert "its table cannot be read" in cards["compaction"].line
    assert cards["traffic"].charts


def hostile_lake(place: Path) -> Path:
    """Every text that events bring is bad, in every table that shows text."""
    pairs = list(enumerate(HOSTILE))
    write(place, "traffic", [
        {"hour": NOW - timedelta(hours=n), "topic": text, "type": text, "events": 5, "bytes": 1}
        for n, text in pairs
    ])  # fmt: skip
    write(place, "quarantine", [
        {"topic": text, "reason": text, "value": text, "timestamp": NOW} for _, text in pairs
    ])  # fmt: skip
    write(place, "dead_letters", [
        {"topic": text, "group": text, "reason": text, "signature": text, "letters": 2,
         "first_seen": NOW - timedelta(hours=n + 1), "last_seen": NOW, "examples": [text]}
        for n, text in pairs
    ])  # fmt: skip
    write(place, "sequences", [
        {"actor": text, "before": text, "after": other, "times": 3, "surprise": 6.0}
        for _, text in pairs for _, other in pairs
    ])  # fmt: skip
    write(place, "consolidation", [
        {"actor": text, "space": text, "start": NOW - timedelta(hours=n + 1), "end": NOW,
         "mostly": text, "events": 4}
        for n, text in pairs
    ])  # fmt: skip
    write(place, "mine", [{HOSTILE[0]: text, "n": float("nan") if n else 2.5} for n, text in pairs])
    ran(place, *(result(f"p{n}", text) for n, text in pairs))
    return place


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    lake = hostile_lake(tmp_path / "lake")

    report = read(lake, *find([]), own("mine"), *(own(f"p{n}") for n in range(len(HOSTILE))))
    page = write_page(report)

    seen = Page(page)  # it fails on any handler of events
    assert seen.tags.count("script") == 2
    assert "img" not in seen.tags
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert {card.name for card in report.cards if card.charts} >= {
        "traffic", "quarantine", "dead_letters", "sequences", "consolidation",
    }  # fmt: skip


def test_hostile_text_stays_text_in_a_browser(tmp_path: Path) -> None:
    """Even without the policy, which would stop a script that got through."""
    lake = hostile_lake(tmp_path / "lake")
    page = write_page(read(lake, *find([]), own("mine")))

    seen = look_at(page, tmp_path / "hostile.html")

    assert seen["owned"] == "no"
    assert seen["images"] == 0
    assert seen["drawn"] == "yes"
    assert [title for title, marks in seen["charts"] if not marks] == []


def test_json_in_a_script_cannot_end_it_and_has_no_odd_number() -> None:
    text = script_json({"a": "</script><!--&", "b": [float("nan"), float("inf"), 1.5], "c": NOW})

    assert not re.search("[<>&]", text)
    assert json.loads(text) == {"a": "</script><!--&", "b": [None, None, 1.5], "c": str(NOW)}


@pytest.mark.parametrize(
    ("declared", "rows", "title"),
    [
        (
            {},
            [{"day": NOW - timedelta(days=n), "carrier": f"c{n % 3}", "delays": n}
             for n in range(9)],
            "delays over day, by carrier",
        ),
        ({}, [{"name": f"n{n}", "size": n} for n in range(30)], "size by name"),
        ({}, [{"name": f"n{n % 3}"} for n in range(9)], "rows by name"),
        ({"chart": ("b", "rows")}, [{"a": "x", "b": "y"}], "rows by b"),
        ({"chart": ("key", "gone")}, [{"key": "x"}], "gone by key"),
        ({}, [{'a"b <i>': "x", "n'": 1.5}], "largest n' by a\"b <i>"),
        ({"chart": ("key", "total")}, [{"key": "x", "total": 1.5}], "largest total by key"),
        ({"chart": ("key", "total")}, [{"key": "x", "total": 1}], "total by key"),
    ],
)  # fmt: skip
def test_a_table_of_your_own_has_a_sensible_drawing(
    declared: dict[str, Any], rows: list[dict[str, Any]], title: str, tmp_path: Path
) -> None:
    write(tmp_path, "mine", rows)

    (card,) = read(tmp_path, own("mine", **declared)).cards

    assert [chart.title for chart in card.charts] == [title]
    assert card.line == f"{len(rows)} rows"
    assert values(card.charts[0])


def test_a_table_of_numbers_alone_is_not_drawn_but_listed(tmp_path: Path) -> None:
    write(tmp_path, "mine", [{"n": 1}])
    report = read(tmp_path, own("mine"))

    assert report.cards[0].charts == ()
    assert "<b>mine</b>: 1 rows" in write_page(report)


def test_the_rows_shown_are_the_newest(tmp_path: Path) -> None:
    traffic(tmp_path, hours=40)

    (card,) = read(tmp_path, *find(["traffic"])).cards

    assert [row[0] for row in card.rows[:2]] == ["2026-05-04 12:00:00"] * 2
    assert card.total == 80


def test_the_latency_of_a_group_is_that_of_all_of_its_hours(tmp_path: Path) -> None:
    def hour(ago: int, group: str, times: dict[int, int]) -> dict[str, Any]:
        steps = [{"step": step, "n": n} for step, n in times.items()]
        return {
            "hour": NOW - timedelta(hours=ago), "topic": "orders", "group": group,
            "records": sum(times.values()), "deliver_p50_ms": 1.0, "_deliver": steps,
            "_settle": steps[:1],
        }  # fmt: skip

    rows = [hour(2, "billing", {400: 90}), hour(1, "billing", {400: 5, 700: 5})]
    rows += [hour(n, "audit", {300: 1}) for n in range(80)]
    write(tmp_path, "latency", rows)

    (card,) = (one for one in read(tmp_path).cards if one.name == "latency")

    assert [(row["group"], row["deliveries"]) for row in card.top] == [
        ("billing", 100), ("audit", 80)
    ]  # fmt: skip
    assert card.line.startswith("180 deliveries; the slowest group waits 2.73 ms in the middle and")
    over_time, of_groups = card.charts
    assert len({row["t"] for row in values(over_time)}) == 80
    assert sorted({row["label"] for row in values(of_groups)}) == [
        "audit on orders: wait", "audit on orders: work",
        "billing on orders: wait", "billing on orders: work",
    ]  # fmt: skip
    assert len(values(of_groups)) == 4


def test_lag_is_drawn_over_time_once_there_are_two_runs(tmp_path: Path) -> None:
    for lag in (5, 9, 0):
        row = {"topic": "orders", "group": "billing", "lag": lag, "lost": 0}
        own_row = {"topic": "orders", "group": "pipeline.lake", "lag": 7, "lost": 0}
        write(tmp_path, "lag", [row, own_row], mode="overwrite")

    (card,) = read(tmp_path, *find(["lag"])).cards

    assert card.line == "all 1 groups are up to date"
    assert card.charts[0].title == "Records not settled, at each run"
    drawn = values(card.charts[0])
    assert [row["n"] for row in drawn] == [5, 9, 0]
    assert {row["series"] for row in drawn} == {"billing on orders"}


def test_an_old_version_whose_files_are_gone_is_left_out(tmp_path: Path) -> None:
    row = {"topic": "orders", "group": "billing", "lag": 5, "lost": 0}
    write(tmp_path, "lag", [row])
    for file in (tmp_path / "lag").glob("*.parquet"):
        shutil.move(file, tmp_path / "gone")
    write(tmp_path, "lag", [{**row, "lag": 6}], mode="overwrite")

    (card,) = read(tmp_path, *find(["lag"])).cards

    assert [chart.title for chart in card.charts] == ["Records not settled, now"]


@pytest.mark.parametrize(
    ("good", "judged", "low", "high"),
    [(0, 10, 0.0, 0.278), (5, 10, 0.237, 0.763), (10, 10, 0.722, 1.0), (0, 0, 0.0, 1.0)],
)
def test_the_interval_of_a_rate_is_wilsons(good: int, judged: int, low: float, high: float) -> None:
    assert interval(good, judged) == pytest.approx((low, high), abs=0.001)


def test_a_drawing_over_time_has_at_most_a_hundred_bars() -> None:
    for days in (0, 0.01, 1, 30, 400, 5000):
        step = time_step(0, days * 86_400_000)
        assert days * 86_400_000 / step <= 100
    assert time_step(0, 3_600_000, 3600) == 3_600_000


def test_labels_of_points_that_lie_close_are_told_apart() -> None:
    rows = [
        {"label": name, "expected": sure, "rate": 0.47, "low": 0.2, "high": 0.7, "n": 20}
        for name, sure in (("discount, day", 0.82), ("discount, night", 0.83), ("far", 0.1))
    ]

    chart = calibration("sure", rows)

    drawn = {row["label"]: row["at"] for rows in chart.spec["datasets"].values()
             for row in rows if "at" in row}  # fmt: skip
    assert abs(drawn["discount, day"] - drawn["discount, night"]) > 0.04
    assert all(abs(at - 0.47) < 0.1 for at in drawn.values())


def test_a_share_that_is_not_nothing_does_not_read_as_nothing() -> None:
    cells = [{"x": "b", "y": "a", "n": 0.004}, {"x": "a", "y": "a", "n": 0.996}]

    chart = heat("steps", cells, "share", ["a", "b"], ["a"], text=True, share=True)

    (rows,) = chart.spec["datasets"].values()
    assert [row["word"] for row in rows] == ["<1%", "100%"]


def test_a_few_counts_have_whole_ticks() -> None:
    rows = [{"label": "a", "series": "x", "n": 1}, {"label": "a", "series": "y", "n": 1}]

    chart = bars("counts", rows, "claims")

    assert chart.spec["encoding"]["x"]["axis"]["values"] == [0, 1, 2]
