"""What the soak makes of its samples."""

from __future__ import annotations

from pathlib import Path

from benchmarks.soak import Sample, draw, grown, table

FLAT = [Sample(n, 50.0 + n % 3, 30 + n % 2, 7, 40 + n % 4) for n in range(90)]


def test_samples_that_go_up_and_down_have_not_grown() -> None:
    assert grown(FLAT) == {}


def test_warming_up_is_no_growth() -> None:
    assert grown([one._replace(memory_mb=10.0) for one in FLAT[:30]] + FLAT[30:]) == {}


def test_a_leak_is_found() -> None:
    leaking = [one._replace(descriptors=30 + n // 5) for n, one in enumerate(FLAT)]
    assert grown(leaking) == {"descriptors": (38.5, 44.5)}


def test_the_samples_become_a_picture_and_a_table(tmp_path: Path) -> None:
    draw(FLAT, tmp_path / "soak.svg")
    picture = (tmp_path / "soak.svg").read_text("utf-8")
    assert picture.startswith("<svg")
    assert "open descriptors" in picture
    assert "| threads | 7 | 7 | 7 | 7 |" in table(FLAT)
