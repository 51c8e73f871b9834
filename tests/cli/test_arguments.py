"""What a person types for an offset, a time, a bus."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import trunkline
from trunkline.cli.arguments import (
    Point,
    Span,
    bus_path,
    duration,
    parse_point,
    parse_span,
    parse_time,
)
from trunkline.cli.spark import located
from trunkline.errors import Invalid, NoBus

from .conftest import Run, lines

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)


def at(when: datetime) -> Point:
    return Point("time", when=when)


def offset(n: int) -> Point:
    return Point("offset", n)


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("start", Span(Point("start"), None, single=True)),
        ("earliest", Span(Point("start"), None, single=True)),
        ("end", Span(Point("end"), None, single=True)),
        ("latest", Span(Point("end"), None, single=True)),
        ("+3", Span(Point("start", 3), None, single=True)),
        ("-3", Span(Point("end", 3), None, single=True)),
        ("7", Span(offset(7), None, single=True)),
        ("7:", Span(offset(7), None)),
        (":7", Span(None, offset(7))),
        ("3:7", Span(offset(3), offset(7))),
        ("-3:", Span(Point("end", 3), None)),
        ("+2:-2", Span(Point("start", 2), Point("end", 2))),
        ("start:end", Span(Point("start"), Point("end"))),
        ("@2026-01-01", Span(at(NEW_YEAR), None, single=True)),
        ("@2026-01-01T00:00:00Z", Span(at(NEW_YEAR), None, single=True)),
        ("@2026-01-01T02:00:00+02:00", Span(at(NEW_YEAR), None, single=True)),
        ("@1767225600", Span(at(NEW_YEAR), None, single=True)),
        ("@1767225600000", Span(at(NEW_YEAR), None, single=True)),
        ("@-1h", Span(at(NOW - timedelta(hours=1)), None, single=True)),
        ("@now", Span(at(NOW), None, single=True)),
        ("@-1h:", Span(at(NOW - timedelta(hours=1)), None)),
        ("@:-90s", Span(None, at(NOW - timedelta(seconds=90)))),
        ("@-2d:-1d", Span(at(NOW - timedelta(days=2)), at(NOW - timedelta(days=1)))),
        ("@2026-01-01:2026-01-02", Span(at(NEW_YEAR), at(NEW_YEAR + timedelta(days=1)))),
        (
            "@2026-01-01T00:00:00Z:2026-01-01T12:30:00Z",
            Span(at(NEW_YEAR), at(NEW_YEAR + timedelta(hours=12, minutes=30))),
        ),
        ("@2026-01-01T00:00:", Span(at(NEW_YEAR), None)),
        ("@1767225600:1767225660", Span(at(NEW_YEAR), at(NEW_YEAR + timedelta(minutes=1)))),
    ],
)
def test_each_form_of_a_place_is_understood(text: str, span: Span) -> None:
    assert parse_span(text, NOW) == span


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "@",
        "@:",
        "x",
        "1:x",
        "1:2:3",
        "--1",
        "+-1",
        "1.5",
        "@x",
        "@12:99",
        "@-1y",
        "@-9999999999w",
        "\u0661",
        "@\u0661777896000",
    ],
)
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="not a"):
        parse_span(text, NOW)


@pytest.mark.parametrize("text", ["4:2", "+4:+2", "-2:-4", "@-1h:-2h", "@2026-01-02:2026-01-01"])
def test_what_ends_before_it_begins_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="it ends before it begins"):
        parse_span(text, NOW)


@pytest.mark.parametrize("text", ["2:2", "-2:1", "end:start", "@-1h:-1h"])
def test_what_is_empty_or_depends_on_the_log_is_a_range(text: str) -> None:
    assert parse_span(text, NOW).stop is not None


def test_a_point_is_no_range() -> None:
    assert parse_point("@-1h", NOW) == at(NOW - timedelta(hours=1))
    with pytest.raises(Invalid):
        parse_point("1:2", NOW)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5s", 1.5),
        ("500ms", 0.5),
        ("10m", 600),
        ("2h", 7200),
        ("1d", 86400),
        ("1w", 604800),
    ],
)
def test_a_duration_has_units(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "-1", "1y", "1 h", "1e3", "nan", "\u0661"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="not a duration"):
        duration(text)


def test_a_time_without_a_zone_is_utc() -> None:
    assert parse_time("2026-01-01T00:00", NOW) == NEW_YEAR
    assert parse_time("12:30", NOW) is None


def test_a_place_of_a_thousand_digits_is_refused_and_not_a_trace(run: Run) -> None:
    run("pub", "t", "1")
    for words in (("get", "t"), ("topic", "purge", "t", "--dry-run", "--before")):
        done = run(*words, "9" * 5000)
        assert (done.code, done.out) == (4, "")
        assert "start end +N -N N" in done.err


def test_a_partition_beyond_the_only_one_is_told_so(run: Run) -> None:
    run("pub", "t", "1")
    done = run("get", "t", "1", "-p", "5")
    assert (done.code, done.err) == (3, "trunkline: there is no partition 5: there is only 0\n")


@pytest.mark.parametrize(
    ("url", "path"), [("file:.bus", ".bus"), ("file:/a/b", "/a/b"), ("file:///a/b", "/a/b")]
)
def test_a_url_names_a_folder(url: str, path: str) -> None:
    assert bus_path(url) == path


def test_every_command_finds_the_home_behind_a_tilde(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home / "me"))
    monkeypatch.setenv("TRUNKLINE_URL", "file:~/bus")
    assert run("pub", "orders", "1").code == 0
    assert run("bridge", "file:~/bus", "ndjson:~/events").code == 0
    assert run("claim", "src", "--actor", "me", "--url", "ndjson:~/events").code == 0
    assert located("file:~/bus") == f"file:{home}/me/bus"
    assert os.listdir(home) == ["me"]


def test_where_the_current_folder_is_gone_there_is_no_bus(run: Run, home: Path) -> None:
    (home / "gone").mkdir()
    os.chdir(home / "gone")
    (home / "gone").rmdir()
    try:
        for words in (["topic", "ls"], ["pub", "t", "1"], ["init"], ["sub", "t"], ["doctor"]):
            done = run(*words)
            assert (done.code, done.err.count("\n")) == (2, 1)
            assert ".bus" in done.err
        with pytest.raises(NoBus):
            trunkline.open("file:.bus")
        assert run("init", "--url", f"file:{home}/bus").code == 0
    finally:
        os.chdir(home)


@pytest.mark.parametrize("url", ["memory:", "nats://x", "file:", "file://bus", ".bus", ""])
def test_other_urls_are_refused_with_a_hint(url: str) -> None:
    with pytest.raises(Invalid) as caught:
        bus_path(url)
    assert "file:" in caught.value.hint


@pytest.mark.parametrize(
    ("place", "offsets"),
    [
        ("start", [1]),
        ("+2", [3]),
        ("-1", [9]),
        ("4", [4]),
        ("8:", [8, 9]),
        (":3", [1, 2]),
        ("3:6", [3, 4, 5]),
        ("-2:", [8, 9]),
        ("-3:-1", [7, 8]),
        ("0:2", [1]),
        ("8:99", [8, 9]),
        ("@-1h:", list(range(1, 10))),
        ("@-1h", [1]),
        ("@:-1h", []),
    ],
)
def test_a_place_finds_these_records(run: Run, place: str, offsets: list[int]) -> None:
    run("pub", "orders", stdin=lines(9))

    got = run("get", "orders", place)

    assert [row["offset"] for row in got.rows] == offsets
    assert got.code == (0 if offsets else 3)
