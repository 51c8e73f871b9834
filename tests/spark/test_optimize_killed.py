"""Killed with -9 while it merges files, whoever merges: then each row is there once.

No session is needed for merging, so kills are cheap here; ``test_exactly_once`` has those that meet
a pipeline which merges behind each of its batches.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql.types import LongType, StringType, StructType

from trunkline.spark.lake import Lake
from trunkline.spark.lake.schema import loose
from trunkline.spark.lake.table import StagedFiles, _writing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLE, APP = "t", "stream"
SHAPE = StructType().add("offset", LongType()).add("value", StringType()).add("day", StringType())
FILES, ROWS = 12, 4000  # of a round, and of a file
PATIENCE_S = 120.0


class Merger:
    def __init__(self, lake: Lake) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.merger", lake.path, TABLE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._said(PATIENCE_S) == "ready"

    def merge(self, life_s: float = PATIENCE_S) -> bool:
        """Whether it came to its end within its life; else it is dead."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        said = self._said(life_s)
        assert said is None or said.isdigit(), f"it failed by itself: {said!r}"
        if said is None:
            self.kill()
        return said is not None

    def _said(self, within_s: float) -> str | None:
        out = self.process.stdout
        assert out is not None
        return out.readline().strip() if select.select([out], [], [], within_s)[0] else None

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Table:
    """A table to which a stream adds small files, one commit each."""

    def __init__(self, lake: Lake) -> None:
        self.lake, self.versions, self.offset = lake, 0, 0

    def grow(self) -> None:
        for number in range(FILES):
            offsets = range(self.offset, self.offset + ROWS)
            batch = pa.record_batch(
                {
                    "offset": pa.array(offsets, pa.int64()),
                    "value": [f"{n * 7919:x}" * 8 for n in offsets],
                    "day": [f"2026-01-0{1 + number % 2}"] * ROWS,
                }
            )
            write = _writing(self.lake.storage, TABLE, ("day",), (), "part")
            (made,) = write(iter([batch]))
            files = [json.loads(file) for file in made.column("file").to_pylist()]
            staged = StagedFiles(TABLE, loose(SHAPE), files, ("day",))
            self.lake.commit(staged, app=APP, version=self.versions)
            self.versions += 1
            self.offset += ROWS

    def files(self) -> list[str]:
        found = pa.table(DeltaTable(self.lake.place(TABLE)).get_add_actions(flatten=True))
        return [os.path.join(self.lake.place(TABLE), path) for path in found["path"].to_pylist()]

    def orphans(self) -> int:
        """Files of rows that no version of the table ever had: a merge was at work on them."""
        place = Path(self.lake.place(TABLE))
        log = "".join(path.read_text() for path in (place / "_delta_log").glob("*.json"))
        return sum(path.name not in log for path in place.rglob("*.parquet"))

    def check(self) -> None:
        """File by file: every row once, and what the stream wrote is known."""
        offsets: Counter[int] = Counter()
        for path in self.files():
            offsets.update(pq.ParquetFile(path).read(["offset"])["offset"].to_pylist())
        assert offsets == Counter(range(self.offset))
        assert self.lake.rows(TABLE) == self.offset
        assert self.lake.version(TABLE, APP) == self.versions - 1


def under_fire(lake: Lake, kills: int) -> tuple[Table, int]:
    """The table after so many kills in the middle of a merge, and how many left a file behind."""
    seed = random.randrange(1 << 32)
    moments = random.Random(seed)
    table = Table(lake)
    table.grow()
    merger = Merger(lake)
    began = time.monotonic()
    assert merger.merge()
    takes_s = time.monotonic() - began
    landed = marks = 0
    try:
        for _ in range(20 * kills):
            table.grow()
            before = table.orphans()
            done = merger.merge(moments.uniform(0.0, takes_s))
            table.check()
            if not done:
                landed += 1
                marks += table.orphans() > before
                merger = Merger(lake)
                if landed == kills:
                    break
        assert landed == kills, f"only {landed} kills met a merge, seed {seed}"
        table.grow()
        assert merger.merge()
    finally:
        merger.kill()
    table.check()
    assert len(table.files()) == 2, f"one file for each day, seed {seed}"
    return table, marks


def check_by_others(spark: SparkSession, table: Table) -> None:
    """As delta-rs and Spark read it. The former may abort when its process ends, so it has one."""
    place = table.lake.place(TABLE)
    read = "sorted(DeltaTable(sys.argv[1]).to_pyarrow_table()['offset'].to_pylist())"
    program = (
        "import os, sys; from deltalake import DeltaTable; "
        f"print({read} == list(range({table.offset})), flush=True); os._exit(0)"
    )
    said = subprocess.run([sys.executable, "-c", program, place], capture_output=True, text=True)
    assert said.stdout.strip() == "True", said.stderr
    found = table.lake.read(spark, TABLE).toArrow()
    assert Counter(found["offset"].to_pylist()) == Counter(range(table.offset))
    values = dict(zip(found["offset"].to_pylist(), found["value"].to_pylist(), strict=True))
    assert all(value == f"{n * 7919:x}" * 8 for n, value in values.items())


@pytest.mark.timeout(300)
def test_three_kills_while_merging(spark: SparkSession, tmp_path: Path) -> None:
    table, _ = under_fire(Lake(str(tmp_path)), kills=3)
    check_by_others(spark, table)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills_while_merging(spark: SparkSession, tmp_path: Path) -> None:
    table, marks = under_fire(Lake(str(tmp_path)), kills=50)
    assert marks, "no kill met a merge that had begun to write"
    check_by_others(spark, table)
    print(f"50 kills, {marks} in the middle of writing")
