"""The examples, the notebook and the recipes for Spark do what they say."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from trunkline.cli import main
from trunkline.spark.pipelines import declare

from .logs import make_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
BLOCK = re.compile(r"(<!-- .*? -->\n)?```(python|sql|sh)\n(.*?)```", re.DOTALL)
# These go on until they are stopped, or need a cluster; other tests run them.
ELSEWHERE = ("--follow", "--master", "trunkline spark", "pipeline run --url")


def execute(source: str, names: dict[str, Any]) -> None:
    """Run code as a notebook does, where ``await`` may stand at the top."""
    source = located(source)
    code = compile(source, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    done = eval(code, names)
    if inspect.isawaitable(done):

        async def wait() -> None:
            await done

        asyncio.run(wait())


def located(source: str) -> str:
    """Spark was started elsewhere, and takes a path from there."""
    return re.sub(r"(file:|[\"'])(\.bus|\.?checkpoints/)", rf"\1{os.getcwd()}/\2", source)


@pytest.fixture
def place(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SparkSession]:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    yield spark
    for query in spark.streams.active:
        query.stop()


def test_spark_orders(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    assert spark.version.startswith("4.")

    runpy.run_path(str(EXAMPLES / "spark_orders.py"), run_name="__main__")

    said = capsys.readouterr().out.splitlines()
    assert said == ['ann {"total":90.0}', 'bob {"total":30.0}', 'cid {"total":30.0}']


def test_the_notebook(place: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "spark_tour.ipynb").read_text("utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}

    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            execute("".join(cell["source"]), names)

    said = capsys.readouterr().out
    assert re.search(r"\| +c4\| +20\|3090\.0\|", said)
    assert "batch 0 has 100 orders" in said
    assert Path("report.html").exists()
    assert place.sql("SELECT * FROM orders_view").count() == 100
    assert all(ran.error == "" for ran in names["outcomes"])


def test_the_recipes(
    place: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = declare.all_pipelines()
    monkeypatch.setattr(declare, "_known", dict(known))
    make_log(Path(".bus"), 60)
    names: dict[str, Any] = {"__name__": "__main__"}
    text = (ROOT / "docs" / "spark.md").read_text("utf-8")
    kinds = set()
    assert main(["pipeline", "run", "traffic", "--quiet"]) == 0

    for note, kind, source in BLOCK.findall(text):
        kinds.add(kind)
        if "test_cluster.py" in note:
            continue
        if kind == "python":
            execute(source, names)
            for query in place.streams.active:
                query.processAllAvailable()
                query.stop()
        elif kind == "sql":
            for statement in filter(str.strip, source.split(";\n")):
                place.sql(located(statement))
        else:
            for line in source.splitlines():
                words = shlex.split(line, comments=True)
                if words and not any(part in line for part in ELSEWHERE):
                    assert words[0] == "trunkline"
                    assert main(words[1:]) == 0, f"{line}: {capsys.readouterr().err}"

    assert kinds == {"python", "sql", "sh"}
    assert place.sql("SELECT * FROM orders").count() == 60
    assert Path("report.html").exists()
