"""The examples for Spark say what they say they do."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_spark_orders(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    assert spark.version.startswith("4.")

    runpy.run_path(str(EXAMPLES / "spark_orders.py"), run_name="__main__")

    said = capsys.readouterr().out.splitlines()
    assert said == ['ann {"total":90.0}', 'bob {"total":30.0}', 'cid {"total":30.0}']
