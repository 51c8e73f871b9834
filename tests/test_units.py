"""Durations, sizes and times as people write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from trunkline.units import read_duration, read_moment, read_size, read_time, write_time

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5s", 1.5), ("500ms", 0.5), ("10m", 600), ("2h", 7200), ("1d", 86_400)],
)
def test_a_duration_is_read_as_seconds(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-5m", "5x", "5 minutes", "1e3", "٣m", "5m ", "1 h"])
def test_a_text_that_is_no_duration_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        read_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64k", 65_536), ("10MiB", 10 << 20), ("2GB", 2 << 30), ("1t", 1 << 40)],
)
def test_a_size_is_read_as_bytes(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "-1k", "1.5m", "5 miles", "1 k"])
def test_a_text_that_is_no_size_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        read_size(text)


def test_a_time_without_a_zone_is_in_utc_or_an_error() -> None:
    assert read_time("2026-01-31T12:00:00") == NOW
    assert read_time("2026-01-31T13:00:00+01:00") == NOW
    with pytest.raises(ValueError, match="timezone"):
        read_time("2026-01-31T12:00:00", zone=None)


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("now", NOW),
        ("-10m", NOW - timedelta(minutes=10)),
        ("1769860800", NOW),
        ("1769860800000", NOW),
        ("2026-01-31T12:00:00Z", NOW),
    ],
)
def test_a_moment_may_be_relative_or_an_epoch(text: str, when: datetime) -> None:
    assert read_moment(text, NOW) == when


@pytest.mark.parametrize("text", ["2024", "-99999999d", "soon", "-5x"])
def test_a_text_that_is_no_moment_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a|Invalid isoformat"):
        read_moment(text, NOW)


def test_a_time_is_written_in_utc() -> None:
    there = datetime(2026, 1, 31, 13, 0, 0, 250_000, tzinfo=timezone(timedelta(hours=1)))
    assert write_time(there) == "2026-01-31T12:00:00.250000Z"
    assert write_time(there, fraction=False) == "2026-01-31T12:00:00Z"
