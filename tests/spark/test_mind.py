"""The write workflow starts the pipeline ``consolidation``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import trunkline
from trunkline.cli import main
from trunkline.cognition.options import MemoryOptions
from trunkline.cognition.writing import SparkConsolidation, WriteHandler


@pytest.mark.timeout(300)
@pytest.mark.skipif(not SparkConsolidation.is_installed(), reason="no Spark")
async def test_the_spark_pipeline_starts_where_spark_is_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{tmp_path / 'bus'}"
    async with trunkline.connect(url) as bus:
        spark = SparkConsolidation(url, str(tmp_path / "lake"), "local[1]")
        options = MemoryOptions(after_writes=2, after_s=None, idle_s=None)
        writer = WriteHandler(bus, options, spark=spark)
        for n in range(2):
            await writer.write(f"s{n}", {"n": n}, space="home", actor="phone")
        await writer.settle()
    assert spark.code == 0
    lake = str(tmp_path / "lake")
    assert await asyncio.to_thread(main, ["pipeline", "status", "--lake", lake]) == 0
    assert "consolidation" in capsys.readouterr().out
