"""``make run``: the tour, then Spark over the tour's folder and a day of events."""

from __future__ import annotations

import os
import runpy
import selectors
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from trunkline.spark import pipelines

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]


def take_the_tour(place: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "tour.py")],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return done.stdout


@pytest.mark.timeout(600)
def test_the_pipelines_run_over_the_tour_and_a_day(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert spark.version
    take_the_tour(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["spark_day.py", "--events", "1500"])

    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / "spark_day.py"), run_name="__main__")

    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    assert said.err == ""
    assert "A shop lived through a day: " in said.out
    assert [name for name in pipelines.all_pipelines() if f"\n{name} " not in said.out] == []
    page = Path(".tour/report.html")
    assert said.out.endswith(f"The report: {page.resolve().as_uri()}\n")
    assert "shop.orders" in page.read_text("utf-8")
    for name in ("bus/wal", "lake/traffic", "lake/quarantine"):
        assert (Path(".tour") / name).is_dir()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_make_run_in_a_fresh_clone_is_quick(tmp_path: Path) -> None:
    """With nothing installed: the tour speaks within 30 s, all of it ends within 5 minutes."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    outside = {"VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "CI"}
    process = subprocess.Popen(
        ["make", "run", f"PYTHON={sys.base_prefix}/bin/python3"],
        cwd=clone,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={name: value for name, value in os.environ.items() if name not in outside},
    )
    assert process.stdout is not None
    started, said, first_s = time.monotonic(), b"", 0.0
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() - started < 800 and ready.select(timeout=800):
            part = os.read(process.stdout.fileno(), 65536)
            if not part:
                break
            said += part
            if not first_s and b"1. Publish" in said:
                first_s = time.monotonic() - started
    code, took_s = process.wait(), time.monotonic() - started

    text = said.decode()
    print(f"first output of the tour after {first_s:.0f} s, all of it {took_s:.0f} s")
    assert code == 0, text
    assert "killed: all were delivered again" in text
    assert "The report: file://" in text
    assert (clone / ".tour" / "report.html").is_file()
    assert 0 < first_s <= 30
    assert took_s <= 300
